"""The working state of one EcoServe decision, which `iteration.py` and `pipelining.py` fill. Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.memory.preemption_cost import SWAP, cheapest, preemption_costs
from headway.policy.pack.ecoserve.queues import ACTIVE, GONE, RowView
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
# What a packer has done so far: iterations in which generations were scheduled (full), and in which the last decision
# was kept; answers that went on from the pool (extended), and that had to pause for KV (stalled); loans; times when a
# lender met a borrower that had not gone (late), and when only taking a row's KV let any row run (rescued).
DONE = ("full", "kept", "extended", "stalled", "lent", "late", "rescued")
# What it keeps from one iteration to the next: that, time-synced groups, and whether to schedule again at once.
PROGRESS = np.dtype([(name, int) for name in ("groups", "again", *DONE)])


class Options(NamedTuple):
    """Which parts of the method are on, and its numbers.

    synced: time-synced groups (else every iteration is scheduled).
    ordered: 3.3's order (else by arrival).
    lends: KVC pipelining.
    tfs: target forward size, tokens of an iteration.
    reserve: share of the KV that is the pool.
    buffer: tokens that a borrower must be predicted to end before its lender comes,
    buffer_share: and this share of the tokens that it is predicted to make.
    extra: tokens an answer gets when it outgrows its prediction.
    idle: share of the KV that lies free before groups are refilled although none has ended.
    grain: tokens by which predicted lengths are equal, 0 = a block.
    loose: of borrowers of equal length the one with the latest deadline, else the first in the queue.
    fixed_ranges: deadlines in 3.3's ranges, of which the last begins at 2 s; else ranges that double.
    hosts_first: generations get allocations of their own before others may borrow, else after.
    lends_to_prompts: a borrower may be a prompt that waits.
    whole: a prompt is admitted with the KV of its answer where that is free, else with its own alone.
    by_cost: a row that must give way is copied, computed again or waited for, whichever is cheapest; else a
        borrower always gives way, and its KV is copied where the engine can.
    """

    synced: bool = True
    ordered: bool = True
    lends: bool = True
    tfs: int = 512
    reserve: float = 0.03
    buffer: int = 8
    extra: int = 32
    idle: float = 0.02
    buffer_share: float = 0.0
    grain: int = 0
    loose: bool = False
    fixed_ranges: bool = False
    hosts_first: bool = False
    lends_to_prompts: bool = True
    whole: bool = True
    by_cost: bool = True


class EcoServeParams(NamedTuple):
    """An `EcoServe` packer as compiled loops take it.

    options: with `grain` in tokens, 0 no more. tfs: target forward size, tokens of an iteration.
    max_running: rows that compute in an iteration. reserve: blocks of the pool.
    idle: free blocks that are worth a decision.
    copy_seconds: to move one token's KV between device and host; inf = not possible.
    longest: tokens that one request may have. row_chunk: as in `KvBudget`.
    """

    options: Options
    tfs: int
    max_running: int
    reserve: int
    idle: int
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


class Turn(NamedTuple):
    """The arguments of one decision.

    status, progress: the packer's, updated in place. size: tokens of a block. theta: as in
    `OnlineLatency`.
    """

    params: EcoServeParams
    jobs: Rows
    status: Rows
    progress: Rows
    seen: RowView
    size: int
    now: float
    theta: Floats
    buffer: StepBuffer


@compiled
def put(buffer: StepBuffer, row: int, tokens: int, hold: int) -> None:
    """Schedule tokens of a row, with `hold` tokens reserved for it."""
    n = buffer.counts[0]
    i = n["order"]
    buffer.order[i], buffer.tokens[i], buffer.hold[i] = row, tokens, hold
    n["order"] += 1


@compiled
def leave(turn: Turn, row: int) -> None:
    """Take a row's KV, to the host or for good, whichever is cheaper; it waits again.

    Without `by_cost` to the host wherever the engine can copy.
    """
    params, jobs, status, buffer = turn.params, turn.jobs, turn.status, turn.buffer
    n = buffer.counts[0]
    costs = preemption_costs(turn.theta, jobs["computed"][row], np.inf, n["generating"], params.copy_seconds)
    if cheapest(costs) == SWAP or (not params.options.by_cost and params.copy_seconds < np.inf):
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
