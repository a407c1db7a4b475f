"""The best priority mapping of a few requests, by exhaustive search (the strawman of SLO-aware 4.3) and exactly.

`exhaustive` tries every sequence of batches. `exact`, for batches of one, is a dynamic program: for every set of
requests served first and every number of SLOs met, it keeps the smallest sum of latencies, 2^n * n numbers
instead of n! sequences. `most_met` bounds the attainment of any number of requests.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from headway.compiled import compiled, compiled_in_place
from headway.policy.core.mapping import Records, execution, last_start
from headway.types import Floats, Ints


def exhaustive(costs: Records, limit: int) -> float:
    """Return the best G over all orders and batches of at most `limit`, requests per second of latency.

    costs: records of `mapping.COST`, at most 20.
    """
    masks = np.array([mask for mask in range(1, 1 << costs.size) if mask.bit_count() <= limit])
    seconds, spent = np.zeros(masks.size), np.zeros(masks.size)
    last = np.array([[last_start(costs, i, size) for size in range(limit + 1)] for i in range(costs.size)])
    for number, mask in enumerate(masks.tolist()):
        each = [execution(costs, i, mask.bit_count()) for i in range(costs.size) if mask >> i & 1]
        seconds[number], spent[number] = max(each), sum(each)
    best = np.zeros(1)
    everything = (1 << costs.size) - 1
    _try_all((masks, seconds, spent, last), everything, 0.0, float(costs["waited"].sum()), 0, best)
    return float(best[0])


@compiled_in_place
def _try_all(
    batches: tuple[Ints, Floats, Floats, Floats], left: int, now: float, latency: float, met: int, best: Floats
) -> int:
    """Update `best` with the best G of all continuations; return their number.

    left: a bit for each request that is not in a batch yet.
    """
    if left == 0:
        best[0] = max(best[0], met / latency)
        return 1
    masks, seconds, spent, last = batches
    ways = 0
    for number in range(masks.size):
        mask = masks[number]
        if mask & ~left:
            continue
        size, more = 0, 0
        for i in range(last.shape[0]):
            size += mask >> i & 1
        for i in range(last.shape[0]):
            more += (mask >> i & 1) and last[i, size] >= now
        later = latency + size * now + spent[number]
        ways += _try_all(batches, left & ~mask, now + seconds[number], later, met + more, best)
    return ways


def exact(costs: Records) -> float:
    """Return the best G over all orders, one request at a time."""
    last = np.array([last_start(costs, i, 1) for i in range(costs.size)])
    seconds = np.array([execution(costs, i, 1) for i in range(costs.size)])
    latency = _least_latencies(seconds, last) + costs["waited"].sum()
    return float((np.arange(costs.size + 1) / latency).max())


def most_met(costs: Records) -> int:
    """Return how many requests meet their SLO at most over all orders, one request at a time (Moore-Hodgson)."""
    seconds = [execution(costs, i, 1) for i in range(costs.size)]
    due = [last_start(costs, i, 1) + seconds[i] for i in range(costs.size)]
    now, longest = 0.0, list[float]()
    for i in sorted(range(costs.size), key=due.__getitem__):
        heappush(longest, -seconds[i])
        now += seconds[i]
        if now > due[i]:
            now += heappop(longest)
    return len(longest)


@compiled
def _least_latencies(seconds: Floats, last: Floats) -> Floats:
    """Return the smallest sum of latencies by the number of SLOs met; inf = impossible."""
    n = seconds.size
    least = np.full((1 << n, n + 1), np.inf)
    least[0, 0] = 0.0
    for served in range(1 << n):
        now = 0.0
        for i in range(n):
            now += seconds[i] * (served >> i & 1)
        for i in range(n):
            if served >> i & 1:
                continue
            met = int(last[i] >= now)
            for before in range(n + 1 - met):
                after = least[served, before] + now + seconds[i]
                then = served | 1 << i
                least[then, before + met] = min(least[then, before + met], after)
    return np.asarray(least[-1])
