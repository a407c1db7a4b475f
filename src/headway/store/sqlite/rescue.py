"""Rescues the rows of a damaged SQLite file that an open connection still reads, and recovers the rest.

`make` creates a file; `merge(source, target)` copies all readable rows and returns the number of the others.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from typing import Any

from headway.errors import ConfigError
from headway.store.sqlite.health import examine, log_bytes
from headway.store.versions import Versions

RECOVER = "stop the gateways that use it, run `headway queue recover`, and start them again"
Make = Callable[[str], sqlite3.Connection]
Merge = Callable[[sqlite3.Connection, sqlite3.Connection], int]
_RESCUED = ".rescued-"
_BESIDE = "-wal", "-shm", "-journal", ".lock", ".turn"  # suffixes of the files beside a file
_NOWHERE = 2**63  # beyond all rows
_SHARED = 0x40000002, 510  # bytes that every connection in WAL mode keeps a lock on (SQLite's format)


def check_sound(path: str, what: str, param: str) -> None:
    """Raise ConfigError for a file that is damaged, or was and still lacks the rows that gateways rescued."""
    problem = examine(path)
    if problem is None and (rescued := _rescued_files(path)):
        problem = f"it was damaged, and {rescued[0]} has its rescued rows"
    if problem is not None:
        fix = f"If Headway made it, {RECOVER}; otherwise give another path."
        raise ConfigError(f"{what} cannot use {path}: {problem}.", fix, param=param)


def rescue(path: str, make: Make, fill: Callable[[sqlite3.Connection], int]) -> tuple[str, int]:
    """Make a file beside a damaged one and fill it; return its name and how many rows could not be read.

    OSError or sqlite3.Error when the disk does not allow it; nothing is left behind then.
    """
    file = f"{path}{_RESCUED}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    try:
        with closing(make(file)) as target, target:
            target.execute("BEGIN")
            unreadable = fill(target)
    except BaseException:
        _delete(file)
        raise
    return file, unreadable


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of `recover`.

    counts: numbers of rows in the new file, as requested. aside: the new name of the damaged file.
    unreadable: rows that could not be read, at least.
    """

    counts: tuple[int, ...]
    unreadable: int
    aside: str


def recover(path: str, make: Make, merge: Merge, count: str, versions: Versions) -> Recovered | None:
    """Replace a damaged file with a new one that has all readable rows of it and of rescued files beside it.

    count: SQL of the counts. None when nothing is damaged. ConfigError when another process has it open, or a newer
    Headway has used it, whose tables this one would lose.
    """
    path = os.path.realpath(path)
    _refuse_if_used(path)
    if os.path.exists(path) and os.path.getsize(path) == 0 and log_bytes(path):  # SQLite would delete the log
        fix = "Restore the database, or move its log away to start over."
        raise ConfigError(f"{path} is empty, but {path}-wal is not.", fix)
    rescued = _rescued_files(path)
    if not rescued and examine(path) is None:
        return None
    new, aside = f"{path}.recovering", f"{path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    _delete(new)  # left by an interrupted run
    unreadable = 0
    with closing(make(new)) as target:
        for file in (*rescued, *([path] if os.path.exists(path) else [])):
            with closing(sqlite3.connect(file, isolation_level=None)) as source, target:
                _refuse_newer(source, versions, file)
                target.execute("BEGIN")
                unreadable += merge(source, target)
        counts = target.execute(count).fetchone()
    _replace(path, new, aside)
    for file in rescued:  # last: as long as one has its name, no gateway starts
        os.rename(file, file.replace(_RESCUED, ".merged-"))
        _delete(file)
    return Recovered(counts, unreadable, aside)


def _refuse_newer(db: sqlite3.Connection, versions: Versions, path: str) -> None:
    with suppress(sqlite3.DatabaseError):  # its header is damaged
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > versions.latest:
            versions.scripts(version, path)


def merge_rows(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    table: str,
    columns: str,
    conflict: str,
    repair: Callable[[list[Any]], list[Any]] = lambda row: row,
) -> int:
    """Copy the rows of a table with a unique `id`; return how many could not be read or were altered.

    conflict: SQL clause for a row that the target has. repair: returns another row for an altered one.
    """
    source.text_factory = partial(str, encoding="utf-8", errors="replace")
    marks, unreadable = ", ".join("?" * len(columns.split(","))), 0
    insert = f"INSERT INTO {table} ({columns}) VALUES ({marks}) ON CONFLICT (id) {conflict}"
    for row in _rows(source, table, columns):
        sound = False
        with suppress(sqlite3.IntegrityError):  # damage may violate constraints
            if row is not None:
                whole = repair(row)
                target.execute(insert, whole)
                sound = whole is row
        unreadable += not sound
    return unreadable


def _rows(db: sqlite3.Connection, table: str, columns: str) -> Iterator[list[Any] | None]:
    """Yield rows in the order of their insertion, None for each that cannot be read."""
    following = f"SELECT rowid, {columns} FROM {table} WHERE rowid >= ? ORDER BY rowid LIMIT 1"
    at, last = _bounds(db, table)
    if at == _NOWHERE:  # how many rows there were cannot be known
        yield None
    while at <= last:
        try:
            row = db.execute(following, [at]).fetchone()
        except sqlite3.DatabaseError:
            yield None
            at += 1
            continue
        if row is None:
            return
        at = row[0] + 1
        yield [*row[1:]]


def _bounds(db: sqlite3.Connection, table: str) -> tuple[int, int]:
    """Return the first and the last rowid, as far as they can be read: `_NOWHERE` and 0 when none can."""
    with suppress(sqlite3.DatabaseError):
        sql = f"SELECT (SELECT min(rowid) FROM {table}), (SELECT max(rowid) FROM {table})"
        first, last = db.execute(sql).fetchone()
        return first or 1, last or 0
    first, last = _NOWHERE, 0
    for order in ("rowid", "rowid DESC", "id", "id DESC"):  # each up to where its table or index is damaged
        with suppress(sqlite3.DatabaseError):
            for (at,) in db.execute(f"SELECT rowid FROM {table} ORDER BY {order}"):
                first, last = min(first, at), max(last, at)
    return first, last


def _rescued_files(path: str) -> list[str]:
    return sorted(file for file in glob(escape(path + _RESCUED) + "*") if not file.endswith(_BESIDE))


def _replace(path: str, new: str, aside: str) -> None:
    """Replace a damaged file with a new one; the path is never empty, or a gateway would start a new file."""
    with suppress(FileNotFoundError):
        os.rename(path + "-wal", aside + "-wal")  # SQLite would apply it to the new file
    with suppress(FileNotFoundError):
        os.unlink(path + "-shm")
    with suppress(FileNotFoundError):
        os.link(path, aside)
    os.rename(new, path)


def _delete(file: str) -> None:
    """Delete a file and those that SQLite and gateways make beside it."""
    for suffix in ("", *_BESIDE):
        with suppress(FileNotFoundError):
            os.unlink(file + suffix)


def _refuse_if_used(path: str) -> None:
    """Raise ConfigError when another process has the file open. SQLite must not have it open in this one."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        start, length = _SHARED
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            raise ConfigError(f"{path} is in use.", "Stop the gateways that use it first.") from error
