"""Tasks that run beside a block and end with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
Loop = Callable[[], Coroutine[Any, Any, None]]
_PAUSE_S = 1.0  # before a loop that has failed begins again
log = logging.getLogger("headway.gateway")


async def in_daemon(work: Callable[[], T]) -> T:
    """Return `work()`, done in a thread for which the end of the process does not wait."""
    done = Future[T]()
    done.set_running_or_notify_cancel()  # so that a cancelled caller leaves it alone

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


@asynccontextmanager
async def running(*loops: Loop, failed: Callable[[str], None] = lambda name: None) -> AsyncIterator[None]:
    """Run endless loops until the block ends, then cancel them and wait for their end.

    A loop that raises is logged and begun again; one that returns is done.

    failed: called with the name of a loop that has raised.
    """
    group = Group(*loops, failed=failed)
    try:
        yield
    finally:
        await group.end()


async def _supervised(loop: Loop, failed: Callable[[str], None]) -> None:
    name = (loop.func if isinstance(loop, partial) else loop).__qualname__
    while True:
        try:
            await loop()
            return
        except Exception:  # whatever it was, the others rely on this loop
            log.exception("%s failed and begins again", name)
            failed(name)
        await asyncio.sleep(_PAUSE_S)


class Group:
    """Loops that begin now and run until `end`, as in `running`."""

    def __init__(self, *loops: Loop, failed: Callable[[str], None]) -> None:
        self._tasks = [asyncio.create_task(_supervised(loop, failed)) for loop in loops]

    async def end(self) -> None:
        """Cancel the loops and wait for their end."""
        await cancel(*self._tasks)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and return when all have ended; their errors are theirs to report."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
