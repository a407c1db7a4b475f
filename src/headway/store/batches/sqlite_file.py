"""The SQLite file of a directory of batches: its tables, and transactions in threads."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from headway import private
from headway.store.batches.port import out
from headway.store.batches.records import Batch, StoredFile
from headway.store.queue.port import RETRY_S
from headway.store.sqlite.health import Watch, connect, damage, leave_open, limit_log, upgrade
from headway.store.sqlite.rescue import RECOVER, Recovered, check_sound, merge_rows, recover, rescue
from headway.store.versions import Versions

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="SqliteFile")

NAME = "batches.sqlite"
_APPLICATION = 0  # these files are not marked
_PATIENCE = 10.0  # seconds to wait while another gateway writes
_VERSION_2 = """
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
    custom_id TEXT NOT NULL, ended INTEGER NOT NULL DEFAULT 0, checksum INTEGER, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE answers (batch TEXT NOT NULL, number INTEGER NOT NULL, checksum INTEGER, content BLOB NOT NULL);
CREATE UNIQUE INDEX answer_of ON answers (batch, number);
"""
# Version 1 had no checksums, version 2 no files that expire.
_TO_2 = """
ALTER TABLE lines ADD COLUMN checksum INTEGER;
ALTER TABLE answers ADD COLUMN checksum INTEGER;
"""
_TO_3 = """
ALTER TABLE files ADD COLUMN expires REAL;
ALTER TABLE batches ADD COLUMN output_expires_s REAL;
"""
VERSIONS = Versions(param="batches.dir", made=2, script=_VERSION_2, steps={1: _TO_2, 2: _TO_3})
COLUMNS = {kind: ", ".join(field.name for field in fields(kind)) for kind in (StoredFile, Batch)}
# Its lines are not recovered: they are in its input file, and their answers in the queue.
_CHECK_AGAIN = """UPDATE batches SET began = NULL, finalizing = NULL, total = 0, completed = 0, failed = 0,
    state = CASE WHEN cancelling IS NULL THEN 'validating' ELSE 'cancelling' END WHERE ended IS NULL"""
log = logging.getLogger("headway.gateway")


def recover_batches(folder: Path) -> Recovered | None:
    """Recover files and batches of a damaged directory, as `recover`. counts: of batches, and of open ones."""
    count = "SELECT COUNT(*), COUNT(*) FILTER (WHERE ended IS NULL) FROM batches"
    return recover(str(folder / NAME), _open, _merge, count, VERSIONS)


class SqliteFile:
    """One connection to the file, which threads use in turn. Raises sqlite3.Error when it cannot be used.

    Once the file is found damaged, nothing more is written and its contents are saved beside it. ConfigError
    for one that was damaged before. max_log_bytes: of its write-ahead log, beyond which no file or batch is added.
    """

    def __init__(self, path: Path, max_log_bytes: int) -> None:
        # First: SQLite deletes the log of an empty file.
        private.database(path, used=any((path.parent / "files").glob("*")))
        check_sound(str(path), "The batches", "batches.dir")
        self._path, self._db = path, _open(str(path))
        self._lock = threading.Lock()
        self._durable = True
        self.threads = ThreadPoolExecutor(2, "batches")
        self._damage: str | None = None
        self._saving = threading.Lock()
        self._saved = False
        # Batches in memory, safe from damage: the latest ones added, and those that run.
        self.added, self.unended = deque[Batch](maxlen=1000), list[Batch]()
        self._watch = Watch(str(path), self.found_damaged, max_log_bytes)

    def problem(self) -> str | None:
        """Return why nothing can be written, None = it can."""
        return self._damage

    def check_log(self) -> None:
        """Raise HeadwayError (503) while the write-ahead log is too long for new work."""
        if (problem := self._watch.log_problem()) is not None:
            raise out("The directory of batches", problem, "Try again once that is fixed.", retry_s=RETRY_S)

    def found_damaged(self, what: str) -> None:
        """Write nothing more, and save all that can be read."""
        with self._saving:
            if self._damage is None:
                self._damage = f"{NAME} is damaged ({what}): {RECOVER}"
                log.error("no batch is accepted any more: %s", self._damage)
                self._save()

    def _save(self) -> None:
        try:
            with self._lock:
                file, unreadable = rescue(str(self._path), _open, self._fill)
        except (sqlite3.Error, OSError) as error:
            log.error("the batches could not be saved yet: %s", error)
            return
        self._saved = True
        log.error("the batches are saved in %s; %d rows could not be read", file, unreadable)

    def _fill(self, target: sqlite3.Connection) -> int:
        """Copy all that can be read, then missing batches from memory, with their input files."""
        unreadable = _merge(self._db, target)
        for batch in (*self.added, *self.unended):
            file = self._path.parent / "files" / batch.input_file
            if file.exists():
                size = file.stat().st_size
                stored = StoredFile(file.name, batch.tenant, file.name, "batch", size, batch.created)
                add(target, "files", stored, "ON CONFLICT DO NOTHING")
                add(target, "batches", batch, "ON CONFLICT DO NOTHING")
        target.execute(_CHECK_AGAIN)
        return unreadable

    def close_file(self) -> None:
        """Wait for pending calls and close the file."""
        self._watch.close()
        if self._damage is not None and not self._saved:
            self._save()
        self.threads.shutdown()
        with self._lock:
            if self._damage is None:
                self._db.close()
            else:
                leave_open(self._db)  # closing it would write to the damaged file

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Yield the connection in a transaction. durable: it survives a power loss, not only a dead process."""
        with self._lock:
            if self._damage is not None:
                raise sqlite3.DatabaseError(self._damage)
            if durable != self._durable:
                self._db.execute(f"PRAGMA synchronous = {'full' if durable else 'normal'}")
                self._durable = durable
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db

    def rows(self, sql: str, *values: object) -> list[Any]:
        """Return the rows of a query."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def in_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Turn a blocking method into a coroutine method. HeadwayError (503) when the directory fails."""

    @wraps(method)
    async def call(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.threads, partial(method, self, *args, **named))
        except (sqlite3.Error, OSError) as error:
            if (what := damage(error)) is not None:
                await loop.run_in_executor(None, self.found_damaged, what)
            why = self.problem() or error
            raise out("The directory of batches", why, "Check its disk, then try again.") from error

    return call


def _open(path: str) -> sqlite3.Connection:
    return connect(path, _PATIENCE, partial(_prepare, path))


def add(db: sqlite3.Connection, table: str, row: StoredFile | Batch, conflict: str = "") -> None:
    """Insert a file or batch. conflict: SQL clause for a row that exists."""
    values = [getattr(row, field.name) for field in fields(row)]
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({COLUMNS[type(row)]}) VALUES ({marks}) {conflict}", values)


def _merge(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    """Copy files and batches; batches that have not ended begin again with the check of their lines."""
    files = merge_rows(source, target, "files", _columns(source, "files", StoredFile), "DO NOTHING")
    batches = merge_rows(source, target, "batches", _columns(source, "batches", Batch), "DO NOTHING")
    target.execute(_CHECK_AGAIN)
    return files + batches


def _columns(source: sqlite3.Connection, table: str, kind: type[StoredFile | Batch]) -> str:
    """Return the columns of a table of files or batches; an older file has fewer."""
    names = [field.name for field in fields(kind)]
    with suppress(sqlite3.DatabaseError):
        there = {name for _, name, *_ in source.execute(f"PRAGMA table_info({table})")}
        names = [name for name in names if name in there]
    return ", ".join(names)


def _prepare(path: str, db: sqlite3.Connection) -> None:
    upgrade(db, VERSIONS, _APPLICATION, path)
    db.execute("PRAGMA journal_mode = wal")
    db.execute("PRAGMA synchronous = full")
    limit_log(db)
