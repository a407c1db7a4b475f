"""Work on large bodies, off the event loop, so that other requests go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
INLINE = 8192  # bytes or characters; less is read at once, which takes less time than another thread's turn
# Few threads: Python runs one at a time, and the event loop waits for its turn behind each of them.
_POOL = ThreadPoolExecutor(2, "large-body")


async def offload(size: int, work: Callable[[], T]) -> T:
    """Return `work()`, done in a thread when there is much of it (`size` of its input)."""
    if size <= INLINE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
