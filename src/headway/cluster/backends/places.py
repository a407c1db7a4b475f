"""Whose unit gets the next worker of a backend, and whose may wait for one.

Each tenant may have a share of what the others leave, as in the queue (`policy/core/shares.py`), so that a
worker is left for the tenant that comes next. Of those that wait, the tenant with the fewest goes first, of
equals the one whose last turn is longest ago.
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
    """Counts the workers of a backend that each tenant has, and keeps the units that wait.

    most: workers at a time. waiting: units that may wait. share: of either, for one tenant; 1 = no limit.
    """

    def __init__(self, name: str, most: int, waiting: int, share: float) -> None:
        self._name, self._most, self._limit, self._share = name, most, waiting, share
        self._waiting: dict[Ticket, None] = {}  # in the order of their arrival
        self._taken = Counter[str]()  # workers by tenant
        self._turns, self._last = count(1), Counter[str]()  # number of the last turn of each tenant

    def add(self, tenant: str, *, possible: bool) -> Ticket:
        """Add a unit. RequestError (429) when it would have to wait and may not.

        possible: a worker is free.
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
        """Return the unit that gets the next worker, None while all that wait have their share."""
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
            what = f"{waiting[tenant]} units of yours wait for the backend {self._name}, as many as may now"
            raise _busy(f"{what} (server.tenant_share).", "tenant_queue_full")

    def _leaves_room(self, counts: Counter[str], tenant: str, limit: int) -> bool:
        """Tell whether a tenant may have one more of `limit`."""
        mine = counts[tenant]
        return self._share == 1.0 or mine < self._share * (limit - (counts.total() - mine))


def _busy(what: str, code: str) -> RequestError:
    return RequestError(what, "Try again later.", status=429, code=code, kind="rate_limit_error")
