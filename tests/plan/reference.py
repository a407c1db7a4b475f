"""A planner that orders the whole queue anew for every plan: what `Ordered` must decide, written plainly.

It is the oracle of `test_ordered.py`; its cost grows with the queue, which is why it is not in the package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ARRIVAL, ATTAINABLE, DUE, PRIORITY
from headway.policy.plan.dispatch import sends, virtual_queue
from headway.ports import Planner
from headway.types import Backlog, Floats, Ints, Plan

Columns = tuple[Floats | Ints, ...]


def _attainable(backlog: Backlog, rows: Ints, now: float) -> Columns:
    due = backlog.due[rows]
    waiting_late = (due < now) & ~backlog.sent[rows]
    return waiting_late + 2 * np.isinf(due), due, backlog.arrival[rows]


# Rank columns, most significant first; smaller goes earlier.
COLUMNS: dict[int, Callable[[Backlog, Ints, float], Columns]] = {
    ARRIVAL: lambda b, rows, now: (b.arrival[rows],),
    PRIORITY: lambda b, rows, now: (b.priority[rows], b.arrival[rows]),
    DUE: lambda b, rows, now: (b.due[rows], b.arrival[rows]),
    ATTAINABLE: _attainable,
}


class Reference(Planner):
    """Orders everything by a kind of rank, whatever happened before."""

    pull = True

    def __init__(self, kind: int, displaces: bool = True, *, pull: bool = True) -> None:
        self.kind, self.displaces, self.pull = kind, displaces, pull

    def queues(self, cluster: Cluster, now: float) -> dict[str, Ints]:
        """Return the virtual queue of each instance."""
        rows = cluster.backlog.rows()
        columns = (*COLUMNS[self.kind](cluster.backlog, rows, now), cluster.backlog.serial[rows])
        inside = np.zeros(rows.size, np.bool_) if self.displaces else ~cluster.backlog.sent[rows]
        ranked = rows[np.lexsort((*reversed(columns), inside))]
        return {name: virtual_queue(cluster, name, ranked) for name in cluster.instances}

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what belongs inside an instance by its place in the order, and is not there yet."""
        return Plan(sends(self.queues(cluster, now), cluster, now, pull=self.pull))
