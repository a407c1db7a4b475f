"""The SQLite file of a directory of batches: its tables, and transactions in threads."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from headway.broker.sqlite_health import Watch, examine, limit_log, means_damage
from headway.serve.batches.port import out

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="SqliteFile")

_MEND = "stop the gateways that use it, and put back a copy of the directory, or begin with an empty one"
NAME = "batches.sqlite"
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
log = logging.getLogger("headway.serve")


class SqliteFile:
    """One connection to the file, which threads take in turn. Raises sqlite3.Error when it cannot be used.

    Once the file is found damaged nothing is written any more.
    """

    def __init__(self, path: Path) -> None:
        if (damage := examine(str(path))) is not None:
            raise sqlite3.DatabaseError(f"{path.name} is damaged ({damage})")
        self._db = sqlite3.connect(path, _PATIENCE, isolation_level=None, check_same_thread=False)
        _prepare(self._db)
        self._lock = threading.Lock()
        self._durable = True
        self.threads = ThreadPoolExecutor(2, "batches")
        self._damage: str | None = None
        self._watch = Watch(str(path), self._found_damaged)

    def problem(self) -> str | None:
        """Return why nothing can be written, None = it can."""
        return self._damage

    def note(self, error: Exception) -> None:
        """Take note when an error says that the file is damaged."""
        if means_damage(error):
            self._found_damaged(str(error))

    def _found_damaged(self, what: str) -> None:
        if self._damage is None:
            self._damage = f"batches.sqlite is damaged ({what}): {_MEND}"
            log.error("no batch is accepted any more: %s", self._damage)

    def close_file(self) -> None:
        """Wait for calls that were made and close the file."""
        self._watch.close()
        self.threads.shutdown()
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Change all or nothing. durable: it survives loss of power, not only the death of the process."""
        if self._damage is not None:
            raise sqlite3.DatabaseError(self._damage)
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

    def rows(self, sql: str, *values: object) -> list[Any]:
        """Return what a query finds."""
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def in_thread(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Turn a method that blocks into one that is awaited. HeadwayError (503) when the directory fails."""

    @wraps(method)
    async def call(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.threads, partial(method, self, *args, **named))
        except (sqlite3.Error, OSError) as error:
            self.note(error)
            why = self.problem() or error
            raise out("The directory of batches", why, "Look at its disk, then try again.") from error

    return call


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = wal")
    db.execute("PRAGMA synchronous = full")
    limit_log(db)
    db.execute("BEGIN IMMEDIATE")  # another gateway may be making it
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not version:
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute("COMMIT")
    if version > _VERSION:
        raise sqlite3.DatabaseError(f"its schema {version} is a newer Headway's")
