"""One order for every instance: by arrival, by priority, by deadline, by attainable deadline.

Virtual queues overlap: a request that several instances could serve is in all their queues, and the first
with room takes it, so that no instance idles while work for it waits. The order is kept as requests come and
go, and a plan names only what may be sent now, so its cost does not grow with the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Peers:
    """Instances that may serve the same requests, and the queues that these wait in.

    head: the request that was next when they were looked at last.
    """

    queues: list[WaitingQueue]
    inside: SentOrder
    head: Entry | None = None

    def next(self) -> Entry | None:
        """Return the request that is next for these instances."""
        heads = [queue.head for queue in self.queues if queue.head is not None]
        return min(heads) if heads else None

    def has_changed(self) -> bool:
        """Tell whether the head, or what is inside, has changed since this was asked last."""
        head, last = self.next(), self.head
        changed = self.inside.changed or head != last
        self.head, self.inside.changed = head, False
        return changed and head is not None

    def walk(self, backlog: Backlog, now: float) -> Iterator[Entry]:
        """Yield the waiting requests in order."""
        walks = [queue.walk(backlog, now) for queue in self.queues]
        return walks[0] if len(walks) == 1 else heapq.merge(*walks)


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
        self._queues: dict[tuple[int, int], WaitingQueue] = {}
        self._limits: dict[int, list[int]] = {}
        self._peers: list[_Peers] = []
        self._inside: dict[int, SentOrder] = {}  # by code of an instance
        self._names: dict[int, str] = {}
        self._fleet: tuple[object, ...] = ()
        self._fleet_version = -1

    @property
    def restricts(self) -> bool:
        """Tell that a request may be one for some instances alone."""
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
        for queue in self._queues.values():
            queue.settle(backlog, now)
        if self.counts_late:
            for peers in self._peers:
                peers.inside.settle(now)
        # What may go to some instances alone can be next without being sent, which changes nothing.
        changed = [peers for peers in self._peers if peers.has_changed() or (cluster.only and peers.head is not None)]
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
        inside, rows, backlog = peers.inside, list[int](), cluster.backlog
        for entry in peers.walk(backlog, now):
            only = cluster.only.get(entry[4])
            if only is not None and not inside.has_place(entry, only, self.displaces):
                continue  # it keeps no others waiting
            size = size_of(backlog, entry[4])
            if self.pull and not inside.belongs(entry, *size, len(rows), self.displaces):
                break
            rows.append(entry[4])
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
        if self._fleet_version < 0:
            return  # the first plan looks at the whole backlog
        queue = self._queue(int(backlog.model[row]), int(backlog.longest[row]))
        queue.push(self._entry(backlog, row))

    def _queue(self, model: int, longest: int) -> WaitingQueue:
        """Return the queue of requests of a model that fit the same instances as one of `longest` tokens."""
        limits = self._limits.get(model, [])
        size = next((i for i, limit in enumerate(limits) if longest <= limit), max(len(limits) - 1, 0))
        if (model, size) not in self._queues:
            self._queues[model, size] = WaitingQueue(self.kind, self._far_s)
        return self._queues[model, size]

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
        names = {cluster.code(name): name for peers in self._peers for name in peers.inside.names}
        self._names = names
        self._inside = {
            code: peers.inside for peers in self._peers for code, name in names.items() if name in peers.inside
        }

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
                self._queue(model, longest).fill(self._entries(backlog, part))

    def _group(self, cluster: Cluster) -> list[_Peers]:
        """Return the instances in groups that may serve the same requests."""
        groups: dict[tuple[int, int], list[Instance]] = {}
        for instance in cluster.instances.values():
            model = cluster.code(instance.model)
            groups.setdefault((model, self._limits[model].index(instance.limit)), []).append(instance)
        return [
            _Peers(
                [self._queue(model, limit) for limit in self._limits[model][: size + 1]],
                SentOrder(self._entries, instances, cluster, self.ahead, self._far_s),
            )
            for (model, size), instances in groups.items()
        ]


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
