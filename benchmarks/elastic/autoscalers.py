"""The other autoscalers of `headway bench elastic`, from their public descriptions, with one setting to tune each.

`concurrency-target` is Kubernetes' HorizontalPodAutoscaler on requests in flight per engine, as KEDA and llm-d's guide
set it up: a look every 15 s, a tolerance of 10 %, and down only to the most wanted over the stabilization window.
`ttft-target` is the throughput-based scaling of Dynamo's SLA planner (docs.nvidia.com/dynamo, Planner Design), whose
prefill and decode workers are one here: every interval, the rate that the next one is expected to have, by the
capacity that a profile gives for the target of the mean first token (and the promise of the others), corrected by how
observed first tokens compare with the profile's. Its ARIMA forecast is a line through the last four intervals here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from benchmarks.elastic.grounds import fleet
from headway.policy.recipes.registry import find
from headway.simulate.loop import Loop
from headway.simulate.run import Simulation
from headway.simulate.workload.arrivals import poisson
from headway.simulate.workload.traffic import Workload, single
from headway.types import Slo

_LOOK_S, _TOLERANCE = 15.0, 0.1  # of a HorizontalPodAutoscaler
_PROFILED_S = 240.0


@dataclass(slots=True)
class ConcurrencyTarget:
    """target: requests in flight per engine. window: seconds of stabilization downward."""

    target: float
    window: float = 300.0
    _looked: float = -math.inf
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def __call__(self, loop: Loop, model: str, now: float, have: int) -> int:
        """Return the engines wanted (`elastic.Decide`)."""
        if now - self._looked < _LOOK_S:
            return have
        self._looked = now
        ratio = len(loop.controller.requests) / (self.target * max(have, 1))
        wanted = have if abs(ratio - 1) <= _TOLERANCE else math.ceil(ratio * max(have, 1))
        self._wanted.append((now, max(wanted, 1)))
        while self._wanted[0][0] <= now - self.window:
            self._wanted.popleft()
        return max(wanted, min(have, max(count for _, count in self._wanted)), 1)


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine under constant rates of a ground's mean request. rates: per second. ttft, tpot: mean seconds."""

    rates: tuple[float, ...]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    tokens: float

    def capacity(self, ttft: float, tpot: float) -> float:
        """Return the highest rate with mean times within these."""
        good = [rate for rate, t, p in zip(self.rates, self.ttft, self.tpot, strict=True) if t <= ttft and p <= tpot]
        return max(good, default=self.rates[0])

    def expected(self, rate: float) -> float:
        """Return the mean seconds to the first token at a rate."""
        return float(np.interp(rate, self.rates, self.ttft))


def profile(work: Workload, longest: int, slo: Slo) -> Profile:
    """Measure one simulated engine of stock vLLM at rising rates of the workload's mean request."""
    prompt, output = round(work.prompt.mean()), round(work.output.mean())
    rates, ttft, tpot = 0.1 * 1.15 ** np.arange(28), list[float](), list[float]()
    for rate in rates.tolist():
        at = poisson(rate, _PROFILED_S, np.random.default_rng(0))
        one = single(at, np.full(at.size, prompt), np.full(at.size, output), slo=slo)
        found = Simulation(find("vllm"), fleet(1, longest, 0.0), one).run()
        ttft.append(float((found.first - one.arrival).mean()))
        tpot.append(float(((found.end - found.first) / max(output - 1, 1)).mean()))
    return Profile(tuple(rates.tolist()), tuple(ttft), tuple(tpot), float(prompt + output))


@dataclass(slots=True)
class TtftTarget:
    """target: mean seconds to the first token. interval: seconds between two adjustments."""

    profile: Profile
    target: float
    tpot: float
    interval: float = 180.0
    _looked: float = 0.0
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=4))

    def __call__(self, loop: Loop, model: str, now: float, have: int) -> int:
        """Return the engines wanted (`elastic.Decide`)."""
        if now - self._looked < self.interval:
            return have
        work, began, self._looked = loop.workload, self._looked, now
        mine = (work.arrival >= began) & (work.arrival < now)
        if not mine.any():
            return 1
        tokens = float((work.prompt[mine] + work.output[mine]).mean())
        self._rates.append(float(mine.sum()) / (now - began) * tokens / self.profile.tokens)
        seen = mine & np.isfinite(loop.outcome.first)
        expected = self.profile.expected(self._rates[-1] / max(have, 1))
        correction = float((loop.outcome.first - work.arrival)[seen].mean()) / expected if seen.any() else 1.0
        # As for prefill workers there: queues may not raise the number, shorter times may lower it.
        needed = self._next() * min(1.0, correction) / self.profile.capacity(self.target, self.tpot)
        return max(math.ceil(needed), 1)

    def _next(self) -> float:
        """Return the rate of the next interval, by a line through the last ones."""
        if len(self._rates) < 3:
            return self._rates[-1]
        slope, level = np.polyfit(np.arange(len(self._rates)), np.array(self._rates), 1)
        return max(float(level + slope * len(self._rates)), 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Engines by window of the run: as many as any window between `behind` seconds ago and `ahead` from now needs."""

    engines: tuple[int, ...]
    window: float
    ahead: float
    behind: float = 0.0

    def __call__(self, loop: Loop, model: str, now: float, have: int) -> int:
        """Return the engines wanted (`elastic.Decide`)."""
        last = len(self.engines) - 1
        first, final = max(now - self.behind, 0.0), now + self.ahead
        return max(self.engines[min(int(first / self.window), last) : min(int(final / self.window), last) + 1])


def best_schedule(kept: np.ndarray, window: float, start_s: float, price: float) -> tuple[int, ...]:
    """Return the engines per window that keep the most promises at a price of engine-seconds in promises.

    kept: (engines, windows), the promises that so many engines, always there, kept of a window's. Dynamic programming.
    """
    counts = np.arange(1, kept.shape[0] + 1)
    rise = np.maximum(counts[None, :] - counts[:, None], 0) * start_s  # from row to column
    value, choice = kept[:, 0] - price * window * counts, list[np.ndarray]()
    for column in kept.T[1:]:
        through = value[:, None] - price * rise
        choice.append(through.argmax(0))
        value = through.max(0) + column - price * window * counts
    path = [int(value.argmax())]
    for step in reversed(choice):
        path.append(int(step[path[-1]]))
    return tuple(int(counts[i]) for i in reversed(path))
