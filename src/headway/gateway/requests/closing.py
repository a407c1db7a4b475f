"""Stores the ends of requests in the broker, and tries again until they are stored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headway.errors import HeadwayError
from headway.store.queue.port import NO_CHARGES, Broker, Unused

_FIRST_S, _LONGEST_S = 0.1, 5.0  # between tries
log = logging.getLogger("headway.gateway")
_End = Callable[[], Awaitable[bool]]
Then = Callable[[str], Awaitable[None]]


class Closings:
    """Stores the ends of requests; what a full disk refuses is kept and tried again.

    Without that a request that has ended here would stay open in the broker, and run again after a restart.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._waiting: dict[str, _End] = {}
        self._some = asyncio.Event()

    def __contains__(self, id: str) -> bool:
        """Return whether the end of a request waits to be stored."""
        return id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    async def done(
        self, id: str, result: bytes | None, now: float, unused: Unused = NO_CHARGES, then: Then | None = None
    ) -> bool:
        """Close a request as done. False when it has another end, or another gateway holds it.

        then: called with its id once its end is stored; tried again with it, so that it may have been done before.
        """

        async def end() -> bool:
            ended = await self._broker.done(id, result, now, unused)
            if then is not None:
                await then(id)
            return ended

        try:
            return await self._close(id, end)
        except HeadwayError as error:  # no disk space would help: the answer itself cannot be stored
            return await self.fail(id, f"internal: the answer cannot be stored: {error.message}", now, unused)

    async def fail(self, id: str, reason: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        """Close a request as failed; False as in `done`."""
        return await self._close(id, lambda: self._broker.fail(id, reason, now, unused))

    async def _close(self, id: str, end: _End) -> bool:
        try:
            return await end()
        except asyncio.CancelledError:  # it may be stored or not
            self._retry_later(id, end)
            raise
        except HeadwayError as error:
            if error.status < 500:
                raise
            log.error("the end of %s is not stored yet: %s", id, error)
            self._retry_later(id, end)
            return True

    def _retry_later(self, id: str, end: _End) -> None:
        self._waiting[id] = end
        self._some.set()

    async def run(self) -> None:
        """Try again what could not be stored, until cancelled."""
        wait = _FIRST_S
        while True:
            await self._some.wait()
            await asyncio.sleep(wait)
            wait = _FIRST_S if await self.retry() else min(2 * wait, _LONGEST_S)

    async def retry(self) -> bool:
        """Try once more; return whether nothing waits any more."""
        for id, end in list(self._waiting.items()):
            try:
                await end()
            except HeadwayError as error:
                if error.status >= 500:
                    return False
                log.error("the end of %s cannot be stored: %s", id, error)
            del self._waiting[id]
        self._some.clear()
        log.info("all ends of requests are stored")
        return True
