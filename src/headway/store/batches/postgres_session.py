"""The batch store's session with PostgreSQL, which carries out one call at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import asyncpg
from asyncpg import Connection

from headway.errors import HeadwayError, RequestError
from headway.store.postgres import session
from headway.store.postgres.link import Address
from headway.store.postgres.schema import PARAM, Tables, loaded
from headway.store.queue.postgres_schema import JOBS
from headway.store.versions import Versions

T = TypeVar("T")
Work = Callable[[Connection], Awaitable[T]]
_CANCELED = "57014"  # by `statement_timeout`


class StatementTimeout(HeadwayError):
    """A statement was canceled after `timeout_s` and changed nothing; one with fewer rows may succeed."""


@dataclass(slots=True, eq=False)
class _Call(session.SessionCall, Generic[T]):
    """A call's work. undo: runs before all later work if the connection ended before the outcome was known."""

    work: Work[T]
    undo: Work[None] | None


class BatchSession(session.Session):
    """One connection to the tables of files and batches, which are created if missing."""

    def __init__(self, address: Address) -> None:
        self._undo = deque[Work[None]]()
        super().__init__(address, "The store of files and batches", "try again")

    async def ask(self, work: Work[T], *, undo: Work[None] | None = None) -> T:
        """Return the result of `work` on the connection; errors as `call`, `StatementTimeout` when it is slow.

        undo: runs before all later work if the connection ended before the outcome was known.
        """
        return cast(T, await self.call(self._works, _Call(work, undo)))

    async def change(self, work: Work[T], *, undo: Work[None] | None = None) -> T:
        """Run `work` as `ask` does, but in a transaction."""

        async def whole(connection: Connection) -> T:
            async with connection.transaction():
                return await work(connection)

        return await self.ask(whole, undo=undo)

    def later(self, work: Work[None]) -> None:
        """Run work before all later work."""
        self._undo.append(work)

    async def rows(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a statement; {s} in it is the schema."""
        text = self.sql(sql)
        return await self.ask(lambda connection: cast(Awaitable[list[Any]], connection.fetch(text, *values)))

    async def records(self, kind: Callable[..., T], sql: str, *values: Any) -> list[T]:
        """Return the rows of a statement, each as a record of that kind."""
        return [kind(*(loaded(value) for value in row)) for row in await self.rows(sql, *values)]

    async def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of a statement's first row, None when there is none."""
        found = await self.rows(sql, *values)
        return found[0][0] if found else None

    # ---- on the session's thread

    async def _begin(self, held: AsyncExitStack) -> None:
        link = await self._link(held, "batches", [JOBS, BATCHES])
        self._works = session.Lane[_Call[Any]](link, lambda calls: [calls.popleft()], self._carry_out)
        self._lanes.append(self._works)

    async def _carry_out(self, group: list[_Call[Any]], tries: int, connection: Connection) -> list[Any]:
        return [await self._after_undo(group[0].work, connection)]

    async def _after_undo(self, work: Work[T], connection: Connection) -> T:
        while self._undo:
            await self._undo[0](connection)
            self._undo.popleft()
        return await work(connection)

    def _note_unknown(self, group: Sequence[_Call[Any]]) -> None:
        self._undo += [call.undo for call in group if call.undo is not None]

    def _unfit(self, error: asyncpg.PostgresError) -> HeadwayError:
        session.log.error("PostgreSQL cannot hold a value of a file or batch: %r", type(error))
        return RequestError("PostgreSQL cannot hold this.", "Send a smaller or well-formed request.")

    def _refused(self, error: asyncpg.PostgresError) -> HeadwayError:
        if error.sqlstate != _CANCELED:
            return super()._refused(error)
        session.log.warning("PostgreSQL is slow: a statement of the batch store timed out")
        fix = "Check the PostgreSQL server's load, or raise timeout_s in [queue.postgres]."
        why = "The store of files and batches is slow: a statement took longer than its timeout_s."
        return StatementTimeout(why, fix, status=503, kind="server_error")


# A file is first an "upload", written by `writer` and last extended at `grown`; then "stored", or "gone" while
# its chunks are deleted. Chunks and answers are not compressed, so that a part can be read without the rest. An
# ended batch is `cleared` once its lines are deleted.
_SCHEMA = """
CREATE TABLE {s}.batch_runner (
    one boolean PRIMARY KEY DEFAULT true CHECK (one), term bigint NOT NULL, holder text,
    until timestamptz NOT NULL
);
CREATE TABLE {s}.files (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, tenant text NOT NULL,
    name text NOT NULL, purpose text NOT NULL, size bigint NOT NULL, created double precision NOT NULL,
    state text NOT NULL, writer text NOT NULL, grown timestamptz NOT NULL
);
CREATE INDEX files_of ON {s}.files (tenant, seq);
CREATE INDEX unlisted_files ON {s}.files (grown) WHERE state <> 'stored';
CREATE TABLE {s}.chunks (
    file text NOT NULL, start bigint NOT NULL, content bytea NOT NULL, PRIMARY KEY (file, start)
);
CREATE TABLE {s}.batches (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text NOT NULL UNIQUE, tenant text NOT NULL,
    endpoint text NOT NULL, input_file text NOT NULL, "window" text NOT NULL,
    created double precision NOT NULL, due double precision NOT NULL, metadata text, claims text,
    state text NOT NULL, began double precision, finalizing double precision, cancelling double precision,
    ended double precision, errors text, output_file text, error_file text, total bigint NOT NULL,
    completed bigint NOT NULL, failed bigint NOT NULL, cleared boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);
CREATE INDEX batches_of ON {s}.batches (tenant, seq);
CREATE INDEX open_batches ON {s}.batches (due, seq) WHERE ended IS NULL;
CREATE INDEX uncleared_batches ON {s}.batches (seq) WHERE ended IS NOT NULL AND NOT cleared;
CREATE TABLE {s}.lines (
    batch text NOT NULL, number bigint NOT NULL, start bigint NOT NULL, size bigint NOT NULL,
    custom_id text NOT NULL, ended smallint NOT NULL DEFAULT 0, content bytea, PRIMARY KEY (batch, number)
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX open_lines ON {s}.lines (batch, number) WHERE ended = 0;
ALTER TABLE {s}.chunks ALTER content SET STORAGE EXTERNAL;
ALTER TABLE {s}.lines ALTER content SET STORAGE EXTERNAL;
INSERT INTO {s}.batch_runner (term, until) VALUES (0, '-infinity');
"""
# Version 1 had no files that expire.
_TO_2 = """
ALTER TABLE {s}.files ADD COLUMN expires double precision;
ALTER TABLE {s}.batches ADD COLUMN output_expires_s double precision;
"""
BATCHES = Tables(
    "batches_meta",
    ("batch_runner", "files", "chunks", "batches", "lines"),
    Versions(param=PARAM, made=1, script=_SCHEMA, steps={1: _TO_2}),
)
