"""In what order, when requests belong to applications? Whole applications, first come, first served.

Parrot (OSDI '24), as a baseline of Hermes and QLM: requests of one application run are scheduled together, by
the arrival of the run's first request, so that a late stage does not queue behind runs that came after it.
Not modelled: Parrot's sharing of prompt prefixes and its placement by data dependence.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from headway.core.cluster import Cluster
from headway.plan.ordered import Ordered
from headway.plan.request_column import RequestColumn
from headway.ports import Planner
from headway.types import Arrived, Backlog, Event, Floats, Ints, Plan, Stage


class Parrot(Planner):
    """Orders by the run's beginning; a request of no run is a run of its own. Nothing running is displaced.

    remembered: how many runs' beginnings are kept, the least recently active going first.
    """

    def __init__(self, remembered: int = 65_536) -> None:
        self._remembered = remembered
        self._runs: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._began = RequestColumn()
        self._order = Ordered(self._rank, displaces=False)

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Note when the run of a new request began."""
        if isinstance(event, Arrived):
            request = event.request
            began = self._beginning(request.tenant, request.stage, request.arrival)
            row = cluster.backlog.row_of[request.id]
            self._began.put(cluster.backlog, _one(row), began)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return lines in the order of the runs' beginnings."""
        return self._order.plan(cluster, now)

    def _beginning(self, tenant: str, stage: Stage | None, arrival: float) -> float:
        if stage is None:
            return arrival
        key = (tenant, stage.app, stage.run)
        self._runs[key] = min(self._runs.pop(key, arrival), arrival)
        if len(self._runs) > self._remembered:
            self._runs.popitem(last=False)
        return self._runs[key]

    def _rank(self, backlog: Backlog, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
        return self._began.get(backlog, rows), backlog.arrival[rows]


def _one(row: int) -> Ints:
    return np.array([row], np.int64)
