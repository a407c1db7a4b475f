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
from headway.types import Ints, Plan, Send, Swap, Warm


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
