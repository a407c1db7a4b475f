"""The planner of SLO-aware scheduling (4.4, Algorithm 2): requests are assigned, then each queue is annealed.

A request is bound to an instance when it arrives (`Assignment`). Each instance has a queue of its own, which
is annealed again when the instance has room and the queue has changed since; the first of it are sent, with
their place in the order as the rank. What is inside an instance stays there: the paper's scheduler decides
about waiting requests only. With `pull=False` all are sent at once, and the packer
(`policy/pack/annealed.py`) finds the order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headway.events import Arrived, Event, Failed, Finished, Learned, Returned
from headway.policy.core.annealing import MOST_ANNEALED, sequence
from headway.policy.core.cluster import Cluster
from headway.policy.core.mapping import Targets, costs_of
from headway.policy.forecast.latency.laws import PUBLISHED, SloAware, sampled
from headway.policy.forecast.latency.online import seconds_of
from headway.policy.plan.dispatch import eligible, sends
from headway.policy.plan.request_column import RequestColumn
from headway.ports import Planner
from headway.types import Backlog, Batch, Floats, Instance, Ints, Plan

_UTILITY = 0.9  # of the KV, the rest is lost in half-filled blocks (mu of equation 20)


class Assignment:
    """Tokens that each instance still has room for in this round.

    A request goes to the instance with the most. When even that has too few, as many requests as possible
    have been assigned, and a round begins in which all are empty again.
    """

    def __init__(self) -> None:
        self._whole: dict[str, float] = {}
        self._left: dict[str, float] = {}

    def follow(self, instances: Iterable[Instance]) -> None:
        """Bring the instances up to date; new ones are empty."""
        self._whole = {one.id: _UTILITY * one.blocks_total * one.block_size for one in instances}
        self._left = {name: min(self._left.get(name, whole), whole) for name, whole in self._whole.items()}

    def take(self, tokens: float, names: Sequence[str]) -> str:
        """Return which of these instances gets a request of so many tokens, the first of equals."""
        best = max(names, key=self._left.__getitem__)
        if self._left[best] < tokens:
            self._left.update((name, self._whole[name]) for name in names)
            best = max(names, key=self._left.__getitem__)
        self._left[best] -= tokens
        return best

    def give_back(self, tokens: float, name: str) -> None:
        """Note that a request of so many tokens has left an instance."""
        if name in self._left:
            self._left[name] = min(self._left[name] + tokens, self._whole[name])


_NOWHERE = -1


@dataclass(slots=True)
class _Queue:
    """What waits for one instance, as serial numbers and rows.

    head: promised requests whose order is annealed, in that order once it has been.
    later: promised ones beyond `most`, as a heap by deadline.
    late: promised ones beyond `most` whose deadline has passed, as a heap by arrival: they would keep those
        out of the head that can still be in time.
    best_effort: those that were promised nothing, by arrival.
    changed: something came to the head since it was annealed.
    """

    head: list[tuple[int, int]] = field(default_factory=list)
    later: list[tuple[float, int, int]] = field(default_factory=list)
    late: list[tuple[int, int]] = field(default_factory=list)
    best_effort: list[tuple[int, int]] = field(default_factory=list)
    changed: bool = False

    def add(self, backlog: Backlog, row: int, promised: bool, most: int) -> None:
        """Queue a request. From a head that is too full the one that is due last goes back."""
        entry = (int(backlog.serial[row]), row)
        if not promised:
            heapq.heappush(self.best_effort, entry)
            return
        self.changed = True
        self.head.append(entry)
        if len(self.head) > most:
            last = max(self.head, key=lambda other: (backlog.due[other[1]], other[0]))
            self.head.remove(last)
            heapq.heappush(self.later, (float(backlog.due[last[1]]), *last))

    def settle(self, backlog: Backlog, most: int, now: float) -> None:
        """Drop what has left the queue, and fill the head with what is due next."""
        waiting = [entry for entry in self.head if _waits(backlog, entry)]
        self.head = [entry for entry in waiting if not self.later or backlog.due[entry[1]] >= now]
        for entry in set(waiting) - set(self.head):
            heapq.heappush(self.late, entry)
        while (self.later or self.late) and len(self.head) < most:
            due, *rest = heapq.heappop(self.later) if self.later else (np.inf, *heapq.heappop(self.late))
            entry = (rest[0], rest[1])
            if not _waits(backlog, entry):
                continue
            if due < now and self.later:
                heapq.heappush(self.late, entry)
            else:
                self.head.append(entry)
                self.changed = True

    def first(self, backlog: Backlog, count: int) -> Ints:
        """Return the rows of the first requests in the queue's order."""
        first = self.head[:count]
        for heap in (self.late, self.best_effort):
            more = list[tuple[int, int]]()
            while heap and len(first) + len(more) < count:
                entry = heapq.heappop(heap)
                if _waits(backlog, entry):
                    more.append(entry)
            for entry in more:  # they stay queued until they are sent
                heapq.heappush(heap, entry)
            first = first + more
        return np.array([row for _, row in first], np.int64)

    def drain(self, backlog: Backlog) -> list[int]:
        """Take all requests out; return their rows by arrival."""
        entries = sorted([*self.head, *(entry[1:] for entry in self.later), *self.late, *self.best_effort])
        self.head, self.later, self.late, self.best_effort = [], [], [], []
        return [row for serial, row in entries if _waits(backlog, (serial, row))]


def _waits(backlog: Backlog, entry: tuple[int, int]) -> bool:
    """Tell whether a request is still queued: rows are used again after it has ended."""
    serial, row = entry
    return bool(backlog.live[row] and backlog.serial[row] == serial and not backlog.sent[row])


class Annealed(Planner):
    """SLO-aware scheduling.

    most: requests of an instance whose order is searched; those due later follow by deadline, so that the
        cost of an event is bounded.
    seed: of the search.
    pull: requests wait here; otherwise they only are assigned here, and wait inside the engine.
    batches: an engine gets the next batch, of the annealed size, once the previous one has ended. Otherwise only the
        order is sent: an engine with continuous batching fills its batch as requests end.

    A request with no SLO goes behind all that have one.
    """

    pull = True

    def __init__(self, most: int = MOST_ANNEALED, seed: int = 0, *, pull: bool = True, batches: bool = False) -> None:
        self._most, self._seed, self.pull, self._batches = most, seed, pull, batches
        self._ttft, self._tpot, self._e2e = RequestColumn(), RequestColumn(), RequestColumn()
        self._home = RequestColumn()
        self._homeless: dict[int, int] = {}  # row -> serial number
        self._queues: dict[str, _Queue] = {}
        self._assignment = Assignment()
        self._laws: dict[str, SloAware] = {}
        self._learned: dict[str, Floats] = {}
        self._fleet = _NOWHERE
        self._rank = itertools.count(1)

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Note a request's SLO; bind it anew when it comes back; free its memory when it has ended."""
        backlog = cluster.backlog
        match event:
            case Arrived(request):
                row, slo = np.array([backlog.row_of[request.id]]), request.slo
                for column, seconds in (self._ttft, slo.ttft), (self._tpot, slo.per_token), (self._e2e, slo.e2e):
                    column.put(backlog, row, np.inf if seconds is None else seconds)
                self._homeless[int(row[0])] = int(backlog.serial[row[0]])
            case Returned(id):
                self._leave(cluster, backlog.row_of[id])
                self._homeless[backlog.row_of[id]] = int(backlog.serial[backlog.row_of[id]])
            case Finished(id) | Failed(id) if id in backlog:
                self._leave(cluster, backlog.row_of[id])
            case Learned(instance, theta):
                self._learned[instance] = theta
                self._laws.pop(instance, None)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the first of each instance's queue, as many as belong inside it."""
        self._follow_fleet(cluster)
        self._bind(cluster)
        lines = {name: self._line(cluster, name, now) for name in cluster.instances}
        lines = {name: line for name, line in lines.items() if line.size}
        sending = sends(lines, cluster, now, pull=self.pull)
        if self.pull:
            sending = [replace(send, rank=float(next(self._rank))) for send in sending]
        return Plan(sending, final=True)  # no send changes what belongs inside another instance

    def _leave(self, cluster: Cluster, row: int) -> None:
        """Give back the memory of a request that leaves its instance."""
        home = self._home.get(cluster.backlog, np.array([row]))[0]
        for name in cluster.instances:
            if cluster.code(name) == home:
                self._assignment.give_back(float(cluster.backlog.tokens[row]), name)

    # ---- instance assignment

    def _follow_fleet(self, cluster: Cluster) -> None:
        """Bind anew what waited for an instance that has gone or serves another model now."""
        if cluster.fleet_version == self._fleet:
            return
        first, self._fleet = self._fleet == _NOWHERE, cluster.fleet_version
        backlog = cluster.backlog
        if first:  # the planner may be new to a cluster that has requests
            queued = np.flatnonzero(backlog.live & ~backlog.sent).tolist()
        else:
            queued = [row for queue in self._queues.values() for row in queue.drain(backlog)]
        self._homeless |= {row: int(backlog.serial[row]) for row in queued}
        self._queues = {name: _Queue() for name in cluster.instances}
        self._laws.clear()
        self._assignment = Assignment()
        self._assignment.follow(cluster.instances.values())
        for name in cluster.instances:
            for row in cluster.inside(name).rows.tolist():
                self._assignment.take(float(backlog.tokens[row]), [name])

    def _bind(self, cluster: Cluster) -> None:
        """Assign each request without a home to an instance of its model, by arrival."""
        backlog = cluster.backlog
        waiting = sorted((serial, row) for row, serial in self._homeless.items())
        for entry in waiting:
            row = np.array([entry[1]])
            if not _waits(backlog, entry):
                del self._homeless[entry[1]]
                continue
            names = [name for name in cluster.instances if eligible(cluster, name, row)[0]]
            if not names:
                continue
            name = self._assignment.take(float(backlog.tokens[entry[1]]), names)
            self._home.put(backlog, row, cluster.code(name))
            self._queues[name].add(backlog, entry[1], self._promised(backlog, row), self._most)
            del self._homeless[entry[1]]

    def _promised(self, backlog: Backlog, row: Ints) -> bool:
        """Tell whether a request has an SLO."""
        return any(np.isfinite(c.get(backlog, row)[0]) for c in (self._ttft, self._tpot, self._e2e))

    # ---- request scheduling

    def _line(self, cluster: Cluster, name: str, now: float) -> Ints:
        """Return the requests inside an instance and then the first of its queue; empty if it is full.

        With `batches` it is empty while requests are inside; the queue is annealed again for each batch.
        """
        backlog, instance, queue = cluster.backlog, cluster.instances[name], self._queues[name]
        if not self.pull:
            return np.array(queue.drain(backlog), np.int64)
        inside = cluster.inside(name).rows
        room = instance.window - inside.size
        if room <= 0 or (self._batches and inside.size):
            return np.empty(0, np.int64)
        queue.settle(backlog, self._most, now)
        if (queue.changed and len(queue.head) > 1) or (self._batches and queue.head):
            queue.head, first = self._sequence(cluster, instance, queue.head, now)
            room = min(room, first) if self._batches else room
        queue.changed = False
        return np.concatenate([inside, queue.first(backlog, room)])

    def _sequence(
        self, cluster: Cluster, instance: Instance, head: list[tuple[int, int]], now: float
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the annealed order of requests that wait for an instance, and the size of the first batch."""
        backlog = cluster.backlog
        head = sorted(head)
        rows = np.array([row for _, row in head])
        wait = now + self._until_free(cluster, instance) - backlog.arrival[rows]
        targets = Targets(
            self._ttft.get(backlog, rows) - wait, self._tpot.get(backlog, rows), self._e2e.get(backlog, rows) - wait
        )
        prompt, output = backlog.prompt[rows], _output(backlog, rows)
        costs = costs_of(self._law(instance), prompt, prompt, output, targets, wait)
        promised = np.ones(rows.size, np.bool_)
        order, first = sequence(
            costs, backlog.due[rows], promised, instance.max_running, self._seed + cluster.version, self._most
        )
        return [head[i] for i in order.tolist()], first

    def _until_free(self, cluster: Cluster, instance: Instance) -> float:
        """Return about how long a full instance takes until the next request can begin.

        On average half of what is inside is done.
        """
        backlog, inside = cluster.backlog, cluster.inside(instance.id).rows
        if inside.size < instance.max_running:
            return 0.0
        never = np.full(inside.size, np.inf)
        prompt, output = backlog.prompt[inside], _output(backlog, inside)
        none = Targets(never, never, never)
        costs = costs_of(self._law(instance), prompt, prompt, output, none, np.zeros(inside.size))
        each = costs["execution_slope"] * instance.max_running + costs["execution_base"]
        return float(each.sum()) / 2 / instance.max_running

    def _law(self, instance: Instance) -> SloAware:
        """Return the law of an instance: sampled, as it has learned it, or else the published one."""
        if instance.id not in self._laws:
            self._laws[instance.id] = self._fitted(instance)
        return self._laws[instance.id]

    def _fitted(self, instance: Instance) -> SloAware:
        if instance.latency is not None:
            return sampled(instance.latency, instance.max_running)
        theta = self._learned.get(instance.id)
        if theta is None:
            return PUBLISHED

        def learned(batch: Batch) -> float:
            shape = batch.decodes, batch.context, batch.prefill, batch.prefill_context
            return float(seconds_of(theta, *shape))

        return sampled(learned, instance.max_running)


def _output(backlog: Backlog, rows: Ints) -> Floats:
    """Return the expected output tokens, at least 1."""
    return np.asarray(np.maximum(backlog.tokens[rows] - backlog.prompt[rows], 1.0), float)
