"""A planner's own column beside those of the backlog: one number per request.

Rows are reused after a request has ended; its serial number tells whether a value is still its own.
"""

from __future__ import annotations

import numpy as np

from headway.types import Backlog, Floats, Ints


class RequestColumn:
    """One number per request; NaN where none was stored for the request that has the row now."""

    def __init__(self) -> None:
        self._value: Floats = np.full(64, np.nan)
        self._serial: Ints = np.full(64, -1)

    def put(self, backlog: Backlog, rows: Ints, values: Floats | Ints | float) -> None:
        """Note a number about the requests in these rows."""
        self._grow(backlog.live.size)
        self._value[rows], self._serial[rows] = values, backlog.serial[rows]

    def get(self, backlog: Backlog, rows: Ints) -> Floats:
        """Return what was noted about the requests in these rows, NaN = nothing."""
        self._grow(backlog.live.size)
        mine = self._serial[rows] == backlog.serial[rows]
        return np.asarray(np.where(mine, self._value[rows], np.nan), float)

    def _grow(self, size: int) -> None:
        more = size - self._value.size
        if more > 0:
            self._value = np.concatenate([self._value, np.full(more, np.nan)])
            self._serial = np.concatenate([self._serial, np.full(more, -1)])
