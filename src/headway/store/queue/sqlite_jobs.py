"""Saves the jobs of a damaged queue: those in memory, and those that can still be read."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from headway import clock
from headway.store.queue.port import Job
from headway.store.queue.sqlite_file import COLUMNS, FIELDS, KEEP, SUMS, VERSIONS, job_of, locked, new_file, row_of
from headway.store.sqlite.health import Altered
from headway.store.sqlite.rescue import Recovered, merge_rows, recover, rescue

KEPT = 2**26  # bytes of bodies in memory
ALTERED = "damaged: its request or answer has changed on the disk; send it again"  # why such a job failed
# Of two rows of a job, the ended one counts; one that has failed as altered counts least.
_ENDS_COUNT = f"""DO UPDATE SET {{}}
    WHERE jobs.reason IS '{ALTERED}'
        OR jobs.state = 'open' AND excluded.state <> 'open' AND excluded.reason IS NOT '{ALTERED}'"""
# Of two rows of a request the dearer one counts, so that no budget is exceeded; damage may violate constraints.
_KEEP_SPENT = """INSERT OR IGNORE INTO spent (account, id, at, units) VALUES (?, ?, ?, ?)
    ON CONFLICT (account, id) DO UPDATE SET at = max(at, excluded.at), units = max(units, excluded.units)"""
# What a job has cost that has ended in one file is in the sum there, though the other one has a row of it.
_DROP_SETTLED = """DELETE FROM spent WHERE account GLOB 'budget of *'
    AND id IN (SELECT jobs.id FROM jobs WHERE state <> 'open')"""
# Of two rows of a key, a revocation counts, and the earlier end; the number of the change stays.
_KEEP_KEYS = """INSERT OR IGNORE INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET revoked = coalesce(revoked, excluded.revoked),
        expires = coalesce(min(expires, excluded.expires), expires, excluded.expires)"""
_COUNT = "SELECT COUNT(*), COUNT(*) FILTER (WHERE state = 'open') FROM jobs"


class Kept:
    """Open background jobs in memory, at most `most_bytes`: damage on the disk does not reach them."""

    def __init__(self, most_bytes: int = KEPT) -> None:
        self._jobs, self._most = dict[str, Job](), most_bytes
        self._bytes = 0

    def add(self, job: Job) -> None:
        """Keep a job, if there is room."""
        if job.background and self._bytes + len(job.body) <= self._most and job.id not in self._jobs:
            self._jobs[job.id] = job
            self._bytes += len(job.body)

    def drop(self, id: str) -> None:
        """Remove a job, if it is kept."""
        if (job := self._jobs.pop(id, None)) is not None:
            self._bytes -= len(job.body)

    def jobs(self) -> list[Job]:
        """Return the jobs that are kept."""
        return [*self._jobs.values()]


def rescue_jobs(path: str, db: sqlite3.Connection, kept: Iterable[Job], owner: str) -> tuple[str, int]:
    """Write kept jobs, held by `owner`, and those that `db` still reads of a damaged queue to a new file.

    Returns its name and how many rows could not be read; errors as `rescue`.
    """
    rows = [row_of(job, owner) for job in kept]

    def fill(target: sqlite3.Connection) -> int:
        target.executemany(KEEP, rows)
        return _merge(db, target)

    return rescue(path, new_file, fill)


def recover_jobs(path: str) -> Recovered | None:
    """Recover a damaged queue; open jobs are free to take. counts: jobs, and open ones. As `recover`."""
    with locked(os.path.realpath(path)):
        return recover(path, new_file, partial(_merge, free=True), _COUNT, VERSIONS)


def _merge(source: sqlite3.Connection, target: sqlite3.Connection, *, free: bool = False) -> int:
    """Copy jobs, API keys and what was spent; the end of a job counts, whichever file has it."""
    columns = COLUMNS
    with suppress(sqlite3.DatabaseError):
        source.execute(f"SELECT {SUMS} FROM jobs LIMIT 0")  # an older file has none
        columns += f", {SUMS}"
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns.split(", "))
    unreadable = merge_rows(source, target, "jobs", columns, _ENDS_COUNT.format(changes), _repaired)
    if free:
        target.execute("UPDATE jobs SET owner = NULL WHERE state = 'open'")
    unreadable += _merge_table(source, target, "spent", "account, id", _KEEP_SPENT)
    target.execute(_DROP_SETTLED)
    return unreadable + _merge_table(source, target, "keys", "changed", _KEEP_KEYS)


def _merge_table(source: sqlite3.Connection, target: sqlite3.Connection, table: str, order: str, keep: str) -> int:
    """Copy a table, from both ends of an order up to damage; return how many rows could not be read, at least.

    keep: SQL that inserts a row, or merges it with the one that is there.
    """
    rows, unreadable = set[tuple[Any, ...]](), 0
    for way in ("", "DESC"):
        try:
            if source.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [table]).fetchone() is None:
                return 0  # an older file has none
            by = ", ".join(f"{column} {way}" for column in order.split(", "))
            rows.update(source.execute(f"SELECT * FROM {table} ORDER BY {by}"))
        except sqlite3.DatabaseError:
            unreadable = 1
    target.executemany(keep, rows)
    return unreadable


def _repaired(row: list[Any]) -> list[Any]:
    """Return a sound row unchanged, or the row of a failed job in place of an altered one."""
    if len(row) == len(FIELDS):
        return row
    try:
        job_of(row)
    except Altered:
        known = dict(zip(FIELDS, row, strict=False))
        known |= {"state": "failed", "body": b"", "result": None, "reason": ALTERED}
        known["finished"] = known["finished"] or clock.now()
        return [*known.values(), None, None]
    return row
