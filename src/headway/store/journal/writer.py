"""Writes a journal: SQLite files in a folder, of which the oldest are deleted by total size and age.

A file never changes once the next one is begun, so removing old rows takes a deletion and no vacuum.
A write is a transaction: when the process dies in the middle of one, the file has all of it or nothing.
Several gateways may share a folder; each has its own newest file.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headway import private
from headway.store.journal.rows import APPLICATION, VERSIONS, EngineRow, Row, insert, values
from headway.store.sqlite.health import connect, upgrade

PATTERN = "journal-*.sqlite"
MIB = 2**20
_FILES = 8  # number of files in a full journal
_PAGE = 4096
_SWEEP_S = 600.0  # between two deletions of old files


class Writer:
    """Writes rows of one gateway; not thread-safe, but it may move between threads.

    max_bytes: limit of all files of the folder together. seconds: age at which rows are deleted, a file at a
    time.
    most: bytes by which one transaction may enlarge a file; the caller keeps to it.
    """

    def __init__(self, folder: Path, max_bytes: int, seconds: float, *, most: int = MIB) -> None:
        self._folder, self._max, self._seconds = folder, max_bytes, seconds
        # Besides the other files there are the newest one and its write-ahead log, which holds up to a checkpoint's
        # pages and one transaction that are not in the file yet.
        self._log_pages = max(most // (2 * _PAGE), 1)
        self._spare = 2 * most + self._log_pages * _PAGE + 64 * 1024
        self._file_bytes = max((max_bytes - self._spare) // _FILES, 1)
        self._db: sqlite3.Connection | None = None
        self._path = folder
        self._engines: dict[str, EngineRow] = {}
        self._swept = 0.0

    def write(self, rows: Sequence[Row]) -> None:
        """Store all rows, or none and raise sqlite3.Error or OSError (a full disk); the caller may retry.

        An EngineRow is repeated in every file, so that each can be read alone.
        """
        for row in rows:
            if isinstance(row, EngineRow):
                self._engines[row.instance] = row
        db, new = self._current()
        if new:
            rows = [*self._engines.values(), *(row for row in rows if not isinstance(row, EngineRow))]
        kinds: dict[type[Row], list[Row]] = defaultdict(list)
        for row in rows:
            kinds[type(row)].append(row)
        try:
            with db:
                db.execute("BEGIN")
                for kind, some in kinds.items():
                    db.executemany(insert(kind), map(values, some))
        except sqlite3.Error:
            if new:  # the next one begins with the engines again
                self.close()
            raise

    def close(self) -> None:
        """Close the newest file; a later write begins another."""
        db, self._db = self._db, None
        if db is not None:
            with suppress(sqlite3.Error):  # its checkpoint may meet a full disk; the log stays beside it
                db.close()

    @property
    def size(self) -> int:
        """Return the bytes of all files of the folder."""
        return sum(size for _, size in _files(self._folder).values())

    def _current(self) -> tuple[sqlite3.Connection, bool]:
        """Return the connection to the newest file, and whether it has just been begun."""
        if self._db is not None and self._path.exists() and self._path.stat().st_size < self._file_bytes:
            if time.time() - self._swept > _SWEEP_S:
                self._sweep()
            return self._db, False
        self.close()
        private.directory(self._folder)
        self._sweep()
        self._path = self._folder / f"journal-{time.time_ns() // 1000:016d}-{os.getpid()}.sqlite"
        self._db = connect(self._path, 5.0, self._prepare)
        return self._db, True

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = wal")
        db.execute("PRAGMA synchronous = normal")
        db.execute(f"PRAGMA wal_autocheckpoint = {self._log_pages}")
        upgrade(db, VERSIONS, APPLICATION, self._path)

    def _sweep(self) -> None:
        """Delete the oldest files until there is room for another, and those that are too old."""
        self._swept = time.time()
        files = _files(self._folder)
        files.pop(self._path.name, None) if self._db is not None else None
        room = self._max - self._spare - self._file_bytes
        total, oldest = sum(size for _, size in files.values()), self._swept - self._seconds
        for name in sorted(files):
            newest, size = files[name]
            if total > room or newest < oldest:
                delete(self._folder / name)
                total -= size


def delete(path: Path) -> None:
    """Delete a file of a journal with its write-ahead log."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _files(folder: Path) -> dict[str, tuple[float, int]]:
    """Return the journal's files: name -> (when it was last written, bytes with its write-ahead log)."""
    found: dict[str, tuple[float, int]] = {}
    for path in folder.glob(f"{PATTERN}*"):
        name = path.name.removesuffix("-wal").removesuffix("-shm")
        with suppress(FileNotFoundError):  # another gateway sweeps, too
            status, (newest, size) = path.stat(), found.get(name, (0.0, 0))
            found[name] = max(newest, status.st_mtime), size + status.st_size
    return found
