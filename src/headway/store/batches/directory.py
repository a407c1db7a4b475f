"""Files and batches in a directory: the files themselves, and one SQLite file for everything else.

A line ends once: its end, its answer and the batch's counts change in one transaction. So a gateway that was
killed goes on with the lines that have no end, and no answer is in two files.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from headway import private
from headway.errors import ConfigError
from headway.store.batches.port import PIECE, STALE_S
from headway.store.batches.records import (
    BAD,
    ENDED_KEPT_S,
    EXPIRED,
    FORGOTTEN,
    GOOD,
    LEAST_BYTES,
    MOST_ENDED,
    Batch,
    EndedLine,
    Line,
    StoredFile,
    in_use,
    input_gone,
    no_file,
    no_room,
    too_many_open,
)
from headway.store.batches.sqlite_file import COLUMNS, NAME, SqliteFile, add, in_thread
from headway.store.sqlite.health import MAX_LOG_BYTES, Altered, checksum

_FILE, _BATCH = COLUMNS[StoredFile], COLUMNS[Batch]
_USED = f"SELECT COALESCE(SUM(MAX(size, {LEAST_BYTES})), 0) FROM files WHERE tenant = ?"
_FORGET_BATCHES = f"""DELETE FROM batches WHERE seq IN (SELECT seq FROM batches WHERE tenant = ?1 AND ended < ?2
    AND seq <= (SELECT seq FROM batches WHERE tenant = ?1 ORDER BY seq DESC LIMIT 1 OFFSET {MOST_ENDED})
    ORDER BY seq LIMIT {FORGOTTEN})"""


class DirectoryStore(SqliteFile):
    """A `BatchStore`, which documents the methods, in a directory.

    max_log_bytes: as in `SqliteFile`. Raises ConfigError when the directory cannot be used.

    Of the gateways that share the directory, the one with a lock on the file `runner.lock` runs batches. The
    kernel drops the lock when the process dies, so calls of that gateway need no check.
    """

    def __init__(self, folder: Path, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self.folder = folder
        try:
            private.directory(private.directory(folder) / "files")
            super().__init__(folder / NAME, max_log_bytes)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The directory of batches {folder} cannot be used: {error}.",
                'Set batches.dir to one that can be written to, or to "none".',
                param="batches.dir",
            ) from error
        self.changed = asyncio.Event()
        self._runner: int | None = None  # the handle of the lock, while it is held

    async def close(self) -> None:
        await asyncio.to_thread(self.close_file)
        self._unlock()

    # ---- files

    @in_thread
    def used(self, tenant: str) -> int:
        """Return the bytes of all files of a tenant."""
        ((size,),) = self.rows(_USED, tenant)
        return int(size)

    @in_thread
    def add_file(self, file: StoredFile, most: int) -> None:
        """List a file whose content is complete. RequestError (413) if the tenant would have more bytes."""
        self.check_log()
        _flush(self.path(file.id))
        with self.transaction() as db:
            (used,) = db.execute(_USED, [file.tenant]).fetchone()
            if used + max(file.size, LEAST_BYTES) > most:
                raise no_room(most)
            add(db, "files", file)

    @in_thread
    def file(self, tenant: str, id: str) -> StoredFile | None:
        rows = self.rows(f"SELECT {_FILE} FROM files WHERE id = ? AND tenant = ?", id, tenant)
        return StoredFile(*rows[0]) if rows else None

    @in_thread
    def files(
        self,
        tenant: str,
        after: str | None,
        limit: int,
        *,
        newest: bool = True,
        purpose: str | None = None,
        now: float = 0.0,
    ) -> list[StoredFile]:
        order, past = ("DESC", "<") if newest else ("ASC", ">")
        sql = f"""SELECT {_FILE} FROM files WHERE tenant = ?1 AND purpose = COALESCE(?4, purpose)
            AND (expires IS NULL OR expires >= ?5)
            AND (?3 IS NULL OR seq {past} (SELECT seq FROM files WHERE id = ?3 AND tenant = ?1))
            ORDER BY seq {order} LIMIT ?2"""
        rows = self.rows(sql, tenant, limit, after, purpose, now)
        return [StoredFile(*row) for row in rows]

    @in_thread
    def expired(self, now: float, limit: int) -> list[StoredFile]:
        sql = f"""SELECT {_FILE} FROM files WHERE expires < ? AND id NOT IN
            (SELECT input_file FROM batches WHERE ended IS NULL) LIMIT ?"""
        return [StoredFile(*row) for row in self.rows(sql, now, limit)]

    @in_thread
    def delete_file(self, tenant: str, id: str) -> bool:
        with self.transaction() as db:
            reader = db.execute(
                "SELECT id FROM batches WHERE ended IS NULL AND tenant = ? AND input_file = ?", [tenant, id]
            ).fetchone()
            if reader:
                raise in_use(reader[0])
            gone = db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", [tenant, id]).rowcount
        if gone:
            self.path(id).unlink(missing_ok=True)
        return bool(gone)

    def path(self, id: str) -> Path:
        return self.folder / "files" / id

    @in_thread
    def begin_file(self, file: StoredFile) -> None:
        """Make a file, readable by its owner only."""
        os.close(private.opened(self.path(file.id), os.O_WRONLY | os.O_EXCL))

    @in_thread
    def append(self, id: str, at: int, content: bytes) -> None:
        """Add to a file that was begun and not discarded."""
        handle = os.open(self.path(id), os.O_WRONLY | os.O_APPEND)
        with os.fdopen(handle, "wb") as file:
            file.write(content)

    @in_thread
    def discard(self, id: str) -> None:
        """Delete a file that was begun and not added; if the disk fails, `sweep` does it later."""
        with suppress(OSError):
            self.path(id).unlink(missing_ok=True)

    @in_thread
    def read(self, id: str, start: int, size: int) -> bytes:
        try:
            with self.path(id).open("rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError as error:
            raise input_gone() from error

    # ---- batches

    @in_thread
    def add_batch(self, batch: Batch, most: int, *, keyed: bool = False) -> bool:
        """Add a batch; False when its id exists. The outcome is known here, so `keyed` is unused.

        RequestError: 404 when its file is gone, 429 when `most` of its tenant are open.
        """
        self.check_log()
        with self.transaction() as db:
            if db.execute("SELECT 1 FROM batches WHERE id = ?", [batch.id]).fetchone():
                return False
            of = [batch.tenant, batch.input_file]
            if not db.execute("SELECT 1 FROM files WHERE tenant = ? AND id = ?", of).fetchone():
                raise no_file(batch.input_file)
            sql = "SELECT COUNT(*) FROM batches WHERE ended IS NULL AND tenant = ?"
            (count,) = db.execute(sql, [batch.tenant]).fetchone()
            if count >= most:
                raise too_many_open(count, most)
            add(db, "batches", batch)
            db.execute(_FORGET_BATCHES, [batch.tenant, batch.created - ENDED_KEPT_S])
        self.added.append(batch)
        return True

    @in_thread
    def batch(self, tenant: str, id: str) -> Batch | None:
        rows = self.rows(f"SELECT {_BATCH} FROM batches WHERE id = ? AND tenant = ?", id, tenant)
        return Batch(*rows[0]) if rows else None

    @in_thread
    def batches(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        sql = f"""SELECT {_BATCH} FROM batches WHERE tenant = ?1
            AND (?3 IS NULL OR seq < (SELECT seq FROM batches WHERE id = ?3 AND tenant = ?1))
            ORDER BY seq DESC LIMIT ?2"""
        return [Batch(*row) for row in self.rows(sql, tenant, limit, after)]

    @in_thread
    def open_batches(self) -> list[Batch]:
        rows = self.rows(f"SELECT {_BATCH} FROM batches WHERE ended IS NULL ORDER BY due, seq")
        self.unended = [Batch(*row) for row in rows]
        return self.unended

    @in_thread
    def cancel(self, tenant: str, id: str, now: float) -> bool:
        sql = """UPDATE batches SET state = 'cancelling', cancelling = ? WHERE tenant = ? AND id = ?
            AND state IN ('validating', 'in_progress')"""
        with self.transaction() as db:
            return db.execute(sql, [now, tenant, id]).rowcount == 1

    # ---- the gateway that runs batches

    @in_thread
    def hold(self) -> bool:
        """Take the lock unless another gateway has it."""
        if self._runner is None:
            handle = private.opened(self.folder / "runner.lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException as error:
                os.close(handle)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._runner = handle
        return True

    @in_thread
    def release(self) -> None:
        """Release the lock."""
        self._unlock()

    def _unlock(self) -> None:
        if self._runner is not None:
            os.close(self._runner)
            self._runner = None

    @in_thread
    def sweep(self) -> None:
        """Delete unlisted files that no longer grow."""
        known, now = {str(id) for (id,) in self.rows("SELECT id FROM files")}, time.time()
        for path in (self.folder / "files").iterdir():
            if path.name not in known and now - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)

    # ---- lines

    @in_thread
    def clear_lines(self, id: str) -> None:
        with self.transaction() as db:
            _forget_lines(db, id)

    @in_thread
    def refuse(self, id: str, problems: Sequence[Mapping[str, Any]], now: float) -> None:
        with self.transaction() as db:
            sql = """UPDATE batches SET
                state = CASE state WHEN 'validating' THEN 'failed' ELSE 'cancelled' END,
                ended = ?, errors = ? WHERE id = ?"""
            db.execute(sql, [now, json.dumps(problems), id])
            _forget_lines(db, id)

    @in_thread
    def add_lines(self, id: str, lines: Sequence[Line]) -> None:
        rows = [(id, *astuple(line)) for line in lines]
        sql = "INSERT INTO lines (batch, number, start, size, custom_id, checksum) VALUES (?, ?, ?, ?, ?, ?)"
        with self.transaction(durable=False) as db:
            db.executemany(sql, rows)

    @in_thread
    def begin(self, id: str, now: float) -> int:
        sql = """UPDATE batches SET began = ?1, total = (SELECT COUNT(*) FROM lines WHERE batch = ?2),
            state = CASE state WHEN 'validating' THEN 'in_progress' ELSE state END WHERE id = ?2
            RETURNING total"""
        with self.transaction() as db:
            (total,) = db.execute(sql, [now, id]).fetchone()
        return int(total)

    @in_thread
    def open_lines(self, id: str, after: int, limit: int) -> list[Line]:
        sql = """SELECT number, start, size, custom_id, checksum FROM lines
            WHERE batch = ? AND number > ? AND ended = 0 ORDER BY number LIMIT ?"""
        return [Line(*row) for row in self.rows(sql, id, after, limit)]

    @in_thread
    def record(self, id: str, number: int, good: bool, content: bytes) -> bool:
        end, column = (GOOD, "completed") if good else (BAD, "failed")
        with self.transaction(durable=False) as db:
            sql = "UPDATE lines SET ended = ? WHERE batch = ? AND number = ? AND ended = 0"
            if not db.execute(sql, [end, id, number]).rowcount:
                return False
            answer = [id, number, checksum(content, id, number), content]
            db.execute("INSERT INTO answers (batch, number, checksum, content) VALUES (?, ?, ?, ?)", answer)
            db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", [id])
        return True

    @in_thread
    def close_lines(self, id: str, end: int) -> int:
        with self.transaction() as db:
            sql = "UPDATE lines SET ended = ? WHERE batch = ? AND ended = 0"
            closed = db.execute(sql, [end, id]).rowcount
            db.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", [closed, id])
        return closed

    @in_thread
    def ended_lines(self, id: str, after: int, limit: int) -> list[EndedLine]:
        sql = """SELECT number, custom_id, ended, (SELECT content FROM answers
                WHERE answers.batch = ?1 AND answers.number = some.number), (SELECT checksum FROM answers
                WHERE answers.batch = ?1 AND answers.number = some.number) FROM (
            SELECT lines.number, custom_id, ended, COALESCE(SUM(LENGTH(content)) OVER (
                ORDER BY lines.number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before,
                COALESCE(LENGTH(content), 0) AS size
            FROM (SELECT * FROM lines WHERE batch = ?1 AND number > ?2 AND ended > 0
                ORDER BY number LIMIT ?3) AS lines
            LEFT JOIN answers ON answers.batch = lines.batch AND answers.number = lines.number
        ) AS some WHERE before = 0 OR before + size <= ?4 ORDER BY number"""
        rows = self.rows(sql, id, after, limit, PIECE)
        for number, _, _, content, stored in rows:
            if stored not in (None, checksum(content, id, number)):
                raise Altered(f"the answer to line {number} of the batch {id} has changed")
        return [EndedLine(*row[:-1]) for row in rows]

    # ---- ends of batches

    @in_thread
    def finalize(self, id: str, now: float) -> str:
        with self.transaction() as db:
            db.execute(
                """UPDATE batches SET finalizing = COALESCE(finalizing, ?),
                    state = CASE state WHEN 'cancelling' THEN state ELSE 'finalizing' END WHERE id = ?""",
                [now, id],
            )
            (state,) = db.execute("SELECT state FROM batches WHERE id = ?", [id]).fetchone()
            late = db.execute("SELECT 1 FROM lines WHERE batch = ? AND ended = ? LIMIT 1", [id, EXPIRED]).fetchone()
        if state == "cancelling":
            return "cancelled"
        return "expired" if late else "completed"

    @in_thread
    def end(
        self, id: str, state: str, now: float, *, output: StoredFile | None = None, error: StoredFile | None = None
    ) -> None:
        for file in (output, error):
            if file is not None:
                _flush(self.path(file.id))
        with self.transaction() as db:
            for file in (output, error):
                if file is not None:
                    add(db, "files", file)
            ids = [None if file is None else file.id for file in (output, error)]
            sql = "UPDATE batches SET state = ?, ended = ?, output_file = ?, error_file = ? WHERE id = ?"
            db.execute(sql, [state, now, *ids, id])
            _forget_lines(db, id)


def _flush(path: Path) -> None:
    """Flush a file and its directory entry to disk."""
    for place in (path, path.parent):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _forget_lines(db: sqlite3.Connection, id: str) -> None:
    db.execute("DELETE FROM lines WHERE batch = ?", [id])
    db.execute("DELETE FROM answers WHERE batch = ?", [id])
