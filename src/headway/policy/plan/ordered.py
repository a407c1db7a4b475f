"""One order for every instance: by arrival, by priority, by deadline, by attainable deadline.

Virtual queues overlap: a request that several instances could serve is in all their queues, and the first
with room takes it, so that no instance idles while work for it waits. The order is kept as requests come and
go, and a plan names only what may be sent now, so its cost does not grow with the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from headway.events import Arrived, Event, Failed, Finished, Returned
from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ATTAINABLE, FAR_S
from headway.policy.plan.dispatch import Offers, spread
from headway.policy.plan.sent import SentOrder, size_of
from headway.policy.plan.waiting import Entry, WaitingQueue, entries_of, entry_of
from headway.ports import Planner
from headway.types import Backlog, Instance, Ints, Plan, Send

Key = Callable[[Backlog, int], float]
Only = frozenset[str] | None  # the instances that a request may go to, None = all (`Cluster.only`)


@dataclass(slots=True)
class _Peers:
    """Instances that may serve the same requests, and the queues that these wait in.

    heads: the first requests of the queues at the last check, with the instances that these are for.
    """

    inside: SentOrder
    queues: list[tuple[Only, WaitingQueue]] = field(default_factory=list)
    heads: list[tuple[Only, Entry | None]] = field(default_factory=list)

    def has_changed(self) -> bool:
        """Tell whether a head, or the requests inside, have changed since the last call."""
        heads = [(only, queue.head) for only, queue in self.queues]
        changed = self.inside.changed or heads != self.heads
        self.heads, self.inside.changed = heads, False
        return changed and any(head is not None for _, head in heads)

    def walk(self, backlog: Backlog, now: float, full: Container[Only]) -> Iterator[Entry]:
        """Yield the waiting requests in order, except those restricted to a set of instances in `full`."""
        walks = [_until(only, full, queue.walk(backlog, now)) for only, queue in self.queues]
        return walks[0] if len(walks) == 1 else heapq.merge(*walks)


def _until(only: Only, full: Container[Only], walk: Iterator[Entry]) -> Iterator[Entry]:
    return takewhile(lambda _: only not in full, walk)


class Ordered(Planner):
    """A kind of rank (`policy/core/ranks.py`) for every instance.

    Attributes:
        kind: of the rank.
        displaces: queued requests may overtake those inside an engine.
        ranked: each `Send` carries the first number of its rank, so that the engine orders by it, too.
        pull: requests stay in the queue until an engine has room for them.
        ahead: requests that wait inside an engine whose packer chooses among them, whatever KV they need;
            None = none but those that have a slot and KV there.
        key: the planner's own first number of a request's rank within its level; it must not change.
        held: ids of requests that are kept out of all queues for now.
    """

    pull = True
    follows_runs = False  # what orders a request depends on the run that it belongs to

    def __init__(
        self,
        kind: int,
        displaces: bool = True,
        *,
        pull: bool = True,
        ranked: bool = False,
        ahead: int | None = None,
        key: Key | None = None,
    ) -> None:
        self.pull, self.ahead = pull, ahead
        self.kind, self.displaces, self.ranked, self.key = kind, displaces, ranked, key
        self.held: Collection[str] = ()
        self._queues: dict[tuple[int, int, Only], WaitingQueue] = {}  # by model, index of its limit, and instances
        self._limits: dict[int, list[int]] = {}
        self._peers: dict[tuple[int, int], _Peers] = {}  # by model and index of their limit
        self._inside: dict[int, SentOrder] = {}  # by code of an instance
        self._names: dict[int, str] = {}
        self._fleet: tuple[object, ...] = ()
        self._fleet_version = -1

    @property
    def restricts(self) -> bool:
        """Tell that it keeps to `Request.engines`."""
        return True

    @property
    def counts_late(self) -> bool:
        """Tell whether overdue requests rank behind those that can be on time, and before `FAR` ones."""
        return self.kind == ATTAINABLE and self.ahead is not None

    @property
    def _far_s(self) -> float:
        return FAR_S if self.counts_late else np.inf

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Queue a request that has come, or come back; forget one that has left its instance."""
        backlog = cluster.backlog
        match event:
            case Arrived(request):
                self._push(cluster, backlog.row_of[request.id])
            case Returned(id):
                row = backlog.row_of[id]
                self._forget(backlog, row)
                self._push(cluster, row)
            case Finished(id) | Failed(id) if id in backlog and backlog.sent[backlog.row_of[id]]:
                self._forget(backlog, backlog.row_of[id])

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what belongs inside an instance by its place in the order, and is not there yet."""
        self._follow_fleet(cluster)
        backlog = cluster.backlog
        for key, queue in [*self._queues.items()]:
            queue.settle(backlog, now)
            if queue.head is None and key[2] is not None:  # there may be many sets of instances
                del self._queues[key]
                self._connect()
        if self.counts_late:
            for peers in self._peers.values():
                peers.inside.settle(now)
        changed = [peers for peers in self._peers.values() if peers.has_changed()]
        offers = [offer for peers in changed if (offer := self._offers(peers, cluster, now))]
        out = spread(offers, cluster.instances, cluster, now)
        self._put_back({row for row, _ in out})
        sending = [self._send(cluster, row, name) for row, name in out]
        return Plan(sending, final=len(self._names) == 1)  # a send changes what belongs inside others only

    def _put_back(self, taken: set[int]) -> None:
        for queue in self._queues.values():
            queue.put_back(taken)

    def _offers(self, peers: _Peers, cluster: Cluster, now: float) -> Offers | None:
        """Return the queued rows that belong inside an instance of these; None when there are none."""
        inside, rows, backlog, full = peers.inside, list[int](), cluster.backlog, set[Only]()
        for entry in peers.walk(backlog, now, full):
            only = cluster.only.get(entry[4])
            size = size_of(backlog, entry[4])
            if not self.pull or inside.belongs(entry, *size, len(rows), self.displaces, only):
                rows.append(entry[4])
            elif only is None:
                break
            else:
                full.add(only)  # only requests for the same instances wait behind it
        if not rows:
            return None
        return Offers(inside.names, rows, inside.offered if self.pull else [len(rows)] * len(inside.names))

    def _send(self, cluster: Cluster, row: int, name: str) -> Send:
        entry = self._entry(cluster.backlog, row)
        self._inside[cluster.code(name)].add(name, entry, *size_of(cluster.backlog, row))
        return Send(str(cluster.backlog.keys[row]), name, entry[1] if self.ranked else 0.0)

    def _forget(self, backlog: Backlog, row: int) -> None:
        """Take a request out of the order of what is inside its instance, if that instance is up."""
        code = int(backlog.instance[row])
        if code in self._inside:
            self._inside[code].remove(self._names[code], self._entry(backlog, row))

    def _entry(self, backlog: Backlog, row: int) -> Entry:
        """Return a request's rank and row; the same as long as it is in the system."""
        entry = entry_of(self.kind, backlog, row)
        return entry if self.key is None else (entry[0], self.key(backlog, row), *entry[2:])

    def _entries(self, backlog: Backlog, rows: Ints) -> Iterator[Entry]:
        if self.key is None:
            return entries_of(self.kind, backlog, rows)
        return (self._entry(backlog, row) for row in rows.tolist())

    # ---- what waits where

    def _push(self, cluster: Cluster, row: int) -> None:
        backlog = cluster.backlog
        if self._fleet_version < 0 or (self.held and str(backlog.keys[row]) in self.held):
            return  # the first plan looks at the whole backlog
        queue = self._queue(int(backlog.model[row]), int(backlog.longest[row]), cluster.only.get(row))
        queue.push(self._entry(backlog, row))

    def _queue(self, model: int, longest: int, only: Only = None) -> WaitingQueue:
        """Return the queue of requests of a model that fit the same instances as one of `longest` tokens.

        Each set of instances (`only`) has its own queue, so that its requests do not block others.
        """
        limits = self._limits.get(model, [])
        size = next((i for i, limit in enumerate(limits) if longest <= limit), max(len(limits) - 1, 0))
        key = model, size, only
        if key not in self._queues:
            self._queues[key] = WaitingQueue(self.kind, self._far_s)
            self._connect()
        return self._queues[key]

    def _connect(self) -> None:
        """Give each group of instances the queues of all requests that they may serve."""
        for (model, limit), peers in self._peers.items():
            able = ((key, queue) for key, queue in self._queues.items() if key[0] == model and key[1] <= limit)
            peers.queues = [(key[2], queue) for key, queue in able]

    def _follow_fleet(self, cluster: Cluster) -> None:
        """Group the instances anew when some have come, gone or changed their model.

        The queue is sorted anew only when requests are set apart by other lengths than before.
        """
        if cluster.fleet_version == self._fleet_version:
            return
        self._fleet_version = cluster.fleet_version
        if (fleet := _sizes(cluster)) == self._fleet:
            return
        self._fleet = fleet
        if (limits := _limits(cluster)) != self._limits or not self._queues:
            self._limits, self._queues = limits, {}
            self._fill(cluster)
        self._peers = self._group(cluster)
        self._connect()
        insides = [peers.inside for peers in self._peers.values()]
        self._names = {cluster.code(name): name for inside in insides for name in inside.names}
        self._inside = {cluster.code(name): inside for inside in insides for name in inside.names}

    def _fill(self, cluster: Cluster) -> None:
        backlog = cluster.backlog
        waits = backlog.live & ~backlog.sent
        waits[[backlog.row_of[id] for id in self.held]] = False
        for row in cluster.only:
            if waits[row]:
                self._push(cluster, row)
                waits[row] = False
        rows = np.flatnonzero(waits)
        for model in np.unique(backlog.model[rows]).tolist():
            mine = rows[backlog.model[rows] == model]
            limits = self._limits.get(model, [])
            sizes = np.minimum(np.searchsorted(limits, backlog.longest[mine]), max(len(limits) - 1, 0))
            for size in np.unique(sizes).tolist():
                part = mine[sizes == size]
                longest = int(backlog.longest[part[0]])
                self._queue(model, longest).fill(self._entries(backlog, part))

    def _group(self, cluster: Cluster) -> dict[tuple[int, int], _Peers]:
        """Return the instances in groups that may serve the same requests."""
        groups: dict[tuple[int, int], list[Instance]] = {}
        for instance in cluster.instances.values():
            model = cluster.code(instance.model)
            groups.setdefault((model, self._limits[model].index(instance.limit)), []).append(instance)
        return {
            key: _Peers(SentOrder(self._entries, instances, cluster, self.ahead, self._far_s))
            for key, instances in groups.items()
        }


def _sizes(cluster: Cluster) -> tuple[object, ...]:
    """Return all of a fleet that this planner depends on."""
    up = [(i.id, i.model, i.limit, i.window, i.blocks_total, i.block_size) for i in cluster.instances.values()]
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
