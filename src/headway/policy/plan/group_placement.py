"""Virtual queues of request groups: the instance of a new group, and the situation of the whole fleet (QLM 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from headway.policy.core.cluster import Cluster
from headway.policy.core.pseudo_random import below, seeded
from headway.policy.placement.cost import Engine, least
from headway.policy.plan.groups import Group, Kind
from headway.policy.plan.pulling import Occupancy
from headway.policy.plan.queue_order import best_place, insert
from headway.policy.plan.situation import Placed, describe, fleet_of, holds, limit_of
from headway.types import Instance


@dataclass(frozen=True, slots=True)
class Item:
    """A queued group, or what runs of one kind on one instance; `policy/plan/queue_order.py` orders both.

    group: None = it runs already.
    """

    kind: Kind
    size: int
    group: Group | None = None
    instance: int = -1


class GroupQueues:
    """Groups on virtual queues, in order (definition 4.2), and what is inside each instance.

    What runs has its place in that order, too: each group has a rank between those of its neighbours, whether these
    are queued or running. Neighbours of one model are in the order of their deadlines, those overdue last: what an
    order decides is which model an instance serves next, and which groups stand on which instance.

    queues: by instance, most urgent group first. inside: by instance, what was sent there and has not ended.
    unplaced: groups on no queue: new ones, and those of instances that are gone.
    """

    def __init__(self) -> None:
        self.queues: dict[str, list[Group]] = {}
        self.inside: dict[str, Occupancy] = {}
        self.unplaced: list[Group] = []

    def follow(self, names: Sequence[str]) -> None:
        """Keep queues for these instances; the groups of others are to be placed anew."""
        for name in [name for name in self.queues if name not in names]:
            for group in self.queues.pop(name):
                self.unplace(group)
            del self.inside[name]
        for name in names:
            self.queues.setdefault(name, [])
            self.inside.setdefault(name, Occupancy())

    def unplace(self, group: Group) -> None:
        """Let a group be placed anew."""
        group.instance = ""
        self.unplaced.append(group)

    def remove(self, group: Group) -> None:
        """Take a group off its queue."""
        if group.instance:
            self.queues[group.instance].remove(group)
            group.instance = ""
        else:
            self.unplaced.remove(group)

    def append(self, name: str, group: Group) -> None:
        """Put a group at the end of a queue, behind all that is inside, too."""
        queue, inside = self.queues[name], self.inside[name]
        last = max(queue[-1].rank if queue else 0.0, inside.highest if len(inside) else 0.0)
        self._put(name, len(queue), group, last + 1.0)

    def after(self, group: Group, other: Group) -> None:
        """Put a group right behind another one."""
        queue = self.queues[group.instance]
        at = queue.index(group) + 1
        behind = queue[at].rank if at < len(queue) else group.rank + 1.0
        self._put(group.instance, at, other, (group.rank + behind) / 2)

    def put(self, name: str, item: Item | None, group: Group) -> None:
        """Put a group behind an item of an instance's order, None = before all others."""
        queue, inside = self.queues[name], self.inside[name]
        low = -math.inf if item is None else _highest(item, inside)
        at = sum(other.rank <= low for other in queue)
        above = [other.rank for other in queue[at : at + 1]] + _above(inside, low)
        high = min(above, default=math.inf)
        if math.isinf(low):
            rank = 0.0 if math.isinf(high) else high - 1.0
        else:
            rank = low + 1.0 if math.isinf(high) else (low + high) / 2
        self._put(name, at, group, rank)

    def _put(self, name: str, at: int, group: Group, rank: float) -> None:
        self.queues[name].insert(at, group)
        group.instance, group.rank = name, rank
        self.settle(group)

    def adopt(self, orders: Mapping[str, Sequence[Item]]) -> None:
        """Take over an order of the fleet. Groups that have come since it was made are to be placed anew."""
        placed = {item.group.id for items in orders.values() for item in items if item.group is not None}
        new = {name: [one for one in queue if one.id not in placed] for name, queue in self.queues.items()}
        self.unplaced = [group for group in self.unplaced if group.id not in placed]
        for name, items in orders.items():
            self._reorder(name, items)
        for name, groups in new.items():
            if name not in orders:
                self.queues[name] = groups
                continue
            for group in groups:
                self.unplace(group)

    def _reorder(self, name: str, items: Sequence[Item]) -> None:
        """Make an instance's order that of these items; what has come inside since goes before them."""
        at = {item.kind.id: rank for rank, item in enumerate(items) if item.group is None}
        for request in self.inside[name]:
            request.rank = at.get(request.kind.id, -1.0)
        queue = self.queues[name] = list[Group]()
        for rank, item in enumerate(items):
            if item.group is not None:
                item.group.instance, item.group.rank = name, rank
                queue.append(item.group)
        begin = 0
        for _, run in groupby(list(queue), lambda group: group.kind.sort.model):
            self._by_deadline(name, begin, begin := begin + len(list(run)))

    def settle(self, group: Group) -> None:
        """Bring a group to its place in the run of its model, after its first deadline has changed."""
        queue, model = self.queues[group.instance], group.kind.sort.model
        begin = end = queue.index(group)
        while begin > 0 and queue[begin - 1].kind.sort.model == model:
            begin -= 1
        while end < len(queue) and queue[end].kind.sort.model == model:
            end += 1
        self._by_deadline(group.instance, begin, end)

    def _by_deadline(self, name: str, begin: int, end: int) -> None:
        """Sort neighbouring groups of one model; they exchange their ranks."""
        run = self.queues[name][begin:end]
        ranks = sorted(group.rank for group in run)
        run.sort(key=lambda group: (group.lost, group.first))
        for group, rank in zip(run, ranks, strict=True):
            group.rank = rank
        self.queues[name][begin:end] = run


def _highest(item: Item, inside: Occupancy) -> float:
    """Return the rank of the last request of an item."""
    if item.group is not None:
        return item.group.rank
    return max(request.rank for request in inside if request.kind.id == item.kind.id)


def _above(inside: Occupancy, low: float) -> list[float]:
    return [request.rank for request in inside if request.rank > low]


@dataclass(frozen=True, slots=True)
class QlmOptions:
    """What QLM leaves open, and its ablations (QLM 8, figures 10, 13, 14 and 18).

    delta: largest group, in batches.
    period: seconds between two runs of the plan generator, at least.
    exact: items up to which it solves the stochastic program by HiGHS, within `time_limit` seconds.
    stay: a model stays loaded for this many times the seconds that its swap took, while it has work.
    evicts, warms: the LSOs of that name.
    ranks: inside an engine requests run by the rank of their group; else its packer decides.
    places: how a new group gets its instance: where it costs least, at random, or in turn. Only the first
        moves it later.
    orders: by the plan generator, or by deadline (with model swaps wherever that order has them).
    """

    delta: float = 4.0
    period: float = 1.0
    exact: int = 3
    time_limit: float = 1.0
    stay: float = 10.0
    evicts: bool = True
    warms: bool = True
    ranks: bool = True
    places: Literal["planned", "random", "in turn"] = "planned"
    orders: Literal["planned", "deadline"] = "planned"


class GroupPlacement(Placed):
    """The virtual queues of a fleet, and which of them a group goes to.

    changed: instances whose queue or contents have changed since the last plan.
    """

    def __init__(self, options: QlmOptions) -> None:
        super().__init__(pinned=options.places != "planned", evicts=options.evicts)
        self.options = options
        self.changed: set[str] = set()
        self._turn = 0
        self._random = seeded(0)

    def has_loaded(self, name: str, now: float) -> None:
        """Note that a model swap has ended.

        The model then stays for a multiple of the time that the swap took, whatever else is more urgent,
        unless the instance has nothing to run: so that swaps take a bounded share of the time.
        """
        began = self.loading.pop(name, None)
        if began is not None:
            self.stays[name] = now + self.options.stay * (now - began)

    def model(self, group: Group) -> str:
        """Return the model that a group asks for."""
        return self.models[group.kind.sort.model]

    def place_new(self, cluster: Cluster, now: float) -> None:
        """Put groups that have no place on virtual queues, as far as some instance can serve them."""
        waiting, self.queues.unplaced = self.queues.unplaced, []
        undecided = [group for group in waiting if not self._put(cluster, group, now)]
        if undecided:
            self._put_where_it_costs_least(cluster, undecided, now)

    def _put(self, cluster: Cluster, group: Group, now: float) -> bool:
        """Put a group where nothing needs to be compared; tell whether there is such a place."""
        model = self.model(group)
        fleet = fleet_of(cluster)
        most = max((limit_of(one, model) for one in fleet), default=0)
        names = [one.id for one in fleet if holds(one, model, group.longest, most)]
        if not names:
            return False
        if self.options.places == "planned":
            name = self._with_room(cluster, group, names, now)
            if name is not None:
                self.queues.append(name, group)
                self.changed.add(name)
                return True
            if self.options.orders == "planned":
                return False
            name = min(names, key=lambda one: sum(other.size for other in self.queues.queues[one]))
        elif self.options.places == "random":
            name = names[below(self._random, len(names))]
        else:
            name, self._turn = names[self._turn % len(names)], self._turn + 1
        self._put_by_deadline(name, group)
        return True

    def _put_by_deadline(self, name: str, group: Group) -> None:
        before = [other for other in self.queues.queues[name] if other.first <= group.first]
        behind = Item(before[-1].kind, before[-1].size, before[-1]) if before else None
        inside = self.queues.inside[name]
        if behind is None and any(request.due <= group.first for request in inside):
            last = max((one for one in inside if one.due <= group.first), key=lambda one: one.rank)
            behind = Item(last.kind, 1)
        self.queues.put(name, behind, group)
        self.changed.add(name)

    def _with_room(self, cluster: Cluster, group: Group, names: list[str], now: float) -> str | None:
        """Return an instance that serves the model, has a free slot and no queue, None = there is none.

        The soonest free one; where one holds some of the prompt, that on which the group's next request costs least.
        """
        model, works = self.model(group), dict[str, float]()
        for name in names:
            instance = cluster.instances.get(name)
            if instance is None or instance.model != model or self.queues.queues[name]:
                continue
            inside = self.queues.inside[name]
            if len(inside) + group.size > instance.max_running or self._full(instance, group):
                continue
            serving = self.estimator.serving(instance, model)
            assert serving is not None, "an instance serves its own model"
            works[name] = (len(inside) + 1) * self.estimator.pace(serving, group.kind.tokens).share
        row = group.head(cluster.backlog)
        if row is not None and len(works) > 1:
            engines = [Engine(cluster.instances[name], cluster.code(name)) for name in works]
            costs = cluster.placement.costs(cluster.backlog, row, engines, now)
            if any(cost.found for cost in costs):
                return engines[least(costs)].instance.id
        return min(works, key=works.__getitem__, default=None)

    def _full(self, instance: Instance, group: Group) -> bool:
        tokens = group.kind.tokens
        needs = group.size * math.ceil((tokens.prompt + tokens.mean) / instance.block_size)
        return self.queues.inside[instance.id].ahead(math.inf)[1] + needs > instance.blocks_total

    def _put_where_it_costs_least(self, cluster: Cluster, groups: list[Group], now: float) -> None:
        """Put groups, one after the other, where each costs least; those that have no place stay without."""
        situation = describe(self, cluster, now, groups)
        items, length = situation.order
        for i, group in enumerate(groups, len(situation.items) - len(groups)):
            g, at = best_place(situation.problem, items, length, i)
            if g < 0:
                self.queues.unplaced.append(group)
                continue
            before = situation.items[items[g, at - 1]] if at else None
            insert(items, length, g, at, i)
            self.queues.put(situation.names[g], before, group)
            self.changed.add(situation.names[g])

    def idles(self, cluster: Cluster) -> bool:
        """Tell whether an instance has room and no queue while groups that it could serve wait elsewhere."""
        queues, inside = self.queues.queues, self.queues.inside
        idle = [
            instance
            for name, instance in cluster.instances.items()
            if not queues[name] and 2 * len(inside[name]) < instance.max_running
        ]
        models = {self.model(group) for queue in queues.values() for group in queue}
        return any(model == one.model or one.can_load(model) for one in idle for model in models)


def served_by(instance: Instance) -> list[tuple[str, int]]:
    """Return (model, tokens of the longest request) of what an instance has or can load."""
    return [(instance.model, instance.limit), *((other.model, other.limit) for other in instance.loadable)]


def serves(cluster: Cluster, name: str, model: str) -> bool:
    """Tell whether an instance is there and has a model or can load it."""
    return any(one.id == name and limit_of(one, model) > 0 for one in fleet_of(cluster))
