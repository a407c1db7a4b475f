"""A request must give up its place: recompute it, swap it, or let it pause? (QLM 2.4 and 5, insight 2.)

Which is cheaper depends on the job: recomputing costs the seconds of its prefill, swapping those of two
copies, and a pause only delays the one who waits. All three follow from the pace of the machine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from headway.compiled import compiled
from headway.forecast.latency.online import prefill_of
from headway.types import Floats

PAUSE, SWAP, RECOMPUTE = range(3)


class Costs(NamedTuple):
    """Seconds that one engine loses by each way; a pause counts as the waiting row's share of the batch."""

    pause: float
    swap: float
    recompute: float


@compiled
def costs_of(theta: Floats, tokens: int, wait: float, running: int, copy_seconds: float) -> Costs:
    """Return what it costs to get `tokens` of KV out of the way and back.

    theta: the learned pace. wait: iterations that a pause would last (inf = a pause does not help). running:
    rows in the batch, of which a pause idles one. copy_seconds: of one token between device and host (inf
    when not known: then nothing is swapped).
    """
    one = prefill_of(theta, 1.0)  # about an iteration: reading the weights dominates both
    return Costs(
        wait * one / max(running, 1),
        2.0 * tokens * copy_seconds if copy_seconds < math.inf else math.inf,
        prefill_of(theta, float(tokens)),
    )


@compiled
def cheapest(costs: Costs) -> int:
    """Return PAUSE, SWAP or RECOMPUTE; of equals the first."""
    if costs.pause <= costs.swap and costs.pause <= costs.recompute:
        return PAUSE
    return SWAP if costs.swap <= costs.recompute else RECOMPUTE
