"""SHEPHERD (NSDI '23) as QLM 8 uses it: models assigned to instances, execution times taken to be known.

SHEPHERD plans for models with a fixed execution time: periodically an integer program gives each instance a
model so that the mean demand is served; online each instance forms batches by deadline and may preempt a
running batch for a much larger one. Assumptions, because QLM does not say more:

- the integer program is solved exactly, by enumeration over instances that are alike (`assign`);
- a batch takes as long as `max_running` mean requests that start and end together, at the instance's pace;
- the next batch goes in when the last one has ended (no continuous batching), or at `flex` times its size
  (SHEPHERD 4.3's preemption, lambda = 3.03; the engine's packer decides by deadline what then runs). With
  `flex` 0 the engine is refilled all the time, which is kinder than what QLM says of it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.errors import ConfigError
from headway.events import Arrived, Event
from headway.policy.core.cluster import Cluster
from headway.policy.plan.dispatch import inside, sends, virtual_queue
from headway.ports import Planner
from headway.types import Batch, Instance, Ints, Plan

_MOST = 200_000  # assignments that are still enumerated


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of one model: requests per second, and the mean request's tokens."""

    rate: float
    prompt: float
    answer: float


# Per instance: requests per second that it could serve of each model that it has or can load.
Options = Mapping[str, float]


def assign(now: Mapping[str, str], options: Mapping[str, Options], rates: Mapping[str, float]) -> dict[str, str]:
    """Return the model of each instance that serves the most: first models, then requests per second.

    now: what each serves; of equally good assignments the one with the fewest swaps is taken. rates: requests
    per second asked of each model. Exact: every way to split each kind of like instances over its models is
    tried. Raises ConfigError when there are over 200,000 ways.
    """
    kinds: dict[tuple[tuple[str, float], ...], list[str]] = defaultdict(list)
    for name in now:
        kinds[tuple(sorted(options[name].items()))].append(name)
    ways = math.prod(math.comb(len(names) + len(kind) - 1, len(kind) - 1) for kind, names in kinds.items())
    if ways > _MOST:
        raise ConfigError(
            f"shepherd cannot try {ways} assignments of models to instances.",
            "Use a smaller or more uniform fleet, or let each instance load fewer models.",
        )
    splits = [list(_splits(len(names), len(kind))) for kind, names in kinds.items()]
    best = max(itertools.product(*splits), key=lambda split: _score(split, kinds, now, rates))
    out: dict[str, str] = {}
    for (kind, names), counts in zip(kinds.items(), best, strict=True):
        out |= _settle(names, dict(zip((model for model, _ in kind), counts, strict=True)), now)
    return {name: out[name] for name in now}


@dataclass(slots=True)
class Shepherd(Planner):
    """period: seconds between two assignments, and over which demand is averaged. flex: see above."""

    swaps = True
    period: float = 30.0
    flex: float = 3.03
    _asked: dict[str, deque[tuple[float, int, float]]] = field(default_factory=lambda: defaultdict(deque))
    _since: float | None = None
    _target: dict[str, str] = field(default_factory=dict)

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Count what is asked of each model."""
        if isinstance(event, Arrived):
            row = cluster.backlog.row_of[event.request.id]
            prompt, tokens = int(cluster.backlog.prompt[row]), float(cluster.backlog.tokens[row])
            self._asked[event.request.model].append((now, prompt, tokens - prompt))

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the next batch of each instance that is free, and the swaps when it is time for them."""
        self._since = now if self._since is None else self._since
        if now - self._since >= self.period:
            self._since = now
            self._target = self._assignment(cluster, now)
        swap = {
            name: model
            for name, model in self._target.items()
            if name in cluster.instances and cluster.instances[name].model != model
        }
        ranked = _by_deadline(cluster)
        lines = {name: self._batch(cluster, name, ranked) for name in cluster.instances if name not in swap}
        return Plan(sends(lines, cluster, now), swap=swap)

    def _batch(self, cluster: Cluster, name: str, ranked: Ints) -> Ints:
        """Return what the instance runs, and a whole new batch if none runs or it is worth breaking off."""
        here = virtual_queue(cluster, name, ranked, later=True)
        running = inside(cluster, name, here)
        queued = here[~running][: cluster.instances[name].max_running]
        if queued.size <= self.flex * np.count_nonzero(running):
            return here[running]
        return np.concatenate([queued, here[running]])

    def _assignment(self, cluster: Cluster, now: float) -> dict[str, str]:
        demands = self._demands(cluster, now)
        loading = {name: (instance, model) for name, (instance, model) in cluster.loading.items()}
        serving = {name: instance.model for name, instance in cluster.instances.items()}
        options = {name: _options(instance, demands) for name, instance in cluster.instances.items()}
        for name, (_, model) in loading.items():  # what is being loaded stays as decided
            serving[name], options[name] = model, {model: 1.0}
        return assign(serving, options, {model: demand.rate for model, demand in demands.items()})

    def _demands(self, cluster: Cluster, now: float) -> dict[str, Demand]:
        """Return the mean demand of the last period; what is still queued asks as if it came in it."""
        backlog, out = cluster.backlog, {}
        queued = backlog.rows()
        queued = queued[~backlog.sent[queued]]
        waiting = Counter(backlog.model[queued].tolist())
        for model, asked in self._asked.items():
            while len(asked) > 1 and asked[0][0] < now - self.period:
                asked.popleft()
            recent = sum(when >= now - self.period for when, _, _ in asked)
            rate = max(recent, waiting[cluster.code(model)]) / self.period
            prompts, answers = zip(*((prompt, answer) for _, prompt, answer in asked), strict=True)
            out[model] = Demand(rate, sum(prompts) / len(asked), sum(answers) / len(asked))
        return out


def _by_deadline(cluster: Cluster) -> Ints:
    backlog = cluster.backlog
    rows = backlog.rows()
    keys = (backlog.serial[rows], backlog.arrival[rows], backlog.due[rows])
    return np.asarray(rows[np.lexsort(keys)], np.int64)


def _options(instance: Instance, demands: Mapping[str, Demand]) -> dict[str, float]:
    """Return the requests per second of each model that an instance has or can load.

    An instance whose pace is not known counts as serving one batch per second of anything.
    """
    latencies = {instance.model: instance.latency} | {other.model: other.latency for other in instance.loadable}
    size, out = instance.max_running, {}
    for model, latency in latencies.items():
        demand = demands.get(model)
        if demand is None or latency is None:
            out[model] = float(size)
            continue
        prompt = latency(Batch(0, 0, int(size * demand.prompt), int(size * demand.prompt**2 / 2)))
        each = latency(Batch(size, int(size * (demand.prompt + demand.answer / 2)), 0))
        out[model] = size / (prompt + demand.answer * each)
    return out


def _splits(count: int, ways: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write count as an ordered sum of `ways` numbers of 0 or more."""
    if ways == 1:
        yield (count,)
        return
    for first in range(count, -1, -1):
        for rest in _splits(count - first, ways - 1):
            yield (first, *rest)


def _score(
    split: Sequence[tuple[int, ...]],
    kinds: Mapping[tuple[tuple[str, float], ...], list[str]],
    now: Mapping[str, str],
    rates: Mapping[str, float],
) -> tuple[int, float, int]:
    """Return (models with demand that are served, requests per second served, instances that stay)."""
    served: defaultdict[str, float] = defaultdict(float)
    stay = 0
    for (kind, names), counts in zip(kinds.items(), split, strict=True):
        have = Counter(now[name] for name in names)
        for (model, rate), count in zip(kind, counts, strict=True):
            served[model] += rate * count
            stay += min(have[model], count)
    asked = {model: rate for model, rate in rates.items() if rate > 0}
    covered = sum(served[model] > 0 for model in asked)
    return covered, round(sum(min(served[model], rate) for model, rate in asked.items()), 9), stay


def _settle(names: Sequence[str], counts: dict[str, int], now: Mapping[str, str]) -> dict[str, str]:
    """Return the model of each of several like instances: those that serve it already come first."""
    out: dict[str, str] = {}
    for name in names:
        if counts.get(now[name], 0) > 0:
            out[name] = now[name]
            counts[now[name]] -= 1
    rest = [model for model, count in counts.items() for _ in range(count)]
    return out | dict(zip((name for name in names if name not in out), rest, strict=True))
