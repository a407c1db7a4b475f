"""What is a decision of the decoupled scheduler written on? `filling.py` and `guests.py` write it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.memory.preemption_cost import SWAP, cheapest, preemption_costs
from headway.pack.ecoserve.queues import ACTIVE, GONE
from headway.types import Floats, Ints

Rows = NDArray[np.void]
# Places in `StepBuffer.n`: sizes of its lists; blocks free, and held by prompts that wait to generate; tokens left
# for prompts; free slots; generations.
ORDER, LOANS, SAVES, EVICTS, FREE, POOL, TOKENS, SEATS, RUNS = range(9)
# Places in the packer's `marks`.
(GROUPS, AGAIN, FULL, KEPT, EXTENDED, STALLED, LENT, LATE, RESCUED) = range(9)


class EcoServeParams(NamedTuple):
    """A `EcoServe` packer as compiled loops take it; reserve in blocks, the rest in tokens.

    longest: tokens that one request may have.
    """

    tfs: int
    budget: int
    reserve: int
    buffer: int
    grain: int
    extra: int
    idle: int
    synced: bool
    ordered: bool
    lends: bool
    copy_seconds: float
    longest: int


class StepBuffer(NamedTuple):
    """A decision in the making: lists with their sizes in n. hold: tokens reserved per row of order."""

    order: Ints
    tokens: Ints
    hold: Ints
    guest: Ints
    host: Ints
    start: Ints
    span: Ints
    save: Ints
    evict: Ints
    n: Ints


@compiled
def put(desk: StepBuffer, row: int, tokens: int, hold: int) -> None:
    i = desk.n[ORDER]
    desk.order[i], desk.tokens[i], desk.hold[i] = row, tokens, hold
    desk.n[ORDER] += 1


@compiled
def leave(rule: EcoServeParams, jobs: Rows, mine: Rows, row: int, theta: Floats, desk: StepBuffer) -> None:
    """Take a row's KV, to the host or for good, whichever is cheaper; it waits again."""
    n = desk.n
    costs = preemption_costs(theta, jobs["computed"][row], np.inf, n[RUNS], rule.copy_seconds)
    if cheapest(costs) == SWAP:
        desk.save[n[SAVES]], n[SAVES] = row, n[SAVES] + 1
    else:
        desk.evict[n[EVICTS]], n[EVICTS] = row, n[EVICTS] + 1
    if mine["state"][row] == ACTIVE:
        n[RUNS] -= 1
    else:
        n[POOL] -= jobs["blocks"][row]
    n[FREE] += _freed(jobs, row)
    n[SEATS] += 1
    mine["state"][row] = GONE


@compiled
def _freed(jobs: Rows, row: int) -> int:
    """Return the blocks that are free when a row leaves: its own, less those its guests live in."""
    kept = 0
    if jobs["first_lent_block"][row] and jobs["loan_blocks"][row] == 0:
        for other in range(jobs.size):
            if jobs["loan_blocks"][other] and jobs["lender"][other] == row:
                kept += jobs["loan_blocks"][other]
    return int(jobs["blocks"][row] - kept)
