"""What is known of files and batches, and of each line of a batch, in one SQLite file beside the files.

A line ends once: its end, its answer and the batch's counts change in one transaction. So a gateway that was
killed goes on with the lines that have no end, and no answer is in two files.

The methods block; `Store.ask` calls them off the event loop. Instants are those of `headway.clock`.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from headway.errors import ConfigError, HeadwayError, RequestError
from headway.serve.batches.records import (
    BAD,
    EXPIRED,
    GOOD,
    Batch,
    EndedLine,
    Line,
    StoredFile,
    no_file,
    no_room,
)

T = TypeVar("T")
P = ParamSpec("P")

_VERSION = 1
_PATIENCE = 10.0  # seconds to wait while another gateway writes
_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL
);
CREATE INDEX files_of ON files (tenant, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL, window TEXT NOT NULL, created REAL NOT NULL, due REAL NOT NULL, metadata TEXT,
    claims TEXT, state TEXT NOT NULL, began REAL, finalizing REAL, cancelling REAL, ended REAL, errors TEXT,
    output_file TEXT, error_file TEXT, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL
);
CREATE INDEX batches_of ON batches (tenant, seq);
CREATE INDEX open_batches ON batches (due) WHERE ended IS NULL;
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    custom_id TEXT NOT NULL, ended INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE answers (batch TEXT NOT NULL, number INTEGER NOT NULL, content BLOB NOT NULL);
CREATE UNIQUE INDEX answer_of ON answers (batch, number);
"""


_FILE = ", ".join(field.name for field in fields(StoredFile))
_BATCH = ", ".join(field.name for field in fields(Batch))


def _marks(columns: str) -> str:
    return ", ".join("?" * len(columns.split(",")))


class Store:
    """The directory of files and batches. Raises ConfigError when it cannot be used.

    changed: to be set when a batch was added or cancelled here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / "files").mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "batches.sqlite", _PATIENCE, isolation_level=None, check_same_thread=False
            )
            _prepare(self._db)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The directory of batches {folder} cannot be used: {error}.",
                "Set batches.dir to one that can be written to, or to \"none\".", param="batches.dir",
            ) from error  # fmt: skip
        self._lock = threading.Lock()
        self._durable = True
        self._threads = ThreadPoolExecutor(2, "batches")
        self.changed = asyncio.Event()

    async def ask(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Return `work(...)`, done in a thread. HeadwayError (503) when the directory fails."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, partial(work, *args, **named))
        except (sqlite3.Error, OSError) as error:
            raise HeadwayError(
                f"The directory of batches is out: {error}.", "Look at its disk, then try again.",
                status=503, kind="server_error",
            ) from error  # fmt: skip

    def close(self) -> None:
        """Wait for calls that were made and close the file."""
        self._threads.shutdown()
        with self._lock:
            self._db.close()

    def path(self, id: str) -> Path:
        """Return where the content of a file is."""
        return self.folder / "files" / id

    @contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Change all or nothing. durable: it survives loss of power, not only the death of the process."""
        with self._lock:
            if durable != self._durable:
                self._db.execute(f"PRAGMA synchronous = {'full' if durable else 'normal'}")
                self._durable = durable
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    # ---- files

    def used(self, tenant: str) -> int:
        """Return the bytes of all files of a tenant."""
        ((size,),) = self._rows("SELECT COALESCE(SUM(size), 0) FROM files WHERE tenant = ?", tenant)
        return int(size)

    def add_file(self, file: StoredFile, most: int) -> None:
        """Add a file whose content is in place. RequestError (413) if the tenant would have more bytes."""
        with self._transaction() as db:
            (used,) = db.execute(
                "SELECT COALESCE(SUM(size), 0) FROM files WHERE tenant = ?", [file.tenant]
            ).fetchone()
            if used + file.size > most:
                raise no_room(most)
            _add_file(db, file)

    def file(self, tenant: str, id: str) -> StoredFile | None:
        """Return a file of a tenant."""
        rows = self._rows(f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ?", id, tenant)
        return StoredFile(*rows[0]) if rows else None

    def files(
        self, tenant: str, after: str | None, limit: int, *, newest: bool = True, purpose: str | None = None
    ) -> list[StoredFile]:
        """Return up to `limit` files of a tenant that come after one of them, in the order of their making.

        newest: the newest first.
        """
        order, past = ("DESC", "<") if newest else ("ASC", ">")
        sql = f"""SELECT {_FILE} FROM files WHERE tenant = ?1 AND purpose = COALESCE(?4, purpose)
            AND (?3 IS NULL OR seq {past} (SELECT seq FROM files WHERE id = ?3 AND tenant = ?1))
            ORDER BY seq {order} LIMIT ?2"""
        rows = self._rows(sql, tenant, limit, after, purpose)
        return [StoredFile(*row) for row in rows]

    def delete_file(self, tenant: str, id: str) -> bool:
        """Delete a file; False when there is none. RequestError (409) while a batch reads it."""
        with self._transaction() as db:
            reader = db.execute(
                "SELECT id FROM batches WHERE ended IS NULL AND tenant = ? AND input_file = ?", [tenant, id]
            ).fetchone()
            if reader:
                raise RequestError(
                    f"The batch {reader[0]} reads this file.", "Cancel it first, or wait for its end.",
                    status=409, code="file_in_use",
                )  # fmt: skip
            gone = db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", [tenant, id]).rowcount
        if gone:
            self.path(id).unlink(missing_ok=True)
        return bool(gone)

    def known_files(self) -> set[str]:
        """Return the ids of all files."""
        return {str(id) for (id,) in self._rows("SELECT id FROM files")}

    # ---- batches

    def add_batch(self, batch: Batch, most: int) -> None:
        """Add a batch. RequestError: 404 when its file is gone, 429 when `most` of its tenant are open."""
        with self._transaction() as db:
            of = [batch.tenant, batch.input_file]
            if not db.execute("SELECT 1 FROM files WHERE tenant = ? AND id = ?", of).fetchone():
                raise no_file(batch.input_file)
            sql = "SELECT COUNT(*) FROM batches WHERE ended IS NULL AND tenant = ?"
            (count,) = db.execute(sql, [batch.tenant]).fetchone()
            if count >= most:
                raise RequestError(
                    f"{count} batches of yours have not ended; at most {most} may be open.",
                    "Wait for the end of one (batches.max_open).",
                    status=429, kind="rate_limit_error", code="too_many_batches",
                )  # fmt: skip
            row = [getattr(batch, field.name) for field in fields(Batch)]
            db.execute(f"INSERT INTO batches ({_BATCH}) VALUES ({_marks(_BATCH)})", row)

    def batch(self, tenant: str, id: str) -> Batch | None:
        """Return a batch of a tenant."""
        rows = self._rows(f"SELECT {_BATCH} FROM batches WHERE id = ? AND tenant = ?", id, tenant)
        return Batch(*rows[0]) if rows else None

    def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """Return up to `limit` batches of a tenant that were made before one of them, the newest first."""
        sql = f"""SELECT {_BATCH} FROM batches WHERE tenant = ?1
            AND (?3 IS NULL OR seq < (SELECT seq FROM batches WHERE id = ?3 AND tenant = ?1))
            ORDER BY seq DESC LIMIT ?2"""
        return [Batch(*row) for row in self._rows(sql, tenant, limit, after)]

    def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended, the most urgent first."""
        rows = self._rows(f"SELECT {_BATCH} FROM batches WHERE ended IS NULL ORDER BY due, seq")
        return [Batch(*row) for row in rows]

    def cancel(self, tenant: str, id: str, now: float) -> bool:
        """Ask for the end of a batch; False when it ends or has ended already."""
        sql = """UPDATE batches SET state = 'cancelling', cancelling = ? WHERE tenant = ? AND id = ?
            AND state IN ('validating', 'in_progress')"""
        with self._transaction() as db:
            return db.execute(sql, [now, tenant, id]).rowcount == 1

    # ---- lines

    def clear_lines(self, id: str) -> None:
        """Forget lines of a batch whose check was cut short."""
        with self._transaction() as db:
            _forget_lines(db, id)

    def refuse(self, id: str, problems: Sequence[Mapping[str, Any]], now: float) -> None:
        """End a batch whose lines are wrong; it is cancelled if that was asked for meanwhile."""
        with self._transaction() as db:
            sql = """UPDATE batches SET
                state = CASE state WHEN 'validating' THEN 'failed' ELSE 'cancelled' END,
                ended = ?, errors = ? WHERE id = ?"""
            db.execute(sql, [now, json.dumps(problems), id])
            _forget_lines(db, id)

    def add_lines(self, id: str, lines: Sequence[Line]) -> None:
        """Add lines that are valid."""
        rows = [(id, line.number, line.start, line.size, line.custom_id) for line in lines]
        sql = "INSERT INTO lines (batch, number, start, size, custom_id) VALUES (?, ?, ?, ?, ?)"
        with self._transaction(durable=False) as db:
            db.executemany(sql, rows)

    def begin(self, id: str, now: float) -> int:
        """Begin to run a batch whose lines are all there; return how many they are."""
        sql = """UPDATE batches SET began = ?1, total = (SELECT COUNT(*) FROM lines WHERE batch = ?2),
            state = CASE state WHEN 'validating' THEN 'in_progress' ELSE state END WHERE id = ?2
            RETURNING total"""
        with self._transaction() as db:
            (total,) = db.execute(sql, [now, id]).fetchone()
        return int(total)

    def open_lines(self, id: str, after: int, limit: int) -> list[Line]:
        """Return up to `limit` lines behind that number which have no end, in order."""
        sql = """SELECT number, start, size, custom_id FROM lines
            WHERE batch = ? AND number > ? AND ended = 0 ORDER BY number LIMIT ?"""
        return [Line(*row) for row in self._rows(sql, id, after, limit)]

    def record(self, id: str, number: int, good: bool, content: bytes) -> bool:
        """End a line with its line of the output (`good`) or error file; False when it has ended already.

        After a loss of power it may be open again; the broker has the answer then.
        """
        end, column = (GOOD, "completed") if good else (BAD, "failed")
        with self._transaction(durable=False) as db:
            sql = "UPDATE lines SET ended = ? WHERE batch = ? AND number = ? AND ended = 0"
            if not db.execute(sql, [end, id, number]).rowcount:
                return False
            db.execute("INSERT INTO answers (batch, number, content) VALUES (?, ?, ?)", [id, number, content])
            db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", [id])
        return True

    def close_lines(self, id: str, end: int) -> int:
        """End all lines that have no end yet, without an answer; return how many."""
        with self._transaction() as db:
            sql = "UPDATE lines SET ended = ? WHERE batch = ? AND ended = 0"
            closed = db.execute(sql, [end, id]).rowcount
            db.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", [closed, id])
        return closed

    def ended_lines(self, id: str, after: int, limit: int) -> list[EndedLine]:
        """Return up to `limit` lines behind that number which have an end, in order."""
        sql = """SELECT lines.number, custom_id, ended, content FROM lines
            LEFT JOIN answers ON answers.batch = lines.batch AND answers.number = lines.number
            WHERE lines.batch = ? AND lines.number > ? AND ended > 0 ORDER BY lines.number LIMIT ?"""
        return [EndedLine(*row) for row in self._rows(sql, id, after, limit)]

    # ---- ends of batches

    def finalize(self, id: str, now: float) -> str:
        """Take note that a batch's files are being written; return the state that it will have then."""
        with self._transaction() as db:
            db.execute(
                """UPDATE batches SET finalizing = COALESCE(finalizing, ?),
                    state = CASE state WHEN 'cancelling' THEN state ELSE 'finalizing' END WHERE id = ?""",
                [now, id],
            )
            (state,) = db.execute("SELECT state FROM batches WHERE id = ?", [id]).fetchone()
            late = db.execute(
                "SELECT 1 FROM lines WHERE batch = ? AND ended = ? LIMIT 1", [id, EXPIRED]
            ).fetchone()
        if state == "cancelling":
            return "cancelled"
        return "expired" if late else "completed"

    def end(
        self, id: str, state: str, now: float, *, output: StoredFile | None = None,
        error: StoredFile | None = None,
    ) -> None:  # fmt: skip
        """End a batch: its files, whose content is in place, are added and its lines forgotten."""
        with self._transaction() as db:
            for file in (output, error):
                if file is not None:
                    _add_file(db, file)
            ids = [None if file is None else file.id for file in (output, error)]
            sql = "UPDATE batches SET state = ?, ended = ?, output_file = ?, error_file = ? WHERE id = ?"
            db.execute(sql, [state, now, *ids, id])
            _forget_lines(db, id)


@asynccontextmanager
async def opened(folder: Path | None) -> AsyncIterator[Store | None]:
    """Open the directory of batches until the block ends; None = there are no batches."""
    if folder is None:
        yield None
        return
    store = await asyncio.to_thread(Store, folder)
    try:
        yield store
    finally:
        await asyncio.to_thread(store.close)


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = wal")
    db.execute("PRAGMA synchronous = full")
    db.execute("BEGIN IMMEDIATE")  # another gateway may be making it
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not version:
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute("COMMIT")
    if version > _VERSION:
        raise sqlite3.DatabaseError(f"its schema {version} is a newer Headway's")


def _add_file(db: sqlite3.Connection, file: StoredFile) -> None:
    row = [getattr(file, field.name) for field in fields(StoredFile)]
    db.execute(f"INSERT INTO files ({_FILE}) VALUES ({_marks(_FILE)})", row)


def _forget_lines(db: sqlite3.Connection, id: str) -> None:
    db.execute("DELETE FROM lines WHERE batch = ?", [id])
    db.execute("DELETE FROM answers WHERE batch = ?", [id])
