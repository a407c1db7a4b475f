"""A broker in this process's memory, for tests, simulations and gateways whose requests may be lost.

Calls never wait. A crash or a restart loses every job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway.store.queue.keys import StoredKey, known_key
from headway.store.queue.port import (
    CANCELLED,
    KEPT_MARK,
    NO_CHARGES,
    TOTAL,
    AccountSpent,
    Charge,
    Job,
    Unused,
    known_id,
    no_lease,
    unknown_id,
)


@dataclass(slots=True)
class _Lease:
    """A gateway's lease: its end, and whether a take has found it ended."""

    until: float
    ended: bool = False


@dataclass(slots=True)
class MemoryStore:
    """The state that brokers of one process share: all jobs in the order of their puts, and leases by owner.

    spent: account -> id -> instant and units. keys: API keys by id; changes: number of their changes.
    """

    jobs: dict[str, Job] = field(default_factory=dict)
    leases: dict[str, _Lease] = field(default_factory=dict)
    spent: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    keys: dict[str, StoredKey] = field(default_factory=dict)
    changes: int = 0


class MemoryBroker:
    """A `Broker`, which documents the methods, in dicts; its guarantees hold while the process lives.

    Jobs are copied in and out, so that a caller's change to one does not change what is stored.
    """

    on_disk = False

    def __init__(self, owner: str, store: MemoryStore | None = None) -> None:
        self.owner = owner
        self._store = store or MemoryStore()
        self._jobs = self._store.jobs

    def problem(self) -> str | None:
        """Return None: memory lasts as long as the process."""
        return None

    async def renew(self, until: float) -> bool:
        lease = self._store.leases.get(self.owner)
        self._store.leases[self.owner] = _Lease(until)
        return lease is not None and not lease.ended

    async def put(self, job: Job, charges: Sequence[Charge] = ()) -> None:
        """Store a new open job. Raises HeadwayError: 409 when its id is known, 503 without a lease, AccountSpent."""
        assert job.state == "open", f"job {job.id} is {job.state}"
        self._check_lease()
        if job.id in self._jobs:
            raise known_id(job.id)
        for charge in charges:
            self._check_room(charge)
        for charge in charges:
            self._count(job.id, charge)
        self._jobs[job.id] = replace(job, owner=self.owner)

    async def take(self, now: float, limit: int) -> list[Job]:
        self._check_lease()
        for owner, lease in self._store.leases.items():
            lease.ended |= lease.until <= now and owner != self.owner
        free = sorted((job for job in self._jobs.values() if self._free(job)), key=lambda job: job.arrival)
        for job in free[:limit]:
            job.owner = self.owner
        return [replace(job) for job in free[:limit]]

    async def give_back(self, id: str) -> bool:
        if (job := self._held(id)) is None:
            return False
        job.owner = None
        return True

    async def done(self, id: str, result: bytes | None, now: float, unused: Unused = NO_CHARGES) -> bool:
        return self._end(id, unused, state="done", result=result, finished=now)

    async def fail(self, id: str, reason: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        return self._end(id, unused, state="failed", reason=reason, finished=now)

    async def cancel(self, id: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        job = self._jobs.get(id)
        if job is None or job.state != "open":
            return False
        self._jobs[id] = replace(job, body=b"", state="failed", reason=CANCELLED, finished=now)
        lease = self._store.leases.get(job.owner or "")
        if lease is None or lease.ended or lease.until <= now:
            self._settle(id, unused)
        return True

    async def gone(self, ids: Sequence[str]) -> dict[str, bool]:
        known = {id: self._jobs[id] for id in ids if id in self._jobs}
        return {id: job.state != "open" for id, job in known.items() if self._held(id) is None}

    async def attempt(self, id: str) -> int:
        if (job := self._jobs.get(id)) is None:
            raise unknown_id(id)
        job.attempts += 1
        return job.attempts

    async def get(self, id: str) -> Job | None:
        """Return a copy of a job; an ended one has an empty body. None when unknown or forgotten."""
        job = self._jobs.get(id)
        return replace(job) if job else None

    async def forget(self, before: float) -> int:
        """Delete jobs and leases that ended before that instant; return how many jobs."""
        old = [id for id, job in self._jobs.items() if job.finished is not None and job.finished < before]
        for id in old:
            del self._jobs[id]
        used = {job.owner for job in self._jobs.values() if job.state == "open"}
        leases = self._store.leases
        for owner in [owner for owner in leases if leases[owner].until < before and owner not in used]:
            del leases[owner]
        return len(old)

    async def amend(self, id: str, result: bytes, now: float, attempts: int) -> bool:
        job = self._jobs.get(id)
        if job is None or job.state != "done" or job.attempts != attempts:
            return False
        self._jobs[id] = replace(job, result=result, finished=now, attempts=attempts + 1)
        return True

    async def trim(self, most: int) -> int:
        """Delete the oldest kept jobs of each tenant beyond `most` bytes."""
        total, gone = Counter[str](), list[str]()
        ended = (job for job in self._jobs.values() if job.finished is not None)
        kept = [job for job in ended if KEPT_MARK in job.request or (job.result is not None and not job.background)]
        for job in sorted(kept, key=lambda job: job.finished or 0.0, reverse=True):
            total[job.tenant] += len(job.request.encode()) + len(job.result or b"")
            if total[job.tenant] > most:
                gone.append(job.id)
        for id in gone:
            del self._jobs[id]
        return len(gone)

    async def delete(self, id: str) -> bool:
        if id not in self._jobs or self._jobs[id].state == "open":
            return False
        del self._jobs[id]
        return True

    async def spend(self, id: str, charge: Charge) -> bool:
        try:
            self._check_room(charge)
        except AccountSpent:
            return False
        self._count(id, charge)
        return True

    async def refund(self, account: str, id: str, units: float) -> None:
        if (found := self._store.spent.get(account, {}).get(id)) is not None:
            self._store.spent[account][id] = found[0], found[1] - units

    async def counted(self, charges: Sequence[Charge]) -> dict[str, float]:
        rows = ((one, self._store.spent.get(one.account, {}).values()) for one in charges)
        found = {one.account: [units for at, units in of if at > one.old] for one, of in rows}
        return {account: sum(units) for account, units in found.items() if units}

    def _check_room(self, charge: Charge) -> None:
        account = self._store.spent.get(charge.account, {})
        counted = sum(units for at, units in account.values() if at > charge.old)
        if counted + charge.units > charge.most:
            raise AccountSpent(charge.account, counted)

    def _count(self, id: str, charge: Charge) -> None:
        account = self._store.spent.setdefault(charge.account, {})
        for old in [id for id, (at, _) in account.items() if at <= charge.old]:
            del account[old]
        _, before = account.get(id, (charge.at, 0.0))
        account[id] = max([charge.at, *(at for at, _ in account.values())]), before + charge.units

    def _settle(self, id: str, unused: Unused) -> None:
        """Add what a job used of its charges to the sums of their accounts, unless it may run again."""
        job = self._jobs.get(id)
        if job is not None and job.state == "open" and job.background:
            return
        for name, units in unused.items():
            account = self._store.spent.get(name, {})
            if id in account:
                at, charged = account.pop(id)
                latest, before = account.get(TOTAL, (at, 0.0))
                account[TOTAL] = max(at, latest), before + charged - units

    async def keys(self, after: int) -> list[StoredKey]:
        found = (key for key in self._store.keys.values() if key.changed > after)
        return sorted(found, key=lambda key: key.changed)

    async def put_keys(self, keys: Sequence[StoredKey], forget: float) -> None:
        store = self._store
        for key in keys:
            if store.keys.get(key.id, key).digest != key.digest:
                raise known_key(key.id)
        for key in keys:
            store.changes += 1
            old = store.keys.get(key.id, key)
            revoked = key.revoked if old.revoked is None else old.revoked
            store.keys[key.id] = replace(old, expires=key.expires, revoked=revoked, changed=store.changes)
        ended = (one.id for one in store.keys.values() if (one.revoked or one.expires or forget) < forget)
        for id in [*ended]:
            del store.keys[id]

    async def close(self) -> None:
        """End the lease."""
        if lease := self._store.leases.get(self.owner):
            lease.ended = True

    def _check_lease(self) -> None:
        if self.owner not in self._store.leases:
            raise no_lease(self.owner)

    def _free(self, job: Job) -> bool:
        if job.state != "open" or job.owner == self.owner:
            return False
        return job.owner is None or self._store.leases[job.owner].ended

    def _held(self, id: str) -> Job | None:
        job = self._jobs.get(id)
        return job if job is not None and job.state == "open" and job.owner == self.owner else None

    def _end(self, id: str, unused: Unused, **end: object) -> bool:
        if (job := self._held(id)) is not None:
            # The request is needed only until it has been answered, and may be large.
            self._jobs[id] = replace(job, body=b"", **end)  # type: ignore[arg-type]
        self._settle(id, unused)
        return job is not None
