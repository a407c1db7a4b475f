"""Virtual Token Counter (OSDI '24, algorithm 2 and 4.4; a baseline of Hermes 5.1): equal service of tenants.

The tenant with the smallest counter of served tokens is next; prompt tokens count 1, output tokens 2. A
tenant that returns is lifted to the smallest counter among those that wait, so that service cannot be saved
up while away. The slow loop learns of an answer's length when it ends; until then the expected length is
charged and later corrected, which is the paper's variant with length prediction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from headway.events import Arrived, Event, Failed, Finished
from headway.policy.core.cluster import Cluster
from headway.policy.plan.dispatch import sends, virtual_queue
from headway.ports import Planner
from headway.types import Backlog, Floats, Ints, Plan

PROMPT_WEIGHT, ANSWER_WEIGHT = 1.0, 2.0  # what a token costs its tenant


class VirtualTokenCounter(Planner):
    """Virtual Token Counter over tenants. prompt_weight, answer_weight: what a token costs its tenant."""

    def __init__(self, prompt_weight: float = PROMPT_WEIGHT, answer_weight: float = ANSWER_WEIGHT) -> None:
        self._prompt, self._answer = prompt_weight, answer_weight
        self._served: defaultdict[int, float] = defaultdict(float)  # by tenant: what has ended, and lifts
        self._last: int | None = None  # the tenant that left the queue last

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Lift a tenant that comes back; charge what was really served."""
        backlog = cluster.backlog
        match event:
            case Arrived(request):
                self._lift(backlog, backlog.row_of[request.id])
            case Finished(id, output_tokens) if id in backlog:
                row = backlog.row_of[id]
                cost = self._prompt * int(backlog.prompt[row]) + self._answer * output_tokens
                self._served[int(backlog.tenant[row])] += cost
            case Failed(id) if id in backlog and backlog.sent[backlog.row_of[id]]:
                row = backlog.row_of[id]
                self._served[int(backlog.tenant[row])] += self._prompt * int(backlog.prompt[row])

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return lines in which the tenants alternate so that their counters stay close."""
        backlog = cluster.backlog
        rows = backlog.rows()
        keys = (backlog.serial[rows], backlog.arrival[rows], self._tags(backlog, rows), ~backlog.sent[rows])
        ranked = np.asarray(rows[np.lexsort(keys)], np.int64)
        queues = {name: virtual_queue(cluster, name, ranked) for name in cluster.instances}
        return Plan(sends(queues, cluster, now))

    def counters(self, backlog: Backlog, tenants: Iterable[int]) -> dict[int, float]:
        """Return the tenants' counters: what was served, and what is being served at its expected cost."""
        rows = backlog.rows()
        rows = rows[backlog.sent[rows]]
        cost, owner = self._cost(backlog, rows), backlog.tenant[rows]
        return {tenant: self._served[tenant] + float(cost[owner == tenant].sum()) for tenant in tenants}

    def _cost(self, backlog: Backlog, rows: Ints) -> Floats:
        prompt = backlog.prompt[rows]
        return np.asarray(self._prompt * prompt + self._answer * (backlog.tokens[rows] - prompt), float)

    def _lift(self, backlog: Backlog, row: int) -> None:
        """A tenant with nothing queued starts no lower than the lowest that waits, or left the queue last."""
        rows = backlog.rows()
        waiting = {int(code) for code in np.unique(backlog.tenant[rows[~backlog.sent[rows] & (rows != row)]])}
        tenant = int(backlog.tenant[row])
        others = waiting or ({self._last} if self._last is not None else set())
        if tenant in waiting or not others:
            return
        counters = self.counters(backlog, sorted(others | {tenant}))
        self._served[tenant] += max(0.0, min(counters[other] for other in others) - counters[tenant])

    def _tags(self, backlog: Backlog, rows: Ints) -> Floats:
        """Return the tenant's counter at the turn of each queued request, 0 for those sent."""
        tags = np.zeros(rows.size)
        queued = np.flatnonzero(~backlog.sent[rows])
        if not queued.size:
            return tags
        order = queued[np.lexsort((backlog.serial[rows[queued]], backlog.arrival[rows[queued]]))]
        order = order[np.argsort(backlog.tenant[rows[order]], kind="stable")]
        owner, cost = backlog.tenant[rows[order]], self._cost(backlog, rows[order])
        begins = np.flatnonzero(np.diff(owner, prepend=-1))  # codes are 0 or more
        tenants, before = owner[begins].tolist(), np.cumsum(cost) - cost
        counters = self.counters(backlog, tenants)
        start = np.array([counters[tenant] for tenant in tenants]) - before[begins]
        tags[order] = before + np.repeat(start, np.diff(begins, append=owner.size))
        self._last = int(owner[np.argmax(tags[order])])
        return tags
