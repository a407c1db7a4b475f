"""KVC pipelining: loans of reserved KV that its owner reaches only later (EcoServe 3.4). Compiled.

`policy/memory/reservations.py` has the rules of a loan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.core.sorting import ordered
from headway.policy.memory.reservations import Tail, allocatable, filled_tokens, lendable_end, lendable_start, tail_of
from headway.policy.pack.ecoserve.queues import ACTIVE, best_fit, by_urgency, class_of, in_turn, left_of, need_of
from headway.policy.pack.ecoserve.step_buffer import EcoServeParams, StepBuffer, Turn, put
from headway.policy.pack.kernels import due_of, missing_of
from headway.types import Bools, Ints

Rows = NDArray[np.void]
AHEAD = 256  # waiting prompts that are tried as borrowers


@compiled
def lend_tails(turn: Turn) -> None:
    """Find for each tail the longest answer that is gone in time; what is left of it is halved again."""
    params, jobs, status, seen, size, buffer = turn.params, turn.jobs, turn.status, turn.seen, turn.size, turn.buffer
    n, rows = buffer.counts[0], by_urgency(jobs, seen.queued)
    if params.options.lends_to_prompts:
        ready = in_turn(params.options.ordered, params.options.fixed_ranges, jobs, seen.waiting, size, turn.now)
        rows = np.concatenate((rows, ready[:AHEAD]))
    if not _is_short(params, jobs, status, rows, size, buffer):
        return
    rows, lefts = _longest_first(params, jobs, status, rows)
    taken = np.zeros(rows.size, np.bool_)
    spent = params.tfs - n["generating"] - seen.queued.size  # tokens that prompts of borrowers may take
    for lender in seen.active:
        if status["state"][lender] != ACTIVE or jobs["resumable"][lender]:
            continue
        front, least = filled_tokens(jobs, lender), lendable_start(jobs, lender)
        stop = lendable_end(jobs, lender)
        while stop > least:
            slot = tail_of(front, stop, least, size)
            i = _borrower(params, jobs, status, rows, lefts, taken, slot, spent, size, buffer)
            if i < 0:
                break
            span = _span(jobs, status, rows[i], slot, size)
            stop -= span
            tokens = min(missing_of(jobs, rows[i]), max(spent, 1), params.row_chunk)
            _lend(jobs, status, rows[i], lender, stop, span, tokens, size, buffer)
            taken[i] = True
            turn.progress[0]["lent"] += 1
            spent -= 0 if jobs["running"][rows[i]] else tokens


@compiled
def _longest_first(params: EcoServeParams, jobs: Rows, status: Rows, rows: Ints) -> tuple[Ints, Ints]:
    """Return the rows by the tokens that they have left, most first, and these tokens.

    With `loose`, tokens are rounded up to whole grains and equals sorted by deadline, the latest first.
    """
    lefts, keys = np.empty(rows.size, np.int64), np.zeros((2, rows.size))
    for i in range(rows.size):
        lefts[i] = left_of(jobs, status, rows[i])
        if params.options.loose:
            lefts[i] = class_of(jobs, status, rows[i], params.options.grain) * params.options.grain
            keys[1, i] = -due_of(jobs, rows[i])
        keys[0, i] = -lefts[i]
    order = ordered(keys, np.arange(rows.size))
    return rows[order], lefts[order]


@compiled
def _time_of(params: EcoServeParams, slot: Tail) -> int:
    """Return the tokens that a borrower may be predicted to make in a slot."""
    return int((slot.iterations - params.options.buffer) / (1.0 + params.options.buffer_share))


@compiled
def _is_short(params: EcoServeParams, jobs: Rows, status: Rows, rows: Ints, size: int, buffer: StepBuffer) -> bool:
    """Tell whether KV is too short for all rows: only then is a loan worth the risk of being late."""
    n = buffer.counts[0]
    room = allocatable(n["free"], params.reserve, n["pool"])
    for row in rows:
        room -= need_of(jobs, status, row, size)
    return bool(room < 0)


@compiled
def _span(jobs: Rows, status: Rows, row: int, slot: Tail, size: int) -> int:
    """Return the blocks that a row would borrow of a slot."""
    return int(min(need_of(jobs, status, row, size), slot.stop - slot.start))


@compiled
def _borrower(
    params: EcoServeParams,
    jobs: Rows,
    status: Rows,
    rows: Ints,
    lefts: Ints,
    taken: Bools,
    slot: Tail,
    spent: int,
    size: int,
    buffer: StepBuffer,
) -> int:
    """Return the candidate with the longest answer that is gone in time (lefts descend), -1 = none."""
    n = buffer.counts[0]
    if slot.stop <= slot.start or n["generating"] >= params.max_running:
        return -1
    for i in range(best_fit(lefts, 0, rows.size, _time_of(params, slot)), rows.size):
        if not taken[i] and _may_borrow(params, jobs, status, rows[i], slot, spent, size, buffer):
            return i
    return -1


@compiled
def _may_borrow(
    params: EcoServeParams, jobs: Rows, status: Rows, row: int, slot: Tail, spent: int, size: int, buffer: StepBuffer
) -> bool:
    """Tell whether a row can be a borrower, with what the slot does not hold of it from free blocks."""
    n, span = buffer.counts[0], _span(jobs, status, row, slot, size)
    queued = n["pool"]
    if status["state"][row] == ACTIVE or jobs["first_lent_block"][row] or span <= 0:
        return False
    if jobs["resumable"][row]:
        return False  # it would keep its loan for as long as its client is silent
    if jobs["running"][row]:
        queued -= jobs["blocks"][row]
    elif jobs["saved"][row] or spent <= 0 or n["free_slots"] <= 0:
        return False
    elif left_of(jobs, status, row) + missing_of(jobs, row) // params.tfs > _time_of(params, slot):
        return False  # its prompt takes iterations too
    own = need_of(jobs, status, row, size) - span
    return bool(own <= max(allocatable(n["free"], params.reserve, queued), 0))


@compiled
def _lend(
    jobs: Rows, status: Rows, row: int, lender: int, start: int, span: int, tokens: int, size: int, buffer: StepBuffer
) -> None:
    """Let a row begin as a borrower. Its loan is the very end of the tail, which the lender reaches last."""
    n = buffer.counts[0]
    i = n["loans"]
    buffer.borrower[i], buffer.lender[i], buffer.start[i], buffer.span[i] = row, lender, start, span
    n["loans"] += 1
    n["free"] -= need_of(jobs, status, row, size) - span
    n["pool"] -= jobs["blocks"][row] if jobs["running"][row] else 0
    n["generating"] += 1
    n["free_slots"] -= not jobs["running"][row]
    status["state"][row] = ACTIVE
    put(buffer, row, tokens, status["goal"][row])
