"""The ranks by which queue, engine and compiled loop order requests, written once and compiled once.

A rank is a level and two numbers, compared in this order, lower first; of equal ranks the request that came
first goes first. The queue (`policy/plan/ordered.py`), the packers (`policy/pack/kernels.py`) and the
compiled loop (`simulate/compiled_loop.py`) call the functions below on their own columns.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from headway.compiled import compiled_within
from headway.types import Floats, Ints

Value = TypeVar("Value", float, Floats)

# Kinds of rank.
ARRIVAL, PRIORITY, DUE, ATTAINABLE = range(4)
# Levels; only `ATTAINABLE` and least slack use more than the first.
ON_TIME, LATE, BEST_EFFORT, FAR = range(4)
# Requests due in more seconds than this rank after overdue ones (`Ordered.counts_late`).
FAR_S = 600.0
# Requests whose deadline is further away than this yield to all others, also begun and in the choice of an engine.
DISTANT_S = 3600.0
# Soft target in seconds that the queue assumes for requests without one; the engine knows better.
SOFT = 10.0
# The rank (`Jobs.urgency`) of a promise that is beyond its tenant's fair share (`policy/plan/tenant_parts.py`), or that
# its class can spare (`policy/core/attainment.py`): it is the first to be given up where not all can be kept, and
# otherwise as with rank 0. Best effort has greater ones.
BEYOND = 5e-7


@compiled_within
def outer(urgency: float) -> float:
    """Return the rank by which a packer orders what it keeps, where `BEYOND` counts as 0."""
    return 0.0 if urgency == BEYOND else urgency


@compiled_within
def due_at(arrival: Value, ttft: Value, e2e: Value) -> Value:
    """Return when the first token or the whole answer is due, whichever comes first; inf = never."""
    return arrival + np.minimum(ttft, e2e)  # type: ignore[no-any-return]


@compiled_within
def level_of(slack: float, waits: bool) -> int:
    """Return whether a request is on time, has lost its first token already, or is best effort.

    slack: seconds until it is due, inf = never. waits: nothing of its answer is out yet. Under overload plain
    earliest-deadline order spends itself on requests that are lost already, and so loses the next ones too.
    """
    if np.isinf(slack):
        return BEST_EFFORT
    return LATE if slack < 0 and waits else ON_TIME


@compiled_within
def first_key(kind: int, arrival: float, priority: int, due: float) -> float:
    """Return the number that decides within a level."""
    if kind == PRIORITY:
        return float(priority)
    return float(arrival if kind == ARRIVAL else due)


def first_keys(kind: int, arrival: Floats, priority: Ints, due: Floats) -> Floats:
    """Return `first_key` of many requests."""
    return np.asarray({PRIORITY: priority, ARRIVAL: arrival}.get(kind, due), float)
