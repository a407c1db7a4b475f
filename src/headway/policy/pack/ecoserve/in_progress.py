"""Generations in progress: they go on, outgrow their prediction, or meet a loan that is due (EcoServe 3.2).

Compiled; `iteration.py` calls it first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.memory.preemption_cost import PAUSE, cheapest, preemption_costs
from headway.policy.memory.reservations import blocks_of, capacity_of, first_borrower
from headway.policy.pack.ecoserve.queues import ACTIVE, GONE, QUEUED, RowView, left_of
from headway.policy.pack.ecoserve.step_buffer import EcoServeParams, StepBuffer, leave, put
from headway.types import Bools, Floats, Ints

Rows = NDArray[np.void]


@compiled
def go_on(
    params: EcoServeParams,
    jobs: Rows,
    status: Rows,
    progress: Rows,
    seen: RowView,
    size: int,
    theta: Floats,
    buffer: StepBuffer,
) -> Bools:
    """Handle rows that reach the end of their KV, or of the part that they have not lent.

    Returns which of the active rows generate now.
    """
    goes = np.ones(seen.active.size, np.bool_)
    for i in range(seen.active.size):
        row = seen.active[i]
        end = blocks_of(jobs["computed"][row] + 1, size)
        if status["state"][row] == ACTIVE and jobs["first_lent_block"][row] and end > jobs["first_lent_block"][row]:
            goes[i] = _reach(params, jobs, status, progress, first_borrower(jobs, row), theta, buffer)
        if goes[i] and status["state"][row] == ACTIVE and end > capacity_of(jobs, row):
            _outgrow(params, jobs, status, progress, row, size, theta, buffer)
    return goes


@compiled
def _reach(
    params: EcoServeParams, jobs: Rows, status: Rows, progress: Rows, borrower: int, theta: Floats, buffer: StepBuffer
) -> bool:
    """Resolve a loan that is due: the lender pauses or the borrower leaves, whichever is cheaper.

    Without `by_cost` the borrower leaves, as in the paper.
    True when the lender goes on.
    """
    n = buffer.counts[0]
    if status["state"][borrower] == GONE:
        return True  # it has just outgrown its loan
    progress[0]["late"] += 1
    costs = preemption_costs(
        theta, jobs["computed"][borrower], left_of(jobs, status, borrower), n["generating"], params.copy_seconds
    )
    if jobs["held"][borrower] or (params.by_cost and cheapest(costs) == PAUSE):
        return False
    leave(params, jobs, status, borrower, theta, buffer)
    return True


@compiled
def _outgrow(
    params: EcoServeParams,
    jobs: Rows,
    status: Rows,
    progress: Rows,
    row: int,
    size: int,
    theta: Floats,
    buffer: StepBuffer,
) -> None:
    """Extend an answer that is longer than predicted: from the pool, else it pauses and keeps its KV.

    A borrower leaves instead.
    """
    n = buffer.counts[0]
    output_tokens = jobs["prompt"][row] + jobs["output_tokens"][row]
    if jobs["loan_blocks"][row]:
        progress[0]["late"] += 1
        status["goal"][row] = min(output_tokens + params.extra, params.longest)
        leave(params, jobs, status, row, theta, buffer)
        return
    more = min(blocks_of(params.extra, size), blocks_of(params.longest, size) - jobs["blocks"][row], n["free"])
    status["goal"][row] = min(output_tokens + params.extra, params.longest)
    if more > 0:
        progress[0]["extended"] += 1
        status["goal"][row] = min((jobs["blocks"][row] + more) * size, params.longest)
        n["free"] -= more
    else:
        progress[0]["stalled"] += 1
        status["state"][row] = QUEUED
        n["pool"] += jobs["blocks"][row]
        n["generating"] -= 1


@compiled
def put_active(params: EcoServeParams, status: Rows, active: Ints, goes: Bools, buffer: StepBuffer) -> None:
    """Schedule one token for each generation that was active before and goes on.

    They can be more than `max_running`: rows that control had held come back after others began.
    """
    n = buffer.counts[0]
    for i in range(active.size):
        if n["order"] >= params.max_running:
            break
        if goes[i] and status["state"][active[i]] == ACTIVE:
            put(buffer, active[i], 1, status["goal"][active[i]])
