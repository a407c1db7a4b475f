"""Which promises are beyond their tenant's fair share under overload.

Promises are ordered by their deadlines, however much their tenant has had: a tenant that floods the queue
with promises would take from the others in proportion. Under overload some promises must be given up; the
first are those beyond a tenant's fair share: those that an engine for this tenant alone, as fast as its
share, could not begin before they are due. While all can be kept, this changes nothing; a single tenant has
all. Work is counted as in VTC: a prompt token is 1, an answer's 2.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from headway.policy.plan.baselines.vtc import ANSWER_WEIGHT, PROMPT_WEIGHT

_ACTIVE = 30.0  # seconds for which a tenant that asks nothing counts
_WINDOW, _LEAST = 5.0, 1.0  # seconds of service that tell the rate, and from which it is told


@dataclass(slots=True)
class _TenantPart:
    """A tenant: its latest arrival, and the work that an engine of its own would have left then."""

    seen: float = 0.0
    left: float = 0.0


class TenantParts:
    """Knows the work served lately, and what of it each tenant has asked for with promises."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _TenantPart] = OrderedDict()  # by their latest arrival
        self._prompts: dict[str, int] = {}  # by id, of requests that have not ended
        self._served: deque[tuple[float, float]] = deque()  # (instant, work) of the last `_WINDOW`
        self._sum = 0.0

    def beyond(self, id: str, tenant: str, prompt: int, answer: float, due: float, now: float) -> bool:
        """Count a request that has come; tell whether it is beyond its tenant's fair share.

        prompt, answer: tokens, of the answer as expected. due: instant.
        """
        self._prompts[id] = prompt
        mine = self._tenants.setdefault(tenant, _TenantPart(now))
        self._tenants.move_to_end(tenant)
        before, mine.seen = mine.seen, now
        while next(iter(self._tenants.values())).seen < now - _ACTIVE:
            self._tenants.popitem(last=False)
        part = self._rate(now) / len(self._tenants)
        done = part * (now - before) if now > before else 0.0
        mine.left = max(mine.left - done, 0.0)
        if len(self._tenants) > 1 and mine.left > part * (due - now):
            return True
        mine.left += PROMPT_WEIGHT * prompt + ANSWER_WEIGHT * answer
        return False

    def ended(self, id: str, answer: int | None, now: float) -> None:
        """Take note of an end; answer: tokens, None = the request failed."""
        prompt = self._prompts.pop(id, None)
        if prompt is not None and answer is not None:
            work = PROMPT_WEIGHT * prompt + ANSWER_WEIGHT * answer
            self._served.append((now, work))
            self._sum += work

    def _rate(self, now: float) -> float:
        """Return the work served per second lately; inf when too little is known."""
        while self._served and self._served[0][0] < now - _WINDOW:
            self._sum -= self._served.popleft()[1]
        seconds = now - self._served[0][0] if self._served else 0.0
        return self._sum / seconds if seconds >= _LEAST else math.inf
