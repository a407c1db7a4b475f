"""The number of engines that one model needs, from moment to moment.

An engine that is started now serves from one start (`start_s` seconds) on. So the arrivals of the stretch after that
say whether another must start, and those until then, too, whether one may stop: a start costs its seconds, and
stopping pays only if the engine stays away for longer than that, which is until after the second of the two stretches.
For the same reason an engine that is not needed waits as long as a start takes before it stops.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from headway.config.tables import Scale
from headway.events import Arrived, Event, Finished, Learned
from headway.policy.core.cluster import Cluster
from headway.policy.scale.outlook import EngineSize, Traffic, kept
from headway.policy.scale.rates import DAY_S, Arrivals, Rates
from headway.types import Floats, Instance, Request

_KEPT = 512  # requests that are replayed
_LOCAL = 64  # requests among which gaps are compared
_STARTS = 8  # starts from which the next one's seconds are taken
_FINE = 1.1  # loads that are replayed: a factor between two of them
_ALL = 1 - 1e-9
_SHARE = 0.99  # of the promises of classes that do not say what share they promise


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that wait outside engines, and those inside.

    tokens, due: (n,), of the waiting: tokens of prompt and expected answer, and the instant, inf = no promise.
    inside: how many are in engines.
    """

    tokens: Floats
    due: Floats
    inside: int = 0


class Needs(NamedTuple):
    """The engines needed until a start has ended, and in as long a time after that."""

    soon: int
    later: int


@dataclass(slots=True)
class Scaler:
    """One model's arrivals, what its requests and its engines were like, and the number of engines that follows."""

    limits: Scale
    rates: Rates = field(default_factory=Rates)
    _last: float | None = None  # arrival
    _silences: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _ended: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=2 * _KEPT))
    _shares: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _KEPT))  # promised, of those
    _starts: deque[float] = field(default_factory=lambda: deque(maxlen=_STARTS))
    _idle: dict[int, float] = field(default_factory=dict)  # number of engines -> since when fewer are needed
    _curves: _Curves | None = None
    _new: int = 0  # requests ended since the curves were made

    @property
    def start_s(self) -> float:
        """Seconds that a start takes: the longest of the last few."""
        return max(self._starts, default=self.limits.start_s)

    @property
    def share(self) -> float:
        """Share of the promises to keep."""
        stated = self.limits.share
        return stated if stated is not None else sum(self._shares) / len(self._shares) if self._shares else _SHARE

    def came(self, now: float) -> None:
        """Take note of an arrival."""
        self.rates.arrived(now)
        if self._last is not None:
            self._silences.append(now - self._last)
        self._last = now

    def ended(self, request: Request, computed: int, output_tokens: int) -> None:
        """Take note of a request that was answered. computed: tokens of its prompt that no cache had."""
        slo = request.slo
        promises = (math.inf if limit is None else limit for limit in (slo.ttft, slo.per_token, slo.e2e))
        answer = max(request.per_answer(output_tokens), 1)
        if slo.objective != "best_effort":
            self._shares.append(slo.share or _SHARE)
        self._ended.append((request.arrival, float(max(computed, 1)), float(answer), *promises))
        self._new += 1

    def started(self, seconds: float) -> None:
        """Take note of the seconds that a start took."""
        self._starts.append(seconds)

    def expected(self) -> tuple[Arrivals, Arrivals]:
        """Return the arrivals until a start has ended, and in as long a time after that (`Rates.expect`)."""
        return self.rates.expect(0.0, self.start_s), self.rates.expect(self.start_s, self.start_s)

    def wanted(self, now: float, have: int, engine: EngineSize | None, queue: Queue) -> int:
        """Return the number of engines that should be up or starting.

        have: those that are. engine: what one is like; None = not known yet, so that nothing changes while
            requests come.
        """
        return self.conclude(self.ask(now, have, engine, queue)(), have, now)

    def ask(self, now: float, have: int, engine: EngineSize | None, queue: Queue) -> Callable[[], Needs]:
        """Return the computation that takes long, which another thread may do while the scaler takes note of events."""
        self.rates.advance(now)
        limits, start = self.limits, self.start_s
        soon, later = self.expected()
        quiet = not queue.tokens.size and not queue.inside and self._quiet(now)
        if not limits.min and quiet:
            return lambda: Needs(0, 0)
        # What is not known yet changes nothing, unless there is nothing to know, as nothing comes.
        bounded = min(max(0 if quiet else have, limits.min, 1), limits.max)
        if engine is None or not self._ended or not self._silences or not have:
            return lambda: Needs(bounded, bounded)
        if self._curves is None or 2 * self._new >= len(self._ended):
            self._curves, self._new = _Curves.of(self._silences, self._ended, engine), 0
        curves, waiting, share = self._curves, _rate(queue, now, start), self.share
        if not (soon.known and later.known):
            return lambda: Needs(bounded, curves.needed(later, waiting, have, limits.max, share))
        return lambda: Needs(*(curves.needed(one, waiting, have, limits.max, share) for one in (soon, later)))

    def conclude(self, needs: Needs, have: int, now: float) -> int:
        """Return the number of engines that follows from what `ask` computed."""
        limits = self.limits
        if not needs.soon:
            return 0
        needed = min(max(needs.soon, needs.later, limits.min, 1), limits.max)
        for count in range(1, limits.max + 1):
            if count > needed:
                self._idle.setdefault(count, now)
            else:
                self._idle.pop(count, None)
        # An engine waits for as long as the next start would cost (ski rental: at most twice the least cost).
        have = min(max(have, limits.min, 1), limits.max)
        stay = next((n for n in range(have, needed, -1) if now - self._idle[n] < self.start_s), min(needed, have))
        return max(min(needs.later, limits.max), stay)

    def _quiet(self, now: float) -> bool:
        """Tell whether nothing came for so long that stopping the last engine pays and keeps the share.

        Each silence that long costs its first request the start; so no more of them may be that long than promises
        may be lost.
        """
        if self._last is None:
            return now - (self.rates.begun(now)) >= self.start_s
        longest = float(np.quantile(self._silences, self.share)) if self._silences else 0.0
        return now - self._last >= max(self.start_s, longest)


@dataclass(slots=True)
class _Curves:
    """The shares of promises kept, by number of engines and rate: of one sample of requests, computed when asked.

    rate: of the sample, per second. tokens: a request's, on average.
    """

    traffic: Traffic
    engine: EngineSize
    rate: float
    tokens: float
    _found: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, silences: deque[float], ended: deque[tuple[float, ...]], engine: EngineSize) -> _Curves:
        """Return the curves of requests as they came not long ago, as far apart as those that came lately.

        How many came over longer times is left to the forecast: gaps are multiples of those around them.
        Of those that ended lately it takes the middle half by arrival: few of the newest have ended, the easy ones, and
        of the oldest only the others are left.
        """
        edge = len(ended) // 4
        middle = sorted(ended)[edge : len(ended) - edge]
        size = min(len(silences), len(middle))
        gaps = np.maximum(np.array(silences)[-size:], 1e-6)
        window = np.ones(min(_LOCAL, size))
        gaps = gaps / (np.convolve(gaps, window, "same") / np.convolve(np.ones(size), window, "same"))
        requests = np.ascontiguousarray(np.array(middle)[-size:, 1:])
        return cls(Traffic(gaps, requests), engine, 1 / float(gaps.mean()), float(requests[:, :2].sum(1).mean()))

    def needed(self, arrivals: Arrivals, waiting: float, have: int, limit: int, share: float) -> int:
        """Return the fewest engines, at most `limit`, that keep the share, on average over the forecast's distribution.

        Fewer where the last of them save less than they cost: a promise lost is worth the engines' time of 1 / (1 -
        share) others. To keep the last promises, such as those of the longest prompts, can take half of the engines.
        waiting: tokens per second of the queue.
        """
        rates, weights = arrivals.rate * arrivals.ratios + waiting / self.tokens, arrivals.ratios

        def attained(engines: int) -> float:
            return float(self.at(engines, rates) @ weights / weights.sum()) if weights.sum() else 1.0

        # Where not even the most engines keep the share, those that keep as much as they do.
        best = most = fewest(attained, min(share, attained(limit)), have, limit) or limit
        # A loss above the cost of all engines is not made good by any number of fewer ones.
        for engines in range(most - 1, 0, -1):
            if (lost := attained(best) - attained(engines)) < (1 - share) * math.log(best / engines):
                best = engines
            elif lost > (1 - share) * math.log(best):
                break
        return best

    def at(self, engines: int, rates: Floats) -> Floats:
        """Return the shares kept at these rates; a higher rate never has a larger one."""
        places = np.log(np.maximum(rates / self.rate, 1e-3)) / math.log(_FINE)
        low, high = math.floor(places.min()), math.ceil(places.max())
        shares = [1.0]
        for place in range(high, low - 1, -1):
            shares.append(self._share(engines, place))
            if shares[-1] > _ALL:  # and so it is at any lower one
                low = place
                break
        running = np.minimum.accumulate(np.array(shares[:0:-1]))
        return np.asarray(np.interp(places, np.arange(low, low + running.size), running))

    def _share(self, engines: int, place: int) -> float:
        key = engines, place
        if key not in self._found:
            self._found[key] = kept(self.traffic, self.engine, engines, _FINE**place)
        return self._found[key]


def _rate(queue: Queue, now: float, start_s: float) -> float:
    """Return the tokens per second that the waiting requests need, by each instant all that are due until then.

    No engine that is started now is in time for those due within a start: they ask for none.
    """
    order = np.argsort(queue.due)
    order = order[queue.due[order] >= now + start_s]
    return float((np.cumsum(queue.tokens[order]) / (queue.due[order] - now)).max(initial=0.0))


def fewest(attained: Callable[[int], float], target: float, first: int, most: int) -> int | None:
    """Return the fewest engines whose attainment is at least the target; None = not even `most` engines' is.

    attained: of a number of engines; it is asked again about the same number, so it should remember.
    first: where the search begins, at least 1.
    """
    low, high = 0, min(max(first, 1), most)  # `low` engines are too few
    while attained(high) < target and high < most:
        low, high = high, min(2 * high, most)
    best = high if attained(high) >= target else None
    while best is not None and best - low > 1:
        middle = (low + best) // 2
        low, best = (low, middle) if attained(middle) >= target else (middle, best)
    return best


_BUDGET = 2048  # tokens per iteration: engines do not tell, and chunks are as small as answers' pace wants them


class Scaling:
    """How many engines each model needs.

    scalers: by model. current: the newest number wanted of each. day_s: as in `Rates`.
    """

    def __init__(self, limits: Mapping[str, Scale], day_s: float = DAY_S) -> None:
        self.scalers = {model: Scaler(one, Rates(day_s)) for model, one in limits.items()}
        self.current: dict[str, int] = {}
        self._engines: dict[str, Instance] = {}  # the newest of each model
        self._thetas: dict[str, Floats] = {}

    def note(self, event: Event, cluster: Cluster, requests: Mapping[str, Request], now: float) -> None:
        """Take note of an event, before the controller forgets a request that has ended."""
        match event:
            case Arrived(request) if request.model in self.scalers:
                self.scalers[request.model].came(now)
            case Finished(id, output_tokens) if id in requests and requests[id].model in self.scalers:
                request = requests[id]
                self.scalers[request.model].ended(request, cluster.placement.computed(id, request), output_tokens)
            case Learned(name, theta) if name in cluster.instances:
                instance = cluster.instances[name]
                self._engines[instance.model], self._thetas[instance.model] = instance, theta

    def wanted(self, model: str, cluster: Cluster, now: float, have: int) -> int:
        """Return how many engines of a model should be up or starting.

        have: those that are; 0 = all were lost, or none is reported, so that the number wanted last counts.
        """
        return self.conclude(model, self.ask(model, cluster, now, have)(), have, now)

    def ask(self, model: str, cluster: Cluster, now: float, have: int) -> Callable[[], Needs]:
        """Return the computation that takes long, for another thread; `conclude` takes its result."""
        backlog = cluster.backlog
        rows = backlog.rows()
        rows = rows[backlog.model[rows] == cluster.code(model)]
        waiting = rows[~backlog.sent[rows]]
        queue = Queue(backlog.tokens[waiting], backlog.due[waiting], rows.size - waiting.size)
        return self.scalers[model].ask(now, have or self.current.get(model, 0), self._size(model), queue)

    def conclude(self, model: str, needs: Needs, have: int, now: float) -> int:
        """Return how many engines follow from what `ask` computed, and keep it in `current`."""
        have = have or self.current.get(model, 0)
        self.current[model] = self.scalers[model].conclude(needs, have, now)
        return self.current[model]

    def _size(self, model: str) -> EngineSize | None:
        if model not in self._thetas:
            return None
        instance = self._engines[model]
        kv = instance.blocks_total * instance.block_size
        return EngineSize(self._thetas[model], max(_BUDGET, instance.max_running), instance.max_running, kv)


class State(Enum):
    """Of an engine that may come and go."""

    OFF = "off"
    STARTING = "starting"
    UP = "up"
    DRAINING = "draining"


class Member(NamedTuple):
    """An engine of the model. inside: requests in it. since: instant of its last start."""

    id: str
    state: State
    inside: int = 0
    since: float = 0.0


class Changes(NamedTuple):
    """Ids of engines. undrain: they take work again. start: they are off. stop: drained, or not started at all.

    missing: how many more are wanted than there are.
    """

    undrain: list[str]
    start: list[str]
    stop: list[str]
    missing: int


def changes(engines: Sequence[Member], wanted: int) -> Changes:
    """Return what leads to the number wanted.

    Draining engines come back first, which costs nothing, those with the most inside first: they would cost longest
    anyway. What is still starting stops first, the newest of it, then the engines with the least inside.
    """

    def first_to_stop(one: Member) -> tuple[bool, float]:
        starting = one.state is State.STARTING
        return not starting, -one.since if starting else one.inside

    work = sorted((one for one in engines if one.state in (State.UP, State.STARTING)), key=first_to_stop)
    draining = sorted((one for one in engines if one.state is State.DRAINING), key=lambda one: -one.inside)
    more = max(wanted - len(work), 0)
    back = [one.id for one in draining[:more]]
    start = [one.id for one in engines if one.state is State.OFF][: more - len(back)]
    stop = [one.id for one in work[: max(len(work) - wanted, 0)]]
    return Changes(back, start, stop, more - len(back) - len(start))
