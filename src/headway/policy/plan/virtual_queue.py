"""The virtual queue of an instance (QLM 4): the requests that it holds and may still get.

A virtual queue holds what is inside an instance and what may still come to it. Virtual queues of instances
that could serve the same requests overlap. In a fleet of unlike instances a long request goes only to where
all the tokens that it may need fit, or, where no instance is so large, to the largest that serve its model.
"""

from __future__ import annotations

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.types import Bools, Ints


def inside(cluster: Cluster, name: str, rows: Ints) -> Bools:
    """Tell which rows are inside this instance."""
    backlog = cluster.backlog
    return np.asarray(backlog.sent[rows] & (backlog.instance[rows] == cluster.code(name)), np.bool_)


def eligible(cluster: Cluster, name: str, rows: Ints, *, later: bool = False) -> Bools:
    """Tell which rows are queued and could be sent to this instance.

    later: the planner swaps models, so that a request may wait for a larger instance to load its model.
    """
    backlog, instance = cluster.backlog, cluster.instances[name]
    queued = ~backlog.sent[rows] & (backlog.model[rows] == cluster.code(instance.model))
    longest = backlog.longest[rows]
    if longest.max(initial=0) > instance.limit and max_context(cluster, instance.model, later) > instance.limit:
        queued &= longest <= instance.limit
    return np.asarray(queued, np.bool_)


def virtual_queue(cluster: Cluster, name: str, ranked: Ints, *, later: bool = False) -> Ints:
    """Return the ranked rows that are inside an instance or could be sent to it, in their order."""
    mine = inside(cluster, name, ranked) | eligible(cluster, name, ranked, later=later)
    return np.asarray(ranked[mine], np.int64)


def max_context(cluster: Cluster, model: str, later: bool) -> int:
    """Return the tokens of the longest request of a model that any instance can hold.

    Instances count that serve the model or are loading it; with `later` also those that could load it.
    """
    limits = [instance.limit for instance in cluster.instances.values() if instance.model == model]
    known = [instance for instance, target in cluster.loading.values() if later or target == model]
    known += cluster.instances.values() if later else ()
    limits += [other.limit for instance in known for other in instance.loadable if other.model == model]
    return max(limits, default=0)
