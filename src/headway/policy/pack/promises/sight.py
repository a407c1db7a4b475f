"""Which of the overdue requests the packer looks at. Compiled.

In a long overload thousands of requests wait in the engine and cannot be on time: they were due before they
began, or their answers lost their KV and fell behind. An iteration considers `PromisesConfig.overdue_seen` from
the front of their order, which are admitted next, and the same number from its end, which show that there is an
overload (`outlook.pressure_of`). So its cost does not grow with the length of that queue.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled, compiled_in_place
from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.core.ranks import BEYOND, SOFT
from headway.policy.pack.kernels import Rows, tpot_from
from headway.policy.pack.promises.outlook import is_over, is_plain
from headway.types import Bools, Floats, Ints

_APART = 1e10  # more than any instant


@compiled_in_place
def due_order(jobs: Rows, row: int) -> float:
    """Return the sort key of an overdue row: answers that have begun first, then by the instant it was due.

    Weights count as in `outlook.soft_due`. Rows beyond their tenant's fair share come last.
    """
    target = jobs["soft"][row]
    if target == 0.0:
        target = min(jobs["ttft"][row], jobs["e2e"][row])
    due = jobs["arrival"][row] + (target if target < np.inf else SOFT) / jobs["weight"][row]
    if jobs["output_tokens"][row] > 0:
        return float(due - _APART)
    return float(due + (_APART if jobs["urgency"][row] == BEYOND else 0.0))


@compiled_in_place
def is_overdue(jobs: Rows, row: int, now: float) -> bool:
    """Tell whether a row was due by now and has no KV on the device.

    Rows with a rank from outside, and those that control holds, do not count.
    """
    if jobs["running"][row] or jobs["computed"][row] > jobs["saved"][row]:
        return False
    if jobs["held"][row] or jobs["resumable"][row]:
        return False
    if jobs["urgency"][row] != 0.0 and jobs["urgency"][row] != BEYOND:
        return False
    arrival, output_tokens, tpot = jobs["arrival"][row], jobs["output_tokens"][row], jobs["tpot"][row]
    if is_plain(jobs, row):
        return bool(arrival + (jobs["soft"][row] if jobs["soft"][row] > 0.0 else SOFT) < now)
    if output_tokens == 0:
        return is_over(jobs, row, now)
    answered = tpot_from(jobs, row) + (output_tokens + jobs["tokens_left"][row]) * tpot if tpot < np.inf else np.inf
    return bool(min(answered, arrival + jobs["e2e"][row]) < now)


@compiled
def in_sight(keep: PromisesConfig, jobs: Rows, rows: Ints, now: float) -> Ints:
    """Return the rows without the overdue ones that are neither first nor last in order."""
    seen, late, size, count = np.empty_like(rows), np.empty_like(rows), 0, 0
    for row in rows:
        if is_overdue(jobs, row, now):
            late[count], count = row, count + 1
        else:
            seen[size], size = row, size + 1
    most = keep.overdue_seen
    if count <= 2 * most:
        return rows
    late, due = late[:count], np.empty(count)
    for i in range(count):
        due[i] = due_order(jobs, late[i])
    serial = jobs["serial"][late]
    ends = _least(due, serial, most) | _least(-due, -serial, most)
    return np.concatenate((seen[:size], late[ends]))


@compiled
def _least(keys: Floats, serial: Ints, count: int) -> Bools:
    """Return a mask of the `count` least by key, of equals those with the lower serial: faster than to sort all."""
    limit = np.partition(keys, count - 1)[count - 1]
    least: Bools = keys < limit
    equal = np.flatnonzero(keys == limit)
    rest = count - np.count_nonzero(least)
    least[equal[np.argsort(serial[equal])[:rest]]] = True
    return least
