"""Ends of jobs without a result, stored together, and their accounts: what requests may cost and have cost.

An account has a row for each open request, and one with the sum of those that have ended.

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

from headway.store.queue.port import NO_CHARGES, TOTAL, AccountSpent, Charge, Unused
from headway.store.sqlite.health import checksum

_EXPIRE = "DELETE FROM spent WHERE account = ? AND at <= ?"
_SUM = "SELECT coalesce(sum(units), 0) FROM spent WHERE account = ? AND at > ?"
_COUNTED = "SELECT sum(units) FROM spent WHERE account = ? AND at > ?"
# At the latest instant of the account, at least: a charge by a gateway whose clock is behind is not old for others.
_CHARGE = """INSERT INTO spent (account, id, at, units)
    SELECT :account, :id, max(:at, coalesce(max(at), :at)), :units FROM spent WHERE account = :account
    ON CONFLICT (account, id) DO UPDATE SET at = excluded.at, units = units + excluded.units"""
_REFUND = "UPDATE spent SET units = units - ? WHERE account = ? AND id = ?"
_ENDED = """account = :account AND id = :id AND NOT EXISTS
    (SELECT 1 FROM jobs WHERE jobs.id = :id AND state = 'open' AND background)"""
_ADD = f"""INSERT INTO spent (account, id, at, units)
    SELECT account, '{TOTAL}', at, units - :unused FROM spent WHERE {_ENDED}
    ON CONFLICT (account, id) DO UPDATE SET at = max(at, excluded.at), units = units + excluded.units"""
_REMOVE = f"DELETE FROM spent WHERE {_ENDED}"


def check_room(charges: Sequence[Charge], db: sqlite3.Connection) -> None:
    """Raise AccountSpent if one of the charges finds no room in its account."""
    for charge in charges:
        (counted,) = db.execute(_SUM, [charge.account, charge.old]).fetchone()
        if counted + charge.units > charge.most:
            raise AccountSpent(charge.account, counted)


def charge_all(id: str, charges: Sequence[Charge], db: sqlite3.Connection) -> None:
    """Count the charges of a request; their accounts have room."""
    db.executemany(_EXPIRE, [(charge.account, charge.old) for charge in charges])
    db.executemany(_CHARGE, [charge._asdict() | {"id": id} for charge in charges])


def spend(id: str, charge: Charge, db: sqlite3.Connection) -> bool:
    """Count a charge of a request if its account has room; tell whether it was counted."""
    try:
        check_room([charge], db)
    except AccountSpent:
        return False
    charge_all(id, [charge], db)
    return True


def refund(account: str, id: str, units: float, db: sqlite3.Connection) -> None:
    """Count this much less for a request."""
    db.execute(_REFUND, [units, account, id])


def counted(charges: Sequence[Charge], db: sqlite3.Connection) -> dict[str, float]:
    """Return what is counted in the accounts of charges."""
    found = {one.account: db.execute(_COUNTED, [one.account, one.old]).fetchone()[0] for one in charges}
    return {account: units for account, units in found.items() if units is not None}


def settle(id: str, unused: Unused, db: sqlite3.Connection) -> None:
    """Add what a job used of its charges to the sums of their accounts, unless it may run again."""
    for account, units in unused.items():
        values = {"account": account, "id": id, "unused": units}
        if db.execute(_ADD, values).rowcount:
            db.execute(_REMOVE, values)


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
