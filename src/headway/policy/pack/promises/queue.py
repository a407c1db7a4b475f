"""The order in which an iteration takes the rows, made only as far as the iteration looks. Compiled.

Under overload most rows wait, for best effort or because they are lost, and at most a few of those come in.
So what is kept or holds a slot is sorted, and the others are a heap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.core.ranks import BEYOND, outer
from headway.policy.core.sorting import push, sort
from headway.policy.pack.kernels import Rows
from headway.policy.pack.promises.outlook import (
    DISTANT,
    FAR,
    GOES_ON,
    HOPE,
    OTHER,
    SURPLUS,
    TURN,
    WAITS,
    Outlook,
    soft_due,
)
from headway.types import Floats, Ints

# Of equals those that were kept come first, then those that hold a slot: more than any serial.
_HOLDS, _COMES = 1 << 40, 1 << 41


class Queue(NamedTuple):
    """All rows with what orders them, as in `policy/core/sorting.py`; the kept come first.

    rows: of the `Jobs` table; level: see `outlook.py`.
    keys: urgency, level and what decides within a level; serial: decides between equals.
    sorted: places of rows that are kept, wait for room or hold a slot, in order.
    newcomers: places of the others, a heap.
    """

    rows: Ints
    level: Ints
    keys: Floats
    serial: Ints
    sorted: Ints
    newcomers: Ints


@compiled
def queue_of(keep: PromisesConfig, jobs: Rows, kept: Outlook, outlook: Outlook, theta: Floats, now: float) -> Queue:
    """Return the queue; kept: in the order of the selection, which may have given up some of them."""
    n = outlook.rows.size
    rows, level, serial = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    keys, stay, heap = np.empty((3, n)), np.empty(n, np.int64), np.empty(n, np.int64)
    # The loop is another function: calls with arrays that it made itself would cost reference counts.
    size, waiting = _fill(keep, jobs, kept, outlook, theta, now, rows, level, keys, serial, stay, heap)
    return Queue(rows, level, keys, serial, sort(keys, serial, stay[:size]), heap[:waiting])


@compiled
def _fill(
    keep: PromisesConfig, jobs: Rows, kept: Outlook, outlook: Outlook, theta: Floats, now: float, rows: Ints,
    level: Ints, keys: Floats, serial: Ints, stay: Ints, heap: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Fill the columns, the kept rows first; return how many places are in `stay` and in `heap`.

    Rows that are not kept go by soft due, those begun and due soon first. Of the FAR those that hold a slot
    come first, so that they lose KV to others one at a time. Negative ranks from outside go before
    all that; positive ones are tenants' turns, among rows that are not kept (`policy/plan/run_order.py`).
    """
    at, size, waiting = kept.rows.size, 0, 0
    rows[:at], level[:at] = kept.rows, kept.level
    for i in range(outlook.rows.size):
        if outlook.level[i] > HOPE:
            rows[at], level[at] = outlook.rows[i], outlook.level[i]
            at += 1
    for i in range(at):
        row, running = rows[i], jobs["running"][rows[i]]
        keys[0, i], keys[1, i], keys[2, i] = outer(jobs["urgency"][row]), level[i], -np.inf
        if level[i] > WAITS:
            due = soft_due(keep, jobs, row, level[i], theta)
            near = jobs["output_tokens"][row] > 0 and due - now < keep.near_s
            level[i] = GOES_ON if near else _level_behind(level[i], jobs["urgency"][row])
            keys[2, i] = keys[0, i] if level[i] == TURN else due
            if level[i] >= FAR and running:
                keys[2, i] = -np.inf
            keys[0, i], keys[1, i] = min(keys[0, i], 0.0), level[i]
        serial[i] = i if i < kept.rows.size else jobs["serial"][row] + (_HOLDS if running else _COMES)
        if running or level[i] <= WAITS:
            stay[size], size = i, size + 1
        else:
            waiting = push(keys, serial, heap, waiting, i)
    return size, waiting


@compiled
def _level_behind(level: int, urgency: float) -> int:
    """Return the level of what is not kept and need not go on."""
    if level in (FAR, DISTANT):
        return level
    if urgency == BEYOND:
        return SURPLUS
    return TURN if urgency > 0.0 else OTHER
