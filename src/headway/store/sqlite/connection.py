"""Connections to the SQLite files of the queue, of batches and of journals."""

from __future__ import annotations

import ctypes
import sqlite3
from collections.abc import Callable
from pathlib import Path

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
