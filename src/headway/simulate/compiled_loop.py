"""The simulation of `loop.py` as one compiled loop, about a thousand times faster than real time.

It covers one instance without prefix caching, an `Ordered` planner and a packer with `params`. It calls the
very functions that those packers, the engine, the latency model and vLLM's hook call; only the slow loop's
bookkeeping is written anew, as heaps instead of tables. `tests/simulate/test_compiled_loop.py` requires the
same outcome to the last bit. Only `advance` begins iterations: what a function calls is compiled into it, too,
and the packer is large.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.engines.simulated import iteration
from headway.policy.core.ranks import ARRIVAL, ATTAINABLE, FAR, FAR_S, LATE, ON_TIME, level_of
from headway.policy.core.sorting import before, pop, push
from headway.policy.forecast.lengths.task import TELLING
from headway.policy.pack.kernels import PROMISES
from headway.policy.pack.promises.outlook import due_order, is_overdue
from headway.simulate.compiled_state import RunState
from headway.types import Floats, Ints


@compiled
def advance(run: RunState, stop: int, until: float) -> None:
    """Run until `stop` requests have arrived; to the end of everything when that is all of them.

    until: instant at which the run ends in any case.
    """
    progress, total, clock, arrival = run.progress[0], run.totals[0], run.engine.clock[0], run.engine.jobs["arrival"]
    size = arrival.size
    while total["now"] < until and (progress["arrived"] < stop or (stop == size and clock["rows"])):
        i = progress["arrived"]
        if clock["rows"] and (i == size or clock["end"] <= arrival[i]):
            total["now"] = clock["end"]
            done = _end_iteration(run, total["now"])
            if progress["rows"] or progress["after_late"] > progress["first_late"]:
                _begin(run, total["now"])
            changes = done.size
        else:
            total["now"] = arrival[i]
            _arrive(run, i)
            done, changes = run.rows[:0], 1
        for k in range(changes):
            if done.size:
                _leave(run, done[k])
            while _send_heads(run, total["now"]):
                _begin(run, total["now"])


@compiled
def _arrive(run: RunState, i: int) -> None:
    run.requests["blocks"][i] = np.ceil((run.engine.jobs["prompt"][i] + _forecast(run, i)) / run.planner.block_size)
    run.progress[0]["arrived"] += 1
    _add(run, level_of(run.keys[0, i], False) if run.planner.kind == ATTAINABLE else ON_TIME, i)


# ---- the engine


@compiled
def _begin(run: RunState, now: float) -> None:
    """Start the next iteration if there is anything to compute."""
    ran = iteration.begin(run.engine, _in_sight(run, now), now, run.totals)
    for row in ran.rows[ran.rows.size - ran.admitted :]:
        if not np.isnan(run.due[0, row]):
            _begin_late(run, row)


@compiled
def _in_sight(run: RunState, now: float) -> Ints:
    """Return the rows that the packer looks at, as `outlook.in_sight` finds them; what is overdue stays sorted."""
    progress, rows = run.progress[0], run.rows
    if run.engine.packer.kind != PROMISES:
        return rows[: progress["rows"]]
    kept = 0
    for k in range(progress["rows"]):
        row = rows[k]
        if is_overdue(run.engine.jobs, row, now):
            _add_late(run, row)
        else:
            rows[kept], kept = row, kept + 1
    progress["rows"] = kept
    late, most = run.late[progress["first_late"] : progress["after_late"]], run.engine.packer.keep.overdue_seen
    if late.size <= 2 * most:
        return np.concatenate((rows[:kept], late))
    return np.concatenate((rows[:kept], late[:most], late[late.size - most :]))


@compiled
def _add_late(run: RunState, row: int) -> None:
    """Add a row to those that are overdue: mostly at the end, as it has become so just now."""
    progress, late, serial = run.progress[0], run.late, run.engine.jobs["serial"]
    first, end = progress["first_late"], progress["after_late"]
    if end == late.size:
        late[: end - first] = late[first:end].copy()
        first, end = 0, end - first
    run.due[0, row], at = due_order(run.engine.jobs, row), end
    while at > first and before(run.due, serial, row, late[at - 1]):
        late[at], at = late[at - 1], at - 1
    late[at] = row
    progress["first_late"], progress["after_late"] = first, end + 1


@compiled
def _begin_late(run: RunState, row: int) -> None:
    """Move a row that has begun from those that are overdue to the others."""
    progress, late = run.progress[0], run.late
    low, high = progress["first_late"], progress["after_late"]
    while low < high:
        middle = (low + high) // 2
        if before(run.due, run.engine.jobs["serial"], late[middle], row):
            low = middle + 1
        else:
            high = middle
    if low - progress["first_late"] < progress["after_late"] - low:
        for at in range(low, progress["first_late"], -1):
            late[at] = late[at - 1]
        progress["first_late"] += 1
    else:
        for at in range(low, progress["after_late"] - 1):
            late[at] = late[at + 1]
        progress["after_late"] -= 1
    run.due[0, row] = np.nan
    run.rows[progress["rows"]] = row
    progress["rows"] += 1


@compiled
def _end_iteration(run: RunState, now: float) -> Ints:
    """Return the rows that are complete."""
    done = iteration.complete(run.engine, now)
    for row in done:
        run.first[row], run.end[row] = run.engine.jobs["first"][row], now
    if done.size:
        _drop_ended(run)
    return done


@compiled
def _drop_ended(run: RunState) -> None:
    progress = run.progress[0]
    kept = 0
    for k in range(progress["rows"]):
        if run.engine.jobs["live"][run.rows[k]]:
            run.rows[kept] = run.rows[k]
            kept += 1
    progress["rows"] = kept


# ---- output lengths (`policy/forecast/lengths/task.py`)


@compiled
def _forecast(run: RunState, i: int) -> float:
    """Return the mean of the task's last answers, none longer than the request allows."""
    if run.given.size:
        return float(run.given[0, i])
    task, most = run.requests["task"][i], run.requests["max_tokens"][i]
    known = min(run.learned[task], run.lengths.shape[1])
    if known == 0:
        return float(min(run.prior, most))
    total = 0
    for k in range(known):
        total += min(run.lengths[task, k], most)
    return float(total / known)


@compiled
def _spread(run: RunState, i: int) -> float:
    """Return `Forecast.spread` of the same answers."""
    if run.given.size:
        return float(run.given[1, i])
    task, most = run.requests["task"][i], run.requests["max_tokens"][i]
    known = max(min(run.learned[task], run.lengths.shape[1]), 1)
    squares = 0
    for k in range(known):
        squares += min(run.lengths[task, k], most) ** 2
    mean = _forecast(run, i)
    told = run.learned[task] >= TELLING
    return float(np.sqrt(max(squares / known - mean * mean, 0.0)) / mean) if told else 1.0


@compiled
def _learn_length(run: RunState, i: int) -> None:
    task = run.requests["task"][i]
    run.lengths[task, run.learned[task] % run.lengths.shape[1]] = run.engine.output[i]
    run.learned[task] += 1


# ---- the virtual queue (`policy/plan/ordered.py`, `policy/plan/dispatch.py`)


@compiled
def _send_heads(run: RunState, now: float) -> bool:
    """Send the head of the queue as long as it belongs inside; True, once one is sent to an engine at rest."""
    progress = run.progress[0]
    if now > progress["late_at"]:  # something inside is late by now
        progress["refused"] = -1
    while True:
        heap = _head(run, now)
        # Under overload most arrivals change neither the head nor what is inside.
        if heap < 0 or run.heaps[heap, 0] == progress["refused"]:
            return False
        if not _belongs(run, run.heaps[heap, 0], heap, now):
            progress["refused"] = run.heaps[heap, 0]
            return False
        i, progress["refused"] = _take_first(run, heap), -1
        _put_inside(run, i)
        if run.planner.ranked:
            run.engine.jobs["urgency"][i] = run.keys[0, i]
        _submit(run, i)
        if not run.engine.clock[0]["rows"]:
            return True


@compiled
def _head(run: RunState, now: float) -> int:
    """Return the heap whose first request is the most urgent of those waiting, -1 = none waits."""
    if run.planner.kind == ATTAINABLE:  # a late request goes behind those that can still meet their SLO
        while run.heap_sizes[ON_TIME] and run.keys[0, run.heaps[ON_TIME, 0]] < now:
            _add(run, LATE, _take_first(run, ON_TIME))
            run.progress[0]["refused"] = -1
    for heap in range(run.heap_sizes.size):
        if run.heap_sizes[heap] and not (heap == ON_TIME and _is_far(run, run.heaps[heap, 0], now)):
            return heap
    return ON_TIME if run.heap_sizes[ON_TIME] else -1


@compiled
def _is_far(run: RunState, i: int, now: float) -> bool:
    """Tell whether a request comes after the late ones, as its deadline is far."""
    return bool(run.planner.counts_late and now + FAR_S < run.keys[0, i] < np.inf)


@compiled
def _belongs(run: RunState, i: int, heap: int, now: float) -> bool:
    """Tell whether i, the first of a heap, is within the dispatch window and its KV fits."""
    progress = run.progress[0]
    # The loop takes the columns, not the whole state: each array in a call costs its reference count.
    ahead, blocks, requests, keys, order, kind = 0, 0, run.requests, run.keys, run.order, run.planner.kind
    counts_late, late_at, level = run.planner.counts_late, np.inf, heap
    if counts_late:
        _set_late_apart(run, now)
    if heap == ON_TIME and _is_far(run, i, now):
        level, late_at = FAR, keys[0, i] - FAR_S
    early = run.inside[: progress["early"]]
    for j in early:
        if kind == ARRIVAL or _inside_first(keys, order, kind, j, i, level, now, counts_late):
            ahead += 1
            blocks += requests["blocks"][j]
        late_at = min(late_at, keys[0, j])
    progress["late_at"] = late_at if counts_late else np.inf
    if level != ON_TIME:
        for j in run.inside[early.size : progress["inside"]]:
            if ahead >= run.planner.window:
                break
            ahead += level != LATE or before(keys, order, j, i)  # their KV does not matter (`sent.kv_room`)
    if ahead >= run.planner.window:
        return False
    return bool(ahead == 0 or blocks + requests["blocks"][i] <= run.planner.room)


@compiled
def _set_late_apart(run: RunState, now: float) -> None:
    """Move what has become overdue inside behind what has not: it does not keep out what can be on time."""
    progress, k = run.progress[0], 0
    while k < progress["early"]:
        if run.keys[0, run.inside[k]] < now:
            progress["early"] -= 1
            _swap(run, k, progress["early"])
        else:
            k += 1


@compiled
def _swap(run: RunState, a: int, b: int) -> None:
    """Let two requests inside change places."""
    inside, place = run.inside, run.place
    inside[a], inside[b] = inside[b], inside[a]
    place[inside[a]], place[inside[b]] = a, b


@compiled
def _inside_first(
    keys: Floats, order: Ints, kind: int, j: int, i: int, level: int, now: float, counts_late: bool
) -> bool:
    """Tell whether j, which is inside, ranks before i, which waits. level: of i."""
    if kind == ATTAINABLE:
        far = counts_late and now + FAR_S < keys[0, j] < np.inf
        other = FAR if far else level_of(keys[0, j] - now, counts_late)
        if other != level:
            return bool(other < level)
    return before(keys, order, j, i)


@compiled
def _submit(run: RunState, i: int) -> None:
    progress = run.progress[0]
    progress["serial"] += 1
    run.engine.jobs["serial"][i] = progress["serial"]
    run.engine.jobs["tokens_left"][i] = _forecast(run, i)
    run.engine.jobs["spread"][i] = _spread(run, i)
    run.engine.jobs["live"][i] = True
    run.rows[progress["rows"]] = i
    progress["rows"] += 1


@compiled
def _leave(run: RunState, i: int) -> None:
    _learn_length(run, i)
    progress = run.progress[0]
    if run.place[i] < progress["early"]:
        progress["early"] -= 1
        _swap(run, run.place[i], progress["early"])
    progress["inside"], progress["refused"] = progress["inside"] - 1, -1
    _swap(run, run.place[i], progress["inside"])


@compiled
def _put_inside(run: RunState, i: int) -> None:
    """Add a request to those inside; one that is overdue is found to be so later."""
    progress = run.progress[0]
    at = progress["inside"]
    run.inside[at], run.place[i] = i, at
    _swap(run, at, progress["early"])
    progress["inside"], progress["early"] = at + 1, progress["early"] + 1


@compiled
def _add(run: RunState, heap: int, i: int) -> None:
    run.heap_sizes[heap] = push(run.keys, run.order, run.heaps[heap], run.heap_sizes[heap], i)


@compiled
def _take_first(run: RunState, heap: int) -> int:
    first = int(run.heaps[heap, 0])
    run.heap_sizes[heap] = pop(run.keys, run.order, run.heaps[heap], run.heap_sizes[heap])
    return first
