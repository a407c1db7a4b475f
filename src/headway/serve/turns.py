"""Turns of streams: what many of them bring at once does not hold up the requests that come meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets so many streams go on per iteration of the event loop, in the order in which they asked.

    A request passes through several iterations. An engine's step brings tokens, first answers or ends to all
    of its streams in one instant; without turns each iteration would serve them all.
    """

    def __init__(self, at_a_time: int) -> None:
        self._most = self._free = at_a_time
        self._waiting = deque[asyncio.Future[None]]()

    def take(self) -> bool:
        """Take a turn of this iteration; False when all are taken: then `wait` for one."""
        if not self._free:
            return False
        if self._free == self._most:
            asyncio.get_running_loop().call_soon(self._next)
        self._free -= 1
        return True

    async def wait(self) -> None:
        """Wait for a turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """Begin the next iteration with those that wait."""
        self._free = self._most
        while self._free and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._free -= 1
        if self._free < self._most:
            asyncio.get_running_loop().call_soon(self._next)
