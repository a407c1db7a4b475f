"""Ends of jobs without a result, stored together.

Each statement on the writer's thread releases the interpreter's lock and waits to get it back, for
milliseconds behind a busy event loop. When one step of an engine ends two hundred streams, a statement for
each would delay the puts behind them; two for all do not.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.store.queue.port import NO_CHARGES, Unused
from headway.store.queue.sqlite_accounts import settle
from headway.store.sqlite.health import checksum

FEW = 4  # up to so few ends, storing them one by one is faster
_END = """UPDATE jobs SET state = ?, result = ?, result_sum = ?, reason = ?, finished = ?, body = x''
    WHERE id = ? AND state = 'open' AND owner = ?"""
_OPEN = """SELECT json_group_array(jobs.id) FROM json_each(?) AS ended CROSS JOIN jobs
    WHERE jobs.id = ended.value AND jobs.state = 'open' AND jobs.owner = ?"""
_END_ALL = """UPDATE jobs SET state = 'done', result = NULL, reason = NULL, finished = ended.value, body = x''
    FROM json_each(?) AS ended WHERE jobs.id = ended.key"""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job that this gateway (`owner`) holds, done at an instant `now`. unused: as in `Broker.done`."""

    owner: str
    id: str
    now: float
    unused: Unused = field(default_factory=lambda: NO_CHARGES)

    def __call__(self, db: sqlite3.Connection) -> bool:
        """Store it; False when the job has ended, or is not held by this gateway."""
        return end(self.owner, self.id, self.now, db, unused=self.unused)


def end(
    owner: str, id: str, now: float, db: sqlite3.Connection, *, result: bytes | None = None, reason: str | None = None,
    unused: Unused = NO_CHARGES,
) -> bool:  # fmt: skip
    """Store the end of a job, which failed if there is a reason; False as in `Done`."""
    state = "done" if reason is None else "failed"
    result_sum = None if result is None else checksum(result, id)
    values: list[Any] = [state, result, result_sum, reason, now, id, owner]
    ended = db.execute(_END, values).rowcount == 1
    settle(id, unused, db)
    return ended


def end_together(ends: Sequence[Done], db: sqlite3.Connection) -> list[bool]:
    """Store ends by one owner inside a transaction; return for each what storing them in turn would."""
    wanted = {end.id: end.now for end in reversed(ends)}  # the first of two ends of a job counts
    (found,) = db.execute(_OPEN, [json.dumps([*wanted]), ends[0].owner]).fetchone()
    open_ids = set(json.loads(found))
    if open_ids:
        db.execute(_END_ALL, [json.dumps({id: wanted[id] for id in open_ids}, allow_nan=False)])
    stored = list[bool]()
    for end in ends:
        settle(end.id, end.unused, db)
        stored.append(end.id in open_ids)
        open_ids.discard(end.id)
    return stored
