"""What must be done so that the cluster follows the plan? (QLM 5: the plan is not the action.)

The first requests of a line belong inside its instance: as many as its window and its KV hold. Those of
them that are still ours are sent now. An urgent arrival at the head of a line is thereby sent even when
the engine is full, and the engine's packer makes room; a request further back stays ours until the last
moment (pull). A model that an instance shall serve and does not is swapped in (QLM 5, model swapping).
"""

from __future__ import annotations

import numpy as np

from headway.core.cluster import Cluster
from headway.types import Ints, Plan, Send, Swap, Warm


def sends(plan: Plan, cluster: Cluster) -> list[Send]:
    """Return the requests to hand to engines now, most urgent first, each once."""
    there = [name for name in plan.lines if name in cluster.instances]
    offers = {name: _offers(cluster, name, plan.lines[name]) for name in there}
    load = {name: _inside(cluster, name) for name in offers}
    out: list[Send] = []
    taken: set[int] = set()
    while offers:
        name = min(offers, key=lambda n: load[n] / cluster.instances[n].window)
        row = next((row for row in offers[name] if row not in taken), None)
        if row is None:
            del offers[name]
            continue
        taken.add(row)
        load[name] += 1
        out += [Send(id, name) for id in cluster.backlog.names([row])]
    return out


def swaps(plan: Plan, cluster: Cluster) -> list[Swap]:
    """Return the swaps to begin: instances that take work and shall serve another model than they do."""
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


def _offers(cluster: Cluster, name: str, line: Ints) -> list[int]:
    """Return the rows of a line that belong inside its instance and are not there yet."""
    backlog, instance = cluster.backlog, cluster.instances[name]
    if not cluster.pull:
        return [int(row) for row in line[~backlog.sent[line]]]
    head = line[: instance.window]
    blocks = np.ceil(backlog.tokens[head] / instance.block_size)
    fits = np.cumsum(blocks) <= instance.blocks_total
    fits[:1] = True  # alone it always may try: the engine itself refuses what can never fit
    return [int(row) for row in head[fits & ~backlog.sent[head]]]


def _inside(cluster: Cluster, name: str) -> int:
    backlog = cluster.backlog
    mine = backlog.live & backlog.sent & (backlog.instance == cluster.code(name))
    return int(np.count_nonzero(mine))
