"""From a plan to commands: which queued requests are handed to engines now, which models are swapped in.

The first requests of a virtual queue belong inside its instance: as many as its dispatch window and its KV
hold. Those of them that are still queued are sent now. An urgent arrival at the head is thereby sent even
when the engine is full, and the engine's packer makes room; a request further back stays in the queue until
the last moment (pull). A model that an instance shall serve and does not is swapped in (QLM 5).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headway.core.cluster import Cluster
from headway.types import Ints, Plan, Send, Swap, Warm


def sends(queues: Mapping[str, Ints], cluster: Cluster, *, pull: bool = True) -> list[Send]:
    """Return the requests to hand to engines now, given the whole virtual queue of each instance.

    pull: requests stay in the queue until their instance has room; otherwise all are handed over.
    """
    offers = {
        name: _offers(cluster, name, rows, pull) for name, rows in queues.items() if name in cluster.instances
    }
    return [Send(str(cluster.backlog.keys[row]), name) for row, name in spread(offers, cluster)]


def spread(offers: Mapping[str, Sequence[int]], cluster: Cluster) -> Iterator[tuple[int, str]]:
    """Yield each offered row once with the instance that gets it: the least loaded of those it is offered to.

    offers: queued rows that belong inside an instance, in its order. Load is relative to the dispatch window;
    of equals the first in `offers`.
    """
    window = {name: cluster.instances[name].window for name, rows in offers.items() if rows}
    load = {name: len(cluster.inside(name)) for name in window}
    heap = [(load[name] / window[name], i, name, iter(offers[name])) for i, name in enumerate(window)]
    heapq.heapify(heap)
    taken: set[int] = set()
    while heap:
        _, i, name, left = heap[0]
        row = next((row for row in left if row not in taken), None)
        if row is None:
            heapq.heappop(heap)
            continue
        taken.add(row)
        load[name] += 1
        heapq.heapreplace(heap, (load[name] / window[name], i, name, left))
        yield row, name


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
        if name in cluster.instances
        and name not in cluster.warming
        and model not in cluster.instances[name].warm
    ]
    for warm in wanted:
        assert cluster.instances[warm.instance].can_load(warm.model), f"{warm.instance} cannot load {warm}"
    return wanted


def _offers(cluster: Cluster, name: str, rows: Ints, pull: bool) -> list[int]:
    """Return the rows of a virtual queue that belong inside its instance and are not there yet."""
    backlog, instance = cluster.backlog, cluster.instances[name]
    if not pull:
        return [int(row) for row in rows[~backlog.sent[rows]]]
    head = rows[: instance.window]
    blocks = np.ceil(backlog.tokens[head] / instance.block_size)
    fits = np.cumsum(blocks) <= instance.blocks_total
    fits[:1] = True  # alone it always may try: the engine itself refuses what can never fit
    return [int(row) for row in head[fits & ~backlog.sent[head]]]
