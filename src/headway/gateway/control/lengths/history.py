"""The length predictor's history on disk, so that a restart keeps it.

It holds sizes, marks and embeddings of prompts, their tasks and the lengths of their answers; no text.
"""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.gateway.files import replacing
from headway.policy.forecast.lengths.ridge import History

_MOST = 64 << 20  # bytes; four times what 8,192 answers take
log = logging.getLogger("headway.gateway")


def keep(path: Path, history: History) -> None:
    """Write a history atomically, readable by its owner only; a disk error is logged."""
    try:
        with replacing(path) as file:
            np.savez(file, features=history.features, tasks=np.array(history.tasks), made=history.output_tokens)
    except OSError as error:
        log.warning("lengths are not kept: %s (%s); set predictor.history to another file", path, error)


def recall(path: Path, width: int) -> History | None:
    """Return what `keep` wrote, or None and a log entry when the file cannot be used.

    width: features of a prompt now; those of another embedding cannot be compared with them.
    """
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"it is larger than {_MOST >> 20} MiB")
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise ValueError("it is damaged")
        with np.load(path, allow_pickle=False) as file:
            features, tasks, lengths = file["features"], file["tasks"], file["made"]
        return _history(features, tasks, lengths, width)
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive raises nearly anything
        log.warning("%s is not used (%s); lengths are learned anew", path, error)
        return None


def _history(features: NDArray[Any], tasks: NDArray[Any], lengths: NDArray[Any], width: int) -> History:
    if features.ndim != 2 or tasks.shape != lengths.shape or lengths.shape != features.shape[:1]:
        raise ValueError("its columns differ in length")
    if features.dtype != np.float32 or lengths.dtype != np.float64 or tasks.dtype.kind != "U":
        raise ValueError("its columns are of other types")
    if not (np.isfinite(features).all() and np.isfinite(lengths).all() and (lengths >= 1).all()):
        raise ValueError("it holds what cannot be a length or a trait")
    if features.shape[1] != width:
        raise ValueError("it was learned with another predictor.embedding")
    return History(features, tuple(tasks.tolist()), lengths)
