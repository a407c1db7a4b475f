"""One scheduling iteration of EcoServe: decoupled queues, exact allocation, time-synced groups (3.2 and 3.3).

Compiled. Generations come first and fill the KV (as borrowers in another row's reserved tail where they fit,
else with an exact allocation of their own), then prompts, which fill the rest of the target forward size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.preemption_cost import PAUSE, cheapest, preemption_costs
from headway.policy.memory.reservations import allocatable, blocks_of, capacity_of, first_borrower
from headway.policy.pack.ecoserve.pipelining import AHEAD, lend_tails
from headway.policy.pack.ecoserve.queues import (
    ACTIVE,
    GONE,
    QUEUED,
    WAITING,
    RowView,
    best_fit,
    by_arrival,
    by_group,
    by_range,
    by_urgency,
    class_of,
    in_turn,
    left_of,
    look,
    need_of,
    same_range,
)
from headway.policy.pack.ecoserve.step_buffer import COUNTS, EcoServeParams, StepBuffer, Turn, leave, put
from headway.policy.pack.kernels import missing_of
from headway.types import Bools, Floats, Ints

Rows = NDArray[np.void]


@compiled
def decide(
    params: EcoServeParams,
    jobs: Rows,
    status: Rows,
    progress: Rows,
    rows: Ints,
    kv_budget: KvBudget,
    now: float,
    theta: Floats,
) -> StepBuffer:
    """Return the next iteration's decision; brings `status` and `progress` up to date.

    Rows are visited by arrival: decisions must not depend on row numbers, which differ between engines.
    """
    seen = look(jobs, status, by_arrival(jobs, rows), params.longest, progress[0]["groups"])
    buffer = _begin_buffer(jobs, status, seen, rows.size, kv_budget)
    n = buffer.counts[0]
    turn = Turn(params, jobs, status, progress, seen, kv_budget.size, now, theta, buffer)
    goes = _go_on(turn)
    if _is_due(params, progress, seen, buffer):
        progress[0]["full"] += 1
        _schedule(turn)
    else:
        progress[0]["kept"] += 1
    _put_active(turn, goes)
    _prompts(turn)
    if n["order"] == 0 and seen.queued.size + seen.prompts.size + seen.waiting.size + seen.active.size:
        _rescue(turn)
    return buffer


@compiled
def _begin_buffer(jobs: Rows, status: Rows, seen: RowView, size: int, kv_budget: KvBudget) -> StepBuffer:
    """Return an empty buffer with what is free now; size: rows of the engine, which no list exceeds."""
    lists, counts = np.zeros((9, size), np.int64), np.zeros(1, COUNTS)
    n = counts[0]
    running = seen.active.size + seen.queued.size + seen.prompts.size + seen.others
    n["free"], n["free_slots"], n["generating"] = kv_budget.free, kv_budget.slots - running, seen.active.size
    for row in seen.queued:
        n["pool"] += jobs["blocks"][row]
    for row in seen.prompts:
        if status["state"][row] == ACTIVE:
            n["generating"] += 1
        else:
            n["pool"] += jobs["blocks"][row]
    return StepBuffer(lists[0], lists[1], lists[2], lists[3], lists[4], lists[5], lists[6], lists[7], lists[8], counts)


@compiled
def _is_due(params: EcoServeParams, progress: Rows, seen: RowView, buffer: StepBuffer) -> bool:
    """Tell whether generations are scheduled now: not while all groups last and no new row waits for KV.

    Answers shorter than predicted free KV before their group ends; once `idle` blocks are free a decision is
    worth its time too.
    """
    n = buffer.counts[0]
    if not params.options.synced or seen.ended or seen.news or progress[0]["again"]:
        return True
    if params.options.lends and params.options.lends_to_prompts and seen.came and seen.waiting.size <= AHEAD:
        return True  # it may fit into another row's tail
    return bool(seen.queued.size and allocatable(n["free"], params.reserve, n["pool"]) >= params.idle)


# ---- generations in progress: they go on, outgrow their prediction, or meet a loan that is due (3.2)


@compiled
def _go_on(turn: Turn) -> Bools:
    """Handle rows that reach the end of their KV, or of the part that they have not lent.

    Returns which of the active rows generate now.
    """
    jobs, status, seen, size = turn.jobs, turn.status, turn.seen, turn.size
    goes = np.ones(seen.active.size, np.bool_)
    for i in range(seen.active.size):
        row = seen.active[i]
        end = blocks_of(jobs["computed"][row] + 1, size)
        if status["state"][row] == ACTIVE and jobs["first_lent_block"][row] and end > jobs["first_lent_block"][row]:
            goes[i] = _reach(turn, first_borrower(jobs, row))
        if goes[i] and status["state"][row] == ACTIVE and end > capacity_of(jobs, row):
            _outgrow(turn, row)
    return goes


@compiled
def _reach(turn: Turn, borrower: int) -> bool:
    """Resolve a loan that is due: the lender pauses or the borrower leaves, whichever is cheaper.

    Without `by_cost` the borrower leaves, as in the paper.
    True when the lender goes on.
    """
    params, jobs, status, n = turn.params, turn.jobs, turn.status, turn.buffer.counts[0]
    if status["state"][borrower] == GONE:
        return True  # it has just outgrown its loan
    turn.progress[0]["late"] += 1
    costs = preemption_costs(
        turn.theta, jobs["computed"][borrower], left_of(jobs, status, borrower), n["generating"], params.copy_seconds
    )
    if jobs["held"][borrower] or (params.options.by_cost and cheapest(costs) == PAUSE):
        return False
    leave(turn, borrower)
    return True


@compiled
def _outgrow(turn: Turn, row: int) -> None:
    """Extend an answer that is longer than predicted: from the pool, else it pauses and keeps its KV.

    A borrower leaves instead.
    """
    params, jobs, status, progress, size = turn.params, turn.jobs, turn.status, turn.progress, turn.size
    n = turn.buffer.counts[0]
    output_tokens = jobs["prompt"][row] + jobs["output_tokens"][row]
    if jobs["loan_blocks"][row]:
        progress[0]["late"] += 1
        status["goal"][row] = min(output_tokens + params.options.extra, params.longest)
        leave(turn, row)
        return
    more = min(blocks_of(params.options.extra, size), blocks_of(params.longest, size) - jobs["blocks"][row], n["free"])
    status["goal"][row] = min(output_tokens + params.options.extra, params.longest)
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
def _put_active(turn: Turn, goes: Bools) -> None:
    """Schedule one token for each generation that was active before and goes on.

    They can be more than `max_running`: rows that control had held come back after others began.
    """
    status, active, buffer = turn.status, turn.seen.active, turn.buffer
    n = buffer.counts[0]
    for i in range(active.size):
        if n["order"] >= turn.params.max_running:
            break
        if goes[i] and status["state"][active[i]] == ACTIVE:
            put(buffer, active[i], 1, status["goal"][active[i]])


# ---- generations that begin


@compiled
def _schedule(turn: Turn) -> None:
    """Fill the KV with queued generations, borrowers first (or last), and number the groups anew."""
    params, progress, n = turn.params, turn.progress, turn.buffer.counts[0]
    before = n["generating"]
    if params.options.lends and not params.options.hosts_first:
        lend_tails(turn)
    _own(turn)
    if params.options.lends and params.options.hosts_first:
        lend_tails(turn)
    # A new reservation can be lent from the next iteration on: look again then.
    progress[0]["again"] = params.options.lends and n["generating"] > before
    progress[0]["groups"] = _number(params, turn.jobs, turn.status, turn.seen)


@compiled
def _number(params: EcoServeParams, jobs: Rows, status: Rows, seen: RowView) -> int:
    """Number the groups of active rows from 0 by what they have left; return how many there are.

    Rows with an equal rest end together, whenever they began.
    """
    if not params.options.synced:
        return 0
    most, rows = 0, np.concatenate((seen.active, seen.queued, seen.prompts, seen.waiting))
    for row in rows:
        if status["state"][row] == ACTIVE:
            most = max(most, class_of(jobs, status, row, params.options.grain))
    number, groups = np.zeros(most + 1, np.int64), 0
    for row in rows:
        if status["state"][row] == ACTIVE:
            kind = class_of(jobs, status, row, params.options.grain)
            if number[kind] == 0:
                groups += 1
                number[kind] = groups
            status["group"][row] = number[kind] - 1
    return groups


@compiled
def _own(turn: Turn) -> None:
    """Give queued generations exact allocations of their own, in order, as long as they fit."""
    params, jobs, status, size, buffer = turn.params, turn.jobs, turn.status, turn.size, turn.buffer
    n, rows = buffer.counts[0], _still(status, turn.seen.queued)
    if rows.size == 0:
        return
    if not params.options.ordered:
        rows = by_group(jobs, status, rows, params.options.grain) if params.options.synced else by_urgency(jobs, rows)
        for row in rows:  # a group that does not fit is split: those that fit begin
            if not _begin(params, jobs, status, row, need_of(jobs, status, row, size), buffer):
                break
        return
    needs = _needs(jobs, status, rows, size)
    order, keys = by_range(jobs, rows, needs, size, turn.now, params.options.fixed_ranges)
    rows, needs, i = rows[order], needs[order], 0
    while i < rows.size:
        stop = same_range(keys, i)
        i = best_fit(needs, i, stop, allocatable(n["free"], params.reserve, n["pool"]))
        if i < stop:
            _begin(params, jobs, status, rows[i], needs[i], buffer)
            i += 1


@compiled
def _still(status: Rows, queued: Ints) -> Ints:
    """Return those of the queued rows that have not begun meanwhile."""
    kept, size = np.empty_like(queued), 0
    for row in queued:
        if status["state"][row] == QUEUED:
            kept[size] = row
            size += 1
    return kept[:size]


@compiled
def _needs(jobs: Rows, status: Rows, rows: Ints, size: int) -> Ints:
    """Return the blocks that each row needs beyond its own to reach its goal."""
    out = np.empty(rows.size, np.int64)
    for i in range(rows.size):
        out[i] = need_of(jobs, status, rows[i], size)
    return out


@compiled
def _begin(params: EcoServeParams, jobs: Rows, status: Rows, row: int, need: int, buffer: StepBuffer) -> bool:
    """Let a queued generation begin if `need` free blocks may be taken for it; tell whether."""
    n, holds = buffer.counts[0], jobs["blocks"][row]
    if need > allocatable(n["free"], params.reserve, n["pool"] - holds) or n["generating"] >= params.max_running:
        return False
    n["free"] -= need
    n["pool"] -= holds
    n["generating"] += 1
    status["state"][row] = ACTIVE
    put(buffer, row, 1, status["goal"][row])
    return True


# ---- prompts


@compiled
def _prompts(turn: Turn) -> None:
    """Fill the forward size with prompts: those in progress, then waiting ones that find KV."""
    params, jobs, status, buffer = turn.params, turn.jobs, turn.status, turn.buffer
    n = buffer.counts[0]
    n["prompt_tokens"] = params.tfs - buffer.tokens[: n["order"]].sum()
    for row in by_urgency(jobs, turn.seen.prompts):
        if status["state"][row] == GONE:
            continue
        tokens = min(missing_of(jobs, row), max(n["prompt_tokens"], 0), params.row_chunk)
        if tokens > 0 and n["order"] < params.max_running:
            hold = status["goal"][row] if status["state"][row] == ACTIVE else 0
            put(buffer, row, tokens, hold)
            n["prompt_tokens"] -= tokens
    _new_prompts(turn)


@compiled
def _new_prompts(turn: Turn) -> None:
    """Admit waiting prompts that find KV, while forward size and slots are left."""
    params, jobs, status, progress, buffer = turn.params, turn.jobs, turn.status, turn.progress, turn.buffer
    n, waiting = buffer.counts[0], turn.seen.waiting
    room = max(allocatable(n["free"], params.reserve, n["pool"]), params.reserve - n["pool"])
    room = room if params.options.whole else n["free"]
    if waiting.size == 0 or n["prompt_tokens"] <= 0 or room <= 0 or n["free_slots"] <= 0:
        return
    before = n["generating"]
    for row in in_turn(params.options.ordered, params.options.fixed_ranges, jobs, waiting, turn.size, turn.now):
        if status["state"][row] != WAITING:
            continue
        if n["prompt_tokens"] <= 0 or n["free_slots"] <= 0 or n["order"] >= params.max_running:
            break
        if (
            params.options.ordered
            and min(missing_of(jobs, row), params.row_chunk) > n["prompt_tokens"]
            and n["prompt_tokens"] < params.tfs // 2
        ):
            continue  # the longest that fits whole goes first
        admitted = _admit(params, jobs, status, row, progress[0]["groups"], turn.size, buffer)
        if not admitted and not params.options.ordered:
            break
    if n["generating"] > before and params.options.synced:
        progress[0]["groups"] += 1  # a group until all are numbered anew
        progress[0]["again"] = params.options.lends


@compiled
def _admit(
    params: EcoServeParams, jobs: Rows, status: Rows, row: int, group: int, size: int, buffer: StepBuffer
) -> bool:
    """Admit a prompt: with all the KV that it will need where there is so much, else into the pool.

    Without `whole` it gets the KV of its prompt alone, of all that is free; its answer then queues.
    """
    n, whole = buffer.counts[0], jobs["prompt"][row] + jobs["output_tokens"][row]
    status["goal"][row] = max(status["goal"][row], whole + 1)
    need, prompt = blocks_of(status["goal"][row], size), blocks_of(whole, size)
    fits = need <= allocatable(n["free"], params.reserve, n["pool"]) and params.options.whole
    room = min(n["free"], params.reserve - n["pool"]) if params.options.whole else n["free"]
    if fits and n["generating"] < params.max_running:
        status["state"][row], status["group"][row] = ACTIVE, group
        n["generating"] += 1
        hold = status["goal"][row]
    elif prompt <= room and jobs["saved"][row] == 0:
        n["pool"] += prompt
        need, hold = prompt, whole
    else:
        return False
    tokens = min(missing_of(jobs, row), n["prompt_tokens"], params.row_chunk)
    n["free"] -= need
    n["prompt_tokens"] -= tokens
    n["free_slots"] -= 1
    put(buffer, row, tokens, hold)
    return True


# ---- when no row can go on


@compiled
def _rescue(turn: Turn) -> None:
    """Let the first row run, whatever the pool says; the last ones make room for it, the cheaper way."""
    jobs, status, seen, size, n = turn.jobs, turn.status, turn.seen, turn.size, turn.buffer.counts[0]
    turn.progress[0]["rescued"] += 1
    rows = by_urgency(jobs, np.concatenate((seen.active, seen.queued, seen.prompts, seen.waiting)))
    rows = rows[status["state"][rows] != GONE]
    if rows.size == 0:
        return
    first = rows[0]
    whole = jobs["prompt"][first] + jobs["output_tokens"][first]
    least = max(blocks_of(whole, size) + 1 - capacity_of(jobs, first), 1)
    for i in range(rows.size - 1, 0, -1):
        if n["free"] >= least and (jobs["running"][first] or n["free_slots"] > 0):
            break
        if jobs["running"][rows[i]]:
            leave(turn, rows[i])
    if n["free"] < min(least, blocks_of(whole, size) - capacity_of(jobs, first)):
        # Held rows have the rest. Control's go on when it says so; sessions between two turns need blocks.
        if jobs["running"][first] and seen.between_turns:
            leave(turn, first)
        return
    if (
        jobs["first_lent_block"][first]
        and blocks_of(jobs["computed"][first] + 1, size) > jobs["first_lent_block"][first]
    ):
        return  # its borrower too is held by control
    _run_first(turn.params, jobs, status, first, whole, size, turn.buffer)


@compiled
def _run_first(
    params: EcoServeParams, jobs: Rows, status: Rows, row: int, whole: int, size: int, buffer: StepBuffer
) -> None:
    """Let a row run with all the KV that is free."""
    n = buffer.counts[0]
    room = (capacity_of(jobs, row) + n["free"]) * size
    status["goal"][row] = min(max(status["goal"][row], whole + 1), max(room, whole))
    status["state"][row] = ACTIVE
    put(buffer, row, min(missing_of(jobs, row), params.tfs, params.row_chunk), status["goal"][row])
