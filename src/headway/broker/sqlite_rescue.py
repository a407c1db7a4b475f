"""What becomes of a damaged queue: a gateway that runs rescues its jobs, `headway queue recover` the rest."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from glob import escape, glob
from typing import Any

from headway.broker.port import Job
from headway.broker.sqlite_file import COLUMNS, FIELDS, PARAM, RESCUED, locked, new_file, rescued_files
from headway.broker.sqlite_health import examine
from headway.errors import ConfigError, HeadwayError

KEPT = 2**26  # bytes of bodies in memory
# The end of a job counts, whichever file tells of it.
_MERGE = f"""INSERT INTO jobs ({COLUMNS}) VALUES ({", ".join("?" * len(FIELDS))})
    ON CONFLICT (id) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in FIELDS)}
    WHERE jobs.state = 'open' AND excluded.state <> 'open'"""
_NEXT = f"SELECT seq, {COLUMNS} FROM jobs WHERE seq >= ? ORDER BY seq LIMIT 1"
_SHARED = (
    0x40000002,
    510,
)  # bytes of a file that every connection in WAL mode keeps a lock on (SQLite's format)


class Kept:
    """Open background jobs in memory, at most `KEPT` bytes: damage on the disk does not reach them."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._bytes = 0

    def add(self, job: Job) -> None:
        """Keep a job, if there is room."""
        if job.background and self._bytes + len(job.body) <= KEPT and job.id not in self._jobs:
            self._jobs[job.id] = job
            self._bytes += len(job.body)

    def drop(self, id: str) -> None:
        """Let go of a job."""
        if (job := self._jobs.pop(id, None)) is not None:
            self._bytes -= len(job.body)

    def jobs(self) -> list[Job]:
        """Return what is kept."""
        return [*self._jobs.values()]


def rescue(path: str, db: sqlite3.Connection, kept: Iterable[Job], owner: str) -> tuple[str, int, int]:
    """Write to a new file beside a damaged one what is kept, and what its open connection still reads.

    owner: holds the jobs that are kept. Returns the new file, how many open jobs it has, and how many rows
    could not be read. OSError or sqlite3.Error when the disk does not allow it; nothing is left behind then.
    """
    rescued = f"{path}{RESCUED}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        with closing(new_file(rescued)) as target:
            target.execute("BEGIN")
            target.executemany(_MERGE, [[*_row(job)[:-1], owner] for job in kept])
            unreadable = _merge(db, target)
            target.execute("COMMIT")
            (count,) = target.execute("SELECT COUNT(*) FROM jobs WHERE state = 'open'").fetchone()
    except BaseException:
        for left in glob(escape(rescued) + "*"):
            os.unlink(left)
        raise
    return rescued, count, unreadable


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` did: requests that the new file has, open ones among them, rows that could not be read.

    aside: the new name of the damaged file. rescued: files of gateways that were read, too.
    """

    requests: int
    open: int
    unreadable: int
    aside: str
    rescued: list[str]


def recover(path: str) -> Recovered:
    """Replace a damaged file by a new one with all that can be read of it and of rescued files beside it.

    Ends are kept, and open jobs are free to take. HeadwayError when there is nothing to do, or a gateway
    has the file open.
    """
    path = os.path.realpath(path)
    with locked(path):
        _refuse_if_used(path)
        rescued = rescued_files(path)
        if not rescued and (not os.path.exists(path) or examine(path) is None):
            raise HeadwayError(f"{path} is not damaged.", "There is nothing to recover.")
        new = path + ".recovering"
        for left in glob(escape(new) + "*"):  # of a run that was cut short
            os.unlink(left)
        with closing(new_file(new)) as target:
            sources = [*rescued, *([path] if os.path.exists(path) else [])]
            unreadable = sum(_merge_file(source, target) for source in sources)
            target.execute("UPDATE jobs SET owner = NULL WHERE state = 'open'")
            sql = "SELECT COUNT(*), COUNT(*) FILTER (WHERE state = 'open') FROM jobs"
            total, still_open = target.execute(sql).fetchone()
        aside = f"{path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        _replace(path, new, aside)
        for file in rescued:  # last: as long as one has this name, no gateway starts
            os.rename(file, file.replace(RESCUED, ".merged-"))
    return Recovered(total, still_open, unreadable, aside, rescued)


def _replace(path: str, new: str, aside: str) -> None:
    for suffix in ("-wal", ""):  # the log first: SQLite would apply it to the new file
        with suppress(FileNotFoundError):
            os.rename(path + suffix, aside + suffix)
    with suppress(FileNotFoundError):
        os.unlink(path + "-shm")
    os.rename(new, path)


def _refuse_if_used(path: str) -> None:
    """Raise ConfigError when another process has the file open. SQLite must not have it open in this one."""
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        start, length = _SHARED
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            raise ConfigError(
                f"{path} is in use.", "Stop the gateways that use it, then recover it.", param=PARAM
            ) from error


def _merge_file(path: str, target: sqlite3.Connection) -> int:
    with closing(sqlite3.connect(path, isolation_level=None)) as source:
        return _merge(source, target)


def _merge(source: sqlite3.Connection, target: sqlite3.Connection) -> int:
    """Copy what jobs can be read; return how many rows cannot."""
    unreadable = 0
    for row in _rows(source):
        try:
            if row is not None:
                target.execute(_MERGE, row)
        except sqlite3.IntegrityError:  # what the damage made of it is no job
            row = None
        unreadable += row is None
    return unreadable


def _rows(db: sqlite3.Connection) -> Iterator[list[Any] | None]:
    """Yield jobs in the order of their puts, None for each that cannot be read."""
    seq, last = _bounds(db)
    while seq <= last:
        try:
            row = db.execute(_NEXT, [seq]).fetchone()
        except sqlite3.DatabaseError:
            yield None
            seq += 1
            continue
        if row is None:
            return
        seq = row[0] + 1
        yield row[1:]


def _bounds(db: sqlite3.Connection) -> tuple[int, int]:
    """Return the first and the last `seq`, as far as they can be read; none: the first is beyond the last."""
    with suppress(sqlite3.DatabaseError):
        sql = "SELECT (SELECT min(seq) FROM jobs), (SELECT max(seq) FROM jobs)"
        first, last = db.execute(sql).fetchone()
        return first or 1, last or 0
    first, last = 2**63, 0
    for order in ("seq", "seq DESC", "id", "id DESC"):  # each up to where its table or index is damaged
        with suppress(sqlite3.DatabaseError):
            for (seq,) in db.execute(f"SELECT seq FROM jobs ORDER BY {order}"):
                first, last = min(first, seq), max(last, seq)
    return first, last


def _row(job: Job) -> list[Any]:
    return [getattr(job, name) for name in FIELDS]
