"""The order in which an iteration takes the rows, made only as far as the iteration looks. Compiled.

Under overload most rows wait, for best effort or because they are lost, and at most a few of those come in.
So what is kept or holds a slot is sorted, and the others are a heap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.core.engine_spec import KeepOptions
from headway.core.feasibility import Pace
from headway.core.ranks import outer
from headway.core.sorting import push, sort
from headway.pack.kernels import Rows
from headway.pack.promises.outlook import GOES_ON, HOPE, OTHER, WAITS, Outlook, soft_due
from headway.types import Floats, Ints

# Of equals those that were kept come first, then those that hold a slot: more than any serial.
_HOLDS, _COMES = 1 << 40, 1 << 41


class Queue(NamedTuple):
    """All rows with what orders them, as in `core/sorting.py`; the first ones are those that were kept.

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
def queue_of(
    keep: KeepOptions, jobs: Rows, kept: Outlook, outlook: Outlook, theta: Floats, pace: Pace, now: float
) -> Queue:
    """Return the queue; kept: in the order of the selection, which may have given up some of them."""
    n = outlook.rows.size
    rows, level, serial = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    keys, stay, heap = np.empty((3, n)), np.empty(n, np.int64), np.empty(n, np.int64)
    # The loop is another function: calls with arrays that it made itself would cost reference counts.
    size, waiting = _fill(keep, jobs, kept, outlook, theta, pace, now, rows, level, keys, serial, stay, heap)
    return Queue(rows, level, keys, serial, sort(keys, serial, stay[:size]), heap[:waiting])


@compiled
def _fill(
    keep: KeepOptions, jobs: Rows, kept: Outlook, outlook: Outlook, theta: Floats, pace: Pace, now: float,
    rows: Ints, level: Ints, keys: Floats, serial: Ints, stay: Ints, heap: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Fill the columns, the kept rows first; return how many places are in `stay` and in `heap`.

    What is not kept goes by its soft due, those that have begun first unless they can wait. A rank from
    outside goes before all that, but for positive ones of best effort: those decide within best effort, as
    the ranks of application runs should (`plan/run_order.py`).
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
            keys[2, i] = soft_due(keep, jobs, row, theta, pace)
            near = jobs["output_tokens"][row] > 0 and keys[2, i] - now < keep.near
            level[i] = GOES_ON if near else OTHER
            if keys[0, i] > 0.0:
                keys[2, i], keys[0, i] = keys[0, i], 0.0
            keys[1, i] = level[i]
        serial[i] = i if i < kept.rows.size else jobs["serial"][row] + (_HOLDS if running else _COMES)
        if running or level[i] <= WAITS:
            stay[size], size = i, size + 1
        else:
            waiting = push(keys, serial, heap, waiting, i)
    return size, waiting
