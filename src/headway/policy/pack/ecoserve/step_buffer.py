"""The working state of one EcoServe decision, which `iteration.py` and `pipelining.py` fill. Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.memory.preemption_cost import SWAP, cheapest, preemption_costs
from headway.policy.pack.ecoserve.queues import ACTIVE, GONE
from headway.types import Floats, Ints

Rows = NDArray[np.void]
# Sizes of a buffer's lists (order, loans, saves, evicts), free blocks, blocks of prompts that wait to
# generate (pool), tokens left for prompts in this iteration, free slots, and rows that generate or will.
COUNTS = np.dtype(
    [
        (name, int)
        for name in ("order", "loans", "saves", "evicts", "free", "pool", "prompt_tokens", "free_slots", "generating")
    ]
)
# What a packer keeps from one iteration to the next: time-synced groups, whether to schedule again at once,
# and what it has done so far (`packer.Counts`).
PROGRESS = np.dtype(
    [(name, int) for name in ("groups", "again", "full", "kept", "extended", "stalled", "lent", "late", "rescued")]
)


class EcoServeParams(NamedTuple):
    """An `EcoServe` packer as compiled loops take it.

    tfs: target forward size, tokens of an iteration.
    max_running: rows that compute in an iteration.
    reserve: blocks of the pool.
    buffer: tokens that a borrower must be predicted to end before its lender comes,
    buffer_share: and this share of what it is predicted to make.
    grain: tokens by which predicted lengths are compared.
    extra: tokens that an answer gets when it outgrows its prediction.
    idle: free blocks that are worth a decision.
    synced, ordered, lends, loose, fixed_ranges, hosts_first, lends_to_prompts, whole, by_cost: as in
        `packer.Options`.
    copy_seconds: to move one token's KV between device and host; inf = not possible.
    longest: tokens that one request may have. row_chunk: as in `KvBudget`.
    """

    tfs: int
    max_running: int
    reserve: int
    buffer: int
    buffer_share: float
    grain: int
    extra: int
    idle: int
    synced: bool
    ordered: bool
    lends: bool
    loose: bool
    fixed_ranges: bool
    hosts_first: bool
    lends_to_prompts: bool
    whole: bool
    by_cost: bool
    copy_seconds: float
    longest: int
    row_chunk: int


class StepBuffer(NamedTuple):
    """A decision in the making: lists, and their sizes in `counts`.

    order, tokens, hold: rows that run, their tokens, the tokens reserved for each.
    borrower, lender, start, span: loans that begin.
    save, evict: rows that lose their KV, to the host or for good.
    counts: one record of `COUNTS`.
    """

    order: Ints
    tokens: Ints
    hold: Ints
    borrower: Ints
    lender: Ints
    start: Ints
    span: Ints
    save: Ints
    evict: Ints
    counts: Rows


@compiled
def put(buffer: StepBuffer, row: int, tokens: int, hold: int) -> None:
    """Schedule tokens of a row, with `hold` tokens reserved for it."""
    n = buffer.counts[0]
    i = n["order"]
    buffer.order[i], buffer.tokens[i], buffer.hold[i] = row, tokens, hold
    n["order"] += 1


@compiled
def leave(params: EcoServeParams, jobs: Rows, status: Rows, row: int, theta: Floats, buffer: StepBuffer) -> None:
    """Take a row's KV, to the host or for good, whichever is cheaper; it waits again.

    Without `by_cost` to the host wherever the engine can copy.
    """
    n = buffer.counts[0]
    costs = preemption_costs(theta, jobs["computed"][row], np.inf, n["generating"], params.copy_seconds)
    if cheapest(costs) == SWAP or (not params.by_cost and params.copy_seconds < np.inf):
        buffer.save[n["saves"]], n["saves"] = row, n["saves"] + 1
    else:
        buffer.evict[n["evicts"]], n["evicts"] = row, n["evicts"] + 1
    if status["state"][row] == ACTIVE:
        n["generating"] -= 1
    else:
        n["pool"] -= jobs["blocks"][row]
    n["free"] += _freed(jobs, row)
    n["free_slots"] += 1
    status["state"][row] = GONE


@compiled
def _freed(jobs: Rows, row: int) -> int:
    """Return the blocks that are free when a row leaves: its own, less those that it has lent."""
    kept = 0
    if jobs["first_lent_block"][row] and jobs["loan_blocks"][row] == 0:
        for other in range(jobs.size):
            if jobs["loan_blocks"][other] and jobs["lender"][other] == row:
                kept += jobs["loan_blocks"][other]
    return int(jobs["blocks"][row] - kept)
