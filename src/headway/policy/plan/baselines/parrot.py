"""Parrot (OSDI '24) as Hermes 2.2 and 5.1 describe it: application runs first come, first served.

Requests of one run are ordered by the arrival of the run's first request, so that a late stage does not queue
behind runs that came after it. Not modelled: sharing of prompt prefixes, placement by data dependence.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from headway.events import Arrived, Event
from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ARRIVAL
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.request_column import RequestColumn
from headway.ports import Planner
from headway.stages import Stage
from headway.types import Backlog, Ints, Plan


class Parrot(Planner):
    """Orders by the start of the run; a request without a run is a run of its own. Never displaces.

    remembered: how many runs are remembered; the least recently active is forgotten first.
    """

    def __init__(self, remembered: int = 65_536) -> None:
        self._remembered = remembered
        self._runs: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._began = RequestColumn()
        self._order = Ordered(ARRIVAL, displaces=False, key=self._began_at)

    @property
    def restricts(self) -> bool:
        """Tell whether it keeps to `Request.engines`."""
        return self._order.restricts

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Note when the run of a new request began."""
        if isinstance(event, Arrived):
            request = event.request
            began = self._beginning(request.tenant, request.stage, request.arrival)
            row = cluster.backlog.row_of[request.id]
            self._began.put(cluster.backlog, _one(row), began)
        self._order.on(event, cluster, now)

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

    def _began_at(self, backlog: Backlog, row: int) -> float:
        return float(self._began.get(backlog, _one(row))[0])


def _one(row: int) -> Ints:
    return np.array([row], np.int64)
