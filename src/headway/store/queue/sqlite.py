"""A broker in one SQLite file, which gateways on one machine may share and which survives crashes.

Each gateway has one thread that writes. Calls that arrive while a commit is under way share the next one
(group commit), so a hundred waiting callers cost one fsync. A call returns after the commit that contains it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar, cast

from headway.errors import HeadwayError
from headway.store.queue.keys import StoredKey, known_key
from headway.store.queue.port import (
    CANCELLED,
    NO_CHARGES,
    Charge,
    Job,
    Unused,
    known_id,
    no_lease,
    queue_unavailable,
    unknown_id,
)
from headway.store.queue.sqlite_ends import (
    FEW,
    Done,
    charge_all,
    check_room,
    counted,
    end,
    end_together,
    refund,
    settle,
    spend,
)
from headway.store.queue.sqlite_file import (
    COLUMNS,
    KEEP,
    SUMS,
    TOO_MUCH,
    Identity,
    WriteTurns,
    job_of,
    open_file,
    row_of,
)
from headway.store.queue.sqlite_jobs import Kept, rescue_jobs
from headway.store.settling import deliver
from headway.store.sqlite.health import MAX_LOG_BYTES, Watch, checksum, damage, leave_open
from headway.store.sqlite.rescue import RECOVER

T = TypeVar("T")

GROUP = 256  # limit of calls that share one commit, so that none waits for a long transaction
TICK_S = 1.0  # between two checks of an idle writer for a damaged file
SWEEP = 500  # jobs deleted per transaction, so that forgetting does not hold up puts

LEASE = "SELECT ended FROM leases WHERE owner = ?"
RENEW = """INSERT INTO leases (owner, until, ended) VALUES (?, ?, 0)
    ON CONFLICT (owner) DO UPDATE SET until = excluded.until, ended = 0"""
EXPIRE = "UPDATE leases SET ended = 1 WHERE until <= ? AND NOT ended AND owner <> ?"
LEAVE = "UPDATE leases SET ended = 1 WHERE owner = ?"
# One statement, and the lease is looked up by its key: a put costs the same as without leases.
PUT = f"{KEEP} WHERE EXISTS (SELECT 1 FROM leases WHERE owner = ?) ON CONFLICT (id) DO NOTHING"
# The first jobs of each ended lease, then the first of these: held jobs are never scanned.
FREE = f"""WITH free (owner) AS (
        SELECT NULL UNION ALL SELECT owner FROM leases WHERE ended AND owner <> :owner)
    SELECT seq, {COLUMNS}, {SUMS} FROM jobs WHERE seq IN (
        SELECT first.seq FROM free CROSS JOIN jobs AS first ON first.seq IN (
            SELECT seq FROM jobs AS held WHERE held.state = 'open' AND held.owner IS free.owner
            ORDER BY arrival, seq LIMIT :limit))
    ORDER BY arrival, seq LIMIT :limit"""
TAKE = "UPDATE jobs SET owner = ? WHERE seq = ?"
DELETE = "DELETE FROM jobs WHERE id = ? AND state <> 'open'"
GIVE_BACK = "UPDATE jobs SET owner = NULL WHERE id = ? AND state = 'open' AND owner = ?"
CANCEL = """UPDATE jobs SET state = 'failed', reason = ?, finished = ?, body = x''
    WHERE id = ? AND state = 'open' RETURNING EXISTS
        (SELECT 1 FROM leases WHERE leases.owner = jobs.owner AND NOT ended AND until > ?)"""
GONE = """SELECT id, state <> 'open' FROM jobs
    WHERE id IN (SELECT value FROM json_each(?)) AND (state <> 'open' OR owner IS NOT ?)"""
ATTEMPT = "UPDATE jobs SET attempts = attempts + 1 WHERE id = ? RETURNING attempts"
AMEND = """UPDATE jobs SET result = ?, result_sum = ?, finished = ?, attempts = attempts + 1
    WHERE id = ? AND state = 'done' AND attempts = ?"""
FORGET = """DELETE FROM jobs WHERE seq IN
    (SELECT seq FROM jobs WHERE finished < ? ORDER BY finished LIMIT ?)"""
FORGET_LEASES = """DELETE FROM leases WHERE until < ? AND NOT EXISTS
    (SELECT 1 FROM jobs WHERE jobs.state = 'open' AND jobs.owner = leases.owner)"""
GET = f"SELECT {COLUMNS}, {SUMS} FROM jobs WHERE id = ?"
PUT_KEY = """INSERT INTO keys SELECT ?, ?, ?, ?, ?, ?, coalesce(max(changed), 0) + 1 FROM keys WHERE true
    ON CONFLICT (id) DO UPDATE SET expires = excluded.expires, changed = excluded.changed,
        revoked = coalesce(revoked, excluded.revoked)"""
OTHER_KEY = "SELECT 1 FROM keys WHERE id = ? AND digest <> ?"
FORGET_KEYS = "DELETE FROM keys WHERE coalesce(revoked, expires) < ?"

# Values that SQLite cannot hold (a NaN instant, half a surrogate pair, 1 GB): the fault of one call only.
UNFIT = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ValueError,
    OverflowError,
)
log = logging.getLogger("headway.store.queue")


@dataclass(slots=True)
class _QueueCall:
    """One caller's change and the future it waits on."""

    apply: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]


class SqliteBroker:
    """A `Broker`, which documents the methods, in one SQLite file (WAL), for any number of gateways on one machine.

    synchronous: "full" survives loss of power; "normal" survives the death of the process, but the last
    moments before a loss of power may be missing. Raises ConfigError when the file cannot be used.

    Every method raises HeadwayError (503) when the file cannot be written or read (a full disk), when it was
    deleted or replaced, or after `close`; the broker keeps working and the next call may succeed. Such a call, or
    one that is cancelled, may or may not have been carried out. Calls of one broker take effect in the order
    in which they were made.

    When the file is found damaged, the broker accepts nothing more. It moves to a new file beside it with the
    jobs that it can still read and those in memory; their ends are stored there.

    max_log_bytes: bytes of the write-ahead log, which grows while another program has a transaction open. Beyond it
    background jobs are refused, beyond twice that all new ones; ends are stored.
    """

    on_disk = True

    def __init__(self, path: str, owner: str, *, synchronous: str = "full", max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self.path, self.owner, self._synchronous = os.path.realpath(path), owner, synchronous
        with ExitStack() as held:
            writing, reading = open_file(self.path, synchronous)
            self._db = held.enter_context(closing(writing))
            self._view = held.enter_context(closing(reading))
            self._turns = held.enter_context(closing(WriteTurns(self.path)))
            self._held = held.pop_all()
        self._file = Identity(self.path)
        self._pending: dict[asyncio.AbstractEventLoop, list[_QueueCall]] = {}
        self._calls: SimpleQueue[_QueueCall | None] = SimpleQueue()
        self._closed = self._moved = False
        self._damage: str | None = None
        self._kept = Kept()
        self._readers = ThreadPoolExecutor(1, "broker-read")
        # A daemon: a gateway that dies without close() must not wait for a queue that is never filled.
        self._writer = Thread(target=self._serve, name="broker-write", daemon=True)
        self._writer.start()
        self._watch = Watch(self.path, self._found_damaged, max_log_bytes)

    async def renew(self, until: float) -> bool:
        return await self._write(partial(_renew, self.owner, until))

    async def put(self, job: Job, charges: Sequence[Charge] = ()) -> None:
        """Store a new open job; it is on the disk when this returns.

        Raises HeadwayError: 409 when the id is known (ended jobs included), 503 without a lease, or while the
        write-ahead log is too long, 400 when SQLite cannot hold it, AccountSpent.
        """
        assert job.state == "open", f"job {job.id} is {job.state}"
        if self._damage is not None:
            raise queue_unavailable(self._damage)
        if (problem := self._watch.log_problem(1 if job.background else 2)) is not None:
            raise queue_unavailable(problem, "no background work" if job.background else "nothing")
        await self._write(partial(_put, job, self.owner, charges))
        self._kept.add(job)

    async def take(self, now: float, limit: int) -> list[Job]:
        if self._damage is not None:
            return []
        jobs = await self._write(partial(_take, self.owner, now, limit))
        for job in jobs:
            self._kept.add(job)
        return jobs

    async def give_back(self, id: str) -> bool:
        self._kept.drop(id)
        return await self._write(partial(_changes, GIVE_BACK, [id, self.owner])) == 1

    async def done(self, id: str, result: bytes | None, now: float, unused: Unused = NO_CHARGES) -> bool:
        self._kept.drop(id)
        if result is None:
            return await self._write(Done(self.owner, id, now, unused))
        return await self._write(partial(end, self.owner, id, now, result=result, unused=unused))

    async def fail(self, id: str, reason: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        self._kept.drop(id)
        return await self._write(partial(end, self.owner, id, now, reason=reason, unused=unused))

    async def cancel(self, id: str, now: float, unused: Unused = NO_CHARGES) -> bool:
        self._kept.drop(id)
        return await self._write(partial(_cancel, id, now, unused))

    async def gone(self, ids: Sequence[str]) -> dict[str, bool]:
        rows = await self._read(partial(_rows, GONE, [json.dumps(ids), self.owner]))
        for id, _ in rows:
            self._kept.drop(id)
        return {id: bool(ended) for id, ended in rows}

    async def attempt(self, id: str) -> int:
        rows = await self._write(partial(_rows, ATTEMPT, [id]))
        if not rows:
            raise unknown_id(id)
        return int(rows[0][0])

    async def get(self, id: str) -> Job | None:
        return await self._read(partial(_get, id))

    async def forget(self, before: float) -> int:
        total, deleted = 0, SWEEP
        while deleted == SWEEP:
            deleted = await self._write(partial(_forget, before))
            total += deleted
        return total

    async def amend(self, id: str, result: bytes, now: float, attempts: int) -> bool:
        return await self._write(partial(_changes, AMEND, [result, checksum(result, id), now, id, attempts])) == 1

    async def trim(self, most: int) -> int:
        total = 0
        while rows := await self._read(partial(_rows, TOO_MUCH, [most, SWEEP])):
            total += sum(await asyncio.gather(*(self.delete(id) for (id,) in rows)))
        return total

    async def delete(self, id: str) -> bool:
        return await self._write(partial(_changes, DELETE, [id])) == 1

    async def spend(self, id: str, charge: Charge) -> bool:
        return await self._write(partial(spend, id, charge))

    async def refund(self, account: str, id: str, units: float) -> None:
        await self._write(partial(refund, account, id, units))

    async def counted(self, charges: Sequence[Charge]) -> dict[str, float]:
        return await self._read(partial(counted, charges))

    async def keys(self, after: int) -> list[StoredKey]:
        return await self._read(partial(_keys, after))

    async def put_keys(self, keys: Sequence[StoredKey], forget: float) -> None:
        if self._damage is not None:  # what is stored in the file beside it reaches no other gateway
            raise queue_unavailable(self._damage)
        await self._write(partial(_put_keys, keys, forget))

    def problem(self) -> str | None:
        """Return why no job is accepted now: the file was deleted, replaced or damaged, or its log is too long."""
        if self._closed:
            return None
        return self._file_problem() or self._watch.log_problem(2)

    def _file_problem(self) -> str | None:
        if self._damage is not None:
            return self._damage
        if self._file.intact():
            return None
        return "its file was deleted, moved or replaced, so restart the gateway unless it comes back"

    async def close(self) -> None:
        """Carry out the calls made so far, end the lease, then release the threads and the file."""
        self._closed = True
        for loop in [*self._pending]:
            self._hand_over(loop)
        self._calls.put(None)
        await asyncio.to_thread(self._watch.close)
        await asyncio.to_thread(self._writer.join)

    # ---- on the event loop

    async def _write(self, apply: Callable[[sqlite3.Connection], T]) -> T:
        self._check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if loop not in self._pending:
            self._pending[loop] = []
            loop.call_soon(self._hand_over, loop)
        self._pending[loop].append(_QueueCall(apply, future))
        return await future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the writer all calls of one iteration of the event loop at once: they share a commit."""
        for call in self._pending.pop(loop, ()):
            self._calls.put(call)

    async def _read(self, look: Callable[[sqlite3.Connection], T]) -> T:
        self._check()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, look, self._view)
        except sqlite3.Error as error:
            self._note(error)
            raise self._down(str(error)) from error

    def _check(self) -> None:
        if self._closed:
            raise self._down("it is closed")

    def _down(self, why: str) -> HeadwayError:
        if self._damage is not None:
            return queue_unavailable(self._damage)
        fix = "Check the disk and other programs that use its file, then send the request again."
        return HeadwayError(f"The broker is out: {why}.", fix, status=503, kind="server_error")

    # ---- on the writer's thread

    def _serve(self) -> None:
        with self._held:
            while (group := self._next_group()) is not None:
                self._leave_damaged()
                if group:
                    deliver(zip([call.future for call in group], self._commit(group), strict=True))
            self._leave_damaged()
            if self._file.intact() and (self._moved or self._damage is None):
                self._leave()
            else:
                leave_open(self._db, self._view)
                self._held.pop_all()
            self._readers.shutdown()  # reads that were asked for before close() are answered

    def _leave(self) -> None:
        with suppress(sqlite3.Error), self._db:  # a lease that cannot be ended runs out
            self._turns.begin(self._db)
            self._db.execute(LEAVE, [self.owner])

    def _next_group(self) -> list[_QueueCall] | None:
        """Wait up to `TICK_S` for a call; return it with all that follow it, None = closed."""
        group: list[_QueueCall] = []
        with suppress(Empty):
            call = self._calls.get(timeout=TICK_S)
            if call is None:
                return None
            while call is not None:
                group.append(call)
                if len(group) == GROUP:
                    return group
                call = self._calls.get_nowait()
            self._calls.put(None)  # the end comes after this group
        return group

    def _commit(self, group: list[_QueueCall]) -> list[Any]:
        """Apply the group in one transaction; return each call's value, or its error."""
        try:
            self._turns.begin(self._db)
            self._check_file()
            outcomes = self._apply_all(group)
            self._db.execute("COMMIT")
        except Exception as error:  # any error: the callers get it and the thread goes on
            self._note(error)
            with suppress(sqlite3.Error):
                self._db.rollback()
            return [self._down(str(error)) for _ in group]
        return outcomes

    def _check_file(self) -> None:
        """Refuse to write where no gateway would look again; a transaction has begun, so the log exists."""
        if not self._moved and (problem := self._file_problem()) is not None:
            raise OSError(problem)

    # ---- damage

    def _note(self, error: Exception) -> None:
        """Take note when an error says that the file is damaged."""
        if not self._moved and (what := damage(error)) is not None:
            self._found_damaged(what)

    def _found_damaged(self, what: str) -> None:
        """Accept nothing more; the writer's thread moves to another file. Called in any thread."""
        if self._damage is None:
            self._damage = f"its file is damaged ({what}): {RECOVER}"
            log.error("nothing is accepted any more by the queue %s: %s", self.path, self._damage)

    def _leave_damaged(self) -> None:
        """Move to a new file if this one is damaged; if the disk does not allow it, a later call tries again."""
        if self._moved or self._damage is None:
            return
        try:
            file, unreadable = rescue_jobs(self.path, self._db, self._kept.jobs(), self.owner)
            writing, reading = open_file(file, self._synchronous)
        except (sqlite3.Error, OSError, HeadwayError) as error:
            log.error("the open requests of the damaged queue could not be saved yet: %s", error)
            return
        leave_open(self._db, self._view)  # closing them would write to the damaged file
        self._held.pop_all()
        self._db = self._held.enter_context(closing(writing))
        self._view = self._held.enter_context(closing(reading))
        self._held.enter_context(closing(self._turns))
        self._file, self._moved = Identity(file), True
        log.error("what the queue has is saved in %s; %d rows could not be read", file, unreadable)

    def _apply_all(self, group: list[_QueueCall]) -> list[Any]:
        """Apply calls in their order; ends that follow each other, together."""
        outcomes = list[Any]()
        for ends, some in groupby(group, lambda call: isinstance(call.apply, Done)):
            calls = [*some]
            if ends and len(calls) > FEW:
                outcomes += self._end(calls)
            else:
                outcomes += [self._apply(call) for call in calls]
        return outcomes

    def _end(self, calls: list[_QueueCall]) -> list[Any]:
        """Store ends together, or one by one when one of them is unfit."""
        try:
            return end_together([cast(Done, call.apply) for call in calls], self._db)
        except UNFIT:
            return [self._apply(call) for call in calls]

    def _apply(self, call: _QueueCall) -> Any:
        try:
            return call.apply(self._db)
        except HeadwayError as error:  # refused before anything was changed
            return error
        except UNFIT as error:  # SQLite has undone this statement alone; the others' transaction goes on
            return HeadwayError(f"The job cannot be stored: {error}.", "Send a smaller or well-formed request.")


def _renew(owner: str, until: float, db: sqlite3.Connection) -> bool:
    before = db.execute(LEASE, [owner]).fetchone()
    db.execute(RENEW, [owner, until])
    return bool(before == (0,))


def _put(job: Job, owner: str, charges: Sequence[Charge], db: sqlite3.Connection) -> None:
    if charges:
        check_room(charges, db)
    if not db.execute(PUT, [*row_of(job, owner), owner]).rowcount:
        _check_lease(owner, db)
        raise known_id(job.id)
    if charges:
        charge_all(job.id, charges, db)


def _get(id: str, db: sqlite3.Connection) -> Job | None:
    row = db.execute(GET, [id]).fetchone()
    return None if row is None else job_of(row)


def _take(owner: str, now: float, limit: int, db: sqlite3.Connection) -> list[Job]:
    _check_lease(owner, db)
    db.execute(EXPIRE, [now, owner])
    rows = db.execute(FREE, {"owner": owner, "limit": limit}).fetchall()
    db.executemany(TAKE, [(owner, seq) for seq, *_ in rows])
    jobs = [job_of(row) for _, *row in rows]
    for job in jobs:
        job.owner = owner
    return jobs


def _cancel(id: str, now: float, unused: Unused, db: sqlite3.Connection) -> bool:
    held = db.execute(CANCEL, [CANCELLED, now, id, now]).fetchall()
    if held == [(0,)]:
        settle(id, unused, db)
    return bool(held)


def _forget(before: float, db: sqlite3.Connection) -> int:
    db.execute(FORGET_LEASES, [before])
    return db.execute(FORGET, [before, SWEEP]).rowcount


def _keys(after: int, db: sqlite3.Connection) -> list[StoredKey]:
    return [StoredKey(*row) for row in db.execute("SELECT * FROM keys WHERE changed > ? ORDER BY changed", [after])]


def _put_keys(keys: Sequence[StoredKey], forget: float, db: sqlite3.Connection) -> None:
    for key in keys:
        if db.execute(OTHER_KEY, [key.id, key.digest]).fetchone():
            raise known_key(key.id)
    db.executemany(PUT_KEY, [astuple(key)[:-1] for key in keys])
    db.execute(FORGET_KEYS, [forget])  # after the puts: no number is given twice


def _check_lease(owner: str, db: sqlite3.Connection) -> None:
    if not db.execute(LEASE, [owner]).fetchone():
        raise no_lease(owner)


def _changes(sql: str, values: list[Any], db: sqlite3.Connection) -> int:
    return db.execute(sql, values).rowcount


def _rows(sql: str, values: list[Any], db: sqlite3.Connection) -> list[Any]:
    return db.execute(sql, values).fetchall()
