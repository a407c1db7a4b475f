"""Files and batches in a PostgreSQL database, beside the queue: any gateway can serve all of them.

One gateway at a time runs batches, under a lease by the server's clock. Each time that another one takes over,
the number of the term grows. A call that changes lines or ends batches locks the lease's row, and does nothing
unless the term is the caller's. So a gateway that was paused or cut off cannot change the batches that another
one runs by then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from asyncpg import Connection

from headway.errors import HeadwayError
from headway.store.batches.port import PIECE
from headway.store.batches.postgres_files import PostgresFiles
from headway.store.batches.postgres_session import StatementTimeout, Work
from headway.store.batches.records import (
    ENDED_KEPT_S,
    EXPIRED,
    FORGOTTEN,
    MOST_ENDED,
    Batch,
    EndedLine,
    Line,
    StoredFile,
    too_many_open,
)
from headway.store.postgres.link import Address
from headway.store.postgres.schema import stored

_LINES = 1000  # lines changed or deleted per transaction, so that no statement exceeds `timeout_s`
_BATCH = ", ".join(f'"{field.name}"' for field in fields(Batch))

_COUNT = "SELECT count(*) FROM {s}.batches WHERE ended IS NULL AND tenant = $1"
_ADD = f"INSERT INTO {{s}}.batches ({_BATCH}) VALUES (%s)" % ", ".join(f"${i}" for i, _ in enumerate(fields(Batch), 1))
_GET = f"SELECT {_BATCH} FROM {{s}}.batches WHERE id = $1 AND tenant = $2"
_SOME = f"""SELECT {_BATCH} FROM {{s}}.batches WHERE tenant = $1 AND ($3::text IS NULL
        OR seq < (SELECT seq FROM {{s}}.batches WHERE id = $3 AND tenant = $1))
    ORDER BY seq DESC LIMIT $2"""
_OPEN = f"SELECT {_BATCH} FROM {{s}}.batches WHERE ended IS NULL ORDER BY due, seq"
_FORGET_BATCHES = f"""DELETE FROM {{s}}.batches WHERE seq IN (SELECT seq FROM {{s}}.batches
    WHERE tenant = $1 AND ended < $2 AND cleared
    AND seq <= (SELECT seq FROM {{s}}.batches WHERE tenant = $1 ORDER BY seq DESC LIMIT 1 OFFSET {MOST_ENDED})
    ORDER BY seq LIMIT {FORGOTTEN})"""
_CANCEL = """UPDATE {s}.batches SET state = 'cancelling', cancelling = $3
    WHERE tenant = $1 AND id = $2 AND state IN ('validating', 'in_progress') RETURNING true"""

_RENEW = """UPDATE {s}.batch_runner SET until = clock_timestamp() + make_interval(secs => $2)
    WHERE term = $1 RETURNING term"""
_TAKE = """UPDATE {s}.batch_runner
    SET until = clock_timestamp() + make_interval(secs => $2), holder = $1, term = term + 1
    WHERE until <= clock_timestamp() OR holder = $1 RETURNING term"""
_RELEASE = "UPDATE {s}.batch_runner SET until = '-infinity', holder = NULL WHERE term = $1"
_HELD = "SELECT term FROM {s}.batch_runner WHERE term = $1 FOR SHARE"

_FORGET = """DELETE FROM {s}.lines WHERE batch = $1 AND number IN
    (SELECT number FROM {s}.lines WHERE batch = $1 ORDER BY number LIMIT $2) RETURNING true"""
_LEFT = "SELECT id FROM {s}.batches WHERE ended IS NOT NULL AND NOT cleared"
_CLEARED = "UPDATE {s}.batches SET cleared = true WHERE id = $1 AND ended IS NOT NULL"
_REFUSE = """UPDATE {s}.batches SET ended = $2, errors = $3,
        state = CASE state WHEN 'validating' THEN 'failed' ELSE 'cancelled' END
    WHERE id = $1 AND ended IS NULL"""
_ADD_LINES = """INSERT INTO {s}.lines (batch, number, start, size, custom_id)
    SELECT $1, * FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::text[])"""
_BEGIN = """UPDATE {s}.batches SET began = $2, total = (SELECT count(*) FROM {s}.lines WHERE batch = $1),
        state = CASE state WHEN 'validating' THEN 'in_progress' ELSE state END
    WHERE id = $1 RETURNING total"""
_OPEN_LINES = """SELECT number, start, size, custom_id FROM {s}.lines
    WHERE batch = $1 AND number > $2 AND ended = 0 ORDER BY number LIMIT $3"""
# Ending a line does not wait for the disk: the queue has the answer, and its earlier commit did wait.
_RECORD = """WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS word),
    held AS MATERIALIZED (SELECT term FROM {s}.batch_runner WHERE term = $1 FOR SHARE),
    line AS (UPDATE {s}.lines SET ended = CASE WHEN $4 THEN 1 ELSE 2 END, content = $5
        WHERE batch = $2 AND number = $3 AND ended = 0 AND EXISTS (SELECT FROM held) RETURNING number),
    counts AS (UPDATE {s}.batches SET completed = completed + CASE WHEN $4 THEN 1 ELSE 0 END,
            failed = failed + CASE WHEN $4 THEN 0 ELSE 1 END
        WHERE id = $2 AND EXISTS (SELECT FROM line) RETURNING id)
    SELECT EXISTS (SELECT FROM held), EXISTS (SELECT FROM line) FROM quick"""
_CLOSE = """WITH closed AS (UPDATE {s}.lines SET ended = $2 WHERE batch = $1 AND ended = 0 AND number IN
            (SELECT number FROM {s}.lines WHERE batch = $1 AND ended = 0 ORDER BY number LIMIT $3)
        RETURNING number),
    counts AS (UPDATE {s}.batches SET failed = failed + (SELECT count(*) FROM closed) WHERE id = $1)
    SELECT count(*) FROM closed"""
_ENDED_LINES = """WITH page AS (
        SELECT number, octet_length(content) AS size FROM {s}.lines
        WHERE batch = $1 AND number > $2 AND ended > 0 ORDER BY number LIMIT $3),
    summed AS (
        SELECT number, coalesce(size, 0) AS size, coalesce(sum(size) OVER (
            ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before FROM page)
    SELECT number, custom_id, ended, content FROM summed JOIN {s}.lines AS lines USING (number)
    WHERE batch = $1 AND (before = 0 OR before + summed.size <= $4) ORDER BY number"""
_FINALIZE = """UPDATE {s}.batches SET finalizing = coalesce(finalizing, $2),
        state = CASE state WHEN 'cancelling' THEN state ELSE 'finalizing' END
    WHERE id = $1 RETURNING state"""
_LATE = "SELECT EXISTS (SELECT FROM {s}.lines WHERE batch = $1 AND ended = $2)"
_END = """UPDATE {s}.batches SET state = $2, ended = $3, output_file = $4, error_file = $5
    WHERE id = $1 AND ended IS NULL RETURNING true"""


class PostgresStore(PostgresFiles):
    """A `BatchStore`, which documents the methods, in one schema of a PostgreSQL database.

    lease_s: seconds of silence after which the gateway that runs batches counts as gone. Raises ConfigError when the
        database cannot be used.
    """

    def __init__(self, address: Address, lease_s: float) -> None:
        self._lease_s = lease_s
        self._term: int | None = None  # while this gateway runs batches, as far as it knows
        self.changed = asyncio.Event()
        super().__init__(address)

    def problem(self) -> str | None:
        """Return None: each call raises an error while the server is out."""
        return None

    async def close(self) -> None:
        with suppress(HeadwayError):
            await self.release()
        await super().close()

    # ---- batches

    async def add_batch(self, batch: Batch, most: int, *, keyed: bool = False) -> bool:
        """Add a batch. If the outcome is unknown and it was added, it is cancelled later, unless it has a key."""
        cancel = self.statement(_CANCEL, stored(batch.tenant), batch.id, batch.created)
        return await self.change(partial(self._add, batch, most), undo=None if keyed else cancel)

    async def _add(self, batch: Batch, most: int, connection: Connection) -> bool:
        await self.lock_tenant(connection, batch.tenant)
        if await connection.fetchrow(self.sql(_GET), batch.id, stored(batch.tenant)) is not None:
            return False
        await self.lock_input(connection, batch.tenant, batch.input_file)
        count = await connection.fetchval(self.sql(_COUNT), stored(batch.tenant))
        if count >= most:
            raise too_many_open(count, most)
        values = [getattr(batch, field.name) for field in fields(Batch)]
        row = [stored(value) if isinstance(value, str) else value for value in values]
        await connection.execute(self.sql(_ADD), *row)
        await connection.execute(self.sql(_FORGET_BATCHES), stored(batch.tenant), batch.created - ENDED_KEPT_S)
        return True

    async def batch(self, tenant: str, id: str) -> Batch | None:
        found = await self.records(Batch, _GET, stored(id), stored(tenant))
        return found[0] if found else None

    async def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        return await self.records(Batch, _SOME, stored(tenant), limit, stored(after))

    async def open_batches(self) -> list[Batch]:
        return await self.records(Batch, _OPEN)

    async def cancel(self, tenant: str, id: str, now: float) -> bool:
        return bool(await self.value(_CANCEL, stored(tenant), stored(id), now))

    # ---- the gateway that runs batches

    async def hold(self) -> bool:
        """Renew the lease, or begin one when there is none in force."""
        if self._term is not None:
            if await self.value(_RENEW, self._term, self._lease_s) is None:
                self._term = None
        else:
            self._term = await self.value(_TAKE, self._me, self._lease_s)
        return self._term is not None

    async def release(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            await self.rows(_RELEASE, term)

    async def sweep(self) -> None:
        """Delete the remains of files, and lines of ended batches."""
        await self.sweep_files()
        for row in await self.rows(_LEFT):
            await self._clear(row["id"])

    async def _as_holder(self, work: Work[Any]) -> Any:
        """Return the result of work in a transaction during which no other gateway can take the lease."""
        term = self._term

        async def checked(connection: Connection) -> Any:
            if await connection.fetchval(self.sql(_HELD), term) is None:
                raise self._not_held()
            return await work(connection)

        return await self.change(checked)

    async def _value_as_holder(self, sql: str, *values: Any) -> Any:
        """Run a statement as `_as_holder` does; return its first value."""

        async def work(connection: Connection) -> Any:
            return await connection.fetchval(self.sql(sql), *values)

        return await self._as_holder(work)

    def _not_held(self) -> HeadwayError:
        return self.down("another gateway runs batches now")

    # ---- lines

    async def clear_lines(self, id: str) -> None:
        await self._in_parts(_FORGET, id)

    async def add_lines(self, id: str, lines: Sequence[Line]) -> None:
        rows = [(line.number, line.start, line.size, stored(line.custom_id)) for line in lines]
        if rows:
            await self._add_rows(id, rows)

    async def refuse(self, id: str, problems: Sequence[Mapping[str, Any]], now: float) -> None:
        await self._value_as_holder(_REFUSE, id, now, json.dumps(problems))
        await self._clear(id)

    async def begin(self, id: str, now: float) -> int:
        return int(await self._value_as_holder(_BEGIN, id, now))

    async def open_lines(self, id: str, after: int, limit: int) -> list[Line]:
        return await self.records(Line, _OPEN_LINES, id, after, limit)

    async def record(self, id: str, number: int, good: bool, content: bytes) -> bool:
        """End a line in one statement, which is a transaction; False when it has ended already."""
        ((held, ended),) = await self.rows(_RECORD, self._term, id, number, good, content)
        if not held:
            raise self._not_held()
        return bool(ended)

    async def close_lines(self, id: str, end: int) -> int:
        """End all open lines, some at a time; return how many."""
        return await self._in_parts(_CLOSE, id, end)

    async def _in_parts(self, sql: str, *values: Any) -> int:
        """Run a statement on some lines at a time until it finds none; return the total.

        Its last parameter is the number of lines, which is halved after each timeout.
        """
        done, most = 0, _LINES
        while True:
            try:
                some = await self._value_as_holder(sql, *values, most)
            except StatementTimeout:
                if most == 1:
                    raise
                most //= 2
                continue
            if not some:
                return done
            done += some

    async def _add_rows(self, id: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows; after a timeout, each half by itself."""
        columns = (list(column) for column in zip(*rows, strict=True))
        try:
            await self._value_as_holder(_ADD_LINES, id, *columns)
        except StatementTimeout:
            if len(rows) == 1:
                raise
            await self._add_rows(id, rows[: len(rows) // 2])
            await self._add_rows(id, rows[len(rows) // 2 :])

    async def ended_lines(self, id: str, after: int, limit: int) -> list[EndedLine]:
        return await self.records(EndedLine, _ENDED_LINES, id, after, limit, PIECE)

    # ---- ends of batches

    async def finalize(self, id: str, now: float) -> str:

        async def work(connection: Connection) -> str:
            if await connection.fetchval(self.sql(_FINALIZE), id, now) == "cancelling":
                return "cancelled"
            late = await connection.fetchval(self.sql(_LATE), id, EXPIRED)
            return "expired" if late else "completed"

        return str(await self._as_holder(work))

    async def end(
        self, id: str, state: str, now: float, *, output: StoredFile | None = None, error: StoredFile | None = None
    ) -> None:
        """End a batch: its files are listed in the same transaction, its lines deleted after it."""

        async def work(connection: Connection) -> None:
            for file in (output, error):
                if file is not None:
                    await self.list_file(connection, file)
            ids = [None if file is None else file.id for file in (output, error)]
            if not await connection.fetchval(self.sql(_END), id, state, now, *ids):
                raise self.down("the batch has ended already")

        await self._as_holder(work)
        await self._clear(id)

    async def _clear(self, id: str) -> None:
        """Delete the lines of an ended batch; if the server fails, `sweep` does it later."""
        with suppress(HeadwayError):
            await self.clear_lines(id)
            await self.rows(_CLEARED, id)
