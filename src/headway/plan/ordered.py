"""One order for every instance: by arrival, by priority, by deadline, by attainable deadline.

Virtual queues overlap: a request that several instances could serve is in all their queues, and the first with
room takes it, so that no instance idles while work for it waits. The order is kept as requests come and go,
and a plan names only what may be sent now, so its cost does not grow with the queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headway.core.cluster import Cluster, RowSet
from headway.core.ranks import ARRIVAL, ATTAINABLE, DUE, PRIORITY, blocks_of, sent_ahead
from headway.plan.dispatch import spread
from headway.plan.waiting import Entry, WaitingQueue, entries_of, entry_of
from headway.ports import Planner
from headway.types import Arrived, Backlog, Event, Instance, Plan, Returned, Send

by_arrival, by_priority, by_due, by_attainable_deadline = ARRIVAL, PRIORITY, DUE, ATTAINABLE
_UNBOUNDED = math.inf

Key = Callable[[Backlog, int], float]


@dataclass(slots=True)
class _Peers:
    """Instances that may serve the same requests, and the queues that these wait in."""

    queues: list[WaitingQueue]
    members: list[tuple[str, RowSet]] = field(default_factory=list)
    head: Entry | None = None

    def first(self) -> Entry | None:
        """Return the request that is next for these instances."""
        heads = [queue.head for queue in self.queues if queue.head is not None]
        return min(heads) if heads else None


@dataclass(slots=True)
class _Full:
    """Why an instance took nothing when it was looked at last.

    version: of its `Cluster.inside` then. blocks: what the request at the head may have at the most for it to
    fit, -1 = the dispatch window is full.
    """

    version: int = -1
    blocks: int = -1


class Ordered(Planner):
    """A kind of rank (`core/ranks.py`) for every instance.

    Attributes:
        kind: of the rank.
        displaces: queued requests may overtake those inside an engine.
        ranked: each `Send` carries the first number of its rank, so that the engine orders by it, too.
        pull: requests stay in the queue until an engine has room for them.
        key: the planner's own first number of a queued request's rank; it must not change while it waits.
    """

    pull = True

    def __init__(
        self, kind: int, displaces: bool = True, *, pull: bool = True, ranked: bool = False,
        key: Key | None = None,
    ) -> None:  # fmt: skip
        assert key is None or not displaces, "what is inside has no key of the planner's own"
        self.pull = pull
        self.kind, self.displaces, self.ranked, self.key = kind, displaces, ranked, key
        self._queues: dict[tuple[int, int], WaitingQueue] = {}
        self._limits: dict[int, list[int]] = {}
        self._peers: list[_Peers] = []
        self._full: dict[str, _Full] = {}
        self._fleet: tuple[object, ...] = ()
        self._fleet_version = -1

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Queue a request that has come, or come back."""
        match event:
            case Arrived(request):
                self._push(cluster, cluster.backlog.row_of[request.id])
            case Returned(id) if id in cluster.backlog:
                row = cluster.backlog.row_of[id]
                if not cluster.backlog.sent[row]:
                    self._push(cluster, row)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what belongs inside an instance by its place in the order, and is not there yet."""
        self._follow_fleet(cluster)
        backlog = cluster.backlog
        for queue in self._queues.values():
            queue.settle(backlog, now)
        names = [name for peers in self._peers for name in self._to_look_at(peers, cluster)]
        order = {name: i for i, name in enumerate(cluster.instances)} if len(names) > 1 else {}
        offers = {
            name: self._offers(peers, cluster, name, now)
            for name, peers in sorted(names, key=lambda pair: order.get(pair[0], 0))
        }
        out = list(spread(offers, cluster))
        taken = {row for row, _ in out}
        for queue in self._queues.values():
            queue.put_back(taken)
        return Plan([self._send(backlog, row, name) for row, name in out])

    def _send(self, backlog: Backlog, row: int, name: str) -> Send:
        rank = self._entry(backlog, row)[1] if self.ranked else 0.0
        return Send(str(backlog.keys[row]), name, rank)

    def _entry(self, backlog: Backlog, row: int) -> Entry:
        entry = entry_of(self.kind, backlog, row)
        return entry if self.key is None else (entry[0], self.key(backlog, row), *entry[2:])

    # ---- what waits where

    def _push(self, cluster: Cluster, row: int) -> None:
        backlog = cluster.backlog
        if self._fleet_version < 0:
            return  # the first plan looks at the whole backlog
        queue = self._queue(int(backlog.model[row]), int(backlog.longest[row]))
        queue.push(self._entry(backlog, row))

    def _queue(self, model: int, longest: int) -> WaitingQueue:
        """Return the queue of requests of a model that fit the same instances as one of `longest` tokens."""
        limits = self._limits.get(model, [])
        size = next((i for i, limit in enumerate(limits) if longest <= limit), max(len(limits) - 1, 0))
        if (model, size) not in self._queues:
            self._queues[model, size] = WaitingQueue(self.kind)
        return self._queues[model, size]

    def _follow_fleet(self, cluster: Cluster) -> None:
        """Sort the queue anew when instances have come, gone or changed their model."""
        if cluster.fleet_version == self._fleet_version:
            return
        self._fleet_version = cluster.fleet_version
        if (fleet := _sizes(cluster)) == self._fleet:
            return
        self._fleet = fleet
        self._limits = _limits(cluster)
        self._queues, self._full = {}, {name: _Full() for name in cluster.instances}
        self._fill(cluster)
        self._peers = self._group(cluster)

    def _fill(self, cluster: Cluster) -> None:
        backlog = cluster.backlog
        rows = np.flatnonzero(backlog.live & ~backlog.sent)
        for model in np.unique(backlog.model[rows]).tolist():
            mine = rows[backlog.model[rows] == model]
            limits = self._limits.get(model, [])
            sizes = np.minimum(np.searchsorted(limits, backlog.longest[mine]), max(len(limits) - 1, 0))
            for size in np.unique(sizes).tolist():
                part = mine[sizes == size]
                longest = int(backlog.longest[part[0]])
                entries = entries_of(self.kind, backlog, part)
                if self.key is not None:
                    entries = (self._entry(backlog, row) for row in part.tolist())
                self._queue(model, longest).fill(entries)

    def _group(self, cluster: Cluster) -> list[_Peers]:
        """Return the instances in groups that may serve the same requests."""
        groups: dict[tuple[int, int], _Peers] = {}
        for name, instance in cluster.instances.items():
            model = cluster.code(instance.model)
            size = self._limits[model].index(instance.limit)
            if (model, size) not in groups:
                queues = [self._queue(model, limit) for limit in self._limits[model][: size + 1]]
                groups[model, size] = _Peers(queues)
            groups[model, size].members.append((name, cluster.inside(name)))
        return list(groups.values())

    # ---- which instance could take something

    def _to_look_at(self, peers: _Peers, cluster: Cluster) -> Iterator[tuple[str, _Peers]]:
        """Yield the instances where something has changed that may let the head in.

        A head that goes behind the last one meets at least as many requests and blocks ahead of it. So where
        the window was full nothing has to be looked at, nor where its blocks are too many.
        """
        head, last = peers.first(), peers.head
        peers.head = head
        if head is None:
            return
        behind = last is not None and (head >= last or not self.displaces)
        tokens = float(cluster.backlog.tokens[head[4]])
        for name, inside in peers.members:
            full = self._full[name]
            if full.version == inside.version and (
                head == last
                or (behind and math.ceil(tokens / cluster.instances[name].block_size) > full.blocks)
            ):
                continue
            yield name, peers

    def _offers(self, peers: _Peers, cluster: Cluster, name: str, now: float) -> list[int]:
        """Return the queued rows that belong inside an instance, in order."""
        backlog, instance, inside = cluster.backlog, cluster.instances[name], cluster.inside(name)
        walks = [queue.walk(backlog, now) for queue in peers.queues]
        out: list[int] = []
        blocks, self._full[name] = 0, _Full()
        for entry in walks[0] if len(walks) == 1 else heapq.merge(*walks):
            if cluster.pull:
                room = self._room(cluster, instance, entry, len(out), blocks)
                need = math.ceil(float(backlog.tokens[entry[4]]) / instance.block_size)
                if need > room:
                    if not out:
                        self._full[name] = _Full(inside.version, int(room))
                    break
                blocks += need
            out.append(entry[4])
        return out

    def _room(self, cluster: Cluster, instance: Instance, entry: Entry, before: int, blocks: int) -> float:
        """Return the blocks that a request at this place in the order may have, -1 = it is beyond the window.

        before, blocks: of queued requests ahead of it. The first of all may always try: the engine itself
        refuses what can never fit.
        """
        rows, data, size = cluster.inside(instance.id).rows, cluster.backlog.data, instance.block_size
        if self.displaces:
            count, held = sent_ahead(self.kind, data, rows, size, entry[:4])
        else:
            count, held = rows.size, blocks_of(data, rows, size)
        if count + before == 0:
            return _UNBOUNDED
        return -1 if count + before >= instance.window else instance.blocks_total - held - blocks


def _sizes(cluster: Cluster) -> tuple[object, ...]:
    """Return all of a fleet that this planner depends on."""
    up = [
        (i.id, i.model, i.limit, i.window, i.blocks_total, i.block_size) for i in cluster.instances.values()
    ]
    return (*up, *((instance.id, model) for instance, model in cluster.loading.values()))


def _limits(cluster: Cluster) -> dict[int, list[int]]:
    """Return, by model, the lengths that set instances apart, ascending: of those up and those loading it."""
    limits: dict[int, set[int]] = {}
    for instance in cluster.instances.values():
        limits.setdefault(cluster.code(instance.model), set()).add(instance.limit)
    for instance, model in cluster.loading.values():
        more = {other.limit for other in instance.loadable if other.model == model}
        limits.setdefault(cluster.code(model), set()).update(more)
    return {model: sorted(sizes) for model, sizes in limits.items()}
