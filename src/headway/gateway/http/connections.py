"""Limits of connections: how many there may be, and how long they may wait for their clients.

One look at all connections twice a second costs less than timers that every request would set and cancel.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from headway.config import Server
from headway.errors import ConfigError
from headway.gateway.http.turns import Turns

_LOOK_S = 0.5
_AT_A_TIME = 500  # connections that are looked at before others have their turn
_MOST = 16_384  # connections, unless configured
_OWN_FILES = 256  # the queue, logs, pipes and sockets of processes, connections to engines' control
_BEGUN = 8  # requests that begin in one iteration of the event loop
TENANT = "headway.tenant"  # in the scope of a request, for the access log
CONNECTION = "headway.connection"  # in the scope of a request: the one that it came on (`http.LimitedHttp`)
SPARE = 16  # connections beyond the limit, for questions about the gateway's health
PROBES = ("/health", "/ready", "/metrics")  # these questions, which come every few seconds
Limit = Literal["head", "body", "write", "room"]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection, and how many there may be.

    max_head: bytes of request line and headers.
    head_s: seconds from the opening, or from the first byte after an answer, to the end of the headers.
    body_s: seconds for a whole body.
    write_s: seconds in which a client takes no byte of what is there for it.
    most: connections at a time.
    """

    max_head: int
    head_s: float
    body_s: float
    write_s: float
    most: int

    @classmethod
    def of(cls, server: Server, files: int) -> ConnectionLimits:
        """Return the configured limits; ConfigError when more connections are allowed than there are files.

        files: how many the process may open. By default half of what it does not need itself is left for
        connections to engines, of which a request has one.
        """
        free = files - _OWN_FILES - SPARE
        most = min(_MOST, free // 2) if server.max_connections is None else server.max_connections
        if most > free or most < 1:
            raise ConfigError(
                f"{max(most, 1)} connections need more open files than this process may have ({files}).",
                "Raise the limit (ulimit -Hn), or lower server.max_connections.",
                param="server.max_connections",
            )
        return cls(
            server.max_header_kib * 1024, server.head_timeout_s, server.body_timeout_s, server.write_timeout_s, most
        )


class Watcher(Protocol):
    """What serves a request and must know whether its client is there."""

    def client_left(self) -> None:
        """Learn that the client has disconnected before it had the whole answer."""


class Connection(Protocol):
    """A connection as its limits see it."""

    def exceeded(self, now: float) -> Limit | None:
        """Return the limit that it exceeds at an instant of the event loop's clock."""

    def end(self, limit: Limit) -> None:
        """Tell the client which limit it exceeded, where that is possible, and close."""


class Connections:
    """All connections of clients.

    Those that wait for their clients (for a request, or the rest of one) make room for new ones when there
    are too many, the oldest first. So slow clients lock nobody out. `SPARE` of them are never given to
    requests that take long. A limit of time ends what exceeds it at two looks in a row: in between the event
    loop has read what had come already, however busy it is.

    ended: called for each connection that a limit ended.
    address: of the gateway, as the latest connection has it.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.ended: Callable[[Limit], None] = lambda limit: None
        self.address: tuple[str, int | None] | None = None
        self._open: set[Connection] = set()
        self._serving: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._late: set[Connection] = set()  # at the last look
        self._answered: set[Connection] = set()
        self._turns, self._status_turns = Turns(_BEGUN), Turns(_BEGUN)

    def add(self, new: Connection) -> None:
        """Add a new connection; the one that has waited longest is closed when there are too many."""
        self._open.add(new)
        self._waiting[new] = None
        if len(self._open) > self.limits.most + SPARE:
            self._end(next(iter(self._waiting)), "room")

    def discard(self, closed: Connection) -> None:
        """Forget a connection."""
        self._open.discard(closed)
        self._serving.discard(closed)
        self._waiting.pop(closed, None)
        self._answered.discard(closed)

    def cut(self, but: Collection[object]) -> None:
        """Close all connections but some at once."""
        for one in self._open - set(but):
            one.end("room")

    def admit(self, one: Connection) -> bool:
        """Return whether a request on a connection may be served."""
        if one not in self._serving and len(self._serving) >= self.limits.most:
            return False
        self._serving.add(one)
        return True

    def busy(self, one: Connection) -> None:
        """Take note that a connection has brought a whole request."""
        self._waiting.pop(one, None)

    def waits(self, one: Connection) -> None:
        """Take note that a connection has its answer and waits for the next request."""
        self._serving.discard(one)
        if one in self._open:
            self._waiting[one] = None
            self._answered.add(one)

    def turns_of(self, one: Connection, status: bool) -> Turns | None:
        """Return the turns in which a request on a connection begins, None = it begins at once.

        Thousands that come at once would fill one iteration of the event loop, and time limits of connections
        to engines would run out in it. Questions about the gateway's health (`status`) wait for no other
        requests; those on a connection that has had an answer do not wait for those on new ones either.
        """
        if not status:
            return self._turns
        return None if one in self._answered else self._status_turns

    async def watch(self, interval_s: float = _LOOK_S) -> None:
        """End connections that exceed a limit, until cancelled. interval_s: between two looks."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            await self._look(loop)

    async def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        before, self._late = self._late, set()
        for number, one in enumerate(list(self._open), 1):
            limit = one.exceeded(loop.time()) if one in self._open else None
            if limit is not None and one in before:
                self._end(one, limit)
                await asyncio.sleep(0)  # to end one takes longer than to look
            elif limit is not None:
                self._late.add(one)
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _end(self, one: Connection, limit: Limit) -> None:
        if limit in ("write", "room"):  # these are closed at once
            self.discard(one)
        one.end(limit)
        self.ended(limit)
