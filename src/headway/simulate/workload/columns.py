"""Checks of a workload's columns: ConfigErrors that name the first bad request."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.types import Bools, Floats


def column(name: str, values: Any, n: int, real: bool) -> NDArray[Any]:
    """Return values as a read-only column; ConfigError for another shape or broken numbers.

    real: of real numbers, otherwise of whole ones.
    """
    found = np.asarray(values)
    if found.shape != (n,):
        raise ConfigError(f"Column {name} has shape {found.shape}.", f"All columns need one value for each of {n}.")
    if not real and found.dtype.kind not in "iu" and n:
        raise ConfigError(f"Column {name} holds {found.dtype}.", "Give whole numbers.")
    found = found.astype(float if real else np.int64, copy=False).view()
    found.flags.writeable = False
    return found


def refuse_times(times: Floats) -> None:
    """Refuse arrivals that are no instants of a simulation."""
    refuse(~(np.isfinite(times) & (times >= 0)), "arrival", times, "0 s or later")


def refuse(bad: Bools, name: str, column: NDArray[Any], needed: str) -> None:
    """Raise ConfigError for the first bad value of a column; needed: what each must be."""
    if bad.any():
        row = int(np.argmax(bad))
        raise ConfigError(f"Request {row} has {name} {column[row]}.", f"It must be {needed}.")
