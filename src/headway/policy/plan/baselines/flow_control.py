"""Flow control modelled after llm-d, the strongest of today's routers.

Strict bands by objective, earliest deadline first inside a band, a saturation gate in front of every engine
(requests that wait in it, KV in use), and rejection of sheddable requests while all engines of their model
are saturated. Unlike llm-d, KV use is forecast from what was sent rather than scraped, and prefix-cache
scores are left out. A request is sheddable if it is best effort and its priority is above 0 (llm-d: a
negative priority; here lower is more urgent, as in vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.policy.plan.dispatch import inside, sends, virtual_queue
from headway.ports import Planner
from headway.types import OBJECTIVES, Bools, Ints, Plan

_BEST_EFFORT = OBJECTIVES.index("best_effort")


@dataclass(frozen=True, slots=True)
class FlowControl(Planner):
    """Bands by objective behind a saturation gate; the defaults are llm-d's.

    Attributes:
        depth: an engine is saturated when this many requests wait inside it (at most its `lead`, which is all
            that is ever sent ahead).
        kv: or when this share of its KV is in use.
    """

    depth: int = 5
    kv: float = 0.8

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what the instances that are not saturated get, and the requests to reject."""
        backlog = cluster.backlog
        rows = backlog.rows()
        full = {name for name in cluster.instances if self.saturated(cluster, name)}
        shed = self._sheddable(cluster, rows) & ~backlog.sent[rows]
        shed &= np.isin(backlog.model[rows], self._closed(cluster, full))
        reject, rows = rows[shed], rows[~shed]
        keys = (backlog.serial[rows], backlog.arrival[rows], backlog.due[rows], backlog.objective[rows])
        ranked = rows[np.lexsort((*keys, ~backlog.sent[rows]))]
        lines = {
            name: ranked[inside(cluster, name, ranked)] if name in full else virtual_queue(cluster, name, ranked)
            for name in cluster.instances
        }
        return Plan(sends(lines, cluster, now), reject=backlog.names(reject))

    def saturated(self, cluster: Cluster, name: str) -> bool:
        """Tell whether an instance has all the work that the gate lets in."""
        backlog, instance = cluster.backlog, cluster.instances[name]
        rows = backlog.rows()
        rows = rows[inside(cluster, name, rows)]
        if not rows.size:
            return False
        blocks = float(np.ceil(backlog.tokens[rows] / instance.block_size).sum())
        waiting = int(backlog.places[rows].sum()) - instance.max_running
        return waiting >= min(self.depth, instance.lead) or blocks >= self.kv * instance.blocks_total

    def _closed(self, cluster: Cluster, full: set[str]) -> list[int]:
        """Return the codes of the models all of whose instances are saturated."""
        models = {instance.model for instance in cluster.instances.values()}
        open_ = {instance.model for name, instance in cluster.instances.items() if name not in full}
        return sorted(cluster.code(model) for model in models - open_)

    def _sheddable(self, cluster: Cluster, rows: Ints) -> Bools:
        backlog = cluster.backlog
        return np.asarray((backlog.objective[rows] == _BEST_EFFORT) & (backlog.priority[rows] > 0), np.bool_)
