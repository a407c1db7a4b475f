"""Watches a SQLite file that is in use: damage on the disk, and the length of its write-ahead log.

An open connection does not notice damage: it reads pages from its cache and from the log. A new connection
reads the disk. SQLite finds what breaks its structure; a changed byte within a value is found by a checksum that
is stored beside the value.

Only SQLite opens the file here: POSIX drops a process's locks on a file, SQLite's among them,
when the process closes any handle of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread
from urllib.parse import quote
from zlib import crc32

from headway import private
from headway.errors import ConfigError
from headway.store.versions import Versions


def connect(path: str | Path, patience: float, prepare: Callable[[sqlite3.Connection], object]) -> sqlite3.Connection:
    """Return a connection to a file that only this user can read, after `prepare` has used it.

    The file is created if missing. Transactions are explicit; any thread may use the connection, one at a time.

    patience: seconds to wait for a lock on the file.
    """
    private.database(path)  # first: SQLite deletes the log of an empty file
    db = sqlite3.connect(path, patience, isolation_level=None, check_same_thread=False)
    try:
        prepare(db)
    except BaseException:
        db.close()
        raise
    return db


def upgrade(db: sqlite3.Connection, versions: Versions, application: int, path: str | Path) -> None:
    """Make the tables in an empty file, or bring an older file's to the latest version.

    All in one transaction, which an error or a crash undoes. The file has its version in PRAGMA user_version, and
    `application` in PRAGMA application_id. Raises ConfigError for another program's file and for a newer version, and
    changes neither.
    """
    if version_of(db, versions, application, path) == versions.latest:
        return
    with db:
        db.execute("BEGIN IMMEDIATE")
        found = version_of(db, versions, application, path)  # another gateway may have been first
        for script in versions.scripts(found, str(path)):
            for statement in script.split(";\n"):
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {application}")
        db.execute(f"PRAGMA user_version = {versions.latest}")


def version_of(db: sqlite3.Connection, versions: Versions, application: int, path: str | Path) -> int | None:
    """Return the version of a file's tables, None when it has no tables. ConfigError as `upgrade`."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (found,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if not tables:
        return None
    if found != application or not version:
        raise ConfigError(f"{path} is another program's database.", "Name a separate file.", param=versions.param)
    versions.scripts(version, str(path))
    return int(version)


def leave_open(*connections: sqlite3.Connection) -> None:
    """Keep connections to a file that was replaced until the process ends.

    Closing the last one would delete the write-ahead log by its name, which is the new file's by now.
    """
    for connection in connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


LOG_LIMIT = 2**22  # bytes that SQLite leaves of the log when it restarts it
LOG_BOUND = 2**24  # bytes of the log beyond which it is truncated
MAX_LOG_BYTES = 2**30  # bytes of the log beyond which new work is refused, unless configured
_PAUSE_S = 2.0  # between two examinations
_SHARE = 50  # thorough examinations take at most 1/50 of the time, however large the file
_READS = range(123, 128)  # bytes of the log's index, one of which a read transaction locks (SQLite's format)
_LOCKS = Path("/proc/locks")
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
log = logging.getLogger("headway.store.queue")


class Altered(sqlite3.DatabaseError):
    """A value is not what was stored, in a file whose structure is sound."""

    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


def checksum(content: object, *of: object) -> int:
    """Return the CRC-32 of a value and what it belongs to, which damage may have turned into any type."""
    data = content if isinstance(content, bytes) else str(content).encode()
    return crc32(data, crc32("\n".join(map(str, of)).encode()))


def damage(error: BaseException) -> str | None:
    """Return the damage that an error reports, None = none, as when the file is locked or the disk is full."""
    if str(error).startswith("Could not decode to UTF-8"):
        return "a text is not UTF-8 any more"  # SQLite's message would quote it
    return str(error) if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED else None


def examine(path: str, *, thorough: bool = True, stop: Callable[[], bool] | None = None) -> str | None:
    """Return the damage of a file, as read from disk by a new connection; None = it is sound.

    thorough: read all of it, not only its header and schema. stop: ends the examination once it returns true.
    """
    try:
        try:
            return _look(path, thorough, stop)
        except sqlite3.Error as error:
            if not _is_short(error):
                raise
        return _look(path, True, stop)  # a part of the log is gone, unless it has just been restarted
    except sqlite3.Error as error:
        return str(error) if _is_short(error) else damage(error)


def _is_short(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHORT_READ


def _look(path: str, thorough: bool, stop: Callable[[], bool] | None) -> str | None:
    with closing(_connect(path)) as db:
        if stop is not None:
            db.set_progress_handler(stop, 10_000)
        db.execute("SELECT * FROM sqlite_master").fetchall()
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0] if thorough else "ok"
    return None if found == "ok" else " ".join(found.split())


def limit_log(db: sqlite3.Connection) -> None:
    """Let SQLite move the log into the file every 1000 pages, and shorten a log that has grown longer."""
    db.execute("PRAGMA wal_autocheckpoint = 1000")
    db.execute(f"PRAGMA journal_size_limit = {LOG_LIMIT}")


def log_bytes(path: str) -> int:
    """Return the size of a file's write-ahead log, 0 when there is none."""
    return _size(os.path.realpath(path) + "-wal")


def _size(file: str) -> int:
    with suppress(FileNotFoundError):
        return os.stat(file).st_size
    return 0


def readers(path: str, locks: Path = _LOCKS) -> list[str]:
    """Return the other programs that have a transaction open on a file, as far as Linux reports them.

    locks: the system's list of locks on files.
    """
    found = set[str]()
    with suppress(OSError):
        index = os.stat(os.path.realpath(path) + "-shm").st_ino
        for line in locks.read_text().splitlines():
            _, _, _, access, process, file, first, *_ = line.split()
            if access == "READ" and file.endswith(f":{index}") and int(first) in _READS and int(process) != os.getpid():
                with suppress(OSError):  # it has ended, or is in another container
                    name = Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
                    found.add(f"{name} (process {process})")
    return sorted(found)


def shorten_log(path: str) -> None:
    """Truncate a log beyond `LOG_BOUND`, unless a reader needs it: then a later call does."""
    if log_bytes(path) <= LOG_BOUND:
        return
    with suppress(sqlite3.Error), closing(_connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # most of it, without blocking writers
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _connect(path: str) -> sqlite3.Connection:
    """Connect to a file that exists, without waiting for its locks."""
    return sqlite3.connect(f"file:{quote(path)}?mode=rw", timeout=0.0, isolation_level=None, uri=True)


class Watch:
    """A thread that watches a file until it is found damaged, or `close`.

    found: called in that thread with a description of the damage. max_log_bytes: see `log_problem`.
    """

    def __init__(self, path: str, found: Callable[[str], None], max_log_bytes: int) -> None:
        self._path, self._found, self._stop = path, found, Event()
        self._log, self.max_log_bytes = os.path.realpath(path) + "-wal", max_log_bytes
        self._readers: list[str] | None = None  # known while the log is too long
        self._thread = Thread(target=self._run, name="sqlite-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def log_problem(self, times: int = 1) -> str | None:
        """Return why the log is longer than `times * max_log_bytes`, None = it is not. Cheap."""
        size = _size(self._log)
        if size <= times * self.max_log_bytes:
            return None
        programs = " and ".join(self._readers or []) or "another program (`fuser` lists those that use the file)"
        return f"its write-ahead log has {size // 2**20:,} MiB because of an open transaction of {programs}"

    def _look_at_log(self) -> None:
        """Shorten the log. While it is too long, note the programs that keep it so; log an error when that begins."""
        shorten_log(self._path)
        before, self._readers = self._readers, readers(self._path) if self.log_problem() else None
        if before is None and (problem := self.log_problem()) is not None:
            log.error("no background work is accepted by %s: %s", self._path, problem)

    def _must_end(self) -> bool:
        """Tell whether an examination must end, as it keeps the log from being shortened."""
        return self._stop.is_set() or _size(self._log) > self.max_log_bytes

    def _run(self) -> None:
        thorough_at = 0.0
        while not self._stop.wait(_PAUSE_S):
            began = time.monotonic()
            thorough = began >= thorough_at
            if (problem := examine(self._path, thorough=thorough, stop=self._must_end)) is not None:
                return self._found(problem)
            if thorough:
                now = time.monotonic()
                thorough_at = now + _SHARE * (now - began)
            self._look_at_log()
        return None
