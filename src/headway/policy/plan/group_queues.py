"""The virtual queues of a fleet: per instance, request groups in order, and what is inside (QLM 4, definition 4.2).

What runs has its place in that order, too: each group has a rank between those of its neighbours, whether these are
queued or running. Neighbours of one model are in the order of their deadlines, those overdue last: what an order
decides is which model an instance serves next, and which groups stand on which instance.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from headway.policy.plan.groups import Group, Kind


@dataclass(slots=True)
class SentRequest:
    """A request inside an instance.

    rank: its place among the groups of that instance's virtual queue. urgency: its `Jobs.urgency` there.
    blocks: KV blocks that it may be expected to fill.
    due: its deadline; inf = best effort. sent: when it was sent.
    full: the batch was full when it was sent. places: as in `Request`.
    """

    id: str
    serial: int
    instance: str
    kind: Kind
    rank: float
    urgency: float
    blocks: int
    due: float
    sent: float
    full: bool = False
    places: int = 1


class Occupancy:
    """What is inside one instance.

    blocks: KV blocks that it may be expected to fill. places: of its requests.
    """

    def __init__(self) -> None:
        self._order: list[tuple[float, int]] = []
        self._requests: dict[int, SentRequest] = {}  # by serial
        self.blocks = self.places = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SentRequest]:
        return iter(self._requests.values())

    @property
    def highest(self) -> float:
        """The last rank; there must be a request."""
        return max(request.rank for request in self)

    def add(self, request: SentRequest) -> None:
        """Add a request that is sent."""
        insort(self._order, (request.urgency, request.serial))
        self._requests[request.serial] = request
        self.blocks += request.blocks
        self.places += request.places

    def remove(self, request: SentRequest) -> None:
        """Remove a request that has ended or come back."""
        if self._requests.pop(request.serial, None) is not None:
            del self._order[bisect_right(self._order, (request.urgency, request.serial)) - 1]
            self.blocks -= request.blocks
            self.places -= request.places

    def change(self, request: SentRequest, urgency: float) -> None:
        """Change the urgency of a request that is inside."""
        self.remove(request)
        request.urgency = urgency
        self.add(request)

    def ahead(self, urgency: float) -> tuple[int, int]:
        """Return the places of the requests that go before a queued one of this urgency, and their KV blocks."""
        if not self._order or self._order[-1][0] <= urgency:
            return self.places, self.blocks
        before = self.before(urgency)
        return sum(one.places for one in before), sum(one.blocks for one in before)

    def before(self, urgency: float) -> list[SentRequest]:
        """Return the requests that go before a queued one of this urgency, in their order."""
        return [self._requests[serial] for _, serial in self._order[: bisect_right(self._order, (urgency, 1 << 62))]]


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
