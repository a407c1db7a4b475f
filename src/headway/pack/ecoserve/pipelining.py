"""Who moves into which tail? KVC pipelining (EcoServe 3.4), compiled; `memory/reservations.py` has the rules."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.memory.reservations import (
    Tail,
    allocatable,
    filled_tokens,
    lendable_end,
    lendable_start,
    tail_of,
)
from headway.pack.ecoserve.queues import ACTIVE, RowView, best_fit, in_turn, left_of, need_of
from headway.pack.ecoserve.step_buffer import (
    FREE,
    LENT,
    LOANS,
    POOL,
    RUNS,
    SEATS,
    EcoServeParams,
    StepBuffer,
    put,
)
from headway.pack.kernels import missing_of, ordered
from headway.types import Bools, Ints

Rows = NDArray[np.void]
AHEAD = 256  # waiting prompts that are tried as guests


@compiled
def lend_tails(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    marks: Ints,
    seen: RowView,
    size: int,
    now: float,
    desk: StepBuffer,
) -> None:
    """Find for each tail the longest answer that is gone in time; what is left of it is halved again."""
    rows = np.concatenate((seen.queued, in_turn(rule.ordered, jobs, seen.waiting, size, now)[:AHEAD]))
    if not _is_short(rule, jobs, mine, rows, size, desk):
        return
    lefts = np.empty(rows.size, np.int64)
    for i in range(rows.size):
        lefts[i] = left_of(jobs, mine, rows[i])
    order = ordered(-lefts.astype(np.float64).reshape(1, -1), np.arange(rows.size))
    rows, lefts = rows[order], lefts[order]
    taken = np.zeros(rows.size, np.bool_)
    spent = rule.tfs - desk.n[RUNS] - seen.queued.size  # tokens that prompts of guests may take
    for host in seen.active:
        if mine["state"][host] != ACTIVE:
            continue
        front, least, stop = filled_tokens(jobs, host), lendable_start(jobs, host), lendable_end(jobs, host)
        while stop > least:
            slot = tail_of(front, stop, least, size)
            i = _guest(rule, jobs, mine, rows, lefts, taken, slot, spent, size, desk)
            if i < 0:
                break
            span = _span(jobs, mine, rows[i], slot, size)
            stop -= span
            tokens = min(missing_of(jobs, rows[i]), max(spent, 1))
            _move_in(jobs, mine, rows[i], host, stop, span, tokens, size, desk)
            taken[i] = True
            marks[LENT] += 1
            spent -= 0 if jobs["running"][rows[i]] else tokens


@compiled
def _is_short(rule: EcoServeParams, jobs: Rows, mine: Rows, rows: Ints, size: int, desk: StepBuffer) -> bool:
    """Tell whether not all rows could have KV of their own: only then is it worth the risk of being late."""
    room = allocatable(desk.n[FREE], rule.reserve, desk.n[POOL])
    for row in rows:
        room -= need_of(jobs, mine, row, size)
    return bool(room < 0)


@compiled
def _span(jobs: Rows, mine: Rows, row: int, slot: Tail, size: int) -> int:
    return int(min(need_of(jobs, mine, row, size), slot.stop - slot.start))


@compiled
def _guest(
    rule: EcoServeParams, jobs: Rows, mine: Rows, rows: Ints, lefts: Ints, taken: Bools, slot: Tail, spent: int,
    size: int, desk: StepBuffer,
) -> int:  # fmt: skip
    """Return the candidate with the longest answer that is gone in time (lefts descend), -1 = none."""
    if slot.stop <= slot.start or desk.n[RUNS] >= rule.budget:
        return -1
    for i in range(best_fit(lefts, 0, rows.size, slot.iterations - rule.buffer), rows.size):
        if not taken[i] and _may_live(rule, jobs, mine, rows[i], slot, spent, size, desk):
            return i
    return -1


@compiled
def _may_live(
    rule: EcoServeParams,
    jobs: Rows,
    mine: Rows,
    row: int,
    slot: Tail,
    spent: int,
    size: int,
    desk: StepBuffer,
) -> bool:
    """Tell whether a row can be a guest, with what the slot does not hold of it from free blocks."""
    n, span, queued = desk.n, _span(jobs, mine, row, slot, size), desk.n[POOL]
    if mine["state"][row] == ACTIVE or jobs["first_lent_block"][row] or span <= 0:
        return False
    if jobs["running"][row]:
        queued -= jobs["blocks"][row]
    elif jobs["saved"][row] or spent <= 0 or n[SEATS] <= 0:
        return False
    elif left_of(jobs, mine, row) + missing_of(jobs, row) // rule.tfs > slot.iterations - rule.buffer:
        return False  # its prompt takes iterations too
    own = need_of(jobs, mine, row, size) - span
    return bool(own <= max(allocatable(n[FREE], rule.reserve, queued), 0))


@compiled
def _move_in(
    jobs: Rows,
    mine: Rows,
    row: int,
    host: int,
    start: int,
    span: int,
    tokens: int,
    size: int,
    desk: StepBuffer,
) -> None:
    """Let a row begin as a guest. Its loan is the very end of the tail, where the host comes last."""
    n, i = desk.n, desk.n[LOANS]
    desk.guest[i], desk.host[i], desk.start[i], desk.span[i] = row, host, start, span
    n[LOANS] += 1
    n[FREE] -= need_of(jobs, mine, row, size) - span
    n[POOL] -= jobs["blocks"][row] if jobs["running"][row] else 0
    n[RUNS] += 1
    n[SEATS] -= not jobs["running"][row]
    mine["state"][row] = ACTIVE
    put(desk, row, tokens, mine["goal"][row])
