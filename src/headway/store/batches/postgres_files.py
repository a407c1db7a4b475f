"""Files of the PostgreSQL store: their content in chunks, written, read and deleted a few at a time."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from asyncpg import Connection

from headway.errors import HeadwayError
from headway.store.batches.port import PIECE, STALE_S
from headway.store.batches.postgres_session import BatchSession, Work
from headway.store.batches.records import LEAST_BYTES, StoredFile, in_use, input_gone, no_file, no_room
from headway.store.postgres.link import Address
from headway.store.postgres.schema import loaded, lock_of, stored

_CHUNKS = 32  # chunks deleted per transaction, so that it ends in time for a file of any size
_FILE = ", ".join(field.name for field in fields(StoredFile))

_SIZES = f"coalesce(sum(greatest(size, {LEAST_BYTES})), 0)::bigint"
_USED = f"""SELECT {_SIZES} FROM {{s}}.files
    WHERE tenant = $1 AND (state = 'stored' OR state = 'upload' AND writer <> $2)"""
_BEGIN = f"""INSERT INTO {{s}}.files ({_FILE}, state, writer, grown)
    VALUES ($1, $2, $3, $4, 0, $5, NULL, 'upload', $6, clock_timestamp())"""
# These commits do not wait for the disk: the commit of the complete file waits for all of them.
_APPEND = """WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)),
    grown AS (UPDATE {s}.files SET size = $2 + $4, grown = clock_timestamp()
        WHERE id = $1 AND state = 'upload' AND size = $2 RETURNING id)
    INSERT INTO {s}.chunks (file, start, content) SELECT $1, $2, $3 FROM grown, quick RETURNING start"""
_GONE = "UPDATE {s}.files SET state = 'gone' WHERE id = $1 AND state <> 'gone'"
_PURGE = """DELETE FROM {s}.chunks WHERE file = $1 AND start IN
    (SELECT start FROM {s}.chunks WHERE file = $1 ORDER BY start LIMIT $2) RETURNING true"""
_PURGED = "DELETE FROM {s}.files WHERE id = $1 AND state = 'gone'"
_SUM = f"SELECT {_SIZES} FROM {{s}}.files WHERE tenant = $1 AND state = 'stored'"
_LIST = """UPDATE {s}.files SET state = 'stored', name = $3, created = $4, expires = $5
    WHERE id = $1 AND state = 'upload' AND size = $2 RETURNING true"""
_GET = f"SELECT {_FILE} FROM {{s}}.files WHERE id = $1 AND tenant = $2 AND state = 'stored'"
_SOME = f"""SELECT {_FILE} FROM {{s}}.files
    WHERE tenant = $1 AND state = 'stored' AND ($4::text IS NULL OR purpose = $4)
        AND (expires IS NULL OR expires >= $5)
        AND ($3::text IS NULL OR seq %s (SELECT seq FROM {{s}}.files WHERE id = $3 AND tenant = $1))
    ORDER BY seq %s LIMIT $2"""
_EXPIRED = f"""SELECT {_FILE} FROM {{s}}.files WHERE state = 'stored' AND expires < $1
    AND id NOT IN (SELECT input_file FROM {{s}}.batches WHERE ended IS NULL) LIMIT $2"""
_READ = """SELECT substring(content FROM (greatest($2 - start, 0) + 1)::integer
        FOR ($2 + $3 - greatest(start, $2))::integer)
    FROM {s}.chunks WHERE file = $1 AND start < $2 + $3 AND start >=
        coalesce((SELECT max(start) FROM {s}.chunks WHERE file = $1 AND start <= $2), 0)
    ORDER BY start"""
_LOCK = "SELECT size FROM {s}.files WHERE tenant = $1 AND id = $2 AND state = 'stored' FOR %s"
_READER = "SELECT id FROM {s}.batches WHERE ended IS NULL AND tenant = $1 AND input_file = $2"
_LEFT = """SELECT id FROM {s}.files WHERE state <> 'stored'
    AND (state = 'gone' OR grown < clock_timestamp() - make_interval(secs => $1))"""


class PostgresFiles(BatchSession):
    """The part of the store that keeps files; `BatchStore` documents the methods."""

    def __init__(self, address: Address) -> None:
        self._me = secrets.token_hex(8)
        super().__init__(address)

    async def used(self, tenant: str) -> int:
        return int(await self.value(_USED, stored(tenant), self._me))

    async def begin_file(self, file: StoredFile) -> None:
        """Insert the row of an upload."""
        row = [stored(text) for text in (file.id, file.tenant, file.name, file.purpose)]
        await self.ask(self.statement(_BEGIN, *row, file.created, self._me), undo=self._drop(file.id))

    async def append(self, id: str, at: int, content: bytes) -> None:
        """Add chunks to an upload that has `at` bytes. HeadwayError (503) when it has been given up."""
        for start in range(0, len(content), PIECE):
            chunk = content[start : start + PIECE]
            if await self.value(_APPEND, stored(id), at + start, chunk, len(chunk)) is None:
                raise self.down("the upload has been given up")

    async def discard(self, id: str) -> None:
        """Delete an upload, also if a call with an unknown outcome has listed it."""
        try:
            await self.ask(self._drop(id))
        except HeadwayError:
            self.later(self._drop(id))
        else:
            await self._purge(id)

    async def add_file(self, file: StoredFile, most: int) -> None:
        """List an upload. RequestError (413) if its tenant would have more than `most` bytes."""
        await self.change(partial(self._add_file, file, most), undo=self._drop(file.id))

    async def _add_file(self, file: StoredFile, most: int, connection: Connection) -> None:
        await self.lock_tenant(connection, file.tenant)
        used = await connection.fetchval(self.sql(_SUM), stored(file.tenant))
        if used + max(file.size, LEAST_BYTES) > most:
            raise no_room(most)
        await self.list_file(connection, file)

    async def list_file(self, connection: Connection, file: StoredFile) -> None:
        """Turn an upload into a file. HeadwayError (503) unless it is complete."""
        row = stored(file.id), file.size, stored(file.name), file.created, file.expires
        if not await connection.fetchval(self.sql(_LIST), *row):
            raise self.down("the upload is not complete")

    async def file(self, tenant: str, id: str) -> StoredFile | None:
        found = await self.records(StoredFile, _GET, stored(id), stored(tenant))
        return found[0] if found else None

    async def files(
        self,
        tenant: str,
        after: str | None,
        limit: int,
        *,
        newest: bool = True,
        purpose: str | None = None,
        now: float = 0.0,
    ) -> list[StoredFile]:
        """Return up to `limit` files of a tenant that come after one of them, and had not expired at `now`."""
        sql = _SOME % (("<", "DESC") if newest else (">", "ASC"))
        return await self.records(StoredFile, sql, stored(tenant), limit, stored(after), stored(purpose), now)

    async def expired(self, now: float, limit: int) -> list[StoredFile]:
        return await self.records(StoredFile, _EXPIRED, now, limit)

    def path(self, id: str) -> Path | None:
        """Return None: no file is on this machine."""
        return None

    async def read(self, id: str, start: int, size: int) -> bytes:
        rows = await self.rows(_READ, stored(id), start, size)
        if not rows:
            raise input_gone()
        return b"".join(row[0] for row in rows)

    async def delete_file(self, tenant: str, id: str) -> bool:
        gone: bool = await self.change(partial(self._delete, stored(tenant), stored(id)))
        if gone:
            await self._purge(id)
        return gone

    async def _delete(self, tenant: str | None, id: str | None, connection: Connection) -> bool:
        if await connection.fetchval(self.sql(_LOCK % "UPDATE"), tenant, id) is None:
            return False
        if reader := await connection.fetchval(self.sql(_READER), tenant, id):
            raise in_use(reader)
        await connection.execute(self.sql(_GONE), id)
        return True

    async def lock_input(self, connection: Connection, tenant: str, id: str) -> None:
        """Keep a file from being deleted until the transaction ends. RequestError (404) when it is gone."""
        if await connection.fetchval(self.sql(_LOCK % "SHARE"), stored(tenant), stored(id)) is None:
            raise no_file(id)

    async def sweep_files(self) -> None:
        """Delete the remains of uploads that were given up, and of deleted files."""
        for row in await self.rows(_LEFT, STALE_S):
            id = loaded(row["id"])
            await self.ask(self._drop(id))
            await self._purge(id)

    async def _purge(self, id: str) -> None:
        """Delete the chunks of a deleted file; if the server fails, `sweep` does it later."""
        with suppress(HeadwayError):
            while await self.rows(_PURGE, stored(id), _CHUNKS):
                pass
            await self.rows(_PURGED, stored(id))

    async def lock_tenant(self, connection: Connection, tenant: str) -> None:
        """Let one gateway at a time count a tenant's files and batches, until the transaction ends."""
        await connection.execute("SELECT pg_advisory_xact_lock($1)", lock_of(f"{self._schema} {tenant}"))

    def _drop(self, id: str) -> Work[None]:
        return self.statement(_GONE, stored(id))

    def statement(self, sql: str, *values: Any) -> Work[None]:
        """Return work that executes one statement."""

        async def work(connection: Connection) -> None:
            await connection.execute(self.sql(sql), *values)

        return work
