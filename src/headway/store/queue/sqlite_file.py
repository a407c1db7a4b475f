"""The SQLite broker's file: the versions of its tables, and the refusal of foreign files."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from headway import clock, private
from headway.errors import ConfigError
from headway.store.queue.port import Job
from headway.store.sqlite.health import Altered, checksum, connect, limit_log, upgrade, version_of
from headway.store.sqlite.rescue import check_sound
from headway.store.versions import Versions

APPLICATION = 0x48445759  # "HDWY": marks our files among other programs' SQLite files
PATIENCE = 5.0  # seconds to wait when another process (a gateway, a backup, a shell) has locked the file
PARAM = "broker.sqlite.path"
FIELDS = tuple(field.name for field in fields(Job))
COLUMNS = ", ".join(FIELDS)
SUMS = "body_sum, result_sum"  # checksums of an open job's request and an ended one's result; NULL = not known
KEEP = f"INSERT INTO jobs ({COLUMNS}, body_sum) SELECT {', '.join('?' * (len(FIELDS) + 1))}"  # takes a `row_of`

# `seq` is the order of the puts. Large columns come last: SQLite skips what follows the columns it reads.
_VERSION_3 = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, owner TEXT, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, body_sum INTEGER, result_sum INTEGER, request TEXT NOT NULL, body BLOB NOT NULL,
    result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX held ON jobs (owner, arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
CREATE TABLE leases (owner TEXT PRIMARY KEY, until REAL NOT NULL, ended INTEGER NOT NULL) WITHOUT ROWID;
"""
# Version 1 had no owners: one gateway held the whole file. Jobs that it left open are free to take.
_TO_2 = """
ALTER TABLE jobs RENAME TO version_1;
DROP INDEX owed;
DROP INDEX closed;
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, owner TEXT, tenant TEXT NOT NULL,
    path TEXT NOT NULL, arrival REAL NOT NULL, background INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished REAL, reason TEXT, request TEXT NOT NULL, body BLOB NOT NULL, result BLOB,
    CHECK ((state = 'open') = (finished IS NULL))
);
CREATE INDEX held ON jobs (owner, arrival, seq) WHERE state = 'open';
CREATE INDEX closed ON jobs (finished) WHERE finished IS NOT NULL;
CREATE TABLE leases (owner TEXT PRIMARY KEY, until REAL NOT NULL, ended INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO jobs (seq, id, state, tenant, path, arrival, background, attempts, finished, reason, request,
    body, result)
SELECT seq, id, state, tenant, path, arrival, background, attempts, finished, reason, request, body, result
    FROM version_1;
DROP TABLE version_1;
"""
# Version 2 had no checksums.
_TO_3 = """
ALTER TABLE jobs ADD COLUMN body_sum INTEGER;
ALTER TABLE jobs ADD COLUMN result_sum INTEGER;
"""
# Version 3 made this table when something was first spent.
_TO_4 = """
CREATE TABLE IF NOT EXISTS spent (account TEXT NOT NULL, id TEXT NOT NULL, at REAL NOT NULL, units REAL NOT NULL,
    PRIMARY KEY (account, id)) WITHOUT ROWID;
"""
# API keys that were made at run time. A change gets a number above all that were given.
_TO_5 = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, digest BLOB NOT NULL, settings TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, revoked REAL, changed INTEGER NOT NULL UNIQUE) WITHOUT ROWID;
"""
# What is trimmed, with its bytes: the search reads nothing else.
_KEPT_JOBS = """finished IS NOT NULL AND (result IS NOT NULL AND NOT background OR instr(request, '"kept":') > 0)"""
_KEPT_BYTES = "length(CAST(request AS BLOB)) + coalesce(length(result), 0)"
_TO_6 = f"""
CREATE INDEX IF NOT EXISTS kept ON jobs (tenant, finished, {_KEPT_BYTES}, id) WHERE {_KEPT_JOBS};
"""
TOO_MUCH = f"""SELECT id FROM (
    SELECT id, SUM({_KEPT_BYTES}) OVER (PARTITION BY tenant ORDER BY finished DESC, id DESC) AS total
    FROM jobs INDEXED BY kept WHERE {_KEPT_JOBS}) WHERE total > ? LIMIT ?"""
VERSIONS = Versions(param=PARAM, made=3, script=_VERSION_3, steps={1: _TO_2, 2: _TO_3, 3: _TO_4, 4: _TO_5, 5: _TO_6})


def row_of(job: Job, owner: str) -> list[Any]:
    """Return the row of an open job that `owner` holds: its fields and the checksum of its request."""
    return [*(getattr(job, name) for name in FIELDS[:-1]), owner, _sum(job)]


def job_of(row: Sequence[Any]) -> Job:
    """Return the job of a row of `COLUMNS` and `SUMS`. Raises Altered if its content is not what was stored."""
    *values, body_sum, result_sum = row
    job = Job(*values)
    if (body_sum if job.state == "open" else result_sum) not in (None, _sum(job)):
        raise Altered(f"the content of the job {job.id} has changed")
    job.background = bool(job.background)  # SQLite has no booleans
    return job


def _sum(job: Job) -> int:
    if job.state == "open":
        return checksum(job.body, job.id, job.tenant, job.path, job.request)
    return checksum(job.result, job.id)


def open_file(path: str, synchronous: str) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    """Return a connection that writes and one that reads.

    Creates the file, with its directory, or upgrades it to this version's schema. Raises ConfigError when it cannot be
    used.
    """
    with _errors_explained(path):
        private.directory(Path(path).parent)
    with _errors_explained(path), locked(path) as lock:
        # First: SQLite deletes the log of an empty file. The lock holds the boot of the last opening.
        private.database(path, used=os.fstat(lock).st_size > 0)
    check_sound(path, "The broker", PARAM)
    with _errors_explained(path), locked(path) as lock:
        writing = connect(path, PATIENCE, partial(_prepare_writer, path, lock, synchronous))
        try:
            reading = connect(path, PATIENCE, lambda db: db.execute("PRAGMA query_only = on"))
        except BaseException:
            writing.close()
            raise
    return writing, reading


def new_file(path: str) -> sqlite3.Connection:
    """Make a file and return a connection to it."""
    return connect(path, PATIENCE, partial(upgrade, versions=VERSIONS, application=APPLICATION, path=path))


def at_start(path: str) -> str:
    """Return in words what a start finds in a sound file and does to its tables; ConfigError for a newer one."""
    with _errors_explained(path), closing(sqlite3.connect(path, PATIENCE)) as db:
        return VERSIONS.at_start(version_of(db, VERSIONS, APPLICATION, path), path)


@contextmanager
def _errors_explained(path: str) -> Iterator[None]:
    """Turn errors of SQLite or the system about a bad file into a ConfigError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        fix = "Give the path of a file that Headway made, or of a new one in a directory it may write to."
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"The broker cannot use {path}: {problem}.", fix, param=PARAM) from error


@contextmanager
def locked(path: str) -> Iterator[int]:
    """Keep other gateways from opening the file meanwhile, and a gateway of version 1 from using it.

    A gateway of version 1 keeps this lock while it runs. The kernel drops a flock when its process dies, so
    no stale lock is ever left. The lock's file stays: deleting it would let two gateways lock two files.
    """
    lock = _lock_file(path, ".lock")
    try:
        _acquire(lock, path)
        yield lock
    finally:
        os.close(lock)


def _lock_file(path: str, suffix: str) -> int:
    """Open the file beside the broker's that carries a lock; return its descriptor."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        return private.opened(path + suffix, os.O_RDWR)
    except OSError as error:
        fix = "Name a file in a directory that exists and that this user may write to."
        raise ConfigError(f"The broker cannot use {path}: {error.strerror}.", fix, param=PARAM) from error


def _acquire(lock: int, path: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() >= deadline:
            fix = "Stop that gateway (one of an older Headway shares no file), or give this one its own."
            raise ConfigError(f"{path} is locked by another gateway.", fix, param=PARAM)
        time.sleep(0.02)


class Identity:
    """Tells whether a path still names the files that were opened.

    SQLite goes on writing a file that was deleted or replaced: every write succeeds, and the next gateway
    finds nothing of it. The write-ahead log holds the latest writes, so it has to be the one that was opened,
    too.
    """

    def __init__(self, path: str) -> None:
        self._paths = (path, path + "-wal")
        self._opened = self._found()

    def intact(self) -> bool:
        """Tell whether both files are still there."""
        found = self._found()
        if self._opened[1] is None and found[0] == self._opened[0]:
            self._opened = found  # the log is made when the file is first used
        return found == self._opened

    def _found(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(_identity(path) for path in self._paths)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


class WriteTurns:
    """Lets the gateways that share a file write in turn, however fast one of them writes.

    SQLite does not queue for its write lock: a waiting process looks again every few milliseconds, so one
    that commits without a pause can shut the others out until their patience ends. A gateway therefore
    waits for the write lock with this flock held. The last writer cannot begin again before it is passed on.
    """

    def __init__(self, path: str) -> None:
        self._lock = _lock_file(path, ".turn")

    def begin(self, db: sqlite3.Connection) -> None:
        """Begin a transaction that writes. Raises sqlite3.OperationalError after `PATIENCE` seconds."""
        self._wait()
        try:
            db.execute("BEGIN IMMEDIATE")
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _wait(self) -> None:
        # No longer than this: a stopped process may hold the turn, which is only for fairness.
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.001)

    def close(self) -> None:
        """Release the file."""
        os.close(self._lock)


def _prepare_writer(path: str, lock: int, synchronous: str, db: sqlite3.Connection) -> None:
    upgrade(db, VERSIONS, APPLICATION, path)
    _end_leases_of_other_boots(db, lock)
    db.execute("PRAGMA journal_mode = wal")
    db.execute(f"PRAGMA synchronous = {synchronous}")
    limit_log(db)


def _end_leases_of_other_boots(db: sqlite3.Connection, lock: int) -> None:
    """End all leases when the machine has booted since the file was last opened: their gateways are gone.

    By then the clock may have been corrected, and leases that were far from their end would seem to go on.
    The lock's file names that boot.
    """
    boot, noted = (clock.boot() or "").encode(), os.pread(lock, 100, 0)
    if noted and boot and noted != boot:
        db.execute("UPDATE leases SET ended = 1")
    if boot and noted != boot:
        os.ftruncate(lock, 0)
        os.pwrite(lock, boot, 0)
