"""What of a plan that was made on an earlier cluster (`Plan.based_on`) can still be carried out."""

from __future__ import annotations

from headway.policy.core.cluster import Cluster
from headway.types import Instance, Plan, Rerank, Send


def still_holding(plan: Plan, cluster: Cluster) -> Plan:
    """Return the part of a plan that concerns requests still queued and instances still there."""
    there = cluster.instances
    return Plan(
        send=[send for send in plan.send if _queued(cluster, send.id) and _serves(cluster, send)],
        rerank=[kept for one in plan.rerank if (kept := _inside(cluster, one)).ranks],
        swap={name: model for name, model in plan.swap.items() if _can_load(there.get(name), model)},
        warm={name: model for name, model in plan.warm.items() if _can_load(there.get(name), model)},
        reject=[id for id in plan.reject if _queued(cluster, id)],
    )


def _queued(cluster: Cluster, id: str) -> bool:
    row = cluster.backlog.row_of.get(id)
    return row is not None and not cluster.backlog.sent[row]


def _serves(cluster: Cluster, send: Send) -> bool:
    """Tell whether the instance still serves the model of a request that is still queued."""
    instance, row = cluster.instances.get(send.instance), cluster.backlog.row_of[send.id]
    return instance is not None and cluster.code(instance.model) == int(cluster.backlog.model[row])


def _inside(cluster: Cluster, rerank: Rerank) -> Rerank:
    """Return a rerank of those of its requests that are inside its instance."""
    backlog, inside = cluster.backlog, cluster.inside(rerank.instance)
    ranks = {id: rank for id, rank in rerank.ranks.items() if backlog.row_of.get(id, -1) in inside}
    return Rerank(rerank.instance, ranks)


def _can_load(instance: Instance | None, model: str) -> bool:
    return instance is not None and instance.can_load(model)
