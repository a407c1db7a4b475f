"""The decoupled queues of EcoServe and their order (3.2 and 3.3). Compiled, on the table's own array.

A row is one of: waiting (a prompt, or KV on the host), a prompt in progress, queued (its prompt is done and
keeps its KV, its generation waits), active (it generates, or will without another decision). `status` is the
packer's own column beside the table: state, goal (tokens whose KV the row is to hold) and time-synced group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.core.sorting import ordered
from headway.policy.memory.reservations import blocks_of, tokens_to_reserve
from headway.policy.pack.kernels import due_of, missing_of
from headway.types import Floats, Ints

Rows = NDArray[np.void]
WAITING, QUEUED, ACTIVE, GONE = range(4)  # GONE: it loses its KV in this very step
ROW_STATUS = np.dtype([("serial", int), ("state", int), ("goal", int), ("group", int)])
_RANGE = 0.5  # seconds of the first deadline range; each is twice the one before
_FIXED = np.array([0.2, 0.5, 2.0])  # seconds between the ranges that 3.3 gives as an example
_HELD = 128  # tokens of a held-KV range


class RowView(NamedTuple):
    """Rows by what they are.

    active, queued, prompts, waiting: as above.
    others: rows that control holds and that hold a slot.
    between_turns: rows that hold KV but no slot, streaming sessions; nothing can take their KV.
    ended: some time-synced group has no row left.
    news: rows new in the queue of generations.
    came: rows never seen before.
    """

    active: Ints
    queued: Ints
    prompts: Ints
    waiting: Ints
    others: int
    between_turns: int
    ended: bool
    news: int
    came: int


@compiled
def look(jobs: Rows, status: Rows, rows: Ints, most: int, groups: int) -> RowView:
    """Sort the live rows into queues; renew the status of rows that were used again or lost their KV.

    most: tokens that a row may hold. groups: how many time-synced groups were numbered.
    """
    kinds, sizes = np.empty((4, rows.size), np.int64), np.zeros(4, np.int64)
    alive, others, between_turns, news, came = np.zeros(groups, np.bool_), 0, 0, 0, 0
    for row in rows:
        if status["serial"][row] != jobs["serial"][row]:
            _meet(jobs, status, row, most)
            came += 1
        if jobs["held"][row]:
            others += jobs["running"][row]
            between_turns += not jobs["running"][row] and jobs["blocks"][row] > 0
            continue
        kind = _kind(jobs, status, row)
        if kind == 1 and status["state"][row] != QUEUED:
            status["state"][row], news = QUEUED, news + 1
        if status["state"][row] == ACTIVE and status["group"][row] < groups:
            alive[status["group"][row]] = True
        kinds[kind, sizes[kind]] = row
        sizes[kind] += 1
    return RowView(
        kinds[0, : sizes[0]],
        kinds[1, : sizes[1]],
        kinds[2, : sizes[2]],
        kinds[3, : sizes[3]],
        others,
        between_turns,
        not alive.all(),
        news,
        came,
    )


@compiled
def _meet(jobs: Rows, status: Rows, row: int, most: int) -> None:
    """Begin the status of a new row."""
    status["serial"][row], status["state"][row], status["group"][row] = jobs["serial"][row], WAITING, 0
    status["goal"][row] = tokens_to_reserve(
        jobs["prompt"][row] + jobs["output_tokens"][row], jobs["tokens_left"][row], most
    )


@compiled
def _kind(jobs: Rows, status: Rows, row: int) -> int:
    """Return 0 active, 1 queued, 2 a prompt in progress, 3 waiting."""
    if not jobs["running"][row]:
        status["state"][row] = WAITING
        return 3
    if jobs["output_tokens"][row] == 0 or missing_of(jobs, row) > 1:
        return 2
    return 0 if status["state"][row] == ACTIVE else 1


@compiled
def left_of(jobs: Rows, status: Rows, row: int) -> int:
    """Return the tokens that a row is predicted to make yet, at least one."""
    return int(max(status["goal"][row] - jobs["prompt"][row] - jobs["output_tokens"][row], 1))


@compiled
def need_of(jobs: Rows, status: Rows, row: int, size: int) -> int:
    """Return the blocks that a row needs beyond its own to reach its goal."""
    return int(max(blocks_of(status["goal"][row], size) - jobs["blocks"][row], 0))


# ---- ordering (EcoServe 3.3)


@compiled
def deadline_range(due: float, now: float, fixed: bool) -> float:
    """Return in which range of time before its deadline a row is: 0 late or nearly, inf without one.

    fixed: the ranges are 0.2 to 0.5, 0.5 to 2 and over 2 s; else each is twice the one before, without end.
    """
    left = due - now
    if fixed:
        return float(np.searchsorted(_FIXED, left, side="right"))
    if np.isinf(left):
        return np.inf
    return 0.0 if left < _RANGE else np.floor(np.log2(left / _RANGE)) + 1.0


@compiled
def held_range(jobs: Rows, row: int, size: int) -> int:
    """Return in which range of held KV a row is, on the host too; the most first when sorted by its minus."""
    return int((jobs["blocks"][row] * size + jobs["saved"][row]) // _HELD)


@compiled
def by_arrival(jobs: Rows, rows: Ints) -> Ints:
    """Return rows by when they came."""
    return rows[ordered(np.zeros((1, rows.size)), jobs["serial"][rows])]


@compiled
def by_urgency(jobs: Rows, rows: Ints) -> Ints:
    """Return rows by urgency, then by when they came."""
    keys = np.empty((1, rows.size))
    keys[0] = jobs["urgency"][rows]
    return rows[ordered(keys, jobs["serial"][rows])]


@compiled
def by_range(jobs: Rows, rows: Ints, lengths: Ints, size: int, now: float, fixed: bool) -> tuple[Ints, Floats]:
    """Return the order of rows by urgency, deadline range, held KV (most first) and length (longest first).

    Second, the ordered keys, shape (4, rows). fixed: as in `deadline_range`.
    """
    keys = np.zeros((4, rows.size))
    for i in range(rows.size):
        keys[0, i] = jobs["urgency"][rows[i]]
        keys[1, i] = deadline_range(due_of(jobs, rows[i]), now, fixed)
        keys[2, i] = -held_range(jobs, rows[i], size)
        keys[3, i] = -lengths[i]
    order = ordered(keys, jobs["serial"][rows])
    return order, keys[:, order]


@compiled
def by_group(jobs: Rows, status: Rows, rows: Ints, grain: int) -> Ints:
    """Return rows by urgency, those of equal predicted length together, the group of the oldest row first."""
    keys = np.zeros((2, rows.size))
    for i in range(rows.size):
        keys[0, i], keys[1, i] = jobs["urgency"][rows[i]], class_of(jobs, status, rows[i], grain)
    order = ordered(keys, jobs["serial"][rows])
    rows, keys, begin = rows[order], keys[:, order], 0
    lengths = keys[1].copy()
    for i in range(rows.size):
        if keys[0, i] != keys[0, begin] or lengths[i] != lengths[begin]:
            begin = i
        keys[1, i] = jobs["serial"][rows[begin]]
    return rows[ordered(keys, jobs["serial"][rows])]


@compiled
def class_of(jobs: Rows, status: Rows, row: int, grain: int) -> int:
    """Return the class of a row's predicted length: equal ones can be synchronized."""
    return int(-(-left_of(jobs, status, row) // grain))


@compiled
def best_fit(lengths: Ints, start: int, stop: int, room: int) -> int:
    """Return the index of the longest that fits into room among lengths[start:stop], which descend.

    Binary search; `stop` when none fits.
    """
    low, high = start, stop
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] <= room:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def same_range(keys: Floats, start: int) -> int:
    """Return where the rows end that have the urgency, deadline and held-KV ranges of the one at `start`."""
    stop = start + 1  # itself, whatever its keys are, so that a loop over ranges ends
    while stop < keys.shape[1] and (keys[:3, stop] == keys[:3, start]).all():
        stop += 1
    return stop


@compiled
def in_turn(ranged: bool, fixed: bool, jobs: Rows, waiting: Ints, size: int, now: float) -> Ints:
    """Return waiting rows in the order in which they are tried."""
    if not ranged:
        return by_urgency(jobs, waiting)
    lengths = np.empty(waiting.size, np.int64)
    for i in range(waiting.size):
        lengths[i] = missing_of(jobs, waiting[i])
    return waiting[by_range(jobs, waiting, lengths, size, now, fixed)[0]]
