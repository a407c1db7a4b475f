"""What one tenant may take of the queue, so that none can fill it and leave nothing for the others.

The rule of shared-memory switches (Choudhury and Hahne 1998, dynamic thresholds): the limit of one follows
from what all others leave free. A tenant may have `tenant_share` of the places that other tenants leave; of
this part one of its classes may have `class_share` of what its other classes leave. With shares below 1 a
place stays free for whoever has nothing waiting, until as many tenants flood as there are places. Nothing is
reserved for tenants that are silent: with a share of 1/2 one tenant takes up to 1/2, two up to 1/3 each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from headway.types import QueueLimit

Group = tuple[str, str]  # tenant, class


class Waiting(NamedTuple):
    """The queue as a request finds it.

    limit: places that may wait. inside: those that engines work on. storing: those of requests that were
    admitted and have not arrived yet. most: `max_queued` of the request's key, None = there is none.
    """

    limit: int
    inside: int
    storing: Mapping[Group, int]
    most: int | None = None


@dataclass(slots=True)
class QueueShares:
    """Counts the accepted requests of each tenant and class by places, and refuses those beyond a share.

    A request is within a share of which anything is left, however many places it takes itself.

    tenant_share, class_share: above 0, at most 1 = no limit.
    """

    tenant_share: float = 1.0
    class_share: float = 1.0
    _held: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _all: int = 0

    def came(self, tenant: str, tier: str, places: int = 1) -> None:
        """Count a request that was accepted."""
        self._held[tenant][tier] += places
        self._all += places

    def left(self, tenant: str, tier: str, places: int = 1) -> None:
        """Forget a request that has ended."""
        self._all -= places
        held = self._held[tenant]
        held[tier] -= places
        if not held[tier]:
            del held[tier]
        if not held:
            del self._held[tenant]

    def exceeded(self, tenant: str, tier: str | None, queue: Waiting) -> QueueLimit | None:
        """Return the limit that one more request would exceed, None = there is room for it.

        tier: None = it is not known yet, so that only the tenant's limits count.
        """
        return None if self._surely_fits(tenant, tier, queue) else self._exceeded(tenant, tier, queue)

    def _exceeded(self, tenant: str, tier: str | None, queue: Waiting) -> QueueLimit | None:
        held = {name: Counter(tiers) for name, tiers in self._held.items()}
        for (name, of), count in queue.storing.items():
            held.setdefault(name, Counter())[of] += count
        counts = {name: tiers.total() for name, tiers in held.items()}
        runs = fair_parts(counts, queue.inside)
        waits = {name: counts[name] - runs[name] for name in counts}
        mine, total = waits.get(tenant, 0), sum(waits.values())
        if queue.most is not None and mine >= queue.most:
            return QueueLimit("keys.max_queued", mine, queue.most)
        part = self.tenant_share * (queue.limit - (total - mine))
        if self.tenant_share < 1.0 and mine >= part:
            return QueueLimit("server.tenant_share", mine, ceil(part))
        if tier is None or self.class_share == 1.0:
            return None
        tiers = held.get(tenant, Counter())
        same = tiers[tier] - fair_parts(tiers, runs.get(tenant, 0)).get(tier, 0)
        piece = self.class_share * (part - (mine - same))
        return QueueLimit("server.class_share", same, ceil(piece), tier) if same >= piece else None

    def _surely_fits(self, tenant: str, tier: str | None, queue: Waiting) -> bool:
        """Tell, without a look at the other tenants, whether all limits hold even if all of its own wait.

        What is far from every limit, as nearly all requests are, so costs the same however many tenants are.
        """
        storing = sum(count for (name, _), count in queue.storing.items() if name == tenant)
        own = self._held[tenant].total() + storing if tenant in self._held else storing
        total = max(self._all + sum(queue.storing.values()) - queue.inside, 0)
        mine, share = min(own, total), self.tenant_share
        room = share * (queue.limit - total) - (1.0 - share) * mine
        below = queue.most is None or own < queue.most
        fits = tier is None or (1.0 - self.class_share) * mine < self.class_share * room
        return below and room > 0 and fits


def fair_parts(counts: Mapping[str, int], places: int) -> dict[str, int]:
    """Return how many requests of each count as those inside engines: max-min fair, whole ones.

    All places are given out as long as there are requests for them, of equals to the first names first.
    """
    parts, left = dict[str, int](), max(places, 0)
    order = sorted(counts, key=lambda name: (counts[name], name))
    for i, name in enumerate(order):
        parts[name] = min(counts[name], ceil(left / (len(order) - i)))
        left -= parts[name]
    return parts
