"""The ranks by which queue, engine and compiled loop order requests, written once and compiled once.

A rank is a level and two numbers, compared in this order, lower first; of equal ranks the request that came
first goes first. The queue (`plan/ordered.py`), the packers (`pack/kernels.py`) and the compiled loop
(`sim/compiled_loop.py`) call the functions below on their own columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.types import Ints

# Kinds of rank.
ARRIVAL, PRIORITY, DUE, ATTAINABLE = range(4)
# Levels; only `ATTAINABLE` and least slack use more than the first.
ON_TIME, LATE, BEST_EFFORT = range(3)

Rows = NDArray[np.void]


@compiled
def due_at(arrival: float, ttft: float, e2e: float) -> float:
    """Return the instant at which the first promised thing is owed, inf = nothing is promised."""
    return float(arrival + min(ttft, e2e))


@compiled
def level_of(slack: float, waits: bool) -> int:
    """Return whether a request is on time, has lost its first token already, or is best effort.

    slack: seconds until it is due, inf = never. waits: nothing of its answer is out yet. Under overload plain
    earliest-deadline order spends itself on requests that are lost already, and so loses the next ones too.
    """
    if np.isinf(slack):
        return BEST_EFFORT
    return LATE if slack < 0 and waits else ON_TIME


@compiled
def first_key(kind: int, arrival: float, priority: int, due: float) -> float:
    """Return the number that decides within a level."""
    if kind == PRIORITY:
        return float(priority)
    return float(arrival if kind == ARRIVAL else due)


@compiled
def rank_before(a: tuple[int, float, float, int], b: tuple[int, float, float, int]) -> bool:
    """Tell whether a goes before b; both are (level, first key, arrival, serial)."""
    if a[0] != b[0]:
        return a[0] < b[0]
    if a[1] != b[1]:
        return a[1] < b[1]
    if a[2] != b[2]:
        return a[2] < b[2]
    return a[3] < b[3]


@compiled
def sent_ahead(
    kind: int, backlog: Rows, sent: Ints, block_size: int, rank: tuple[int, float, float, int]
) -> tuple[int, int]:
    """Return how many rows of `sent` go before `rank`, and the KV blocks that these are expected to fill.

    A request that was sent is never late: its first token may be out already.
    """
    count, blocks = 0, 0
    for row in sent:
        due, arrival = backlog["due"][row], backlog["arrival"][row]
        level = level_of(due, False) if kind == ATTAINABLE else ON_TIME
        key = first_key(kind, arrival, backlog["priority"][row], due)
        if rank_before((level, key, arrival, backlog["serial"][row]), rank):
            count += 1
            blocks += int(np.ceil(backlog["tokens"][row] / block_size))
    return count, blocks


@compiled
def blocks_of(backlog: Rows, sent: Ints, block_size: int) -> int:
    """Return the KV blocks that the rows of `sent` are expected to fill."""
    blocks = 0
    for row in sent:
        blocks += int(np.ceil(backlog["tokens"][row] / block_size))
    return blocks
