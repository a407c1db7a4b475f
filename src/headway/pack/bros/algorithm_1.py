"""Which rows make up the next iteration, by BROS's Algorithm 1? Compiled; `bros.py` says what is assumed.

`algorithm_1` puts a `Batch` together within `StepLimits`: it adds real-time rows by the time they have left, then
best-effort rows by swap cost, and keeps the sums from which the iteration's seconds are forecast (BROS 4.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.forecast.latency.online import seconds_of
from headway.pack.kernels import due_of, missing_of, ordered
from headway.types import Bools, Floats, Ints

Rows = NDArray[np.void]
# Places in the sum of an iteration: its shape, tokens to copy, the bound on its time, tokens left to give.
DECODES, CONTEXT, PREFILL, PAIRS, SWAP, BOUND, LEFT = range(7)
# Places in the room: blocks that can be had, blocks that are empty (below 0: to be made so), slots for rows
# that come in, rows chosen, rows to save, real-time rows kept out; 1 = real-time ones hold much.
AVAIL, EMPTY, SEATS, CHOSEN, SAVED, REFUSED, CROWDED = range(7)
_LOST = 1e9  # seconds


class StepLimits(NamedTuple):
    """What bounds one iteration: places (B), the engine's tokens, blocks and slots, what a copy costs."""

    places: int
    budget: int
    total: int
    free: int
    size: int
    slots: int
    copy: float
    shared: bool
    replaces: bool
    spare: float
    watermark: float
    lost_last: bool
    crowded: float


class Batch(NamedTuple):
    """An iteration being put together. left: seconds each chosen row has left (inf = best effort)."""

    rows: Ints
    tokens: Ints
    left: Floats
    save: Ints
    sums: Floats
    room: Ints


# ---- the algorithm


@compiled
def algorithm_1(t: StepLimits, jobs: Rows, rows: Ints, moves: Ints, now: float, theta: Floats) -> Batch:
    """Return the batch of the next iteration. rows: all that may run; moves: `TwoEndedBudget`'s, or empty."""
    promised = np.zeros(rows.size, np.bool_)
    for i in range(rows.size):
        promised[i] = real_time(jobs, rows[i])
    real, other = rows[promised], rows[~promised]
    urgent, left = polled(jobs, real, now, 2 * t.places, t.lost_last)
    batch = _empty(t, jobs, rows, other)
    _pack_real_time(t, jobs, batch, urgent, left, theta)
    if t.shared:  # what is missing now comes from blocks that are shared
        batch.room[EMPTY] = max(batch.room[EMPTY], 0)
    cheap = by_swap_cost(jobs, other, 2 * t.places)
    _pack_best_effort(t, jobs, batch, cheap, moves, theta)
    if batch.room[CHOSEN] == 0:  # new prompts that find no blocks must not hide those that have some
        inside = other[jobs["running"][other]]
        _pack_best_effort(t, jobs, batch, by_swap_cost(jobs, inside, inside.size), moves, theta)
    _make_room(jobs, batch, other)
    return batch


@compiled
def real_time(jobs: Rows, row: int) -> bool:
    """Tell whether a row was promised anything; then it is real-time to its end."""
    return bool(min(jobs["ttft"][row], jobs["tpot"][row], jobs["e2e"][row]) < np.inf)


@compiled
def polled(jobs: Rows, rows: Ints, now: float, most: int, lost_last: bool) -> tuple[Ints, Floats]:
    """Return real-time rows by the seconds they have left, and these, ascending.

    Two queues, those that hold KV and those that wait, are polled in turn; of each only the `most` least are
    sorted, which is as far as the batch can go into it. lost_last: first tokens that are late already go
    behind all others.
    """
    left = np.empty(rows.size)
    for i in range(rows.size):
        left[i] = due_of(jobs, rows[i]) - now
        if lost_last and left[i] < 0 and jobs["output_tokens"][rows[i]] == 0:
            left[i] += _LOST
    inside = jobs["running"][rows]
    a, a_left = _least(jobs, rows[inside], left[inside], most)
    b, b_left = _least(jobs, rows[~inside], left[~inside], most)
    size = a.size + b.size
    out, seconds = np.empty(size, np.int64), np.empty(size)
    i, j = 0, 0
    for k in range(size):
        if i < a.size and (j >= b.size or a_left[i] <= b_left[j]):
            out[k], seconds[k], i = a[i], a_left[i], i + 1
        else:
            out[k], seconds[k], j = b[j], b_left[j], j + 1
        if seconds[k] > _LOST / 2:
            seconds[k] -= _LOST
    return out, seconds


@compiled
def _least(jobs: Rows, rows: Ints, keys: Floats, most: int) -> tuple[Ints, Floats]:
    """Return the `most` rows with the least keys, sorted (of equals the first come), and the keys."""
    if rows.size > most:
        limit = np.partition(keys, most - 1)[most - 1]
        near = keys <= limit
        rows, keys = rows[near], keys[near]
    columns = np.empty((1, rows.size))
    columns[0] = keys
    order = ordered(columns, jobs["serial"][rows])[:most]
    return rows[order], keys[order]


@compiled
def by_swap_cost(jobs: Rows, rows: Ints, most: int) -> Ints:
    """Return the `most` best-effort rows with the fewest tokens to copy back, of equals those inside."""
    return _least(jobs, rows, jobs["saved"][rows] + 0.5 * ~jobs["running"][rows], most)[0]


@compiled
def _empty(t: StepLimits, jobs: Rows, rows: Ints, other: Ints) -> Batch:
    """Return a batch of nobody. What best-effort rows hold can be had: none of them runs yet."""
    sums, room = np.zeros(7), np.zeros(7, np.int64)
    sums[BOUND], sums[LEFT] = np.inf, t.budget
    room[EMPTY], room[SEATS] = t.free, t.slots - np.count_nonzero(jobs["running"] & jobs["live"])
    promised = 0
    for row in range(jobs.size):  # those that control holds too
        if jobs["live"][row] and real_time(jobs, row):
            promised += jobs["blocks"][row]
    room[CROWDED] = promised > t.crowded * t.total
    room[AVAIL] = t.total - promised if t.shared else t.free + jobs["blocks"][other].sum()
    return Batch(
        np.empty(t.places, np.int64), np.empty(t.places, np.int64), np.empty(t.places),
        np.empty(rows.size, np.int64), sums, room,
    )  # fmt: skip


# ---- real-time rows


@compiled
def _pack_real_time(
    t: StepLimits, jobs: Rows, batch: Batch, urgent: Ints, left: Floats, theta: Floats
) -> None:
    """Add real-time rows, least time left first, as far as places, blocks, tokens and time go."""
    room, spare, last = batch.room, int(t.watermark * t.total), urgent.size
    for i in range(urgent.size):
        if room[CHOSEN] >= t.places or i >= last:
            break
        row = urgent[i]
        want, inside = _want(t, jobs, batch, row), jobs["running"][row]
        need = _need(t, jobs, row)
        while inside and need > room[AVAIL] and last - 1 > i:
            last -= 1  # its own kind is all there is: the least urgent makes room
            _save(jobs, batch, urgent[last])
        short = need > room[AVAIL] - (0 if inside or room[CHOSEN] == 0 else spare)
        out = not inside and room[SEATS] <= 0
        if want <= 0 or short or out or not _in_time(t, jobs, batch, row, want, left[i], theta):
            room[REFUSED] += not inside
            continue
        _tighten(jobs, batch, row, left[i], t, want, theta)
        _take(jobs, batch, row, want, left[i], need, _copies(t, jobs, batch, row, need))


@compiled
def _want(t: StepLimits, jobs: Rows, batch: Batch, row: int) -> int:
    """Return the tokens a row gets: all it misses, or 0; a prompt beyond the whole budget comes in parts."""
    want, left = missing_of(jobs, row), int(batch.sums[LEFT])
    if want <= left:
        return int(want)
    return left if want > t.budget - t.places and left > t.budget // 2 else 0


@compiled
def _need(t: StepLimits, jobs: Rows, row: int) -> int:
    """Return the blocks a row needs beyond those it holds until its next token, a prompt in parts for all."""
    return int(-(-(jobs["computed"][row] + missing_of(jobs, row)) // t.size) - jobs["blocks"][row])


@compiled
def _copies(t: StepLimits, jobs: Rows, batch: Batch, row: int, need: int) -> int:
    """Return the tokens to copy when a row comes in: its own back, and those that make room for it."""
    beyond = max(need - max(batch.room[EMPTY], 0), 0)
    return int(jobs["saved"][row] + beyond * t.size)


@compiled
def _in_time(
    t: StepLimits, jobs: Rows, batch: Batch, row: int, want: int, left: float, theta: Floats
) -> bool:
    """Tell whether the iteration with this row still keeps the bound; the most urgent row always may run."""
    if batch.room[CHOSEN] == 0:
        return True
    need = _need(t, jobs, row)
    seconds = with_row(jobs, batch, row, want, _copies(t, jobs, batch, row, need), theta, t.copy)
    return bool(seconds <= batch.sums[BOUND])


@compiled
def _tighten(
    jobs: Rows, batch: Batch, row: int, left: float, t: StepLimits, want: int, theta: Floats
) -> None:
    """Let the time that a row has left bound the iteration, if it can be kept at all."""
    alone = with_row(jobs, batch, row, want, 0, theta, t.copy)
    bound = left
    if jobs["output_tokens"][row] > 0:  # one that is late already catches up when iterations keep its pace
        bound = jobs["tpot"][row] if left < alone else min(left, jobs["tpot"][row])
    if bound >= alone:
        batch.sums[BOUND] = min(batch.sums[BOUND], bound)


# ---- best-effort rows


@compiled
def _pack_best_effort(
    t: StepLimits, jobs: Rows, batch: Batch, cheap: Ints, moves: Ints, theta: Floats
) -> None:
    """Add best-effort rows by swap cost, then put them in place of the least urgent real-time ones."""
    victim = batch.room[CHOSEN] - 1
    for row in cheap:
        want = _want(t, jobs, batch, row)
        need, claim = _claims(t, jobs, row, want, moves)
        out = not jobs["running"][row] and (need > batch.room[EMPTY] or batch.room[SEATS] <= 0)
        if want <= 0 or claim > batch.room[AVAIL] or out:
            continue
        copies = int(jobs["saved"][row])
        if batch.room[CHOSEN] < t.places:
            if with_row(jobs, batch, row, want, copies, theta, t.copy) <= batch.sums[BOUND]:
                _take(jobs, batch, row, want, np.inf, need, copies)
                batch.room[AVAIL] -= claim - need
        elif t.replaces and victim >= 0 and batch.room[REFUSED] == 0 and not batch.room[CROWDED]:
            victim = _replace(t, jobs, batch, victim, row, want, need, claim, copies, theta)


@compiled
def _claims(t: StepLimits, jobs: Rows, row: int, want: int, moves: Ints) -> tuple[int, int]:
    """Return the empty blocks a best-effort row needs, and the blocks that nobody else can have then."""
    need = _need(t, jobs, row)
    if moves.size:
        need += moves[row]
    return int(need), int(need + jobs["blocks"][row])


@compiled
def _replace(
    t: StepLimits, jobs: Rows, batch: Batch, victim: int, row: int, want: int, need: int, claim: int,
    copies: int, theta: Floats,
) -> int:  # fmt: skip
    """Put a best-effort row in the place of the least urgent real-time one; return the next such place.

    Only when that one can wait for `spare` such iterations, and only within the smallest time left.
    """
    old, had = batch.rows[victim], batch.tokens[victim]
    _count(jobs, batch, old, had, -1)
    seconds = with_row(jobs, batch, row, want, copies, theta, t.copy)
    if seconds > batch.sums[BOUND] or batch.left[victim] < t.spare * seconds:
        _count(jobs, batch, old, had, 1)
        return victim
    batch.rows[victim], batch.tokens[victim], batch.left[victim] = row, want, np.inf
    _count(jobs, batch, row, want, 1)
    batch.sums[SWAP] += copies
    batch.room[AVAIL] -= claim
    batch.room[EMPTY] -= need
    batch.room[SEATS] -= not jobs["running"][row]
    return victim - 1


# ---- adding up


@compiled
def with_row(jobs: Rows, batch: Batch, row: int, want: int, copies: int, theta: Floats, copy: float) -> float:
    """Return the forecast seconds of the iteration with one more row: max(t_exec, t_swap)."""
    _count(jobs, batch, row, want, 1)
    batch.sums[SWAP] += copies
    seconds = forecast(batch.sums, theta, copy)
    batch.sums[SWAP] -= copies
    _count(jobs, batch, row, want, -1)
    return seconds


@compiled
def forecast(sums: Floats, theta: Floats, copy: float) -> float:
    """Return max(t_exec, t_swap) of an iteration in seconds (BROS 4.1)."""
    t_exec = seconds_of(theta, sums[DECODES], sums[CONTEXT], sums[PREFILL], sums[PAIRS])
    return float(max(t_exec, sums[SWAP] * copy))


@compiled
def _count(jobs: Rows, batch: Batch, row: int, tokens: int, sign: int) -> None:
    sums, there = batch.sums, jobs["computed"][row]
    if tokens == 1:
        sums[DECODES] += sign
        sums[CONTEXT] += sign * there
    else:
        sums[PREFILL] += sign * tokens
        sums[PAIRS] += sign * (tokens * there + tokens * tokens // 2)
    sums[LEFT] -= sign * tokens


@compiled
def _take(jobs: Rows, batch: Batch, row: int, want: int, left: float, blocks: int, copies: int) -> None:
    at = batch.room[CHOSEN]
    batch.rows[at], batch.tokens[at], batch.left[at] = row, want, left
    _count(jobs, batch, row, want, 1)
    batch.sums[SWAP] += copies
    batch.room[CHOSEN] += 1
    batch.room[AVAIL] -= blocks
    batch.room[EMPTY] -= blocks
    batch.room[SEATS] -= not jobs["running"][row]


@compiled
def _save(jobs: Rows, batch: Batch, row: int) -> None:
    """Send a row to the host as a whole, if it is here."""
    if jobs["running"][row]:
        batch.save[batch.room[SAVED]] = row
        batch.room[SAVED] += 1
        batch.room[AVAIL] += jobs["blocks"][row]
        batch.room[EMPTY] += jobs["blocks"][row]
        batch.room[SEATS] += 1
        batch.sums[SWAP] += jobs["computed"][row] - jobs["saved"][row]


@compiled
def _make_room(jobs: Rows, batch: Batch, other: Ints) -> None:
    """Swap out whole best-effort rows that do not run, the last come first, until the chosen ones fit."""
    chosen: Bools = np.zeros(jobs.size, np.bool_)
    chosen[batch.rows[: batch.room[CHOSEN]]] = True
    while batch.room[EMPTY] < 0:
        last = -1
        for row in other:
            idle = jobs["running"][row] and not chosen[row]
            if idle and (last < 0 or jobs["serial"][row] > jobs["serial"][last]):
                last = row
        if last < 0:
            return
        chosen[last] = True
        _save(jobs, batch, last)


# ---- near its limit


@compiled
def near_limit(jobs: Rows, rows: Ints, now: float, end: float, share: float) -> bool:
    """Tell whether at `end` some real-time row has less than `share` of its promise left.

    A first token that is late already `now` is not near its limit any more: a smaller batch does not save it.
    """
    for row in rows:
        due = due_of(jobs, row)
        promise, lost = jobs["tpot"][row], False
        if jobs["output_tokens"][row] == 0:
            promise, lost = min(jobs["ttft"][row], jobs["e2e"][row]), due < now
        if np.isfinite(due) and not lost and due - end < share * promise:
            return True
    return False
