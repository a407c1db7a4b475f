"""A bounded pool of worker processes, started on demand or ahead of time.

A worker is spare (ready, or starting) or busy. A unit takes a spare one, ready ones first; without one it starts
a worker, or waits for its turn (`Places`) while all are busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, Protocol, TypeVar

from headway.cluster.backends.port import BackendError, HeldWorker
from headway.errors import RequestError

_CLOSE_S = 10.0  # limit for all workers to end


class Pooled(Protocol):
    """A worker in a pool."""

    @property
    def alive(self) -> bool: ...

    async def end(self) -> None: ...


W = TypeVar("W", bound=Pooled)


@dataclass(slots=True, eq=False)
class _Spare(Generic[W]):
    """A worker that no unit has taken.

    start: the start, pending or done. seconds: duration of the start. holders: one event per warm-up that keeps
        the worker. keep_until: instant (monotonic) until which it stays without a holder.
    """

    start: asyncio.Future[W]
    seconds: float | None = None
    holders: set[asyncio.Event] = field(default_factory=set)
    keep_until: float = 0.0

    @property
    def ready(self) -> bool:
        start = self.start
        return start.done() and not start.cancelled() and start.exception() is None and start.result().alive


@dataclass(frozen=True, slots=True)
class Taken(Generic[W]):
    """A worker that one unit uses; `warm`, `waited`, `started` as in `UnitResult`."""

    worker: W
    warm: bool
    waited: float
    started: float | None


class WorkerPool(Generic[W]):
    """A pool of workers of one kind.

    start: starts a worker. most: limit of workers, starting ones included. waiting: limit of waiting units.
    share: one tenant's share of either, out of what the others leave; 1 = all.
    keep_s: seconds that a worker stays ready after a unit; None = each serves a single unit.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[W]],
        *,
        most: int,
        waiting: int,
        share: float,
        keep_s: float | None,
    ) -> None:
        self._name, self._make, self._most = name, start, most
        self._places = Places(name, most, waiting, share)
        self._turn: Ticket | None = None  # the unit that gets the next worker
        self._keep_s = keep_s
        self._spares: list[_Spare[W]] = []
        self._awaited: set[_Spare[W]] = set()  # taken by units, and not ready yet
        self._busy: set[W] = set()
        self._live = 0
        self._changed = asyncio.Event()
        self._ends: set[asyncio.Task[None]] = set()
        self._warming = asyncio.Lock()
        self._closed = False

    @property
    def live(self) -> int:
        """Return the number of workers, starting, spare or busy."""
        return self._live

    @property
    def busy(self) -> int:
        """Return the number of busy workers."""
        return len(self._busy)

    async def warm(self) -> HeldWorker | None:
        """Start a worker ahead of time, one at a time; if workers are reused, keep a spare one instead.

        None = the pool is full. BackendError when the worker does not start.
        """
        async with self._warming:
            self._remove_dead()
            fresh = self._keep_s is None or not self._spares
            if fresh and (self._live >= self._most or self._closed):
                return None
            spare = self._start_spare() if fresh else max(self._spares, key=lambda one: one.ready)
            used = asyncio.Event()
            spare.holders.add(used)
            try:
                await asyncio.shield(spare.start)
            except BaseException:
                self._release(spare, used)
                raise
        return HeldWorker(used, partial(self._release_held, spare, used), fresh)

    @asynccontextmanager
    async def worker(self, tenant: str) -> AsyncIterator[Taken[W]]:
        """Yield a worker. RequestError (429) when too many wait already; BackendError when none starts."""
        asked = time.monotonic()
        spare, cold = await self._take(tenant)
        warm = spare.ready
        try:
            worker = await self._started(spare)
            self._busy.add(worker)
            try:
                if self._closed:
                    raise self._stopping()
                yield Taken(worker, warm, time.monotonic() - asked, spare.seconds if cold else None)
            finally:
                self._busy.discard(worker)
                await asyncio.shield(self._finish(worker))
        finally:
            self._places.leave(tenant)
            self._change()

    async def close(self) -> None:
        """End all workers; units in progress fail."""
        self._closed = True
        self._change()
        for spare in self._spares.copy():
            self._stop(spare)
        for spare in self._awaited:
            spare.start.cancel()
        await asyncio.gather(*(worker.end() for worker in self._busy))
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):  # the units' own tasks notice that their workers are gone
                while self._live or self._ends:
                    self._changed.clear()
                    await self._changed.wait()

    # ---- spare workers

    def _start_spare(self) -> _Spare[W]:
        """Start a worker and add it to the spare ones."""
        self._live += 1
        spare = _Spare[W](asyncio.ensure_future(self._make()))
        began = time.monotonic()

        def started(start: asyncio.Future[W]) -> None:
            spare.seconds = time.monotonic() - began
            if start.cancelled() or start.exception() is not None:
                self._remove(spare)
                self._gone()

        spare.start.add_done_callback(started)
        self._spares.append(spare)
        return spare

    async def _take(self, tenant: str) -> tuple[_Spare[W], bool]:
        """Wait for a turn; return a spare worker or a new one, and whether it is new."""
        ticket = self._places.add(tenant, possible=self._possible)
        try:
            self._turn = self._next()
            while not (self._turn is ticket or self._closed):
                self._changed.clear()
                await self._changed.wait()
            if self._closed:
                raise self._stopping()
            self._remove_dead()
            cold = not self._spares
            spare = self._start_spare() if cold else max(self._spares, key=lambda one: one.ready)
            self._spares.remove(spare)
            self._places.take(tenant)
        finally:
            self._places.discard(ticket)
            self._change()
        for used in spare.holders:
            used.set()
        return spare, cold

    async def _started(self, spare: _Spare[W]) -> W:
        """Wait until a worker that a unit has taken is ready."""
        self._awaited.add(spare)
        try:
            await asyncio.wait([spare.start])
        except asyncio.CancelledError:
            self._give_back(spare)
            raise
        finally:
            self._awaited.discard(spare)
        if spare.start.cancelled():
            raise self._stopping()
        return spare.start.result()

    def _stopping(self) -> BackendError:
        return BackendError(f"The backend {self._name} is stopping.", "Try again later.", status=503)

    @property
    def _possible(self) -> bool:
        return bool(self._spares) or self._live < self._most

    def _next(self) -> Ticket | None:
        return self._places.next() if self._possible else None

    def _change(self) -> None:
        """Wake waiting units: a worker, a place or a turn may have become free."""
        self._turn = self._next()
        self._changed.set()

    def _remove_dead(self) -> None:
        """Remove spare workers that have died."""
        for spare in self._spares.copy():
            if spare.start.done() and not spare.ready:
                self._stop(spare)

    async def _release_held(self, spare: _Spare[W], used: asyncio.Event) -> None:
        self._release(spare, used)

    def _release(self, spare: _Spare[W], used: asyncio.Event) -> None:
        """End a warm-up's hold on a worker, and the worker if nothing else keeps it."""
        spare.holders.discard(used)
        self._expire(spare)

    def _expire(self, spare: _Spare[W]) -> None:
        if spare in self._spares and not spare.holders and time.monotonic() >= spare.keep_until:
            self._stop(spare)

    def _give_back(self, spare: _Spare[W]) -> None:
        """Return an unused worker to the spare ones."""
        if not (spare.start.done() and not spare.ready):
            spare.holders.clear()
            self._spares.append(spare)
            self._keep(spare)

    def _keep(self, spare: _Spare[W]) -> None:
        """Keep a spare worker ready for `keep_s`."""
        seconds = self._keep_s or 0.0
        spare.keep_until = time.monotonic() + seconds
        asyncio.get_running_loop().call_later(seconds + 0.001, self._expire, spare)
        self._change()

    def _stop(self, spare: _Spare[W]) -> None:
        """End a spare worker in a background task; cancel its start if that is pending."""
        self._remove(spare)

        async def end() -> None:
            if not spare.start.done():
                spare.start.cancel()
            await asyncio.wait([spare.start])
            if not spare.start.cancelled() and spare.start.exception() is None:
                await spare.start.result().end()
                self._gone()

        task = asyncio.create_task(end())
        self._ends.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, end: asyncio.Task[None]) -> None:
        self._ends.discard(end)
        self._change()

    def _remove(self, spare: _Spare[W]) -> None:
        if spare in self._spares:
            self._spares.remove(spare)

    # ---- workers after a unit

    async def _finish(self, worker: W) -> None:
        """Keep a worker for the next unit, or end it."""
        if self._keep_s is None or not worker.alive or self._closed:
            await worker.end()
            self._gone()
            return
        start: asyncio.Future[W] = asyncio.get_running_loop().create_future()
        start.set_result(worker)
        spare = _Spare(start)
        self._spares.append(spare)
        self._keep(spare)

    def _gone(self) -> None:
        self._live -= 1
        self._change()


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A unit that waits for a worker."""

    tenant: str


class Places:
    """Counts each tenant's workers of a backend, and keeps the waiting units.

    Each tenant may take a share of the workers that the others leave, as in the queue (`policy/core/shares.py`), so
    that one remains for the next tenant. Among waiting tenants the one with the fewest workers goes first; ties go
    to the one whose last turn is longest ago.

    most: limit of workers. waiting: limit of waiting units. share: one tenant's share of either; 1 = no limit.
    """

    def __init__(self, name: str, most: int, waiting: int, share: float) -> None:
        self._name, self._most, self._limit, self._share = name, most, waiting, share
        self._waiting: dict[Ticket, None] = {}  # in the order of their arrival
        self._taken = Counter[str]()  # workers by tenant
        self._turns, self._last = count(1), Counter[str]()  # number of each tenant's last turn

    def add(self, tenant: str, *, possible: bool) -> Ticket:
        """Add a unit. RequestError (429) when it would have to wait and the limit is reached.

        possible: a worker is spare, or can be started.
        """
        if not (possible and self._leaves_room(self._taken, tenant, self._most)):
            self._check(tenant)
        ticket = Ticket(tenant)
        self._waiting[ticket] = None
        return ticket

    def discard(self, ticket: Ticket) -> None:
        """Remove a unit that no longer waits."""
        del self._waiting[ticket]

    def next(self) -> Ticket | None:
        """Return the unit that gets the next worker, None when no waiting tenant may have one."""
        able = (one for one in self._waiting if self._leaves_room(self._taken, one.tenant, self._most))
        return min(able, key=lambda one: (self._taken[one.tenant], self._last[one.tenant]), default=None)

    def take(self, tenant: str) -> None:
        """Count a worker as a tenant's."""
        self._taken[tenant] += 1
        self._last[tenant] = next(self._turns)

    def leave(self, tenant: str) -> None:
        """Count a worker as free again."""
        self._taken[tenant] -= 1

    def _check(self, tenant: str) -> None:
        waiting = Counter(one.tenant for one in self._waiting)
        if waiting.total() >= self._limit:
            raise _busy(f"{waiting.total()} units wait for the backend {self._name}.", "backend_busy")
        if not self._leaves_room(waiting, tenant, self._limit):
            problem = f"{waiting[tenant]} of your units wait for the backend {self._name}, the most allowed now"
            raise _busy(f"{problem} (server.tenant_share).", "tenant_queue_full")

    def _leaves_room(self, counts: Counter[str], tenant: str, limit: int) -> bool:
        """Tell whether a tenant may have one more of `limit`."""
        mine = counts[tenant]
        return self._share == 1.0 or mine < self._share * (limit - (counts.total() - mine))


def _busy(problem: str, code: str) -> RequestError:
    return RequestError(problem, "Try again later.", status=429, code=code, kind="rate_limit_error")
