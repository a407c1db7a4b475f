"""Which resources of upcoming units to warm, and when (Hermes 3.4)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.policy.apps.demand import Demand, Draw
from headway.policy.apps.graph import LLM
from headway.policy.apps.run import Run
from headway.stages import Prewarm, Resource
from headway.types import Floats

_FIRST_GUESS = 1.0  # seconds that warming takes until one was measured
_NEWEST = 0.3  # weight of the newest measurement
_SLOWLY = 0.05  # of the pace's, which differs from visit to visit


@dataclass(frozen=True, slots=True)
class PrewarmOptions:
    """What is prewarmed.

    effectiveness: K, the probability that warming is to be of use, by tier of the run's requests; `default`
        for the others. Above 1 = never.
    kinds: of resources.
    """

    effectiveness: Mapping[str, float] = field(default_factory=dict)
    default: float = 0.5
    kinds: frozenset[str] = frozenset({"prefix", "adapter", "backend"})


@dataclass(frozen=True, slots=True)
class _Due:
    run: Run
    visit: int  # the number of the visit during which it is to be warmed
    resource: Resource
    until: float


class Prewarming:
    """The warm-ups that are planned, by their instant.

    seconds: that warming takes, by resource, as measured.
    pace: seconds that LLM visits take per second of their path, which is that of a full batch, as measured.
    """

    def __init__(self, options: PrewarmOptions) -> None:
        self.options = options
        self.seconds: dict[Resource, float] = {}
        self.pace = 1.0
        self._due: list[tuple[float, int, _Due]] = []
        self._number = itertools.count()

    @property
    def wake_at(self) -> float:
        """The instant of the next warm-up, inf = none is planned."""
        return self._due[0][0] if self._due else math.inf

    def learn(self, resource: Resource, seconds: float) -> None:
        """Take note of how long warming took."""
        before = self.seconds.get(resource, seconds)
        self.seconds[resource] = before + _NEWEST * (seconds - before)

    def learn_pace(self, seconds: float, path: float) -> None:
        """Take note of the seconds from a visit's first token to its end, and of those that its path had."""
        if path > 0:
            self.pace += _SLOWLY * (seconds / path - self.pace)

    def begin(self, run: Run, draw: Draw, demand: Demand, now: float) -> None:
        """Plan for a run whose latest visit begins to be served now; what comes after it is in `draw`."""
        k = self.options.effectiveness.get(run.tier, self.options.default)
        ends = draw.visit * (self.pace if run.visits[-1].backend == LLM else 1.0)
        for unit, share in _shares(draw, demand):
            for resource in self._needed(run, demand, unit):
                after = trigger(share, ends, self.seconds.get(resource, _FIRST_GUESS), k)
                if after is not None:
                    until = now + 2 * float(ends.max())
                    due = _Due(run, run.steps, resource, until)
                    heapq.heappush(self._due, (now + after, next(self._number), due))

    def due(self, now: float) -> list[Prewarm]:
        """Return what is to be warmed by now, without what came too late: the run has gone on."""
        out = []
        while self._due and self._due[0][0] <= now:
            due = heapq.heappop(self._due)[2]
            if due.run.steps == due.visit and not due.run.ended:
                tenant, _, run = due.run.key
                out.append(Prewarm(tenant, due.resource, max(due.until, now), run))
        return out

    def _needed(self, run: Run, demand: Demand, unit: str) -> Sequence[Resource]:
        backend = demand.backends[unit]
        if backend != LLM:
            needed = [Resource("backend", backend)]
        else:
            needed = [Resource("prefix", f"{run.key[1]}/{unit}")]
            if run.adapter is not None:
                needed.append(Resource("adapter", run.adapter))
        return [resource for resource in needed if resource.kind in self.options.kinds]


def _shares(draw: Draw, demand: Demand) -> list[tuple[str, float]]:
    """Return the units that may come next, and the probability of each."""
    after, counts = np.unique(draw.after, return_counts=True)
    total: Floats = counts / draw.after.size
    return [(demand.units[int(i)], float(share)) for i, share in zip(after, total, strict=True) if i >= 0]


def trigger(share: float, ends: Floats, warm_s: float, k: float) -> float | None:
    """Return after how many seconds from now warming must begin to be effective with probability `k`.

    share: probability p_s that the next unit uses the backend.
    ends: equally likely seconds from now until the current unit ends.
    warm_s: seconds t_p that warming takes.
    k: the expected prewarming effectiveness K, 0 < K <= 1.

    Equation 3: p_e = p_s P(t_c > t_s + t_p), solved for p_e = K. None = never, as p_s < K. An instant that
    has passed already is 0: it is too late for that effectiveness, and warming at once is the most there is.
    """
    if share < k or not ends.size:
        return None
    ordered = np.sort(ends)
    # The latest start that leaves at least K / p_s of the ends after it.
    late = min(math.floor((1 - k / share) * ordered.size + 1e-9), ordered.size - 1)
    return max(float(ordered[late]) - warm_s, 0.0)
