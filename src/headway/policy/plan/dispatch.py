"""From a plan to commands: which queued requests are handed to engines now, which models are swapped in.

The first requests of a virtual queue belong inside its instance: as many as its dispatch window and its KV
hold. Those of them that are still queued are sent now. An urgent arrival at the head is thereby sent even
when the engine is full, and the engine's packer makes room; a request further back stays in the queue until
the last moment (pull). A model that an instance shall serve and does not is swapped in (QLM 5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.policy.placement.cost import Engine, least
from headway.types import Bools, Ints, Plan, Send, Swap, Warm


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
    """Return the ranked rows that are inside an instance or could be sent to it, in their order (QLM 4).

    Virtual queues of instances that could serve the same requests overlap. In a fleet of unlike instances a long
    request goes only to where all the tokens that it may need fit, or, where no instance is so large, to the largest
    that serve its model.
    """
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


@dataclass(frozen=True, slots=True)
class Offers:
    """Queued rows in one order, and instances inside which the first of them belong.

    count: how many of the rows belong inside each instance.
    """

    names: Sequence[str]
    rows: Sequence[int]
    count: Sequence[int]


def sends(queues: Mapping[str, Ints], cluster: Cluster, now: float, *, pull: bool = True) -> list[Send]:
    """Return the requests to hand to engines now, given the whole virtual queue of each instance.

    pull: requests stay in the queue until their instance has room; otherwise all are handed over.
    `Request.engines` is ignored: otherwise a request in the queue of an instance outside it would wait for ever.
    """
    offers = [_offers(cluster, name, rows, pull) for name, rows in queues.items() if name in cluster.instances]
    return [
        Send(str(cluster.backlog.keys[row]), name)
        for row, name in spread(offers, queues, cluster, now, restricts=False)
    ]


def spread(
    offers: Sequence[Offers], fleet: Iterable[str], cluster: Cluster, now: float, *, restricts: bool = True
) -> list[tuple[int, str]]:
    """Return each offered row once, with the allowed instance on which it costs least; leave out rows without one.

    `placement/cost.py` has the rule; of equal instances the first of the fleet gets it. restricts: as in `Planner`.
    """
    offered: dict[int, set[str]] = {}
    for one in offers:
        for name, count in zip(one.names, one.count, strict=True):
            for row in one.rows[:count]:
                if not restricts or cluster.may(row, name):
                    offered.setdefault(row, set()).add(name)
    if not offered:
        return []
    names, sent = list(fleet), defaultdict[str, float](float)
    return [
        (row, cheapest(row, [name for name in names if name in some], cluster, now, sent))
        for row, some in offered.items()
    ]


def cheapest(row: int, names: list[str], cluster: Cluster, now: float, sent: dict[str, float]) -> str:
    """Return the instance on which a row costs least.

    sent: seconds of prompts that go to each instance before it; is updated.
    """
    if len(names) == 1:
        return names[0]
    engines = [Engine(cluster.instances[name], cluster.code(name), sent[name]) for name in names]
    costs = cluster.placement.costs(cluster.backlog, row, engines, now)
    best = least(costs)
    sent[names[best]] += costs[best].own
    found, most = costs[best].found, max(cost.found for cost in costs)
    cluster.placement.planned(str(cluster.backlog.keys[row]), names[best], found, moved=most > found)
    return names[best]


def swaps(plan: Plan, cluster: Cluster) -> list[Swap]:
    """Return the swaps to begin: instances that take work and shall serve another model than they do."""
    if not plan.swap:
        return []
    wanted = [
        Swap(name, model)
        for name, model in plan.swap.items()
        if name in cluster.instances and cluster.instances[name].model != model
    ]
    for swap in wanted:
        assert cluster.instances[swap.instance].can_load(swap.model), f"{swap.instance} cannot load {swap}"
    return wanted


def warms(plan: Plan, cluster: Cluster) -> list[Warm]:
    """Return the weights to bring into host memories: one model at a time per instance, none twice."""
    if not plan.warm:
        return []
    wanted = [
        Warm(name, model)
        for name, model in plan.warm.items()
        if name in cluster.instances and name not in cluster.warming and model not in cluster.instances[name].warm
    ]
    for warm in wanted:
        assert cluster.instances[warm.instance].can_load(warm.model), f"{warm.instance} cannot load {warm}"
    return wanted


def _offers(cluster: Cluster, name: str, rows: Ints, pull: bool) -> Offers:
    """Return the rows of a virtual queue that belong inside its instance and are not there yet."""
    backlog, instance = cluster.backlog, cluster.instances[name]
    if pull:
        rows = rows[: instance.window]
        places = backlog.places[rows]
        rows = rows[np.cumsum(places) - places < instance.window]
        blocks = np.ceil(backlog.tokens[rows] / instance.block_size)
        fits = np.cumsum(blocks) <= instance.blocks_total
        fits[:1] = True  # alone it always may try: the engine itself refuses what can never fit
        rows = rows[fits]
    queued = rows[~backlog.sent[rows]]
    return Offers([name], queued.tolist(), [queued.size])
