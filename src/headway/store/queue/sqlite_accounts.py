"""Accounts in the SQLite broker's file: what requests may cost, and what those that have ended have cost.

An account has a row for each open request, and one with the sum of those that have ended.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from headway.store.queue.port import TOTAL, AccountSpent, Charge, Unused

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
