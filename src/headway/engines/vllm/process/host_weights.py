"""Weights in host memory, so that a model loads from there and not from disk.

On a machine where vLLM reads its weights from files, host memory is the kernel's page cache. `hold` makes
that explicit: it maps a model's safetensors files and locks their pages (mlock). Where the limit for locked
memory (RLIMIT_MEMLOCK) is lower, the pages are read into the cache, and the kernel may drop them when memory
gets short. With vLLM's sleep mode the weights of a sleeping engine are in host memory, too (`keep`). Both are
bounded by one budget; the least recently used model goes first.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

log = logging.getLogger("headway.engine")
_libc = ctypes.CDLL(None, use_errno=True)  # its calls release Python's lock, mmap's own methods do not
for _call in (_libc.mlock, _libc.mincore):
    _call.restype = ctypes.c_int
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_PAGE = mmap.PAGESIZE
_STEP = 64 * 2**20  # bytes between two looks at whether to stop
_WARM = 0.95  # share of a model's pages from which on its load counts as warm
_Release = Callable[[], None]


class MappedFiles:
    """Files mapped for reading."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._maps: list[mmap.mmap] = []
        self._views: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self.locked = True
        for path in files:
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._views.append(np.frombuffer(self._maps[-1], np.uint8))

    @property
    def size(self) -> int:
        return sum(view.size for view in self._views)

    def lock(self, stop: threading.Event) -> bool:
        """Read every page into memory and keep it there if that is allowed; False when stopped before."""
        for view in self._views:
            for at in range(0, view.size, _STEP):
                if stop.is_set():
                    return False
                part = view[at : at + _STEP]
                if not self.locked or _libc.mlock(part.ctypes.data, part.size) != 0:
                    self.locked = False
                    part[::_PAGE].max()  # touches each page
        return True

    def resident(self) -> float:
        """Return the share of the pages that are in memory; 0 of no files."""
        inside = pages = 0
        for view in self._views:
            flags = np.zeros(-(-view.size // _PAGE), np.uint8)
            _libc.mincore(view.ctypes.data, view.size, flags.ctypes.data)
            inside, pages = inside + int((flags & 1).sum()), pages + flags.size
        return inside / pages if pages else 0.0

    def close(self) -> None:
        """Let go of the pages; they stay in the page cache as long as memory is not short."""
        self._views.clear()
        for one in self._maps:
            one.close()
        self._maps.clear()


def is_warm(files: Sequence[Path]) -> bool:
    """Return whether files are in host memory, whatever read them; False when they cannot be read."""
    try:
        mapped = MappedFiles(files)
    except (OSError, ValueError):
        return False
    try:
        return mapped.resident() >= _WARM
    finally:
        mapped.close()


class HostWeights:
    """Models whose weights are held in host memory: at most `budget` bytes. For one engine; thread-safe."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._held: OrderedDict[str, tuple[int, _Release]] = OrderedDict()
        self._lock = threading.Lock()  # of the table
        self._reading = threading.Lock()  # one model is read at a time

    @property
    def names(self) -> tuple[str, ...]:
        """The models, the least recently used first."""
        return tuple(self._held)

    def hold(self, name: str, files: Sequence[Path], stop: threading.Event) -> bool:
        """Read a model's files and hold them; False when they do not fit or it was stopped.

        Blocks for as long as the disk takes. OSError when a file cannot be read.
        """
        if not files or sum(path.stat().st_size for path in files) > self._budget:
            return False
        with self._reading:
            return self._hold(name, files, stop)

    def _hold(self, name: str, files: Sequence[Path], stop: threading.Event) -> bool:
        if name in self._held:
            self._held.move_to_end(name)
            return True
        mapped = MappedFiles(files)
        self._make_room(mapped.size)  # before it is read: the sum must not be in memory even for a moment
        if not mapped.lock(stop):
            mapped.close()
            return False
        if not mapped.locked:
            log.info("the weights of %s are read, not locked: raise the limit for locked memory", name)
        return self.keep(name, mapped.size, mapped.close)

    def keep(self, name: str, size: int, release: _Release) -> bool:
        """Take over weights that are in host memory already; `release` frees them, at once if too large."""
        self.drop(name)
        if size > self._budget:
            release()
            return False
        self._make_room(size)
        with self._lock:
            self._held[name] = size, release
        return True

    def forget(self, name: str) -> None:
        """Let go of a model without freeing it: the engine that slept with it is about to wake."""
        with self._lock:
            self._held.pop(name, None)

    def drop(self, name: str) -> None:
        """Free a model if it is held."""
        with self._lock:
            _, release = self._held.pop(name, (0, None))
        if release is not None:
            release()

    def close(self) -> None:
        """Free everything."""
        for name in self.names:
            self.drop(name)

    def _make_room(self, size: int) -> None:
        while self._held and sum(one for one, _ in list(self._held.values())) + size > self._budget:
            with suppress(StopIteration):
                self.drop(next(iter(self._held)))
