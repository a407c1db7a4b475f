"""From request groups and instances to a `PlanProblem`, and from its solution to an order (QLM 6 and 7)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from headway.core.cluster import Cluster
from headway.core.pseudo_random import seeded
from headway.forecast.completion import Pace
from headway.plan import stochastic
from headway.plan.estimator import Estimator, Serving, fleet_of, limit_of
from headway.plan.groups import Group, Kind
from headway.plan.occupancy import Occupancy
from headway.plan.queue_order import (
    LEVELS,
    PlanProblem,
    QueueOrder,
    best_place,
    cost_of,
    greedy,
    insert,
    order_of,
    outlook_of_all,
    search,
)
from headway.types import OBJECTIVES, Floats, Instance, Ints

_INTERACTIVE = OBJECTIVES.index("interactive")
_MOVES = 5_000, 300, 100_000  # of the search: at least, per item, at most
# A new order must cost this much less than the old one, or groups would go to and fro: a share, and requests
# (unless an instance idles, because then there is nothing to lose).
_BETTER, _BETTER_BY = 0.05, 0.5
_SEED = 0
# Columns of a table of items: those of `PlanProblem`; of the latest starts one for each level.
_SHARE, _VARIANCE, _ROOM, _FINISH = range(4)
_FIRST, _LAST = slice(4, 4 + len(LEVELS)), slice(4 + len(LEVELS), 4 + 2 * len(LEVELS))
_COLUMNS = 4 + 2 * len(LEVELS)
_Z = np.array([max(NormalDist().inv_cdf(level), 0.0) for level in LEVELS])
_FULL = 0.75  # share of the KV that requests inside are to fill, from which on pausing them is not free
_HOPE = 0.3  # share of the seconds that an answer is expected to take still, which it may be in time with
_NEVER = 1e6  # seconds: what displacing costs where it is not allowed


@dataclass(frozen=True, slots=True)
class Item:
    """A queued group, or what runs of one kind on one instance; `plan/queue_order.py` orders both.

    group: None = it runs already.
    """

    kind: Kind
    size: int
    group: Group | None = None
    instance: int = -1


@dataclass(frozen=True, slots=True)
class Situation:
    """The problem of an instant, with the names that its indices stand for.

    names: of the instances. items: by index. order: as the virtual queues are.
    """

    names: Sequence[str]
    items: Sequence[Item]
    problem: PlanProblem
    order: QueueOrder


class Seen(NamedTuple):
    """What the estimator says of an order: its cost, and rows late, base, ahead of (3, I)."""

    cost: float
    late: Floats
    base: Floats
    ahead: Floats

    def waiting(self, i: int) -> tuple[float, float]:
        """Return when an item's model serves, and the seconds of work that are ahead of it from then on."""
        return float(self.base[i]), float(self.ahead[i])


class Shortage(NamedTuple):
    """By how much the capacity is short under the best plan found.

    requests: that will be late. seconds: by which the latest of them is.
    """

    requests: int = 0
    seconds: float = 0.0


def describe(
    estimator: Estimator, cluster: Cluster, now: float, queues: Mapping[str, Sequence[Group]],
    unplaced: Sequence[Group], inside: Mapping[str, Occupancy], loading: Mapping[str, float],
    models: Mapping[int, str], stays: Mapping[str, float], *, pinned: bool = False, evicts: bool = True,
) -> Situation:  # fmt: skip
    """Return the problem of this instant.

    loading: instance in a model swap -> when it began. stays: instance -> until when its model is not
    swapped out under what runs. pinned: groups stay on the instance they are on. evicts: a group may go
    before what runs.
    """
    fleet = fleet_of(cluster)
    names = [instance.id for instance in fleet]
    items: list[Item] = []
    order: list[list[int]] = []
    for g, name in enumerate(names):
        running, queue = _running(inside[name], g), queues[name]
        mine = [*running, *(Item(group.kind, group.size, group, g) for group in queue)]
        order.append(_by_rank(list(range(len(items), len(items) + len(mine))), mine, inside[name]))
        items += mine
    items += [Item(group.kind, group.size, group) for group in unplaced]
    builder = _Builder(estimator, cluster, now, fleet, items, models, loading, stays)
    problem = builder.problem(inside, pinned, evicts)
    return Situation(names, items, problem, order_of(order, len(items)))


def see(situation: Situation, order: QueueOrder | None = None) -> Seen:
    """Return the outlook of an order; None = of the queues as they are."""
    order = order or situation.order
    seen = np.full((3, len(situation.items)), -np.inf)
    cost = outlook_of_all(situation.problem, order.items, order.length, seen)
    return Seen(float(cost), *seen)


def shortage(situation: Situation, seen: Seen) -> Shortage:
    """Return how many requests will be late and by how much."""
    late = np.flatnonzero(seen.late > 0)
    if not late.size:
        return Shortage()
    return Shortage(int(situation.problem.size[late].sum()), float(seen.late[late].max()))


def improve(situation: Situation, exact: int, time_limit: float, *, idle: bool) -> QueueOrder | None:
    """Return a better order than the queues have, None = there is none worth the change.

    exact: items up to which the stochastic program is solved by HiGHS, within `time_limit` seconds. idle: an
    instance idles while groups wait on others.
    """
    problem, before = situation.problem, situation.order
    least, each, most = _MOVES
    moves = min(least + each * len(situation.items), most)
    placed = int(before.length.sum()) == len(situation.items)
    starts = [QueueOrder(*greedy(problem)), *([before] if placed else [])]
    starts = [start for start in starts if int(start.length.sum()) == len(situation.items)] or starts[:1]
    best = min(starts, key=lambda start: float(cost_of(problem, start.items, start.length)))
    items, length, cost = search(problem, best.items, best.length, moves, seeded(_SEED))
    found = QueueOrder(items, length)
    if len(situation.items) <= exact and int(length.sum()) == len(situation.items):
        solution = stochastic.solve(problem, found, time_limit)
        found, cost = solution.order, solution.cost
    limit = float(cost_of(problem, before.items, before.length)) * (1 - _BETTER) - (
        0.0 if idle else _BETTER_BY
    )
    if placed and cost > limit:
        return None
    return found


def prepare() -> None:
    """Compile what orders groups, which takes seconds."""
    one, table = np.ones(1), np.ones((1, 1))
    levels = np.ones((len(LEVELS), 1, 1))
    problem = PlanProblem(
        one, np.zeros(1, np.int64), np.full(1, -1), table, table, table, table, levels, levels, one, one,
        np.zeros(1, np.int64), one, table, _Z,
    )  # fmt: skip
    items, length = order_of([[]], 1)
    g, at = best_place(problem, items, length, 0)
    insert(items, length, g, at, 0)
    outlook_of_all(problem, items, length, np.zeros((3, 1)))
    search(problem, *greedy(problem), 10, seeded(_SEED))


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
        self, estimator: Estimator, cluster: Cluster, now: float, fleet: Sequence[Instance],
        items: Sequence[Item], models: Mapping[int, str], loading: Mapping[str, float],
        stays: Mapping[str, float],
    ) -> None:  # fmt: skip
        self.estimator, self.cluster, self.now, self.fleet = estimator, cluster, now, fleet
        self.items, self.loading, self.stays = items, loading, stays
        codes = sorted({item.kind.sort.model for item in items})
        self.codes, self.index = codes, {code: m for m, code in enumerate(codes)}
        self.models = [models[code] for code in codes]
        self.requests = self._requests()
        self.limits: dict[str, int] = {}

    def problem(self, inside: Mapping[str, Occupancy], pinned: bool, evicts: bool) -> PlanProblem:
        """Return the arrays."""
        shape = len(self.fleet), len(self.items)
        table = _empty(*shape)
        size = np.array([float(item.size) for item in self.items])
        evict, leave = np.zeros(len(self.items)), np.zeros(len(self.items))
        queued = [i for i, item in enumerate(self.items) if item.group is not None]
        columns: dict[tuple[Serving | None, ...], Floats] = {}
        for g, instance in enumerate(self.fleet):
            key = tuple(self.estimator.serving(instance, model) for model in self.models)
            if key not in columns:
                columns[key] = self._columns(instance, queued)
            table[:, g, queued] = columns[key]
        if pinned:
            for i in queued:
                table[
                    _SHARE, [g for g in range(len(self.fleet)) if self.items[i].instance not in (-1, g)], i
                ] = np.inf
        for i, item in enumerate(self.items):
            if item.group is None:
                g, instance = item.instance, self.fleet[item.instance]
                pace = self._pace(instance, item.kind)
                assert pace is not None, "an instance serves what it runs"
                size[i], latest = self._running_in_time(item, inside[instance.id], pace)
                table[:_FINISH, g, i] = item.size * pace.share, item.size * pace.share_std**2, pace.decode
                table[_FINISH, g, i], table[_FINISH + 1 :, g, i] = pace.decode / 2, latest
                again = item.size * pace.again if evicts else _NEVER
                full = inside[instance.id].blocks > _FULL * instance.blocks_total
                # Else it is paused and keeps its KV; being half done on average speaks for letting it end.
                evict[i] = again if full or not evicts else item.size * pace.share / 2
                leave[i] = _NEVER if self.stays.get(instance.id, -math.inf) > self.now else again
        share, variance, room, finish = table[: _FINISH + 1]
        return PlanProblem(
            size, self._model_of_items(), self._fixed(), share, variance, room, finish, table[_FIRST],
            table[_LAST], evict, leave, self._loaded(), self._ready(), self._swap(), _Z,
        )  # fmt: skip

    def _pace(self, instance: Instance, kind: Kind) -> Pace | None:
        serving = self.estimator.serving(instance, self.models[self.index[kind.sort.model]])
        if serving is None:
            return None
        return self.estimator.pace(serving, kind.tokens, self.requests[kind.sort.model])

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
        """Tell whether all tokens of a group's requests fit here, or no other instance is larger."""
        model = self.models[self.index[group.kind.sort.model]]
        if model not in self.limits:
            self.limits[model] = max(limit_of(one, model) for one in self.fleet)
        return limit_of(instance, model) >= min(group.longest, self.limits[model])

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
        if item.kind.sort.objective == _INTERACTIVE:
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
            target, since = self.cluster.loading.get(instance.id), self.loading.get(instance.id, self.now)
            seconds = _load_seconds(instance, target[1]) if target else 0.0
            out.append(max(seconds - (self.now - since), 0.0))
        return np.array(out, float)

    def _swap(self) -> Floats:
        rows = np.array(
            [[_load_seconds(instance, model) for model in self.models] for instance in self.fleet], float
        ).reshape(len(self.fleet), len(self.models))
        for g, instance in enumerate(self.fleet):
            target = self.cluster.loading.get(instance.id)
            if target is not None:  # seconds are known from the model before only: the way back takes no less
                rows[g] = np.maximum(rows[g], _load_seconds(instance, target[1]))
        return rows


def _empty(*shape: int) -> Floats:
    """Return a table of items that no instance can serve and that have no SLO."""
    table = np.zeros((_COLUMNS, *shape))
    table[_SHARE], table[_FINISH + 1 :] = np.inf, np.inf
    return table


def _needs(kind: Kind, pace: Pace) -> Floats:
    """Return, by level, the seconds from a request's start to what its SLO is about."""
    if kind.sort.objective == _INTERACTIVE:
        return np.full(len(LEVELS), pace.prefill)
    return np.array([pace.finish(level) for level in LEVELS])


def _load_seconds(instance: Instance, model: str) -> float:
    """Return the seconds until an instance serves a model that it does not serve then, inf = it cannot.

    The model that it serves now comes back from host memory, in the time that the others take on average.
    """
    for other in instance.loadable:
        if other.model == model:
            return other.warm_s if model in instance.warm else other.cold_s
    if model != instance.model or not instance.loadable:
        return math.inf
    return sum(other.warm_s for other in instance.loadable) / len(instance.loadable)
