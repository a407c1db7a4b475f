"""Who gets the KV and the tokens of the next iteration, when queues are decoupled? (EcoServe 3.2 and 3.3.)

Compiled. Generations come first and fill the KV (as guests in somebody's tail where they fit, else with an
exact allocation of their own), then prompts, which fill what is left of the target forward size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.memory.budget import KvBudget
from headway.memory.preemption_cost import PAUSE, cheapest, preemption_costs
from headway.memory.reservations import allocatable, blocks_of, capacity_of, first_borrower
from headway.pack.ecoserve.pipelining import AHEAD, lend_tails
from headway.pack.ecoserve.queues import (
    ACTIVE,
    GONE,
    QUEUED,
    WAITING,
    RowView,
    best_fit,
    by_arrival,
    by_group,
    by_range,
    class_of,
    in_turn,
    left_of,
    look,
    need_of,
    same_range,
)  # fmt: skip
from headway.pack.ecoserve.step_buffer import (
    AGAIN,
    EXTENDED,
    FREE,
    FULL,
    GROUPS,
    KEPT,
    LATE,
    ORDER,
    POOL,
    RESCUED,
    RUNS,
    SEATS,
    STALLED,
    TOKENS,
    EcoServeParams,
    StepBuffer,
    leave,
    put,
)  # fmt: skip
from headway.pack.kernels import missing_of
from headway.types import Bools, Floats, Ints

Rows = NDArray[np.void]


@compiled
def decide(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    marks: Ints,
    rows: Ints,
    ledger: KvBudget,
    now: float,
    theta: Floats,
) -> StepBuffer:
    """Return the next iteration's decision; brings `mine` and `marks` up to date.

    Nothing depends on the numbers of rows, which are each host's own affair: rows are met as they came.
    """
    seen = look(jobs, mine, by_arrival(jobs, rows), rule.longest, marks[GROUPS])
    desk = _desk(jobs, mine, seen, rows.size, ledger)
    goes = _go_on(rule, jobs, mine, marks, seen, ledger.size, theta, desk)
    if _is_due(rule, marks, seen, desk, ledger.total):
        marks[FULL] += 1
        _schedule(rule, jobs, mine, marks, seen, goes, ledger.size, now, desk)
    else:
        marks[KEPT] += 1
    _put_active(jobs, mine, seen.active, goes, desk)
    _prompts(rule, jobs, mine, marks, seen, ledger.size, now, desk)
    if desk.n[ORDER] == 0 and seen.queued.size + seen.prompts.size + seen.waiting.size + seen.active.size:
        _rescue(rule, jobs, mine, marks, seen, ledger.size, theta, desk)
    return desk


@compiled
def _desk(jobs: Rows, mine: Rows, seen: RowView, size: int, ledger: KvBudget) -> StepBuffer:
    lists, n = np.zeros((9, size), np.int64), np.zeros(9, np.int64)
    running = seen.active.size + seen.queued.size + seen.prompts.size + seen.others
    n[FREE], n[SEATS], n[RUNS] = ledger.free, ledger.slots - running, seen.active.size
    for row in seen.queued:
        n[POOL] += jobs["blocks"][row]
    for row in seen.prompts:
        if mine["state"][row] == ACTIVE:
            n[RUNS] += 1
        else:
            n[POOL] += jobs["blocks"][row]
    return StepBuffer(
        lists[0], lists[1], lists[2], lists[3], lists[4], lists[5], lists[6], lists[7], lists[8], n
    )  # fmt: skip


@compiled
def _is_due(rule: EcoServeParams, marks: Ints, seen: RowView, desk: StepBuffer, total: int) -> bool:
    """Tell whether generations are scheduled now: not while all groups last and nobody new waits for KV.

    Answers shorter than predicted leave KV behind before their group ends; so much of it that `idle` blocks
    lie free is worth a decision too.
    """
    if not rule.synced or seen.ended or seen.news or marks[AGAIN]:
        return True
    if rule.lends and seen.came and seen.waiting.size <= AHEAD:
        return True  # it may fit into somebody's tail
    return bool(seen.queued.size and allocatable(desk.n[FREE], rule.reserve, desk.n[POOL]) >= rule.idle)


# ---- generations in progress


@compiled
def _go_on(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    marks: Ints,
    seen: RowView,
    size: int,
    theta: Floats,
    desk: StepBuffer,
) -> Bools:
    """See to those who come to the end of their KV, their own or what they have not lent.

    Returns which of the active rows generate now.
    """
    goes = np.ones(seen.active.size, np.bool_)
    for i in range(seen.active.size):
        row = seen.active[i]
        end = blocks_of(jobs["computed"][row] + 1, size)
        if (
            mine["state"][row] == ACTIVE
            and jobs["first_lent_block"][row]
            and end > jobs["first_lent_block"][row]
        ):
            goes[i] = _reach(rule, jobs, mine, marks, first_borrower(jobs, row), theta, desk)
        if goes[i] and mine["state"][row] == ACTIVE and end > capacity_of(jobs, row):
            _outgrow(rule, jobs, mine, marks, row, size, theta, desk)
    return goes


@compiled
def _reach(
    rule: EcoServeParams, jobs: Rows, mine: Rows, marks: Ints, guest: int, theta: Floats, desk: StepBuffer
) -> bool:
    """A guest is late: its host waits, or it leaves, whichever is cheaper. True when the host goes on."""
    if mine["state"][guest] == GONE:
        return True  # it has just outgrown its loan
    marks[LATE] += 1
    costs = preemption_costs(
        theta, jobs["computed"][guest], left_of(jobs, mine, guest), desk.n[RUNS], rule.copy_seconds
    )
    if jobs["held"][guest] or cheapest(costs) == PAUSE:
        return False
    leave(rule, jobs, mine, guest, theta, desk)
    return True


@compiled
def _outgrow(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    marks: Ints,
    row: int,
    size: int,
    theta: Floats,
    desk: StepBuffer,
) -> None:
    """An answer is longer than predicted: the pool first, then it pauses and keeps its KV. A guest leaves."""
    output_tokens = jobs["prompt"][row] + jobs["output_tokens"][row]
    if jobs["loan_blocks"][row]:
        marks[LATE] += 1
        mine["goal"][row] = min(output_tokens + rule.extra, rule.longest)
        leave(rule, jobs, mine, row, theta, desk)
        return
    more = min(blocks_of(rule.extra, size), blocks_of(rule.longest, size) - jobs["blocks"][row], desk.n[FREE])
    mine["goal"][row] = min(output_tokens + rule.extra, rule.longest)
    if more > 0:
        marks[EXTENDED] += 1
        mine["goal"][row] = min((jobs["blocks"][row] + more) * size, rule.longest)
        desk.n[FREE] -= more
    else:
        marks[STALLED] += 1
        mine["state"][row] = QUEUED
        desk.n[POOL] += jobs["blocks"][row]
        desk.n[RUNS] -= 1


@compiled
def _put_active(jobs: Rows, mine: Rows, active: Ints, goes: Bools, desk: StepBuffer) -> None:
    """Write down one token for each generation that was active before and goes on."""
    for i in range(active.size):
        if goes[i] and mine["state"][active[i]] == ACTIVE:
            put(desk, active[i], 1, mine["goal"][active[i]])


# ---- generations that begin


@compiled
def _schedule(
    rule: EcoServeParams, jobs: Rows, mine: Rows, marks: Ints, seen: RowView, goes: Bools, size: int, now: float,
    desk: StepBuffer,
) -> None:  # fmt: skip
    """Fill the KV with queued generations, guests first, and number the groups anew."""
    before = desk.n[RUNS]
    if rule.lends:
        lend_tails(rule, jobs, mine, marks, seen, size, now, desk)
    _own(rule, jobs, mine, seen.queued, size, now, desk)
    # A new reservation can be lent from the next iteration on: look again then.
    marks[AGAIN] = rule.lends and desk.n[RUNS] > before
    marks[GROUPS] = _number(rule, jobs, mine, seen)


@compiled
def _number(rule: EcoServeParams, jobs: Rows, mine: Rows, seen: RowView) -> int:
    """Number the groups of active rows from 0 by what they have left; return how many there are.

    Rows with an equal rest end together, whenever they began.
    """
    if not rule.synced:
        return 0
    most, rows = 0, np.concatenate((seen.active, seen.queued, seen.prompts, seen.waiting))
    for row in rows:
        if mine["state"][row] == ACTIVE:
            most = max(most, class_of(jobs, mine, row, rule.grain))
    number, groups = np.zeros(most + 1, np.int64), 0
    for row in rows:
        if mine["state"][row] == ACTIVE:
            kind = class_of(jobs, mine, row, rule.grain)
            if number[kind] == 0:
                groups += 1
                number[kind] = groups
            mine["group"][row] = number[kind] - 1
    return groups


@compiled
def _own(
    rule: EcoServeParams, jobs: Rows, mine: Rows, queued: Ints, size: int, now: float, desk: StepBuffer
) -> None:
    """Give queued generations exact allocations of their own, in order, as long as they fit."""
    rows = _still(mine, queued)
    if rows.size == 0:
        return
    if not rule.ordered:
        rows = by_group(jobs, mine, rows, rule.grain) if rule.synced else by_arrival(jobs, rows)
        for row in rows:  # a group that does not fit is split: those that fit begin
            if not _begin(rule, jobs, mine, row, need_of(jobs, mine, row, size), desk):
                break
        return
    needs = _needs(jobs, mine, rows, size)
    order, keys = by_range(jobs, rows, needs, size, now)
    rows, needs, i = rows[order], needs[order], 0
    while i < rows.size:
        stop = same_range(keys, i)
        i = best_fit(needs, i, stop, allocatable(desk.n[FREE], rule.reserve, desk.n[POOL]))
        if i < stop:
            _begin(rule, jobs, mine, rows[i], needs[i], desk)
            i += 1


@compiled
def _still(mine: Rows, queued: Ints) -> Ints:
    kept, size = np.empty_like(queued), 0
    for row in queued:
        if mine["state"][row] == QUEUED:
            kept[size] = row
            size += 1
    return kept[:size]


@compiled
def _needs(jobs: Rows, mine: Rows, rows: Ints, size: int) -> Ints:
    out = np.empty(rows.size, np.int64)
    for i in range(rows.size):
        out[i] = need_of(jobs, mine, rows[i], size)
    return out


@compiled
def _begin(rule: EcoServeParams, jobs: Rows, mine: Rows, row: int, need: int, desk: StepBuffer) -> bool:
    """Let a queued generation begin if `need` free blocks may be taken for it; tell whether."""
    n, holds = desk.n, jobs["blocks"][row]
    if need > allocatable(n[FREE], rule.reserve, n[POOL] - holds) or n[RUNS] >= rule.budget:
        return False
    n[FREE] -= need
    n[POOL] -= holds
    n[RUNS] += 1
    mine["state"][row] = ACTIVE
    put(desk, row, 1, mine["goal"][row])
    return True


# ---- prompts


@compiled
def _prompts(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    marks: Ints,
    seen: RowView,
    size: int,
    now: float,
    desk: StepBuffer,
) -> None:
    """Fill the forward size with prompts: those in progress, then waiting ones that find KV."""
    n = desk.n
    n[TOKENS] = rule.tfs - desk.tokens[: n[ORDER]].sum()
    for row in by_arrival(jobs, seen.prompts):
        if mine["state"][row] == GONE:
            continue
        tokens = min(missing_of(jobs, row), max(n[TOKENS], 0))
        if tokens > 0:
            hold = mine["goal"][row] if mine["state"][row] == ACTIVE else 0
            put(desk, row, tokens, hold)
            n[TOKENS] -= tokens
    room = max(allocatable(n[FREE], rule.reserve, n[POOL]), rule.reserve - n[POOL])
    if seen.waiting.size == 0 or n[TOKENS] <= 0 or room <= 0 or n[SEATS] <= 0:
        return
    before = n[RUNS]
    for row in in_turn(rule.ordered, jobs, seen.waiting, size, now):
        if mine["state"][row] != WAITING:
            continue
        if n[TOKENS] <= 0 or n[SEATS] <= 0:
            break
        if rule.ordered and missing_of(jobs, row) > n[TOKENS] and n[TOKENS] < rule.tfs // 2:
            continue  # the longest that fits whole goes first
        if not _admit(rule, jobs, mine, row, marks[GROUPS], size, desk) and not rule.ordered:
            break
    if n[RUNS] > before and rule.synced:
        marks[GROUPS] += 1  # a group until all are numbered anew
        marks[AGAIN] = rule.lends


@compiled
def _admit(
    rule: EcoServeParams, jobs: Rows, mine: Rows, row: int, group: int, size: int, desk: StepBuffer
) -> bool:
    """Admit a prompt: with all the KV that it will need where there is so much, else into the pool."""
    n, whole = desk.n, jobs["prompt"][row] + jobs["output_tokens"][row]
    mine["goal"][row] = max(mine["goal"][row], whole + 1)
    need, prompt = blocks_of(mine["goal"][row], size), blocks_of(whole, size)
    if need <= allocatable(n[FREE], rule.reserve, n[POOL]) and n[RUNS] < rule.budget:
        mine["state"][row], mine["group"][row] = ACTIVE, group
        n[RUNS] += 1
        hold = mine["goal"][row]
    elif prompt <= min(n[FREE], rule.reserve - n[POOL]) and jobs["saved"][row] == 0:
        n[POOL] += prompt
        need, hold = prompt, whole
    else:
        return False
    tokens = min(missing_of(jobs, row), n[TOKENS])
    n[FREE] -= need
    n[TOKENS] -= tokens
    n[SEATS] -= 1
    put(desk, row, tokens, hold)
    return True


# ---- when nobody can go on


@compiled
def _rescue(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    marks: Ints,
    seen: RowView,
    size: int,
    theta: Floats,
    desk: StepBuffer,
) -> None:
    """Let the oldest row run, whatever the pool says; the youngest make room for it, the cheaper way."""
    marks[RESCUED] += 1
    rows = by_arrival(jobs, np.concatenate((seen.active, seen.queued, seen.prompts, seen.waiting)))
    rows = rows[mine["state"][rows] != GONE]
    if rows.size == 0:
        return
    first = rows[0]
    whole = jobs["prompt"][first] + jobs["output_tokens"][first]
    least = max(blocks_of(whole, size) + 1 - capacity_of(jobs, first), 1)
    for i in range(rows.size - 1, 0, -1):
        if desk.n[FREE] >= least and (jobs["running"][first] or desk.n[SEATS] > 0):
            break
        if jobs["running"][rows[i]]:
            leave(rule, jobs, mine, rows[i], theta, desk)
    if desk.n[FREE] < min(least, blocks_of(whole, size) - capacity_of(jobs, first)):
        return  # rows held by control have the rest
    if (
        jobs["first_lent_block"][first]
        and blocks_of(jobs["computed"][first] + 1, size) > jobs["first_lent_block"][first]
    ):
        return  # so does its guest
    _run_first(rule, jobs, mine, first, whole, size, desk)


@compiled
def _run_first(
    rule: EcoServeParams, jobs: Rows, mine: Rows, row: int, whole: int, size: int, desk: StepBuffer
) -> None:
    room = (capacity_of(jobs, row) + desk.n[FREE]) * size
    mine["goal"][row] = min(max(mine["goal"][row], whole + 1), max(room, whole))
    mine["state"][row] = ACTIVE
    put(desk, row, min(missing_of(jobs, row), rule.tfs), mine["goal"][row])
