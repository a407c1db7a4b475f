"""Requests to be refused once they cannot be on time: what each needs at least, and when to look at it again.

The controller's account; it decides nothing. A request costs O(log n) here, and one that is not dropped
nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.events import Learned
from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.core.feasibility import last_start, least_answer, next_token_seconds, pace_at
from headway.types import Floats, Forecast, Request, Shortfall


@dataclass(slots=True)
class Checks:
    """Requests by the instant of their next check; O(log n) for each."""

    _heap: list[tuple[float, str]] = field(default_factory=list, init=False)  # with entries that no longer hold
    _checks: dict[str, float] = field(default_factory=dict, init=False)  # request -> the entry that holds

    def __contains__(self, id: str) -> bool:
        return id in self._checks

    @property
    def next_check(self) -> float:
        """The first instant at which a request is to be checked, inf = none."""
        heap = self._heap
        while heap and self._checks.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def watch(self, id: str, last: float) -> None:
        """Look at a request right after the instant `last`, and not before; inf = never."""
        if math.isinf(last):
            return
        check = math.nextafter(last, math.inf)  # at `last` itself it can still start
        self._checks[id] = check
        heapq.heappush(self._heap, (check, id))
        if len(self._heap) > 2 * len(self._checks) + 64:  # most entries no longer hold
            self._heap = [(check, id) for id, check in self._checks.items()]
            heapq.heapify(self._heap)

    def discard(self, id: str) -> None:
        """Forget a request, because it has a token or its end; unknown ids are ignored."""
        self._checks.pop(id, None)

    def due(self, now: float) -> list[str]:
        """Return the requests to look at by now, earliest first, and forget them."""
        found = []
        while self.next_check <= now:
            _, id = heapq.heappop(self._heap)
            del self._checks[id]
            found.append(id)
        return found


_TRIAL = 60.0  # seconds from one trial of a model to the next


class Needs(NamedTuple):
    """Seconds that a request still needs, at least, on an engine that has nothing else to do.

    prompt: until its first token. answer: for the tokens after it.
    """

    prompt: float = 0.0
    answer: float = 0.0

    def last_start(self, request: Request) -> float:
        """Return the last instant at which it can start and be on time."""
        ttft, e2e = request.slo.ttft or math.inf, request.slo.e2e or math.inf
        return last_start(request.arrival, ttft, e2e, self.prompt, self.answer)

    def shortfall(self, request: Request, now: float) -> Shortfall:
        """Return what is not kept if it starts now; the last start has passed."""
        ttft, e2e, first = request.slo.ttft, request.slo.e2e, now - request.arrival + self.prompt
        if ttft is not None and (e2e is None or first > ttft):
            return Shortfall("ttft", first, ttft)
        assert e2e is not None, f"{request.id} was promised nothing that could be late"
        return Shortfall("e2e", first + self.answer, e2e)


@dataclass(slots=True)
class Drops(Checks):
    """The requests of classes that drop which have no token yet, by the instant to look at them again.

    doubt: `PromisesConfig.lost_below_stds`.
    """

    doubt: float = PromisesConfig().lost.lost_below_stds
    _learned: dict[str, Learned] = field(default_factory=dict)  # by instance
    _trials: dict[str, tuple[float, str]] = field(default_factory=dict)  # model -> the last one's instant, id

    # ---- what a request needs

    def learn(self, learned: Learned) -> None:
        """Take note of what an instance has learned."""
        self._learned[learned.instance] = learned

    def forget(self, instance: str) -> None:
        """Forget what an instance had learned, because another engine is in its place."""
        self._learned.pop(instance, None)

    def needs(self, request: Request, forecast: Forecast, computed: Mapping[str, int], *, exact: bool = False) -> Needs:
        """Return what a request needs on the best of the instances that may serve it.

        Nothing as long as one of them has learned nothing (its next token may come at once for all that is
        known), and of a trial: then only a deadline that has passed counts as missed.

        computed: instance -> tokens of the prompt that it is known to have. exact: these only; otherwise at least
            the longest prefix that it found for other requests lately.
        """
        learned = {name: self._learned.get(name) for name in computed}
        if request.id == self._trials.get(request.model, (0.0, ""))[1] or not learned or None in learned.values():
            return Needs()
        each = (
            self._needs_on(one.theta, request, forecast, computed[name] if exact else max(computed[name], one.cached))
            for name, one in learned.items()
            if one is not None
        )
        return max(each, key=lambda needs: needs.last_start(request))

    def _needs_on(self, theta: Floats, request: Request, forecast: Forecast, computed: int) -> Needs:
        pace = pace_at(theta, 0, 0.0)
        prompt = next_token_seconds(theta, max(request.context - computed, 1), pace.base)
        return Needs(prompt, least_answer(self.doubt, forecast.spread, forecast.mean * pace.token))

    def try_anyway(self, request: Request, now: float) -> bool:
        """Tell whether a request that would be refused is let in as a trial: one of a model in a minute.

        What is refused teaches nothing, so a wrong latency would never be corrected. A trial is refused only
        when its deadline itself passes.
        """
        last, _ = self._trials.setdefault(request.model, (now, ""))
        if now - last < _TRIAL:
            return False
        self._trials[request.model] = now, request.id
        return True
