"""Calls of the PostgreSQL broker, which go to the server in groups, and its accounts of what requests cost.

An account has a row for each open request, and one with the sum of those that have ended. Transactions that look at
an account take its advisory lock first, in one order, so that each sees what the others have counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncpg import Connection

from headway.errors import HeadwayError
from headway.store.postgres import session
from headway.store.postgres.schema import lock_of, stored
from headway.store.queue.keys import StoredKey
from headway.store.queue.port import NO_CHARGES, TOTAL, AccountSpent, Charge, Job, Unused

GROUP_BYTES = 8 * 2**20  # limit of the bodies in a group; a single call may have more
LARGEST = 512 * 2**20  # bytes of a body or text: half of PostgreSQL's limit, which also holds for messages
SINGLE = ("cancel", "gone", "amend", "trim", "refund", "counted", "keys", "put_keys")  # calls with a separate statement


@dataclass(slots=True, eq=False)
class QueueCall(session.SessionCall):
    """One call for the function `apply` in the database."""

    verb: str
    number: int
    id: str | None = None
    instant: float | None = None
    count: int | None = None
    job: Job | None = None
    text: str | None = None
    body: bytes | None = None
    ids: Sequence[str] = ()
    units: float = 0.0
    charges: Sequence[Charge] = ()
    unused: Unused = field(default_factory=lambda: NO_CHARGES)
    keys: Sequence[StoredKey] = ()

    @property
    def accounts(self) -> list[str]:
        """Return the accounts that it changes or looks at, but for `refund`."""
        return [*(charge.account for charge in self.charges), *self.unused]

    def row(self) -> tuple[Any, ...]:
        """Return the elements of the function's arrays."""
        job = self.job
        return (
            self.verb,
            self.number,
            stored(self.id),
            self.instant,
            self.count,
            job.background if job else None,
            stored(job.tenant if job else None),
            stored(job.path if job else None),
            stored(self.text),
            self.body,
        )


def together(calls: deque[QueueCall], limit: int) -> list[QueueCall]:
    """Take up to `limit` of the first calls, which share one round trip."""
    group: list[QueueCall] = []
    size = 0
    while calls and len(group) < limit and size < GROUP_BYTES:
        if group and (group[0].verb in SINGLE or calls[0].verb in SINGLE):
            break
        if calls[0].verb == "take" and any(call.accounts for call in group):  # they are one transaction with accounts
            break
        group.append(calls.popleft())
        size += len(group[-1].body or b"")
        if group[-1].verb == "take":  # its jobs are read after the commit, before a later call changes them
            break
    return group


def unfit(why: object) -> HeadwayError:
    """Return the error of a call whose values PostgreSQL cannot hold (status 400)."""
    return HeadwayError(f"The job cannot be stored: {why}.", "Send a smaller or well-formed request.")


def check(call: QueueCall) -> None:
    """Refuse values that PostgreSQL would misread (NaN sorts after all instants) or cannot take."""
    if call.instant is not None and math.isnan(call.instant):
        raise unfit("an instant is NaN")
    if max(len(call.body or b""), len(call.text or "") * 4) > LARGEST:
        raise unfit(f"it is larger than {LARGEST >> 20} MiB")


REFUND = "UPDATE {s}.spent SET units = units - $3 WHERE account = $1 AND id = $2"
COUNTED = """SELECT account, sum(units) AS units FROM {s}.spent
    JOIN unnest($1::text[], $2::float8[]) AS past (account, until) USING (account) WHERE at > until GROUP BY account"""
# Undoes puts whose outcome is unknown because the connection ended: their jobs and charges are deleted. If another
# gateway has closed a job meanwhile, because the lease had ended, only its charges are.
UNDO_PUTS = """WITH undone AS (
        DELETE FROM {s}.jobs WHERE owner = $1 AND state = 'open' AND call = ANY ($2) RETURNING id),
    closed AS (SELECT id FROM {s}.jobs WHERE id = ANY ($4) AND state = 'failed' AND owner <> $1 AND NOT background)
    DELETE FROM {s}.spent USING (TABLE undone UNION ALL TABLE closed) AS put
        WHERE spent.account = ANY ($3) AND spent.id = put.id"""
_LOCK = "SELECT pg_advisory_xact_lock(number) FROM unnest($1::bigint[]) AS number"
_EXPIRE = """DELETE FROM {s}.spent USING unnest($1::text[], $2::float8[]) AS past (account, until)
    WHERE spent.account = past.account AND spent.at <= past.until"""
# At the latest instant of the account, at least: a charge by a gateway whose clock is behind is not old for others.
_CHARGE = """INSERT INTO {s}.spent AS one (account, id, at, units)
    SELECT $1, $2, greatest($3, max(at)), $4 FROM {s}.spent WHERE account = $1
    ON CONFLICT (account, id) DO UPDATE SET at = excluded.at, units = one.units + excluded.units"""
_SETTLE = f"""WITH ended AS (
        DELETE FROM {{s}}.spent USING unnest($1::text[], $2::text[], $3::float8[]) AS one (account, id, unused)
        WHERE spent.account = one.account AND spent.id = one.id
            AND NOT EXISTS (SELECT FROM {{s}}.jobs WHERE jobs.id = one.id AND state = 'open' AND background)
        RETURNING spent.account, spent.at, spent.units - one.unused AS units)
    INSERT INTO {{s}}.spent AS total (account, id, at, units)
        SELECT account, '{TOTAL}', max(at), sum(units) FROM ended GROUP BY account
    ON CONFLICT (account, id) DO UPDATE
        SET at = greatest(total.at, excluded.at), units = total.units + excluded.units"""
Sql = Callable[[str], str]  # puts the schema into a statement


async def lock(group: Sequence[QueueCall], schema: str, connection: Connection) -> None:
    """Keep other gateways from the accounts of these calls until the transaction ends."""
    numbers = {lock_of(f"{schema} {stored(account)}") for call in group for account in call.accounts}
    await connection.fetch(_LOCK, sorted(numbers))


async def without_room(group: Sequence[QueueCall], sql: Sql, connection: Connection) -> dict[int, AccountSpent]:
    """Return the calls, by number, whose charges find no room after those of the calls before them."""
    charges = [charge for call in group for charge in call.charges]
    if not charges:
        return {}
    past = {stored(charge.account): charge.old for charge in charges}
    rows = await connection.fetch(sql(COUNTED), [*past], [*past.values()])
    counted = {row["account"]: row["units"] for row in rows}
    refused = dict[int, AccountSpent]()
    for call in group:
        found = [(counted.get(stored(charge.account), 0.0), charge) for charge in call.charges]
        full = next(((units, charge) for units, charge in found if units + charge.units > charge.most), None)
        if full is not None:
            refused[call.number] = AccountSpent(full[1].account, full[0])
            continue
        counted |= {stored(charge.account): units + charge.units for units, charge in found}
    return refused


async def count_charges(group: Sequence[QueueCall], sql: Sql, connection: Connection) -> None:
    """Count the charges of these calls; their accounts have room."""
    charges = [charge for call in group for charge in call.charges]
    past = {stored(charge.account): charge.old for charge in charges}
    rows = [
        (stored(charge.account), stored(call.id), charge.at, charge.units) for call in group for charge in call.charges
    ]
    if rows:
        await connection.execute(sql(_EXPIRE), [*past], [*past.values()])
        await connection.executemany(sql(_CHARGE), rows)


async def settle(group: Sequence[QueueCall], sql: Sql, connection: Connection) -> None:
    """Add what jobs used of their charges to the sums of their accounts, unless they may run again."""
    rows = [(stored(name), stored(call.id), units) for call in group for name, units in call.unused.items()]
    if rows:
        await connection.execute(sql(_SETTLE), *map(list, zip(*rows, strict=True)))
