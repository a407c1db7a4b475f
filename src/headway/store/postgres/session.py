"""A session with PostgreSQL: a thread whose connections carry out calls from any event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, Generic, TypeVar

import asyncpg
from asyncpg import Connection

from headway.errors import HeadwayError
from headway.store.postgres.link import Address, Link, Lost, Out
from headway.store.postgres.schema import Tables
from headway.store.settling import deliver

UNFIT = ("22", "23", "54")  # classes of errors that are one call's fault: data, constraint, limit
AGAIN = ("40P01", "40001")  # rolled back in favour of another gateway's transaction
STALE = ("25006", "0A000")  # a new connection may help: a read-only server, an old plan
_TRIES = 5  # attempts at a call that fails with `AGAIN`
log = logging.getLogger("headway.store.postgres")


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False, kw_only=True)
class SessionCall:
    """One call on its way to a connection, and the future that its caller waits on."""

    future: asyncio.Future[Any] = field(default_factory=_future)


C = TypeVar("C", bound=SessionCall)


class Lane(Generic[C]):
    """Calls on their way to one connection, in the order in which they were made.

    together: takes the first calls that share a round trip.
    work: carries them out and returns the outcome of each; its second argument counts earlier attempts.
    """

    def __init__(
        self,
        link: Link,
        together: Callable[[deque[C]], list[C]],
        work: Callable[[list[C], int, Connection], Awaitable[Sequence[Any]]],
    ) -> None:
        self.link, self.work, self._together = link, work, together
        self._loop = asyncio.get_running_loop()
        self._calls: deque[C] = deque()
        self._filled, self._notified, self._closed = asyncio.Event(), False, False

    def add(self, call: C) -> None:
        """Add a call, from any thread."""
        self._calls.append(call)
        if not self._notified:  # else the lane is about to look
            self._notified = True
            self._loop.call_soon_threadsafe(self._filled.set)

    def close(self) -> None:
        """Let `groups` end when all calls are carried out."""
        self._closed = True
        self._filled.set()

    async def groups(self) -> AsyncIterator[list[C]]:
        """Yield groups of calls until the lane is closed and empty."""
        while True:
            self._notified = False
            self._filled.clear()
            while self._calls:
                yield self._together(self._calls)
            if self._closed:
                return
            await self._filled.wait()


class Session(ABC):
    """A thread with connections to a server; each is opened again when it ends.

    Raises ConfigError when the server or the schema cannot be used.

    what: the service that errors name. again: the step that they advise for later.
    """

    def __init__(self, address: Address, what: str, again: str) -> None:
        self._address, self._schema = address, f'"{address.schema}"'
        self._what, self._again = what, again
        self._lanes = list[Lane[Any]]()
        self._closed = False
        opened: Future[None] = Future()
        # A daemon: a gateway that dies without close() must not wait for calls that never come.
        self._thread = Thread(target=self._serve, args=(opened,), name="postgres", daemon=True)
        self._thread.start()
        opened.result()

    async def call(self, lane: Lane[C], call: C) -> Any:
        """Return a call's outcome. A caller that is cancelled does not end the call.

        HeadwayError (503) when the server cannot be reached, refuses or is too slow.
        """
        if self._closed:
            raise self.down("it is closed")
        lane.add(call)
        return await call.future

    def sql(self, statement: str) -> str:
        """Return a statement with the schema in it, for {s}."""
        return statement.replace("{s}", self._schema)

    def down(self, why: object) -> HeadwayError:
        """Return the error of a call that the server did not carry out (503)."""
        fix = f"Check the PostgreSQL server, then {self._again}."
        return HeadwayError(f"{self._what} is out: {why}.", fix, status=503, kind="server_error")

    async def close(self) -> None:
        """Finish pending calls, then release the thread and the connections."""
        if not self._closed:
            self._closed = True
            with suppress(RuntimeError):  # the thread has ended by itself
                for lane in self._lanes:
                    self._loop.call_soon_threadsafe(lane.close)
        await asyncio.to_thread(self._thread.join)

    # ---- on the session's thread

    @abstractmethod
    async def _begin(self, held: AsyncExitStack) -> None:
        """Connect and make the lanes."""

    async def _leave(self) -> None:
        """Clean up after all calls."""
        return

    def _note_unknown(self, group: Sequence[Any]) -> None:
        """Note calls whose outcome is unknown because the connection ended."""
        return

    @abstractmethod
    def _unfit(self, error: asyncpg.PostgresError) -> HeadwayError:
        """Return the error of a call with a value that PostgreSQL cannot hold."""

    def _refused(self, error: asyncpg.PostgresError) -> HeadwayError:
        """Return the error of calls that PostgreSQL refused."""
        log.error("PostgreSQL refuses calls: %s (%s)", error.args[0], error.sqlstate)
        return self.down(f"its server refuses ({type(error).__name__})")

    async def _link(self, held: AsyncExitStack, name: str, tables: Sequence[Tables] | None = None) -> Link:
        """Return a connection; with `tables`, one that changes these, created if missing."""
        name = f"headway-{name}-{secrets.token_hex(8)}"
        if tables is None:
            connect = partial(self._address.connect, name)
            link = Link(await connect(), connect)
        else:
            writer = partial(self._address.connect_writer, name, tables)
            link = Link(await writer(make=True), partial(writer, make=False))
        held.push_async_callback(link.close)
        return link

    def _serve(self, opened: Future[None]) -> None:
        try:
            asyncio.run(self._main(opened))
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _main(self, opened: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as held:
            await self._begin(held)
            running = [asyncio.create_task(self._run(lane)) for lane in self._lanes]
            opened.set_result(None)
            await asyncio.gather(*running)
            await self._leave()

    async def _run(self, lane: Lane[C]) -> None:
        async for group in lane.groups():
            try:
                outcomes = await self._outcomes(lane, group)
            except Exception as error:  # any error: the callers get it and the lane goes on
                log.exception("calls have failed")
                outcomes = [self.down(type(error).__name__)] * len(group)
            deliver(zip([call.future for call in group], outcomes, strict=True))

    async def _outcomes(self, lane: Lane[C], group: list[C], tries: int = 0) -> Sequence[Any]:
        """Carry out a group; return each call's value, or its error."""
        try:
            outcomes: Sequence[Any] = await lane.link.ask(partial(lane.work, group, tries))
            return outcomes
        except HeadwayError as error:
            return [error] * len(group)
        except Out as error:
            return [self.down(error)] * len(group)
        except Lost as error:
            self._note_unknown(group)
            return [self.down(error)] * len(group)
        except asyncpg.PostgresError as error:  # nothing was changed
            refusal, state = error, error.sqlstate or ""
        if state in AGAIN and tries + 1 < _TRIES:
            return await self._outcomes(lane, group, tries + 1)
        if state.startswith(UNFIT) and len(group) > 1:  # one by one, so that only the faulty call fails
            return [(await self._outcomes(lane, [call]))[0] for call in group]
        if state in STALE:
            lane.link.drop("its server takes no writes")
        refused = self._unfit if state.startswith(UNFIT) else self._refused
        return [refused(refusal)] * len(group)
