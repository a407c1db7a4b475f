"""The cost of preempting a request by pausing, swapping or recomputing it (QLM 2.4 and 5), in seconds.

Which way is cheapest depends on the request: recomputing costs its prefill, swapping costs two copies of its
KV, and a pause delays the request that waits for it. All three follow from the engine's learned latency.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.forecast.latency.online import prefill_of
from headway.types import Bools, Floats, Ints

PAUSE, SWAP, RECOMPUTE = range(3)


class PreemptionCosts(NamedTuple):
    """Seconds lost by each way of preemption; a pause costs the waiting row's share of the batch."""

    pause: float
    swap: float
    recompute: float


@compiled
def preemption_costs(theta: Floats, tokens: int, wait: float, running: int, copy_seconds: float) -> PreemptionCosts:
    """Return what it costs to free the KV of `tokens` tokens and to restore it.

    theta: coefficients of the learned latency.
    wait: iterations that a pause would last; inf = a pause does not help.
    running: rows in the batch, of which a pause idles one.
    copy_seconds: of one token between device and host; inf = not known, and nothing is swapped.
    """
    iteration = prefill_of(theta, 1.0)  # about a decode: reading the weights dominates both
    return PreemptionCosts(
        wait * iteration / max(running, 1),
        2.0 * tokens * copy_seconds if copy_seconds < math.inf else math.inf,
        prefill_of(theta, float(tokens)),
    )


@compiled
def are_swapped(tokens: Ints, theta: Floats, copy_seconds: float) -> Bools:
    """Tell of rows that yield whether their KV is copied to the host, which costs less than to compute it.

    tokens: computed, by row. theta, copy_seconds: as in `preemption_costs`.
    """
    swapped = np.zeros(tokens.size, np.bool_)
    for i in range(tokens.size):
        if tokens[i]:
            costs = preemption_costs(theta, tokens[i], np.inf, 1, copy_seconds)
            swapped[i] = cheapest(costs) == SWAP
    return swapped


@compiled
def cheapest(costs: PreemptionCosts) -> int:
    """Return PAUSE, SWAP or RECOMPUTE; of equals the first."""
    if costs.pause <= costs.swap and costs.pause <= costs.recompute:
        return PAUSE
    return SWAP if costs.swap <= costs.recompute else RECOMPUTE
