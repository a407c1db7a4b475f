"""Where request groups stand: the instance of a new group, and the situation of the whole fleet (QLM 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headway.policy.core.cluster import Cluster
from headway.policy.core.pseudo_random import below, seeded
from headway.policy.placement.cost import Engine, least
from headway.policy.plan.estimator import fleet_of, holds, limit_of
from headway.policy.plan.group_queues import Item
from headway.policy.plan.groups import Group
from headway.policy.plan.queue_order import best_place, insert
from headway.policy.plan.situation import Placed, describe
from headway.types import Instance


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
