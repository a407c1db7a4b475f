"""Connections to PostgreSQL: how they are opened and reopened, and what their errors mean."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from asyncpg import Connection

from headway import clock
from headway.addresses import netloc
from headway.errors import ConfigError, HeadwayError
from headway.store.postgres.schema import URL, Tables, prepare

_FIRST_S, _LONGEST_S = 0.1, 2.0  # between attempts to connect
_CLOSE_S = 2.0  # limit for the server to close a connection
log = logging.getLogger("headway.store.postgres")

# PostgreSQL's errors that end a connection: class 08, and operator intervention except 57014, a statement
# timeout.
_GONE = ("08", "57P")

# Every statement finds its rows by an index. A plan made while a table was small must not scan it when it is
# large. Only this isolation level shows each statement all earlier commits.
_SETTINGS = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "default_transaction_isolation": "read committed",
}
# A database may have it off for speed; accepted requests would be lost with the server.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
# A session that this gateway has lost may still commit, even statements in transit. It is ended before
# another one begins.
_FENCE = """SELECT pg_terminate_backend(pid, $2) FROM pg_stat_activity
    WHERE application_name = $1 AND pid <> pg_backend_pid() AND usename = current_user"""


class Lost(Exception):
    """The server's answer did not come: it may have committed, or not."""


class Out(Exception):
    """The call was not sent: the connection is down."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server's URL, Headway's schema there, and the timeout of every call in seconds."""

    url: str
    schema: str
    timeout_s: float

    def __repr__(self) -> str:
        return f"Address({self.place}, {self.schema})"  # the URL may hold a password

    @property
    def place(self) -> str:
        """Return the server's address for messages, without user and password."""
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:
            return "the server of broker.postgres.url"
        host = host or "the local server"
        return (netloc(host, port) if port else host) + parts.path

    async def connect(self, name: str) -> Connection:
        """Return a new connection with an application name. ConfigError when that is not possible."""
        limit = str(round(self.timeout_s * 1000))
        settings = {
            "application_name": name,
            "statement_timeout": limit,
            # Others would wait for the locks of a gateway that is paused or cut off within a transaction.
            "idle_in_transaction_session_timeout": limit,
            **_SETTINGS,
        }
        with explained(self.place):
            # Longer than the server's own limit, so that the server gives up first, and rolls back.
            connection: Connection = await asyncpg.connect(
                self.url,
                timeout=self.timeout_s,
                command_timeout=self.timeout_s + 2,
                target_session_attrs="read-write",
                server_settings=settings,
            )
            try:
                await connection.execute(_DURABLE)
                if await connection.fetchval("SHOW fsync") == "off":
                    log.warning("PostgreSQL runs with fsync = off: a crash of its machine loses requests")
            except BaseException:
                connection.terminate()
                raise
        return connection

    async def check_clock(self, most_apart_s: float) -> None:
        """Raise ConfigError when Headway's clock and the server's are more than these seconds apart."""
        connection = await self.connect("headway-clock")
        try:
            before = clock.now()
            theirs = await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
            apart = (before + clock.now()) / 2 - theirs
        finally:
            connection.terminate()
        if abs(apart) > most_apart_s:
            side = "ahead of" if apart > 0 else "behind"
            raise ConfigError(
                f"Headway's clock on this machine is {abs(apart):.1f} s {side} PostgreSQL's ({self.place}): "
                "gateways would take each other's work.",
                "Synchronize the machines' clocks, then stop Headway here, delete "
                f"{clock.origin_file()}, which goes by the old clock, and start it.",
            )

    async def connect_writer(self, name: str, tables: Sequence[Tables], *, make: bool) -> Connection:
        """Return a connection that changes these tables, after the end of older sessions of that name."""
        connection = await self.connect(name)
        try:
            with explained(self.place):
                ended = await connection.fetch(_FENCE, name, round(self.timeout_s * 1000))
                if not all(row[0] for row in ended):
                    fix = "Check pg_stat_activity."
                    raise ConfigError("An earlier session is still active.", fix, param=URL)
                await prepare(connection, self.schema, tables, make=make)
        except BaseException:
            connection.terminate()
            raise
        return connection


@contextmanager
def explained(place: str) -> Iterator[None]:
    """Turn connection errors into a ConfigError that names the fix and never quotes a password."""
    try:
        yield
    except asyncpg.PostgresError as error:
        raise ConfigError(f"PostgreSQL ({place}): {error.args[0]}.", _fix_of(error), param=URL) from None
    except asyncpg.TargetServerAttributeNotMatched:
        fix = "Name the primary, or all hosts, separated by commas."
        raise ConfigError(f"PostgreSQL ({place}) takes no writes.", fix, param=URL) from None
    except (asyncpg.ClientConfigurationError, ValueError) as error:
        if isinstance(error, OSError):  # a certificate's
            raise _unreachable(place, error) from None
        problem = "broker.postgres.url is not the URL of a PostgreSQL server."  # error's words may quote it
        fix = "Write postgresql://USER:PASSWORD@HOST:PORT/DATABASE; special characters as %XX."
        raise ConfigError(problem, fix, param=URL) from None
    except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:  # a TimeoutError, too
        raise _unreachable(place, error) from None


def _unreachable(place: str, error: Exception) -> ConfigError:
    why = str(error) or "no answer in time"
    fix = "Start it, or correct broker.postgres.url; TLS is set by ?sslmode= there."
    return ConfigError(f"PostgreSQL ({place}) cannot be reached: {why}.", fix, param=URL)


_FIXES = {
    "28P01": "Correct the password in broker.postgres.url, or in PGPASSWORD or ~/.pgpass without one there.",
    "28": "Correct the user in broker.postgres.url, or admit it in the server's pg_hba.conf.",
    "3D000": "Create it with `createdb`, or correct the name at the end of broker.postgres.url.",
    "42501": "Let the user create schemas (GRANT CREATE ON DATABASE), or make it the schema's owner; a schema of an "
    "older Headway is upgraded by its owner.",
    "53300": "Raise max_connections of the server: each gateway takes three.",
    "57P03": "Wait until the server has started.",
    "42939": "Name another schema in broker.postgres.schema.",
    "25006": "The server takes no writes: name the primary.",
}


def _fix_of(error: asyncpg.PostgresError) -> str:
    state = error.sqlstate or ""
    return _FIXES.get(state) or _FIXES.get(state[:2]) or "Check the server's log."


def gone(error: BaseException) -> bool:
    """Tell whether an error means that the connection can no longer be used."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "").startswith(_GONE)
    if isinstance(error, asyncpg.DataError):  # an InterfaceError, too: a value that cannot be encoded
        return False
    return isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError)


class Link:
    """One connection, opened again with growing pauses whenever it ends, until `close`.

    open: opens it. problem: why there is none, in words for clients.
    """

    def __init__(self, first: Connection, open: Callable[[], Awaitable[Connection]]) -> None:
        self._open = open
        self._lost = asyncio.Event()
        self._connection: Connection | None = None
        self.problem: str | None = None
        self._logged = ""
        self._adopt(first)
        self._keeping = asyncio.create_task(self._keep())

    async def ask(self, work: Callable[[Connection], Awaitable[Any]]) -> Any:
        """Return the result of `work` on the connection.

        Raises Out when there is none; Lost when it ended meanwhile; other errors unchanged.
        """
        connection = self._connection
        if connection is None:
            raise Out(self.problem or "there is no connection")
        try:
            return await work(connection)
        except Exception as error:
            if not gone(error) and not connection.is_closed():
                raise
            self.drop("the connection to its server has ended")
            log.warning("the connection to PostgreSQL has ended: %r", error)
            raise Lost(self.problem) from error

    def drop(self, why: str) -> None:
        """Give up the connection; another one is opened at once."""
        if self._connection is not None:
            self._connection.terminate()
        self._connection, self.problem = None, why
        self._lost.set()

    async def close(self) -> None:
        """End the connection."""
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await connection.close(timeout=_CLOSE_S)

    async def _keep(self) -> None:
        while True:
            await self._lost.wait()
            wait = _FIRST_S
            while not await self._reconnected():
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_S)

    async def _reconnected(self) -> bool:
        try:
            connection = await self._open()
        except Exception as error:  # any error: the next attempt may succeed
            if (why := str(error) or repr(error)) != self._logged:  # once, not every two seconds
                log.warning("no connection to PostgreSQL: %s", why, exc_info=not isinstance(error, HeadwayError))
            self.problem, self._logged = "its server cannot be used", why
            return False
        log.info("connected to PostgreSQL again")
        self._adopt(connection)
        return True

    def _adopt(self, connection: Connection) -> None:
        self._connection = connection
        self.problem, self._logged = None, ""
        self._lost.clear()
        connection.add_termination_listener(self._ended)

    def _ended(self, connection: Any) -> None:
        if connection is self._connection:
            self.drop("the connection to its server has ended")
