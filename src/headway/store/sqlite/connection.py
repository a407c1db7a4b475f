"""Connections to the SQLite files of the queue, of batches and of journals."""

from __future__ import annotations

import ctypes
import sqlite3
from collections.abc import Callable
from pathlib import Path

from headway import private


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


def make(db: sqlite3.Connection, script: str, application: int, version: int) -> None:
    """Make or change tables and mark the file in one transaction, which a crash undoes."""
    marks = f"PRAGMA application_id = {application}; PRAGMA user_version = {version};"
    db.executescript(f"BEGIN IMMEDIATE; {script} {marks} COMMIT;")


def leave_open(*connections: sqlite3.Connection) -> None:
    """Keep connections to a file that was replaced until the process ends.

    Closing the last one would delete the write-ahead log by its name, which is the new file's by now.
    """
    for connection in connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
