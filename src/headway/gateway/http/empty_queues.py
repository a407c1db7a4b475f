"""Queues of a connection that are empty nearly always, without the 760 bytes of an empty deque.

uvicorn makes three for each connection with a request: those that wait until it can be written to, those that
wait for the body, and pipelined requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal, TypeVar

from uvicorn.protocols.http.flow_control import FlowControl

_Item = TypeVar("_Item")


class Event(asyncio.Event):
    """An event whose waiters get a deque when the first one waits."""

    def __init__(self, *, is_set: bool = False) -> None:
        super().__init__()
        self._waiters = ()  # type: ignore[assignment]
        if is_set:
            self.set()

    async def wait(self) -> Literal[True]:
        """Wait until the event is set."""
        if not self._waiters and not self.is_set():
            self._waiters = deque()
        return await super().wait()


class Flow(FlowControl):
    """uvicorn's flow control with such an event."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_writable_event = Event(is_set=True)


class Pipeline(list[_Item]):
    """A list with the two ends of a deque; clients that pipeline at all have few requests in it."""

    def appendleft(self, item: _Item) -> None:
        """Put an item before all others."""
        self.insert(0, item)

    def popleft(self) -> _Item:
        """Take the first item."""
        return self.pop(0)
