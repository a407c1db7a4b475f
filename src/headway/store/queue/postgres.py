"""A broker in a PostgreSQL database, which gateways on any number of machines share.

Each gateway has one thread with two connections: one carries out calls in their order, one reads. Calls that
arrive while a commit is under way share the next one (group commit), as one statement: up to 256 callers cost
one round trip and one flush of the server's log. A call waits for two of these at most, its own included. It
returns after the commit that contains it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, fields
from functools import partial
from itertools import count
from typing import Any

import asyncpg
from asyncpg import Connection

from headway.errors import HeadwayError
from headway.store.postgres.link import Address, Lost
from headway.store.postgres.schema import loaded, lock_of, stored
from headway.store.postgres.session import Lane, Session
from headway.store.queue.keys import StoredKey, known_key
from headway.store.queue.port import (
    CANCELLED,
    NO_CHARGES,
    AccountSpent,
    Charge,
    Job,
    Unused,
    known_id,
    no_lease,
    unknown_id,
)
from headway.store.queue.postgres_calls import (
    COUNTED,
    REFUND,
    UNDO_PUTS,
    QueueCall,
    check,
    count_charges,
    lock,
    settle,
    together,
    unfit,
    without_room,
)
from headway.store.queue.postgres_schema import JOBS, TOO_MUCH

GROUP = 256  # limit of calls that share one commit, so that none waits for a long transaction
READS = 16  # limit of reads that share one round trip: each answer may be megabytes
SWEEP = 500  # jobs deleted per transaction, so that forgetting does not hold up puts

FIELDS = tuple(field.name for field in fields(Job))
GET = f"SELECT {', '.join(FIELDS)} FROM {{s}}.jobs WHERE id = ANY ($1)"
TAKEN = f"""SELECT seq, {", ".join(FIELDS)} FROM {{s}}.jobs
    WHERE seq = ANY ($1) AND state = 'open' AND owner = $2"""
CANCEL = """UPDATE {s}.jobs SET state = 'failed', reason = $1, finished = $2, body = ''
    WHERE id = $3 AND state = 'open' RETURNING EXISTS
        (SELECT FROM {s}.leases WHERE leases.owner = jobs.owner AND NOT ended AND until > $2)"""
AMEND = """UPDATE {s}.jobs SET result = $1, finished = $2, attempts = attempts + 1
    WHERE id = $3 AND state = 'done' AND attempts = $4 RETURNING true"""
GONE = """SELECT id, state <> 'open' AS ended FROM {s}.jobs
    WHERE id = ANY ($1) AND (state <> 'open' OR owner IS DISTINCT FROM $2)"""
GET_KEYS = "SELECT * FROM {s}.keys WHERE changed > $1 ORDER BY changed"
PUT_KEY = """INSERT INTO {s}.keys AS one SELECT $1, $2, $3, $4, $5, $6, coalesce(max(changed), 0) + 1 FROM {s}.keys
    ON CONFLICT (id) DO UPDATE SET expires = excluded.expires, changed = excluded.changed,
        revoked = coalesce(one.revoked, excluded.revoked)"""
OTHER_KEY = "SELECT FROM {s}.keys WHERE id = $1 AND digest <> $2"
FORGET_KEYS = "DELETE FROM {s}.keys WHERE coalesce(revoked, expires) < $1"
# For calls whose outcome is unknown as the connection ended: taken jobs are given back.
UNDO_TAKES = "UPDATE {s}.jobs SET owner = NULL WHERE owner = $1 AND state = 'open' AND call = ANY ($2)"

ALONE = ("take", "forget")  # calls that look at other gateways' leases


class PostgresBroker(Session):
    """A `Broker`, which documents the methods, in one schema of a PostgreSQL database, for gateways on any machines.

    Raises ConfigError when the server or the schema cannot be used, or when the clocks of the server and this
    machine are more than `most_apart_s` apart. The schema is created if missing.

    Every method raises HeadwayError (503) when the server cannot be reached, refuses or is too slow, or after
    `close`; the broker connects again by itself, and the next call may succeed. Such a call, or one that is
    cancelled, may or may not have been carried out. A put or take that failed this way is undone once there is a
    connection, unless another gateway has the job by then. Calls of one broker take effect in the order in
    which they were made. After a failed `renew`, the next one may return False needlessly.
    """

    on_disk = True

    def __init__(self, address: Address, owner: str, *, most_apart_s: float = math.inf) -> None:
        self.owner, self._lock = owner, lock_of(address.schema)
        self._numbers = count(secrets.randbits(62))  # differ from those of other connections under this name
        self._unknown: dict[str, list[QueueCall]] = {"put": [], "take": []}
        self._most_apart_s = most_apart_s
        self._renewal_unknown = False  # the outcome of the last renewal is unknown
        super().__init__(address, "The broker", "send the request again")

    async def renew(self, until: float) -> bool:
        return bool(await self._write("renew", instant=until))

    async def put(self, job: Job, charges: Sequence[Charge] = ()) -> None:
        """Store a new open job; it is in the server's log on the disk when this returns.

        Raises HeadwayError: 409 when the id is known (ended jobs included), 503 without a lease, 400 when
        PostgreSQL cannot hold it, AccountSpent.
        """
        assert job.state == "open", f"job {job.id} is {job.state}"
        columns = {"instant": job.arrival, "count": job.attempts, "text": job.request, "body": job.body}
        outcome = await self._write("put", id=job.id, job=job, charges=charges, **columns)
        if outcome != 1:
            raise no_lease(self.owner) if outcome < 0 else known_id(job.id)

    async def take(self, now: float, limit: int) -> list[Job]:
        jobs: list[Job] | None = await self._write("take", instant=now, count=limit)
        if jobs is None:
            raise no_lease(self.owner)
        return jobs

    async def give_back(self, id: str) -> bool:
        return bool(await self._write("give_back", id=id))

    async def done(self, id: str, result: bytes | None, now: float, unused: Unused = NO_CHARGES) -> bool:
        return bool(await self._write("done", id=id, instant=now, body=result, unused=unused))

    async def fail(self, id: str, reason: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        return bool(await self._write("failed", id=id, instant=now, text=reason, unused=unused))

    async def cancel(self, id: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        return bool(await self._write("cancel", id=id, instant=now, unused=unused))

    async def gone(self, ids: Sequence[str]) -> dict[str, bool]:
        found: dict[str, bool] = await self._ask(self._reads, "gone", ids=ids)
        return found

    async def attempt(self, id: str) -> int:
        total: int | None = await self._write("attempt", id=id)
        if total is None:
            raise unknown_id(id)
        return total

    async def get(self, id: str) -> Job | None:
        job: Job | None = await self._ask(self._reads, "get", id=id)
        return job

    async def forget(self, before: float) -> int:
        total, deleted = 0, SWEEP
        while deleted == SWEEP:
            deleted = await self._write("forget", instant=before, count=SWEEP)
            total += deleted
        return total

    async def amend(self, id: str, result: bytes, now: float, attempts: int) -> bool:
        return bool(await self._write("amend", id=id, instant=now, count=attempts, body=result))

    async def trim(self, most: int) -> int:
        total = 0
        while ids := await self._ask(self._reads, "trim", count=most):
            total += sum(await asyncio.gather(*map(self.delete, ids)))
        return total

    async def delete(self, id: str) -> bool:
        return bool(await self._write("delete", id=id))

    async def spend(self, id: str, charge: Charge) -> bool:
        try:
            await self._write("spend", id=id, charges=[charge])
        except AccountSpent:
            return False
        return True

    async def refund(self, account: str, id: str, units: float) -> None:
        await self._write("refund", text=account, id=id, units=units)

    async def counted(self, charges: Sequence[Charge]) -> dict[str, float]:
        found: dict[str, float] = await self._ask(self._reads, "counted", charges=charges)
        return found

    async def keys(self, after: int) -> list[StoredKey]:
        found: list[StoredKey] = await self._ask(self._reads, "keys", count=after)
        return found

    async def put_keys(self, keys: Sequence[StoredKey], forget: float) -> None:
        await self._write("put_keys", keys=keys, instant=forget)

    def problem(self) -> str | None:
        """Return why jobs can be neither stored nor read now; None while both connections are up."""
        return None if self._closed else self._writer.problem or self._reader.problem

    async def _write(self, verb: str, **more: Any) -> Any:
        return await self._ask(self._writes, verb, **more)

    async def _ask(self, lane: Lane[QueueCall], verb: str, **more: Any) -> Any:
        call = QueueCall(verb, next(self._numbers), **more)
        check(call)
        return await self.call(lane, call)

    # ---- on the broker's thread

    async def _begin(self, held: AsyncExitStack) -> None:
        if math.isfinite(self._most_apart_s):
            await self._address.check_clock(self._most_apart_s)
        self._writer, self._reader = await self._link(held, "write", [JOBS]), await self._link(held, "read")
        self._writes = Lane(self._writer, partial(together, limit=GROUP), self._change)
        self._reads = Lane(self._reader, partial(together, limit=READS), self._answer)
        self._lanes += self._writes, self._reads

    async def _leave(self) -> None:
        await self._outcomes(self._writes, [QueueCall("leave", 0)])  # else the lease runs out

    def _unfit(self, error: asyncpg.PostgresError) -> HeadwayError:
        # asyncpg's own refusals have class 22, too, and quote the whole value.
        return unfit(error.__cause__ or error.args[0])

    async def _answer(self, group: list[QueueCall], tries: int, connection: Connection) -> Sequence[Any]:
        """Answer calls of `get`, or one call of `gone`, `trim`, `counted` or `keys`."""
        first = group[0]
        if first.verb == "counted":
            past = {stored(one.account): one.old for one in first.charges}
            rows = await connection.fetch(self.sql(COUNTED), [*past], [*past.values()])
            return [{loaded(row["account"]): row["units"] for row in rows}]
        if first.verb == "keys":
            return [[StoredKey(**row) for row in await connection.fetch(self.sql(GET_KEYS), first.count)]]
        if first.verb == "trim":
            return [[loaded(row["id"]) for row in await connection.fetch(self.sql(TOO_MUCH), first.count, SWEEP)]]
        if first.verb == "gone":
            ids = list({stored(id) for id in first.ids})
            rows = await connection.fetch(self.sql(GONE), ids, self.owner)
            return [{loaded(row["id"]): row["ended"] for row in rows}]
        rows = await connection.fetch(self.sql(GET), list({stored(call.id) for call in group}))
        found = {row["id"]: row for row in rows}
        return [_job(found.get(stored(call.id))) for call in group]

    async def _change(self, group: list[QueueCall], tries: int, connection: Connection) -> Sequence[Any]:
        """Apply the group in one transaction."""
        if group[0].verb == "cancel":
            return [await self._cancel(group[0], connection)]
        if group[0].verb == "amend":
            call = group[0]
            values = call.body, call.instant, stored(call.id), call.count
            return [bool(await connection.fetchval(self.sql(AMEND), *values))]
        if group[0].verb == "refund":
            account, id, units = stored(group[0].text), stored(group[0].id), group[0].units
            return [await connection.execute(self.sql(REFUND), account, id, units)]
        if group[0].verb == "put_keys":
            return [await self._put_keys(group[0], connection)]
        await self._undo(connection)
        # After a failure alone: then no other transaction has locked its rows.
        alone = tries > 0 or any(call.verb in ALONE for call in group)
        if any(call.accounts for call in group):
            return await self._apply_charged(group, alone, connection)
        return await self._apply(group, alone, connection)

    async def _apply_charged(self, group: list[QueueCall], alone: bool, connection: Connection) -> list[Any]:
        """Apply a group with its changes of accounts, in one transaction."""
        async with connection.transaction():
            await lock(group, self._address.schema, connection)
            refused = await without_room(group, self.sql, connection)
            calls = [call for call in group if call.number not in refused and call.verb != "spend"]
            outcomes = await self._apply(calls, alone, connection) if calls else []
            applied = {call.number: outcome for call, outcome in zip(calls, outcomes, strict=True)}
            kept = [call for call in group if call.number not in refused and applied.get(call.number, 1) == 1]
            await count_charges(kept, self.sql, connection)
            await settle(group, self.sql, connection)
        return [refused.get(call.number, applied.get(call.number)) for call in group]

    async def _apply(self, group: list[QueueCall], alone: bool, connection: Connection) -> list[Any]:
        columns = [list(column) for column in zip(*(call.row() for call in group), strict=True)]
        places = ", ".join(f"${i}" for i in range(1, 4 + len(columns)))
        rows = await connection.fetch(
            f"SELECT outcome, taken FROM {self._schema}.apply({places})", self.owner, alone, self._lock, *columns
        )
        outcomes = [row["outcome"] for row in rows]
        for i, call in enumerate(group):
            if call.verb == "take":
                outcomes[i] = None if outcomes[i] < 0 else await self._bodies(connection, rows[i]["taken"])
            elif call.verb == "renew":
                outcomes[i], self._renewal_unknown = outcomes[i] and not self._renewal_unknown, False
        return outcomes

    async def _cancel(self, call: QueueCall, connection: Connection) -> bool:
        async with connection.transaction():
            await lock([call], self._address.schema, connection)
            held = await connection.fetchval(self.sql(CANCEL), CANCELLED, call.instant, stored(call.id))
            if held is False:
                await settle([call], self.sql, connection)
        return held is not None

    async def _put_keys(self, call: QueueCall, connection: Connection) -> HeadwayError | None:
        """Store keys while no other gateway does: changes become visible in the order of their numbers.

        Return the error of a key whose id another key has, else None.
        """
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", lock_of(f"{self._address.schema} keys"))
            for key in call.keys:
                if await connection.fetchrow(self.sql(OTHER_KEY), key.id, key.digest) is not None:
                    return known_key(key.id)
            await connection.executemany(self.sql(PUT_KEY), [astuple(key)[:-1] for key in call.keys])
            await connection.execute(self.sql(FORGET_KEYS), call.instant)  # after the puts: no number is given twice
        return None

    async def _bodies(self, connection: Connection, taken: list[int]) -> list[Job]:
        """Read taken jobs in a separate statement, so that large answers delay no commit."""
        try:
            found = await connection.fetch(self.sql(TAKEN), taken, self.owner)
        except asyncpg.PostgresError as error:  # the take is committed, so it must be undone
            raise Lost("taken jobs cannot be read") from error
        rows = {row["seq"]: row for row in found}
        return [job for seq in taken if (job := _job(rows.get(seq))) is not None]

    def _note_unknown(self, group: Sequence[QueueCall]) -> None:
        for call in group:
            if call.verb in self._unknown:
                self._unknown[call.verb].append(call)
            self._renewal_unknown |= call.verb == "renew"

    async def _undo(self, connection: Connection) -> None:
        if puts := self._unknown["put"]:
            numbers, ids = [call.number for call in puts], [stored(call.id) for call in puts]
            accounts = [stored(account) for call in puts for account in call.accounts]
            await connection.execute(self.sql(UNDO_PUTS), self.owner, numbers, accounts, ids)
            puts.clear()
        if takes := self._unknown["take"]:
            await connection.execute(self.sql(UNDO_TAKES), self.owner, [call.number for call in takes])
            takes.clear()


def _job(row: Any) -> Job | None:
    return None if row is None else Job(*(loaded(row[name]) for name in FIELDS))
