"""The situation of a fleet with groups on virtual queues, as a `PlanProblem` (QLM 6 and 7)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.policy.forecast.completion import Pace
from headway.policy.plan.estimator import Estimator, Serving, fleet_of, holds, limit_of, load_seconds
from headway.policy.plan.group_queues import GroupQueues, Item, Occupancy
from headway.policy.plan.groups import Group, Kind
from headway.policy.plan.queue_order import LEVELS, PlanProblem, QueueOrder, order_of
from headway.types import OBJECTIVES, Floats, Instance, Ints

INTERACTIVE = OBJECTIVES.index("interactive")
# Columns of a table of items: those of `PlanProblem`; of the latest starts one for each level.
_SHARE, _VARIANCE, _ROOM, _FINISH = range(4)
_FIRST, _LAST = slice(4, 4 + len(LEVELS)), slice(4 + len(LEVELS), 4 + 2 * len(LEVELS))
_COLUMNS = 4 + 2 * len(LEVELS)
_Z = np.array([max(NormalDist().inv_cdf(level), 0.0) for level in LEVELS])
_FULL = 0.75  # share of the KV that requests inside are to fill, from which on pausing them is not free
_HOPE = 0.3  # share of the seconds that an answer is expected to take still, which it may be in time with
# Share of the requests that come while an instance loads a model, per instance, which are late because of it.
# Chosen by `headway bench fleet --simulated`: from 0.02 to 0.15 the outcome is much the same.
_DELAYED = 0.05
_NEVER = 1e6  # seconds: what displacing costs where it is not allowed


class ArrivalRate:
    """Requests per second that arrive, with older ones counting less and less.

    memory: seconds after which an arrival counts 1/e.
    """

    def __init__(self, memory: float = 120.0) -> None:
        self._memory, self._count, self._last, self._first = memory, 0.0, 0.0, math.inf

    def arrived(self, now: float) -> None:
        """Count an arrival."""
        self._count = 1.0 + self._count * math.exp(-(now - self._last) / self._memory)
        self._first, self._last = min(self._first, now), now

    def rate(self, now: float) -> float:
        """Return requests per second; since the first arrival, if that is not long ago."""
        seen = 1.0 - math.exp(-max(now - self._first, 1.0) / self._memory)
        return self._count * math.exp(-(now - self._last) / self._memory) / (self._memory * seen)


@dataclass(slots=True)
class Placed:
    """Which groups stand where, and what decides about their order.

    pinned: groups stay on the instance they are on. evicts: a group may go before what runs.
    models: code -> name of a model. loading: instance in a model swap -> when that began. stays: instance ->
    until when its model is not swapped out under what runs. arrivals: of all requests.
    """

    pinned: bool = False
    evicts: bool = True
    estimator: Estimator = field(default_factory=Estimator)
    queues: GroupQueues = field(default_factory=GroupQueues)
    models: dict[int, str] = field(default_factory=dict)
    loading: dict[str, float] = field(default_factory=dict)
    stays: dict[str, float] = field(default_factory=dict)
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)


@dataclass(frozen=True, slots=True)
class Situation:
    """The problem of an instant, with the names that its indices stand for.

    names: of the instances. items: by index. order: as the virtual queues are.
    """

    names: Sequence[str]
    items: Sequence[Item]
    problem: PlanProblem
    order: QueueOrder


def describe(placed: Placed, cluster: Cluster, now: float, unplaced: Sequence[Group]) -> Situation:
    """Return the problem of this instant; `unplaced` are groups to be placed beside those on queues."""
    fleet, queues = fleet_of(cluster), placed.queues
    names = [instance.id for instance in fleet]
    items: list[Item] = []
    order: list[list[int]] = []
    for g, name in enumerate(names):
        running = _running(queues.inside[name], g)
        mine = [*running, *(Item(group.kind, group.size, group, g) for group in queues.queues[name])]
        order.append(_by_rank(list(range(len(items), len(items) + len(mine))), mine, queues.inside[name]))
        items += mine
    items += [Item(group.kind, group.size, group) for group in unplaced]
    problem = _Builder(placed, cluster, now, fleet, items).problem()
    return Situation(names, items, problem, order_of(order, len(items)))


def _running(inside: Occupancy, g: int) -> list[Item]:
    """Return what an instance runs, one item per kind."""
    kinds = {request.kind.id: request.kind for request in inside}
    sizes = Counter(request.kind.id for request in inside)
    return [Item(kinds[id], size, None, g) for id, size in sizes.items()]


def _by_rank(numbers: list[int], items: Sequence[Item], inside: Occupancy) -> list[int]:
    """Return the numbers of an instance's items in the order of their ranks."""
    lowest: dict[int, float] = {}
    for request in inside:
        lowest[request.kind.id] = min(lowest.get(request.kind.id, math.inf), request.rank)
    ranks = [lowest[item.kind.id] if item.group is None else item.group.rank for item in items]
    return [number for _, number in sorted(zip(ranks, numbers, strict=True))]


class _Builder:
    """Fills the arrays of a `PlanProblem`, one kind and one sort of instance at a time."""

    def __init__(
        self, placed: Placed, cluster: Cluster, now: float, fleet: Sequence[Instance], items: Sequence[Item]
    ) -> None:
        self.placed, self.cluster, self.now = placed, cluster, now
        self.fleet, self.items = fleet, items
        codes = sorted({item.kind.sort.model for item in items})
        self.codes, self.index = codes, {code: m for m, code in enumerate(codes)}
        self.models = [placed.models[code] for code in codes]
        self.requests = self._requests()
        self.limits: dict[str, int] = {}

    def problem(self) -> PlanProblem:
        """Return the arrays."""
        shape = len(self.fleet), len(self.items)
        table = _empty(*shape)
        size = np.array([float(item.size) for item in self.items])
        evict, leave = np.zeros(len(self.items)), np.zeros(len(self.items))
        queued = [i for i, item in enumerate(self.items) if item.group is not None]
        columns: dict[tuple[Serving | None, ...], Floats] = {}
        for g, instance in enumerate(self.fleet):
            key = tuple(self.placed.estimator.serving(instance, model) for model in self.models)
            if key not in columns:
                columns[key] = self._columns(instance, queued)
            table[:, g, queued] = columns[key]
        if self.placed.pinned:
            for i in queued:
                there = [g for g in range(len(self.fleet)) if self.items[i].instance not in (-1, g)]
                table[_SHARE, there, i] = np.inf
        for i, item in enumerate(self.items):
            if item.group is None:
                size[i], evict[i], leave[i] = self._runs(item, table[:, item.instance, i])
        share, variance, room, finish = table[: _FINISH + 1]
        return PlanProblem(
            size,
            self._model_of_items(),
            self._fixed(),
            share,
            variance,
            room,
            finish,
            table[_FIRST],
            table[_LAST],
            evict,
            leave,
            self._loaded(),
            self._ready(),
            self._swap(),
            _Z,
            _DELAYED * self.placed.arrivals.rate(self.now) / max(len(self.fleet), 1),
        )

    def _runs(self, item: Item, column: Floats) -> tuple[float, float, float]:
        """Fill the column of what runs; return its `size`, `evict` and `leave`."""
        instance, placed = self.fleet[item.instance], self.placed
        inside, pace = placed.queues.inside[instance.id], self._pace(instance, item.kind)
        assert pace is not None, "an instance serves what it runs"
        size, latest = self._running_in_time(item, inside, pace)
        column[:_FINISH] = item.size * pace.share, item.size * pace.share_std**2, pace.decode
        column[_FINISH], column[_FINISH + 1 :] = pace.decode / 2, latest
        again = item.size * pace.again if placed.evicts else _NEVER
        full = inside.blocks > _FULL * instance.blocks_total
        # Else it is paused and keeps its KV; being half done on average speaks for letting it end.
        evict = again if full or not placed.evicts else item.size * pace.share / 2
        stays = placed.stays.get(instance.id, -math.inf) > self.now
        return size, evict, _NEVER if stays else again

    def _pace(self, instance: Instance, kind: Kind) -> Pace | None:
        serving = self.placed.estimator.serving(instance, self.models[self.index[kind.sort.model]])
        if serving is None:
            return None
        return self.placed.estimator.pace(serving, kind.tokens, self.requests[kind.sort.model])

    def _columns(self, instance: Instance, queued: Sequence[int]) -> Floats:
        """Return (columns, queued) what an instance makes of the groups; alike instances have the same."""
        paces: dict[int, Pace | None] = {}
        out = _empty(len(queued))
        for column, i in enumerate(queued):
            kind, group = self.items[i].kind, self.items[i].group
            assert group is not None, "only groups are queued"
            if kind.id not in paces:
                paces[kind.id] = self._pace(instance, kind)
            pace = paces[kind.id]
            if pace is not None and self._holds(instance, group):
                out[:_FINISH, column] = group.size * pace.share, group.size * pace.share_std**2, pace.decode
                out[_FINISH, column] = pace.finish(0.5, group.size)
                needs = _needs(kind, pace)
                out[_FIRST, column] = group.first - self.now - needs
                out[_LAST, column] = group.last - self.now - needs
        return out

    def _holds(self, instance: Instance, group: Group) -> bool:
        model = self.models[self.index[group.kind.sort.model]]
        if model not in self.limits:
            self.limits[model] = max(limit_of(one, model) for one in self.fleet)
        return holds(instance, model, group.longest, self.limits[model])

    def _requests(self) -> dict[int, float]:
        """Return the requests of each model per instance that serves it, which is how large batches get."""
        sizes = Counter[int]()
        for item in self.items:
            sizes[item.kind.sort.model] += item.size
        loading = {name: model for name, (_, model) in self.cluster.loading.items()}
        serving = Counter(self.cluster.code(loading.get(one.id, one.model)) for one in self.fleet)
        return {model: size / max(serving[model], 1) for model, size in sizes.items()}

    def _running_in_time(self, item: Item, inside: Occupancy, pace: Pace) -> tuple[float, float]:
        """Return how many requests of what runs can still be in time, and until when they must go on.

        An answer that streams must go on at once, as must one that is in time only if short. Of the others
        the first quarter may be given up.
        """
        mine = [request for request in inside if request.kind.id == item.kind.id]
        if item.kind.sort.objective == INTERACTIVE:
            return float(len(mine)), 0.0
        latest = []
        for request in mine:
            left, needs = request.due - self.now, pace.remaining(self.now - request.sent)
            if left > _HOPE * needs:
                latest.append(max(left - needs, 0.0))
        latest.sort()
        return float(len(latest)), latest[len(latest) // 4] if latest else math.inf

    def _model_of_items(self) -> Ints:
        return np.array([self.index[item.kind.sort.model] for item in self.items], np.int64)

    def _fixed(self) -> Ints:
        return np.array([item.instance if item.group is None else -1 for item in self.items], np.int64)

    def _loaded(self) -> Ints:
        """Return the model of each instance; -1 = one that no item asks for."""
        out = []
        for instance in self.fleet:
            target = self.cluster.loading.get(instance.id)
            model = self.cluster.code(target[1] if target else instance.model)
            out.append(self.index.get(model, -1))
        return np.array(out, np.int64)

    def _ready(self) -> Floats:
        out = []
        for instance in self.fleet:
            _, target = self.cluster.loading.get(instance.id, (instance, instance.model))
            seconds = 0.0
            if target != instance.model:
                since = self.placed.loading.get(instance.id, self.now)
                seconds = load_seconds(instance, target, instance.model) - (self.now - since)
            out.append(max(seconds, 0.0))
        return np.array(out, float)

    def _swap(self) -> Floats:
        """Return the seconds of every swap by the model before; last of these, one that no item asks for."""
        out = np.zeros((len(self.fleet), len(self.models) + 1, len(self.models)))
        for g, instance in enumerate(self.fleet):
            _, loaded = self.cluster.loading.get(instance.id, (instance, instance.model))
            for m, before in enumerate((*self.models, loaded)):
                out[g, m] = [load_seconds(instance, model, before) for model in self.models]
        return out


def _empty(*shape: int) -> Floats:
    """Return a table of items that no instance can serve and that have no SLO."""
    table = np.zeros((_COLUMNS, *shape))
    table[_SHARE], table[_FINISH + 1 :] = np.inf, np.inf
    return table


def _needs(kind: Kind, pace: Pace) -> Floats:
    """Return, by level, the seconds from a request's start to what its SLO is about."""
    if kind.sort.objective == INTERACTIVE:
        return np.full(len(LEVELS), pace.prefill)
    return np.array([pace.finish(level) for level in LEVELS])
