"""Which promises are beyond their tenant's part of an overload.

A promise goes by its deadline, whatever its tenant has had: a tenant that floods the queue with promises
would take from the others in proportion. Under overload some promises must be given up; these shall be those
that are beyond a tenant's part. Tenants' service is counted as in `tenant_turns.py`. A request is beyond when
its tenant, with an equal part of what was served lately, could not get to it before it is due. As long as all
can be kept that changes nothing, and a tenant alone has all.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from headway.plan.baselines.vtc import ANSWER_WEIGHT, PROMPT_WEIGHT
from headway.plan.tenant_turns import TenantTurns

_WINDOW = 30.0  # seconds of service that tell the rate, and for which a tenant that asks nothing counts


class TenantParts:
    """Counts the service of tenants whose requests have promises. Unit: VTC's tokens."""

    def __init__(self) -> None:
        self._turns = TenantTurns()
        self._prompts: dict[str, int] = {}  # by id, of requests that have not ended
        self._seen: OrderedDict[str, float] = OrderedDict()  # tenant -> its latest arrival, by that
        self._served: deque[tuple[float, float]] = deque()  # (instant, tokens) of the last `_WINDOW`
        self._sum = 0.0

    def beyond(self, id: str, tenant: str, prompt: int, answer: float, due: float, now: float) -> bool:
        """Count a request that has come; tell whether it is beyond its tenant's part.

        prompt, answer: tokens, of the answer as expected. due: instant.
        """
        at = self._turns.take(id, tenant, prompt, answer)
        self._prompts[id] = prompt
        self._seen[tenant] = now
        self._seen.move_to_end(tenant)
        while next(iter(self._seen.values())) < now - _WINDOW:
            self._seen.popitem(last=False)
        rate = self._rate(now) / len(self._seen)
        return len(self._seen) > 1 and (at - self._turns.now) > rate * (due - now)

    def began(self, id: str) -> None:
        """Take note of a first token."""
        self._turns.began(id)

    def ended(self, id: str, answer: int | None, now: float) -> None:
        """Take note of an end; answer: tokens, None = the request failed."""
        prompt = self._prompts.pop(id, None)
        if prompt is None:
            return
        self._turns.ended(id, answer)
        if answer is not None:
            tokens = PROMPT_WEIGHT * prompt + ANSWER_WEIGHT * answer
            self._served.append((now, tokens))
            self._sum += tokens

    def _rate(self, now: float) -> float:
        """Return the tokens served per second lately; inf when nothing is known."""
        while self._served and self._served[0][0] < now - _WINDOW:
            self._sum -= self._served.popleft()[1]
        return self._sum / _WINDOW if self._served else math.inf
