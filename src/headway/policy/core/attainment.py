"""The account of classes that promise a share of their requests (`Slo.share`).

Of the last 1,000 requests of such a class that ended, (1 - share) x 1,000 may miss their promise. While some of these
misses are left, requests that come are expendable: planner and packer give them up first where not all promises can be
kept. Each takes a miss until it ends, so that of any 1,000 requests no more are given up by choice. The fewer misses
are left, the larger a request must be among those of its class: to give it up makes room for more of the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

from headway.policy.core.drops import Checks
from headway.types import Request

WINDOW = 1000  # requests that ended
_EASE = 10.0  # with a share x of the window left as misses, the largest 10 x of a class's requests are expendable


@dataclass(slots=True)
class Account:
    """A class. Requests before its first one count as kept.

    share: promised. missed: of the last `WINDOW` requests that ended.
    expendable: ids of those in flight that are. late: ids of others in flight whose promise has passed.
    """

    share: float
    missed: int = 0
    expendable: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    _ended: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))  # whether they missed
    _sizes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # of the last that came
    _sorted: list[float] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """Share of the last requests that ended on time, 1 before the first."""
        return 1.0 - self.missed / max(len(self._ended), 1)

    @property
    def left(self) -> int:
        """Misses that are left, without those that requests in flight may still become; negative = overspent."""
        allowed = int((1.0 - self.share) * WINDOW + 1e-9)
        return allowed - self.missed - len(self.expendable) - len(self.late)

    def spares(self, size: float) -> bool:
        """Take note of a request that has come; tell whether it may be given up. size: tokens."""
        if len(self._sizes) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._sizes[0])]
        self._sizes.append(size)
        insort(self._sorted, size)
        larger = 1.0 - bisect_right(self._sorted, size) / len(self._sorted)
        return self.left > 0 and larger <= _EASE * self.left / WINDOW

    def ended(self, *, missed: bool) -> None:
        """Take note of an end."""
        self.missed += missed - (self._ended[0] if len(self._ended) == WINDOW else 0)
        self._ended.append(missed)


@dataclass(slots=True)
class Attainment:
    """The accounts by class."""

    accounts: dict[str, Account] = field(default_factory=dict)
    _of: dict[str, Account] = field(default_factory=dict)  # by request in flight
    _checks: Checks = field(default_factory=Checks)  # when a promise passes, of those that are not expendable

    def came(self, request: Request, size: float, now: float) -> bool:
        """Take note of a request that was accepted; tell whether it may be given up. size: tokens."""
        slo = request.slo
        if slo.share is None:
            self.accounts.pop(request.tier, None)
        if slo.share is None or slo.objective == "best_effort":
            return False
        account = self._account(request.tier, slo.share)
        self._look(now)
        self._of[request.id] = account
        if account.spares(size):
            account.expendable.add(request.id)
            return True
        self._checks.watch(request.id, slo.due(request.arrival))
        return False

    def started(self, request: Request | None, now: float) -> None:
        """Take note of a first token; None = its request has ended."""
        self._look(now)
        if request is not None and request.id in self._checks:
            self._checks.discard(request.id)
            self._checks.watch(request.id, request.arrival + (request.slo.e2e or float("inf")))

    def ended(self, id: str, kept: bool | None) -> None:
        """Take note of an end; kept: None = it counts in no share, such as that of a client that left."""
        account = self._of.pop(id, None)
        if account is None:
            return
        self._checks.discard(id)
        account.expendable.discard(id)
        account.late.discard(id)
        if kept is not None:
            account.ended(missed=not kept)

    def refused(self, request: Request) -> None:
        """Take note of a request that was refused before it was accepted, as it could not be on time."""
        if request.slo.share is not None and request.slo.objective != "best_effort":
            self._account(request.tier, request.slo.share).ended(missed=True)

    def _account(self, tier: str, share: float) -> Account:
        account = self.accounts.setdefault(tier, Account(share))
        account.share = share
        return account

    def _look(self, now: float) -> None:
        for id in self._checks.due(now):
            self._of[id].late.add(id)
