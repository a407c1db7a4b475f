"""Decides which tenant's unit gets a backend's next worker, and which units may wait for one.

Each tenant may take a share of the workers that the others leave, as in the queue (`policy/core/shares.py`),
so that one remains for the next tenant. Among waiting tenants the one with the fewest workers goes first; ties
go to the one whose last turn is longest ago.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import count

from headway.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A unit that waits for a worker."""

    tenant: str


class Places:
    """Counts each tenant's workers of a backend, and keeps the waiting units.

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
