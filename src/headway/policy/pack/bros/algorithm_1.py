"""BROS's Algorithm 1 (4.2): the batch of the next iteration. Compiled; `packer.py` says what is assumed.

`algorithm_1` builds a `Batch` within `StepLimits`: it adds real-time rows by the time they have left, then
best-effort rows by swap cost, and keeps the sums from which the iteration's seconds are forecast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.core.sorting import ordered
from headway.policy.pack.bros.batch import (
    ROOM,
    SUMS,
    Batch,
    StepLimits,
    count,
    goes_first,
    make_room,
    save,
    take,
    with_row,
)
from headway.policy.pack.kernels import due_of, exclusive_of, missing_of, promised
from headway.types import Floats, Ints

Rows = NDArray[np.void]
_LOST = 1e9  # seconds
_LEAST_PART = 32  # tokens; a shorter part of a prompt is not worth its place in the batch


# ---- the algorithm


@compiled
def algorithm_1(t: StepLimits, jobs: Rows, rows: Ints, moves: Ints, last: Floats, now: float, theta: Floats) -> Batch:
    """Return the batch of the next iteration.

    rows: all that may run; moves: `TwoEndedBudget`'s, or empty; last: instants of the last tokens by row,
    where time left counts from them, else empty.
    """
    slo = np.zeros(rows.size, np.bool_)
    for i in range(rows.size):
        slo[i] = promised(jobs, rows[i])
    real, other = rows[slo], rows[~slo]
    urgent, left = polled(jobs, real, last, now, 2 * t.batch_limit, t.lost_last)
    batch = _empty(t, jobs, rows, other)
    _pack_real_time(t, jobs, batch, urgent, left, theta)
    if t.shared:  # what is missing now comes from blocks that are shared
        batch.room[0]["empty"] = max(batch.room[0]["empty"], 0)
    if t.returns_early and batch.room[0]["late"]:
        other = other[:0]
    cheap = by_swap_cost(jobs, other, 2 * t.batch_limit)
    _pack_best_effort(t, jobs, batch, cheap, moves, theta)
    if batch.room[0]["chosen"] == 0:  # new prompts that find no blocks must not hide those that have some
        inside = other[jobs["running"][other]]
        _pack_best_effort(t, jobs, batch, by_swap_cost(jobs, inside, inside.size), moves, theta)
    make_room(jobs, batch, rows[~slo])
    return batch


@compiled
def polled(jobs: Rows, rows: Ints, last: Floats, now: float, most: int, lost_last: bool) -> tuple[Ints, Floats]:
    """Return real-time rows by urgency and the seconds they have left, and these seconds.

    Two queues, those that hold KV and those that wait, are polled in turn; of each only the `most` least are
    sorted, which is as far as the batch can go into it. lost_last: first tokens that are late already go
    behind all others.
    """
    left = np.empty(rows.size)
    for i in range(rows.size):
        left[i] = _owed(jobs, rows[i], last) - now
        if lost_last and left[i] < 0 and jobs["output_tokens"][rows[i]] == 0:
            left[i] += _LOST
    inside = jobs["running"][rows]
    a, a_left = _least(jobs, rows[inside], left[inside], most)
    b, b_left = _least(jobs, rows[~inside], left[~inside], most)
    size = a.size + b.size
    out, seconds = np.empty(size, np.int64), np.empty(size)
    i, j = 0, 0
    for k in range(size):
        if i < a.size and (j >= b.size or goes_first(jobs, a[i], a_left[i], b[j], b_left[j])):
            out[k], seconds[k], i = a[i], a_left[i], i + 1
        else:
            out[k], seconds[k], j = b[j], b_left[j], j + 1
        if seconds[k] > _LOST / 2:
            seconds[k] -= _LOST
    return out, seconds


@compiled
def _owed(jobs: Rows, row: int, last: Floats) -> float:
    """Return the instant at which a row owes its next token: from its last one, or by all since its first."""
    if last.size and jobs["output_tokens"][row] > 0:
        return float(min(last[row] + jobs["tpot"][row], jobs["arrival"][row] + jobs["e2e"][row]))
    return due_of(jobs, row)


@compiled
def _least(jobs: Rows, rows: Ints, keys: Floats, most: int) -> tuple[Ints, Floats]:
    """Return the `most` rows with the least urgency and keys, sorted (then by arrival), and the keys."""
    if rows.size > most and (jobs["urgency"][rows] == jobs["urgency"][rows[0]]).all():
        limit = np.partition(keys, most - 1)[most - 1]
        near = keys <= limit
        rows, keys = rows[near], keys[near]
    columns = np.empty((2, rows.size))
    columns[0], columns[1] = jobs["urgency"][rows], keys
    order = ordered(columns, jobs["serial"][rows])[:most]
    return rows[order], keys[order]


@compiled
def by_swap_cost(jobs: Rows, rows: Ints, most: int) -> Ints:
    """Return `most` best-effort rows by urgency and tokens to copy back, of equals those inside."""
    return _least(jobs, rows, jobs["saved"][rows] + 0.5 * ~jobs["running"][rows], most)[0]


@compiled
def _empty(t: StepLimits, jobs: Rows, rows: Ints, other: Ints) -> Batch:
    """Return an empty batch. What best-effort rows hold can be had: none of them runs yet."""
    all_sums, all_room = np.zeros(1, SUMS), np.zeros(1, ROOM)
    sums, room = all_sums[0], all_room[0]
    sums["bound"], sums["budget"] = np.inf, t.budget
    room["empty"], room["free_slots"] = t.free, t.slots - np.count_nonzero(jobs["running"] & jobs["live"])
    held, inside = 0, 0
    for row in range(jobs.size):  # those that control holds too
        if jobs["live"][row] and promised(jobs, row):
            held += exclusive_of(jobs, row)
            inside += jobs["running"][row]
    room["crowded"] = held > t.crowded * t.total or inside > t.crowded * t.batch_limit
    room["full"] = held > t.parts_below * t.total
    room["available"] = t.total - held if t.shared else t.free + (jobs["blocks"] - jobs["shared"])[other].sum()
    return Batch(
        np.empty(t.batch_limit, np.int64),
        np.empty(t.batch_limit, np.int64),
        np.empty(t.batch_limit),
        np.empty(rows.size, np.int64),
        all_sums,
        all_room,
    )


# ---- real-time rows


@compiled
def _pack_real_time(t: StepLimits, jobs: Rows, batch: Batch, urgent: Ints, left: Floats, theta: Floats) -> None:
    """Add real-time rows, least time left first, as far as slots, blocks, tokens and time go."""
    room, last = batch.room[0], urgent.size
    for i in range(urgent.size):
        if room["chosen"] >= t.batch_limit or i >= last:
            break
        row = urgent[i]
        want, inside = _want(t, jobs, batch, row), jobs["running"][row]
        need = _need(t, jobs, row)
        while inside and need > room["available"] and last - 1 > i:
            last -= 1  # its own kind is all there is: the least urgent makes room
            save(jobs, batch, urgent[last])
        if want <= 0 or need > room["available"] or (not inside and room["free_slots"] <= 0):
            room["refused"] += not inside
            continue
        if not _in_time(t, jobs, batch, row, want, theta):
            room["refused"], room["late"] = room["refused"] + (not inside), 1
            if t.returns_early:
                break
            continue
        _tighten(jobs, batch, row, left[i], t, want, theta)
        take(jobs, batch, row, want, left[i], need, _copies(t, jobs, batch, row, need))


@compiled
def _want(t: StepLimits, jobs: Rows, batch: Batch, row: int) -> int:
    """Return the tokens a row gets: all it misses, or 0; a prompt beyond the whole budget comes in parts.

    Drafts get what is left beyond that.
    """
    want, left = min(missing_of(jobs, row), t.row_chunk), int(batch.sums[0]["budget"])
    if want <= left:
        return int(min(want + jobs["drafts"][row], left))
    return left if want > t.budget - t.batch_limit and left > t.budget // 2 else 0


@compiled
def _need(t: StepLimits, jobs: Rows, row: int) -> int:
    """Return the blocks a row needs beyond those it holds until its next token, a prompt in parts for all."""
    end = jobs["computed"][row] + missing_of(jobs, row) + jobs["drafts"][row] + jobs["lookahead"][row]
    return int(-(-end // t.size) - jobs["blocks"][row])


@compiled
def _copies(t: StepLimits, jobs: Rows, batch: Batch, row: int, need: int) -> int:
    """Return the tokens to copy when a row comes in: its own back, and those that make room for it."""
    beyond = max(need - max(batch.room[0]["empty"], 0), 0)
    return int(jobs["saved"][row] + beyond * t.size)


@compiled
def _in_time(t: StepLimits, jobs: Rows, batch: Batch, row: int, want: int, theta: Floats) -> bool:
    """Tell whether the iteration with this row still keeps the bound; the most urgent row always may run."""
    if batch.room[0]["chosen"] == 0:
        return True
    need = _need(t, jobs, row)
    seconds = with_row(jobs, batch, row, want, _copies(t, jobs, batch, row, need), theta, t.copy)
    return bool(seconds <= batch.sums[0]["bound"])


@compiled
def _tighten(jobs: Rows, batch: Batch, row: int, left: float, t: StepLimits, want: int, theta: Floats) -> None:
    """Let the time that a row has left bound the iteration, if it can be kept at all.

    Where the bound is fixed, it is what the most urgent row has left that can be in time.
    """
    alone = with_row(jobs, batch, row, want, 0, theta, t.copy)
    if t.fixed_bound:
        if batch.sums[0]["bound"] == np.inf and left >= alone:
            batch.sums[0]["bound"] = left
        return
    bound = left
    if jobs["output_tokens"][row] > 0:  # one that is late catches up when iterations keep its tpot
        bound = jobs["tpot"][row] if left < alone else min(left, jobs["tpot"][row])
    if bound >= alone:
        batch.sums[0]["bound"] = min(batch.sums[0]["bound"], bound)


# ---- best-effort rows


@compiled
def _pack_best_effort(t: StepLimits, jobs: Rows, batch: Batch, cheap: Ints, moves: Ints, theta: Floats) -> None:
    """Add best-effort rows by swap cost, then put them in place of the least urgent real-time ones."""
    room, victim = batch.room[0], batch.room[0]["chosen"] - 1
    for row in cheap:
        copies = int(jobs["saved"][row])
        want = _part(t, jobs, batch, row, copies, theta)
        need, claim = _claims(t, jobs, row, moves)
        out = not jobs["running"][row] and (need > room["empty"] or room["free_slots"] <= 0)
        if want <= 0 or claim > room["available"] or out:
            continue
        full = room["chosen"] >= t.batch_limit
        if not full and with_row(jobs, batch, row, want, copies, theta, t.copy) <= batch.sums[0]["bound"]:
            take(jobs, batch, row, want, np.inf, need, copies)
            room["available"] -= claim - need
        elif t.replaces and victim >= 0 and (t.replaces_long or (full and _spared(batch))):
            victim = _replace(t, jobs, batch, victim, row, want, need, claim, copies, theta)


@compiled
def _spared(batch: Batch) -> bool:
    """Tell whether a real-time row may be replaced: none is kept out, and they hold little of the KV."""
    return bool(batch.room[0]["refused"] == 0 and not batch.room[0]["crowded"])


@compiled
def _part(t: StepLimits, jobs: Rows, batch: Batch, row: int, copies: int, theta: Floats) -> int:
    """Return the tokens a best-effort row gets: all it misses, or the part of its prompt that is in time."""
    want, room, bound = _want(t, jobs, batch, row), batch.room[0], batch.sums[0]["bound"]
    most = int(min(missing_of(jobs, row), t.row_chunk, batch.sums[0]["budget"]))
    if room["full"] or room["chosen"] >= t.batch_limit or most < _LEAST_PART:
        return want
    if want > 0 and with_row(jobs, batch, row, want, copies, theta, t.copy) <= bound:
        return want
    bound *= t.parts_fill
    if with_row(jobs, batch, row, _LEAST_PART, copies, theta, t.copy) > bound:
        return want
    least = _LEAST_PART
    while least < most:
        middle = (least + most + 1) // 2
        if with_row(jobs, batch, row, middle, copies, theta, t.copy) <= bound:
            least = middle
        else:
            most = middle - 1
    return least


@compiled
def _claims(t: StepLimits, jobs: Rows, row: int, moves: Ints) -> tuple[int, int]:
    """Return the empty blocks a best-effort row needs, and the blocks that no other row can have then."""
    need = _need(t, jobs, row)
    if moves.size:
        need += moves[row]
    return int(need), int(need + jobs["blocks"][row])


@compiled
def _replace(
    t: StepLimits,
    jobs: Rows,
    batch: Batch,
    victim: int,
    row: int,
    want: int,
    need: int,
    claim: int,
    copies: int,
    theta: Floats,
) -> int:
    """Put a best-effort row in the place of the least urgent real-time one; return the next such place.

    Only when that one can wait for `spare` such iterations, and only within the smallest time left.
    """
    old, had = batch.rows[victim], batch.tokens[victim]
    count(jobs, batch, old, had, -1)
    seconds = with_row(jobs, batch, row, want, copies, theta, t.copy)
    if seconds > batch.sums[0]["bound"] or batch.left[victim] < t.spare * seconds:
        count(jobs, batch, old, had, 1)
        return victim
    batch.rows[victim], batch.tokens[victim], batch.left[victim] = row, want, np.inf
    count(jobs, batch, row, want, 1)
    batch.sums[0]["copies"] += copies
    batch.room[0]["available"] -= claim
    batch.room[0]["empty"] -= need
    batch.room[0]["free_slots"] -= not jobs["running"][row]
    return victim - 1
