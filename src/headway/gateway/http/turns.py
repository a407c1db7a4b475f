"""Turns for requests that begin and streams that begin or end, so that many at once block nothing else."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets a limited number of tasks go on per iteration of the event loop, in the order in which they ask.

    A request passes through several iterations. A step of an engine may begin or end all of its streams at
    once, which takes a quarter of a millisecond for each, and thousands of clients may ask in the same
    instant; without turns one iteration would serve them all.
    """

    def __init__(self, at_a_time: int) -> None:
        self._most = self._free = at_a_time
        self._waiting = deque[asyncio.Future[None]]()

    async def take(self) -> None:
        """Take a turn, in this iteration if one is left."""
        loop = asyncio.get_running_loop()
        if not self._free:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        if self._free == self._most:
            loop.call_soon(self._next)
        self._free -= 1

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
