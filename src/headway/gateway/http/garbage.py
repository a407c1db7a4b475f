"""When Python's garbage collector scans the gateway's long-lived objects.

A full collection looks at every object of every open request: half a second with a few thousand streams, in
which no request is served. It finds next to nothing, for what a request leaves behind is freed by its reference
counts, or found young. So full collections come when few requests are open, and otherwise seldom.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable

_LOOK_S = 10.0
_CALM = 200  # open requests with which a full collection takes a few hundredths of a second at most
_LATEST_S = 3600.0  # after which one is due however many are open
_NEVER = 2**31 - 1


def spare_old_objects() -> None:
    """Leave full collections to `collect`; those of young objects go on by themselves."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)


def collect_all() -> None:
    """Carry out a full collection, and return freed memory to the system.

    By itself glibc keeps what lies below memory that is in use: 50 KiB of each TLS connection, after thousands at once.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


async def collect(open_requests: Callable[[], int], interval_s: float = _LOOK_S) -> None:
    """Carry out full collections, until cancelled.

    open_requests: returns how many there are now. interval_s: between two looks.
    """
    loop = asyncio.get_running_loop()
    latest = loop.time()
    while True:
        await asyncio.sleep(interval_s)
        if due(open_requests(), loop.time() - latest):
            collect_all()
            latest = loop.time()


def due(open_requests: int, since: float) -> bool:
    """Return whether a full collection is due, `since` seconds after the last one."""
    return open_requests <= _CALM or since >= _LATEST_S
