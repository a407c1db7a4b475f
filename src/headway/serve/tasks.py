"""Tasks that run beside a block and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless coroutines until the block ends, then cancel them and wait for their end."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        await cancel(*tasks)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and return when all have ended; their errors are theirs to report."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
