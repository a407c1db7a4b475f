"""The virtual queues of a fleet: per instance, request groups in order (QLM 4, definition 4.2).

The order inside the engines is the same: each group has a rank, which its requests carry when they are sent,
and which lies between those of its neighbours, whether these are queued or running.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway.policy.plan.groups import Group, Kind
from headway.policy.plan.occupancy import Occupancy, SentRequest


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
    """Groups on virtual queues, and what is inside each instance.

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

    def adopt(self, orders: Mapping[str, Sequence[Item]]) -> dict[str, dict[str, float]]:
        """Take over an order of the fleet; return the new ranks of requests inside, by instance.

        Groups that have come since it was made are to be placed anew.
        """
        placed = {item.group.id for items in orders.values() for item in items if item.group is not None}
        new = {name: [one for one in queue if one.id not in placed] for name, queue in self.queues.items()}
        self.unplaced = [group for group in self.unplaced if group.id not in placed]
        ranks = {name: self._reorder(name, items) for name, items in orders.items()}
        for name, groups in new.items():
            if name not in orders:
                self.queues[name] = groups
                continue
            for group in groups:
                self.unplace(group)
        return ranks

    def _reorder(self, name: str, items: Sequence[Item]) -> dict[str, float]:
        """Make an instance's order that of these items; return the new ranks of requests inside.

        What runs keeps its ranks where its order is as before, so that few messages are needed.
        """
        inside, running = self.inside[name], dict[int, list[SentRequest]]()
        for request in inside:
            running.setdefault(request.kind.id, []).append(request)
        order = [item for item in items if item.group is not None or item.kind.id in running]
        spans = [_span(running[item.kind.id]) for item in order if item.group is None]
        keeps = all(one[1] < other[0] for one, other in pairwise(spans))
        changed: dict[str, float] = {}
        rank = min((span[0] for span in spans), default=1.0) - len(order) - 1.0
        for at, item in enumerate(order):
            if item.group is not None:
                rank = _between(rank, order[at + 1 :], running) if keeps else rank + 1.0
                item.group.rank = rank
                continue
            mine = running[item.kind.id]
            if keeps:
                rank = _span(mine)[1]
                continue
            rank += 1.0
            for request in mine:
                if request.rank != rank:
                    inside.rerank(request, rank)
                    changed[request.id] = rank
        self.queues[name] = [item.group for item in order if item.group is not None]
        for group in self.queues[name]:
            group.instance = name
        return changed


def _between(rank: float, behind: Sequence[Item], running: dict[int, list[SentRequest]]) -> float:
    """Return a rank above this one and below that of the next running item."""
    for item in behind:
        if item.group is None:
            return (rank + _span(running[item.kind.id])[0]) / 2
    return rank + 1.0


def _span(requests: Sequence[SentRequest]) -> tuple[float, float]:
    ranks = [request.rank for request in requests]
    return min(ranks), max(ranks)


def _highest(item: Item, inside: Occupancy) -> float:
    """Return the rank of the last request of an item."""
    if item.group is not None:
        return item.group.rank
    return max(request.rank for request in inside if request.kind.id == item.kind.id)


def _above(inside: Occupancy, low: float) -> list[float]:
    return [request.rank for request in inside if request.rank > low]
