"""From a plan to commands: which queued requests are handed to engines now, which models are swapped in.

The first requests of a virtual queue belong inside its instance: as many as its dispatch window and its KV
hold. Those of them that are still queued are sent now. An urgent arrival at the head is thereby sent even
when the engine is full, and the engine's packer makes room; a request further back stays in the queue until
the last moment (pull). A model that an instance shall serve and does not is swapped in (QLM 5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.types import Ints, Plan, Send, Swap, Warm


@dataclass(frozen=True, slots=True)
class Offers:
    """Queued rows in one order, and instances inside which the first of them belong.

    places: of each row. count: how many of the rows belong inside each instance. load: places of the requests
    that are there. window: its dispatch window.
    """

    names: Sequence[str]
    rows: Sequence[int]
    places: Sequence[int]
    count: Sequence[int]
    load: Sequence[int]
    window: Sequence[int]


def sends(queues: Mapping[str, Ints], cluster: Cluster, *, pull: bool = True) -> list[Send]:
    """Return the requests to hand to engines now, given the whole virtual queue of each instance.

    pull: requests stay in the queue until their instance has room; otherwise all are handed over.
    """
    offers = [_offers(cluster, name, rows, pull) for name, rows in queues.items() if name in cluster.instances]
    return [Send(str(cluster.backlog.keys[row]), name) for row, name in spread(offers, queues)]


def spread(offers: Sequence[Offers], fleet: Iterable[str]) -> list[tuple[int, str]]:
    """Return each offered row once, with the instance that gets it: the least loaded that it is offered to.

    Load is relative to the dispatch window; of equally loaded instances the first of the fleet gets it.
    """
    if not offers:
        return []
    one, begin, same = _joined(offers, fleet)
    end = [first + count for first, count in zip(begin, one.count, strict=True)]
    return [(one.rows[at], one.names[i]) for at, i in _spread(same, begin, end, one)]


def _joined(offers: Sequence[Offers], fleet: Iterable[str]) -> tuple[Offers, list[int], Sequence[int]]:
    """Return all offers as one, instances by the fleet's order.

    With it, where each instance's rows begin, and numbers of the rows that are equal for equal rows.
    """
    if len(offers) == 1:  # by far the most frequent: by the fleet's order already, and no row twice
        return offers[0], [0] * len(offers[0].names), range(len(offers[0].rows))
    place, first, found = {name: i for i, name in enumerate(fleet)}, 0, list[tuple[int, ...]]()
    for one in offers:
        columns = (map(place.__getitem__, one.names), one.count, one.load, one.window)
        found += [(*column, first) for column in zip(*columns, strict=True)]
        first += len(one.rows)
    names = [name for one in offers for name in one.names]
    rows = [row for one in offers for row in one.rows]
    places = [some for one in offers for some in one.places]
    names.sort(key=place.__getitem__)
    _, count, load, window, begin = zip(*sorted(found), strict=True)
    return Offers(names, rows, places, count, load, window), [*begin], rows


def _spread(same: Sequence[int], begin: list[int], end: Sequence[int], one: Offers) -> list[tuple[int, int]]:
    """Return indices of rows and the instances that get them, in this order; `begin` moves.

    begin, end: indices of the rows offered to an instance. same: equal for equal rows.
    """
    load, window = [*one.load], one.window
    shares = [
        inf if first == last else inside / most
        for first, last, inside, most in zip(begin, end, load, window, strict=True)
    ]
    taken, out = set[int](), list[tuple[int, int]]()
    while (least := min(shares)) < inf:
        i = shares.index(least)
        while begin[i] < end[i] and same[begin[i]] in taken:
            begin[i] += 1
        if begin[i] == end[i]:
            shares[i] = inf
            continue
        out.append((begin[i], i))
        taken.add(same[begin[i]])
        load[i] += one.places[begin[i]]
        shares[i] = load[i] / window[i]
    return out


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
    inside = int(backlog.places[cluster.inside(name).rows].sum())
    places = backlog.places[queued].tolist()
    return Offers([name], queued.tolist(), places, [queued.size], [inside], [instance.window])
