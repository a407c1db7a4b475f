"""In what order? The rules everybody knows: arrival, priority, earliest deadline, least slack.

Each rule is a rank over the backlog's columns; one planner turns a rank into a line per instance. Lines
overlap: a request that several instances could serve stands in all their lines, and the first with room
takes it, so no instance idles while work for it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.core.cluster import Cluster
from headway.plan.virtual_queue import line
from headway.ports import Planner
from headway.types import Backlog, Floats, Ints, Plan

# Rank columns, most significant first; smaller goes earlier.
Rank = Callable[[Backlog, Ints, float], tuple[Floats | Ints, ...]]


def by_arrival(backlog: Backlog, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """First come, first served."""
    return (backlog.arrival[rows],)


def by_priority(backlog: Backlog, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """vLLM's priority: lower first, then arrival."""
    return backlog.priority[rows], backlog.arrival[rows]


def by_due(backlog: Backlog, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Earliest deadline first; requests without one come last, by arrival."""
    return backlog.due[rows], backlog.arrival[rows]


def by_attainable_deadline(backlog: Backlog, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Earliest deadline first among those that can still make it, then the late, then best effort.

    Under overload plain EDF spends itself on requests that are lost already and so loses the next ones too.
    """
    due = backlog.due[rows]
    waiting_late = (due < now) & ~backlog.sent[rows]
    return waiting_late + 2 * np.isinf(due), due, backlog.arrival[rows]


@dataclass(frozen=True, slots=True)
class Ordered(Planner):
    """One rank for every instance.

    displaces: queued requests may overtake those inside an engine.
    pull: requests stay outside until an engine has room for them.
    """

    rank: Rank
    displaces: bool = True
    pull: bool = True

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return for each instance all requests inside it and all it may still get, in rank order."""
        rows = cluster.backlog.rows()
        columns = (*self.rank(cluster.backlog, rows, now), cluster.backlog.serial[rows])
        inside = ~cluster.backlog.sent[rows] if not self.displaces else np.zeros(rows.size, np.bool_)
        ranked = rows[np.lexsort((*reversed(columns), inside))]
        return Plan({name: line(cluster, name, ranked) for name in cluster.instances})
