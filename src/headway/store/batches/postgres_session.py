"""A connection to PostgreSQL in a thread of its own, for calls of the batch store from any event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar, cast

import asyncpg
from asyncpg import Connection

from headway.errors import HeadwayError, RequestError
from headway.store.batches.port import out
from headway.store.batches.postgres_schema import prepare
from headway.store.queue.postgres import AGAIN, STALE, UNFIT
from headway.store.queue.postgres_link import Address, Link, Lost, Out, explained

T = TypeVar("T")
Work = Callable[[Connection], Awaitable[T]]
_IDLE = "SELECT set_config('idle_in_transaction_session_timeout', $1, false)"
_CANCELED = "57014"  # by `statement_timeout`
_TRIES = 5  # of work that PostgreSQL ends in favour of another gateway's
log = logging.getLogger("headway.gateway")


class StatementTimeout(HeadwayError):
    """A statement was canceled after `timeout_s` and changed nothing; one with fewer rows may succeed."""


class Session:
    """One connection, which carries out calls one after the other and is made anew when it has ended.

    Raises ConfigError when the server or the schema cannot be used. The tables are made where they are
    missing.
    """

    def __init__(self, address: Address) -> None:
        self._schema = f'"{address.schema}"'
        self._undo = deque[Work[None]]()
        self._closed = False
        opened: Future[None] = Future()
        # A daemon: a gateway that dies without close() must not wait for calls that never come.
        self._thread = Thread(target=self._serve, args=(address, opened), name="batches", daemon=True)
        self._thread.start()
        opened.result()

    async def ask(self, work: Work[T], *, undo: Work[None] | None = None) -> T:
        """Return what `work` makes of the connection. A caller that is cancelled does not end the work.

        HeadwayError (503) when the server cannot be reached or refuses, `StatementTimeout` when it is slow.
        undo: is carried out before all later work if the end of the connection has hidden the outcome.
        """
        if self._closed:
            raise down("it is closed")
        doing = asyncio.run_coroutine_threadsafe(self._do(work, undo), self._loop)
        return await asyncio.shield(asyncio.wrap_future(doing))

    async def change(self, work: Work[T], *, undo: Work[None] | None = None) -> T:
        """Do as `ask` does, in a transaction: all of the work or nothing."""

        async def whole(connection: Connection) -> T:
            async with connection.transaction():
                return await work(connection)

        return await self.ask(whole, undo=undo)

    def later(self, work: Work[None]) -> None:
        """Let work be done before all that comes later."""
        self._undo.append(work)

    async def rows(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a statement; {s} in it is the schema."""
        text = self.sql(sql)
        return await self.ask(lambda connection: cast(Awaitable[list[Any]], connection.fetch(text, *values)))

    async def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of a statement's first row, None when there is none."""
        found = await self.rows(sql, *values)
        return found[0][0] if found else None

    def sql(self, statement: str) -> str:
        """Return a statement with the schema in it."""
        return statement.replace("{s}", self._schema)

    async def end_session(self) -> None:
        """Finish the calls that were made, then release the thread and the connection."""
        if not self._closed:
            self._closed = True
            with suppress(RuntimeError):  # the thread has ended by itself
                self._loop.call_soon_threadsafe(self._ending.set)
        await asyncio.to_thread(self._thread.join)

    # ---- on the session's thread

    def _serve(self, address: Address, opened: Future[None]) -> None:
        try:
            asyncio.run(self._main(address, opened))
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _main(self, address: Address, opened: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._turn, self._ending = asyncio.Lock(), asyncio.Event()
        name = f"headway-batches-{secrets.token_hex(8)}"
        first = await _connect(address, name, make=True)
        self._link = Link(first, partial(_connect, address, name, make=False))
        keeping = asyncio.create_task(self._link.run())
        opened.set_result(None)
        await self._ending.wait()
        async with self._turn:  # after the calls that were made before
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await self._link.close()

    async def _do(self, work: Work[T], undo: Work[None] | None) -> T:
        async with self._turn:
            for _ in range(_TRIES):
                try:
                    return cast(T, await self._link.ask(partial(self._after_undo, work)))
                except Out as error:
                    raise down(error) from error
                except Lost as error:
                    if undo is not None:
                        self._undo.append(undo)
                    raise down(error) from error
                except asyncpg.PostgresError as error:
                    if error.sqlstate not in AGAIN:
                        raise self._refused(error) from error
            raise down("its server is too busy")

    async def _after_undo(self, work: Work[T], connection: Connection) -> T:
        while self._undo:
            await self._undo[0](connection)
            self._undo.popleft()
        return await work(connection)

    def _refused(self, error: asyncpg.PostgresError) -> HeadwayError:
        """Return the error of work that PostgreSQL refused, and that has done nothing."""
        state = error.sqlstate or ""
        if state.startswith(UNFIT):
            log.error(
                "PostgreSQL cannot hold a value of a file or batch: %s (%s)", type(error).__name__, state
            )
            return RequestError("PostgreSQL cannot hold this.", "Send a smaller or well-formed request.")
        if state == _CANCELED:
            log.warning("PostgreSQL is slow: a statement of batches was not done in time")
            fix = "Look at the PostgreSQL server's load, or raise timeout_s in [queue.postgres]."
            why = "The store of files and batches is slow: a statement took longer than its timeout_s."
            return StatementTimeout(why, fix, status=503, kind="server_error")
        log.error("PostgreSQL refuses calls of batches: %s (%s)", error.args[0], state)
        if state in STALE:
            self._link.drop("its server takes no writes")
        return down(f"its server refuses ({type(error).__name__})")


async def _connect(address: Address, name: str, *, make: bool) -> Connection:
    """Return a connection to the tables, when no other session of that name is left."""
    connection = await address.connect_writer(name, make=make)
    try:
        with explained(address.place):
            # Of a gateway that is paused or cut off within a transaction others would wait for its locks.
            await connection.execute(_IDLE, str(round(address.timeout_s * 1000)))
            await prepare(connection, address.schema, make=make)
    except BaseException:
        connection.terminate()
        raise
    return connection


def down(why: object) -> HeadwayError:
    """Return the error of a call that was not carried out (503)."""
    return out("The store of files and batches", why, "Look at the PostgreSQL server, then try again.")
