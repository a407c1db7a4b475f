"""Which requests could an instance still get? What every planner asks before it orders them.

A line holds what is inside an instance and what may still come. A fleet of unlike instances has some where a
long request does not fit: it goes only to where all it may need fits, or, where none is so large, to the
max_context one that serves its model.
"""

from __future__ import annotations

import numpy as np

from headway.core.cluster import Cluster
from headway.types import Bools, Ints


def inside(cluster: Cluster, name: str, rows: Ints) -> Bools:
    """Tell which rows are in this instance."""
    backlog = cluster.backlog
    return np.asarray(backlog.sent[rows] & (backlog.instance[rows] == cluster.code(name)), np.bool_)


def eligible(cluster: Cluster, name: str, rows: Ints, *, later: bool = False) -> Bools:
    """Tell which rows are still ours and could be sent to this instance.

    later: the planner swaps models, so that a request may wait for a roomier instance to load its model.
    """
    backlog, instance = cluster.backlog, cluster.instances[name]
    ours = ~backlog.sent[rows] & (backlog.model[rows] == cluster.code(instance.model))
    longest = backlog.longest[rows]
    if (
        longest.max(initial=0) > instance.limit
        and max_context(cluster, instance.model, later) > instance.limit
    ):
        ours &= longest <= instance.limit
    return np.asarray(ours, np.bool_)


def line(cluster: Cluster, name: str, ranked: Ints, *, later: bool = False) -> Ints:
    """Return the ranked rows that are inside an instance or could be sent to it, in their order."""
    mine = inside(cluster, name, ranked) | eligible(cluster, name, ranked, later=later)
    return np.asarray(ranked[mine], np.int64)


def max_context(cluster: Cluster, model: str, later: bool) -> int:
    """Return the tokens of the longest request of a model that an instance takes: now, when what it loads is
    there, or after some swap (later)."""
    limits = [instance.limit for instance in cluster.instances.values() if instance.model == model]
    known = [instance for instance, target in cluster.loading.values() if later or target == model]
    known += cluster.instances.values() if later else ()
    limits += [other.limit for instance in known for other in instance.loadable if other.model == model]
    return max(limits, default=0)
