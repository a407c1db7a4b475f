"""Equal service for all tenants with work waiting (Sheng et al., OSDI '24: VTC), as ranks that stay.

VTC (`policy/plan/baselines/vtc.py`) sorts what waits by its tenants' counters whenever it sends. Here
hundreds of requests wait inside engines with the rank that they were sent with, so each takes its tenant's
counter as its turn when it arrives, as start-time fair queueing does (Goyal et al., SIGCOMM '96). As in VTC a
prompt token counts 1 and an answer's 2, the expected length is corrected when the answer ends, and a tenant
that returns starts where service is now: it cannot save up turns while it is away.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.policy.plan.baselines.vtc import ANSWER_WEIGHT, PROMPT_WEIGHT


class _Turn(NamedTuple):
    tenant: str
    start: float
    prompt: int
    answer: float


class TenantTurns:
    """The counters of tenants, and the turns of the requests that have not ended. Unit: VTC's tokens."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}  # by tenant: the turn of its next request
        self._now = 0.0  # the latest turn that has begun
        self._turns: dict[str, _Turn] = {}

    def take(self, id: str, tenant: str, prompt: int, answer: float, shift: float = 0.0) -> float:
        """Return the turn of a request that has come, lower first.

        prompt, answer: tokens, of the answer as expected. shift: puts it behind (ahead, if negative, but not
        of what is served now); what it costs its tenant is the same.
        """
        start = max(self._next.get(tenant, 0.0), self._now)
        self._next[tenant] = start + PROMPT_WEIGHT * prompt + ANSWER_WEIGHT * answer
        self._turns[id] = _Turn(tenant, start, prompt, answer)
        return max(start + shift, self._now)

    def began(self, id: str) -> None:
        """Take note of a first token: service is at this turn now."""
        if id in self._turns:
            self._now = max(self._now, self._turns[id].start)

    def ended(self, id: str, answer: int | None) -> None:
        """Charge what was really served; answer: tokens, None = the request failed."""
        turn = self._turns.pop(id, None)
        if turn is not None and answer is not None:
            self._now = max(self._now, turn.start)
            self._next[turn.tenant] += ANSWER_WEIGHT * (answer - turn.answer)
