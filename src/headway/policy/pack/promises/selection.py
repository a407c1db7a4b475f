"""Which of the waiting requests are kept, and which of those are admitted now. Compiled.

Under overload not every promise can be kept. Moore and Hodgson's rule (1968) keeps as many as possible on
one machine: take requests by their latest start, and whenever one of them would start too late, give up the
largest so far. Here time, KV and slots are three machines: a request takes a share of each for as long as it
is in progress, and its size is what it takes of the scarcest.

The order in which an iteration takes the rows is made only as far as the iteration looks: what is kept or holds a
slot is sorted, and the others, of which at most a few come in, are a heap (`Queue`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled, compiled_in_place
from headway.policy.core.engine_spec import PackerParams, PromisesConfig
from headway.policy.core.feasibility import Pace
from headway.policy.core.ranks import BEYOND, outer
from headway.policy.core.sorting import pop, push, sort
from headway.policy.forecast.latency.online import seconds_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.kernels import Rows
from headway.policy.pack.promises.outlook import (
    ANSWER,
    DISTANT,
    FAR,
    GOES_ON,
    HOPE,
    LOST,
    OTHER,
    PROMPT,
    SURPLUS,
    TURN,
    WAITS,
    Outlook,
    blocks_of,
    can_wait,
    lead_of,
    prefill_per_token,
    prompt_seconds,
    reserved_of,
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


_LEAST_SHARE = 0.1  # of the time that prompts get beside answers, at least
_RESOURCES = 3  # time, KV, slots
_TRIES = 8  # prompts for which no answers can pause, in an iteration; a thousand may wait
_SORTED = 64  # prompts that are ordered anew; the next iterations compute no more than those


class InProgress(NamedTuple):
    """The kept requests in progress, and those admitted so far.

    blocks: KV that they will hold, as admission counts it.
    answers: how many.
    context: cached tokens halfway through what is left of their answers.
    prefill_load: seconds of prompts per iteration.
    steady: how many need a slot in each iteration.
    rate: tokens/s of the others, which may take turns.
    """

    blocks: float
    answers: int
    context: float
    prefill_load: float
    steady: int
    rate: float


@compiled
def select(
    params: PackerParams,
    jobs: Rows,
    outlook: Outlook,
    kv: KvBudget,
    now: float,
    theta: Floats,
    pace: Pace,
    tpot: float,
    longest: float,
    grow: float,
) -> None:
    """Change the level of prompts that are given up (LOST) or have no room yet (WAITS), and order the others.

    kv: its slots are those that held rows leave. tpot: the tightest of the kept answers, inf = none. longest:
    seconds of an iteration with prompts. grow: as of `growth_of`. All changes are in place.
    """
    # Without a tpot a prompt still pays the base of each of its iterations, and the answers beside it.
    beside = pace.token if pace.decodes else pace.base
    share = max(1.0 - beside / (tpot if tpot < np.inf else longest), _LEAST_SHARE)
    if params.keep.selects_largest_set:
        _keep_most(params, jobs, outlook, kv, now, theta, pace, share, grow)
    _admit(params, jobs, outlook, kv, now, theta, pace, grow)
    if params.keep.short_prompts_first:
        _advance_short(jobs, outlook, now, theta, pace, share)


# ---- the largest set of requests that can be on time


@compiled
def _keep_most(
    params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, now: float, theta: Floats, pace: Pace,
    share: float, grow: float,
) -> None:  # fmt: skip
    """Give up the largest requests until all that are kept can start in time; share: of the time for prompts.

    An answer in progress may be given up, too, unless it has a tpot; it counts with a part of its size. What
    weighs twice as much counts as half as large.
    """
    n, started = outlook.rows.size, params.keep.begun_size_share
    largest, serial, heap, size = np.empty((3, n)), -jobs["serial"][outlook.rows], np.empty(n, np.int64), 0
    need, kept, number = np.zeros((n, 2, _RESOURCES)), np.zeros((2, _RESOURCES)), 0
    for i in range(n):
        row, prompt = outlook.rows[i], outlook.level[i] == PROMPT
        if not prompt and outlook.level[i] != ANSWER:
            continue
        _demand(params, jobs, row, kv, now, theta, pace, share, grow, prompt, need, i)
        _add(kept, need, i, 1.0)
        number += 1
        loses = prompt or (jobs["tpot"][row] == np.inf and started > 0.0)
        if loses and outlook.start[i] > -np.inf:  # else it is the eldest
            largest[0, i] = -jobs["urgency"][row]
            largest[1, i] = (
                -max(need[i, 0, 0], need[i, 0, 1], need[i, 0, 2]) * (1.0 if prompt else started) / jobs["weight"][row]
            )
            largest[2, i] = -jobs["priority"][row]
            size = push(largest, serial, heap, size, i)
        if not prompt or outlook.start[i] < now:
            continue  # it has begun: to give up others would not help it
        while size and outlook.level[i] == PROMPT and now + _wait(kept, need, i, number) > outlook.start[i]:
            worst, size = heap[0], pop(largest, serial, heap, size)
            outlook.level[worst] = LOST
            _add(kept, need, worst, -1.0)
            number -= 1


@compiled_in_place
def _add(kept: Floats, need: Floats, i: int, sign: float) -> None:
    """Add the needs of the row at place `i` to the totals, or subtract them."""
    for kind in range(2):
        for k in range(_RESOURCES):
            kept[kind, k] += sign * need[i, kind, k]


@compiled_in_place
def _demand(
    params: PackerParams,
    jobs: Rows,
    row: int,
    kv: KvBudget,
    now: float,
    theta: Floats,
    pace: Pace,
    share: float,
    grow: float,
    prompt: bool,
    need: Floats,
    i: int,
) -> None:
    """Set what a row needs of each resource: need[i, 0] in seconds of all of it, need[i, 1] as a share."""
    if prompt:
        need[i, 0, 0] = _seconds_beside(jobs, row, theta, pace, share)
        need[i, 1, 1] = blocks_of(jobs, row, kv.size, 0.5) / kv.total
    else:
        need[i, 1, 1] = reserved_of(jobs, row, kv.size, grow) / kv.total
    need[i, 1, 2] = 1.0 / params.max_running
    for k in range(1, _RESOURCES):
        need[i, 0, k] = (need[i, 0, 0] + jobs["tokens_left"][row] * pace.token) * need[i, 1, k]
    if params.keep.turn_capacity > 0.0 and can_wait(jobs, row):
        part = min(_rate(params.keep, jobs, row) * pace.token, 1.0)
        need[i, 1, 2] *= part
        if not prompt and params.host > 0:  # the more it is ahead, the longer its KV can be in the pool
            ahead = lead_of(params.keep, jobs, row, now) / (params.keep.kv_lead_tokens * jobs["tpot"][row])
            need[i, 1, 1] *= 1.0 - min(max(ahead, 0.0), 1.0) * (1.0 - part)


@compiled
def _seconds_beside(jobs: Rows, row: int, theta: Floats, pace: Pace, share: float) -> float:
    """Return the seconds of a row's prompt when answers leave it this share of the time."""
    return float((prompt_seconds(jobs, row, theta, pace) - pace.base) / share + pace.base)


@compiled_in_place
def _wait(kept: Floats, need: Floats, i: int, number: int) -> float:
    """Return the seconds until the last of the kept, at place `i`, can start.

    kept: what all of them need, it included; need: what each needs itself; number: of them. Prompts are
    computed one after another. As long as the shares of KV and slots fit together they are there at once;
    beyond that a request waits until the share that it lacks has been released, at the rate at which those
    ahead end: with one slot, until all of them have.
    """
    wait = kept[0, 0] - need[i, 0, 0]
    for k in range(1, _RESOURCES):
        if kept[1, k] > 1.0:
            wait = max(wait, kept[0, k] * (1.0 - 1.0 / kept[1, k]) + kept[0, k] / number - need[i, 0, k])
    return float(wait)


@compiled
def _advance_short(jobs: Rows, outlook: Outlook, now: float, theta: Floats, pace: Pace, share: float) -> None:
    """Move short prompts before longer ones that have the time to wait for them.

    By latest start alone every prompt would be computed at the last moment, and one that arrives meanwhile
    could be on time only if another is given up.
    """
    place, size, slack = np.empty(_SORTED, np.int64), np.empty(_SORTED), np.empty(_SORTED)
    count, wait = 0, 0.0
    for i in range(outlook.rows.size):
        if outlook.level[i] == PROMPT and count < _SORTED:
            place[count], slack[count] = i, outlook.start[i] - now - wait
            size[count] = _seconds_beside(jobs, outlook.rows[i], theta, pace, share)
            wait, count = wait + size[count], count + 1
    order = np.arange(count)
    for k in range(1, count):
        while k > 0 and size[order[k]] < size[order[k - 1]] and slack[order[k - 1]] >= size[order[k]]:
            one, other = order[k], order[k - 1]
            slack[other] -= size[one]
            slack[one] += size[other]
            order[k - 1], order[k], k = one, other, k - 1
    rows, start = outlook.rows[place[:count]], outlook.start[place[:count]]
    for k in range(count):
        outlook.rows[place[k]], outlook.start[place[k]] = rows[order[k]], start[order[k]]


# ---- admission


@compiled
def _admit(
    params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, now: float, theta: Floats, pace: Pace, grow: float
) -> None:
    """Admit kept prompts as long as they and the answers in progress have KV, `HOPE` after `PROMPT`.

    For one that finds none, answers far ahead pause, or smaller prompts pass it. Rows of a later rank from
    outside do not count.
    """
    inside, begin, tries = InProgress(0.0, 0, 0.0, 0.0, 0, 0.0), 0, _TRIES if params.host > 0 else 0
    while begin < outlook.rows.size:
        end = _same_rank(jobs, outlook, begin)
        inside = _in_progress(params.keep, jobs, outlook, kv, theta, pace, grow, inside, begin, end)
        for level in (PROMPT, HOPE):
            for i in range(begin, end):
                row = outlook.rows[i]
                if outlook.level[i] != level or jobs["running"][row]:
                    continue
                blocks = reserved_of(jobs, row, kv.size, grow)
                more = _with(params.keep, inside, jobs, row, blocks, theta, pace)
                if level == HOPE and not _on_time_if_short(params, jobs, row, now, theta, pace, more):
                    outlook.level[i] = LOST
                    continue
                if level == PROMPT and tries and _is_full(params, kv, pace, more):
                    more = _paused(params, jobs, outlook, kv, now, theta, pace, grow, more, begin, end, i)
                    tries -= _is_full(params, kv, pace, more)
                if inside.answers and _must_wait(params, jobs, kv, pace, more, row, outlook.start[i] - now):
                    outlook.level[i] = WAITS
                    if more.blocks <= kv.total:  # smaller ones may pass it for KV, none for a slot
                        inside = InProgress(
                            inside.blocks, more.answers, more.context, more.prefill_load, more.steady, more.rate
                        )
                else:
                    inside = more
        begin = end


@compiled
def _must_wait(
    params: PackerParams, jobs: Rows, kv: KvBudget, pace: Pace, inside: InProgress, row: int, left: float
) -> bool:
    """Tell whether a prompt waits for room; inside: with it, left: seconds until it must start.

    Answers take turns for one that must start now. Else it waits until one of them ends: the fewer are in
    progress, the freer is the choice among prompts to come.
    """
    early = can_wait(jobs, row) and left > params.max_step
    many = inside.answers > params.max_running
    return _is_full(params, kv, pace, inside) or bool(early and many)


@compiled
def _is_full(params: PackerParams, kv: KvBudget, pace: Pace, inside: InProgress) -> bool:
    """Tell whether these requests are more than the KV or the batch holds.

    Answers that take turns need t / tpot of a slot of the batch each, with iterations of t seconds; each of
    them holds a slot of the engine meanwhile.
    """
    turns = params.keep.turn_capacity
    most = kv.slots if turns > 0.0 else min(params.max_running, kv.slots)
    if inside.blocks > kv.total or inside.answers > most:
        return True
    if inside.answers <= params.max_running:
        return False
    return bool(inside.steady + inside.rate * (pace.token + inside.prefill_load) > turns * params.max_running)


@compiled
def _rate(keep: PromisesConfig, jobs: Rows, row: int) -> float:
    """Return the tokens/s of a row's answer at its tpot, 0 for one that cannot wait for others."""
    return float(1.0 / ((1.0 - keep.tpot_margin) * jobs["tpot"][row])) if can_wait(jobs, row) else 0.0


@compiled
def _paused(
    params: PackerParams,
    jobs: Rows,
    outlook: Outlook,
    kv: KvBudget,
    now: float,
    theta: Floats,
    pace: Pace,
    grow: float,
    inside: InProgress,
    begin: int,
    end: int,
    at: int,
) -> InProgress:
    """Pause the answers furthest ahead until the rest fit, or none if they never do.

    inside: with the prompt at place `at`, for which they make room. What an answer is ahead it loses while it
    waits, so it helps in a burst, and `pause_lead_tokens` says how much of it there must be (BROS 4.2
    replaces real-time requests by others for the same reason).
    """
    chosen, size, wait = np.empty(end - begin, np.int64), 0, max(outlook.start[at] - now, 0.0)
    while _is_full(params, kv, pace, inside):
        best, most = -1, 0.0
        for i in range(begin, end):
            row = outlook.rows[i]
            if outlook.level[i] == ANSWER and can_wait(jobs, row):
                least = params.keep.pause_lead_tokens * jobs["tpot"][row]
                lead = lead_of(params.keep, jobs, row, now) - wait - least
                if lead > most:
                    best, most = i, lead
        if best < 0:
            outlook.level[chosen[:size]] = ANSWER
            return inside
        outlook.level[best], chosen[size], size = WAITS, best, size + 1
        inside = _without(params.keep, inside, jobs, outlook.rows[best], kv, grow, theta, pace)
    return inside


@compiled
def _without(
    keep: PromisesConfig, inside: InProgress, jobs: Rows, row: int, kv: KvBudget, grow: float, theta: Floats, pace: Pace
) -> InProgress:
    """Return the requests in progress without this answer, which can wait."""
    return InProgress(
        inside.blocks - reserved_of(jobs, row, kv.size, grow),
        inside.answers - 1,
        inside.context - jobs["computed"][row] - jobs["tokens_left"][row] / 2,
        inside.prefill_load - prefill_per_token(jobs, row, theta, pace.base),
        inside.steady,
        inside.rate - _rate(keep, jobs, row),
    )


@compiled
def _same_rank(jobs: Rows, outlook: Outlook, begin: int) -> int:
    """Return the end of the rows that have the same rank from outside as the one at `begin`."""
    rank, end = outer(jobs["urgency"][outlook.rows[begin]]), begin + 1
    while end < outlook.rows.size and outer(jobs["urgency"][outlook.rows[end]]) == rank:
        end += 1
    return end


@compiled
def _with(
    keep: PromisesConfig, inside: InProgress, jobs: Rows, row: int, blocks: float, theta: Floats, pace: Pace
) -> InProgress:
    """Return the requests in progress with one more."""
    return InProgress(
        inside.blocks + blocks,
        inside.answers + 1,
        inside.context + jobs["prompt"][row] + jobs["output_tokens"][row] + jobs["tokens_left"][row] / 2,
        inside.prefill_load + prefill_per_token(jobs, row, theta, pace.base),
        inside.steady + (not can_wait(jobs, row)),
        inside.rate + _rate(keep, jobs, row),
    )


@compiled
def _in_progress(
    keep: PromisesConfig,
    jobs: Rows,
    outlook: Outlook,
    kv: KvBudget,
    theta: Floats,
    pace: Pace,
    grow: float,
    inside: InProgress,
    begin: int,
    end: int,
) -> InProgress:
    """Return the requests in progress with those of these rows that are kept and hold a slot."""
    blocks, answers, context, prefill_load = (inside.blocks, inside.answers, inside.context, inside.prefill_load)
    steady, rate = inside.steady, inside.rate
    for i in range(begin, end):
        row = outlook.rows[i]
        if outlook.level[i] <= ANSWER or (outlook.level[i] == PROMPT and jobs["running"][row]):
            blocks += reserved_of(jobs, row, kv.size, grow)
            answers += 1
            context += jobs["computed"][row] + jobs["tokens_left"][row] / 2
            prefill_load += prefill_per_token(jobs, row, theta, pace.base)
            steady += not can_wait(jobs, row)
            rate += _rate(keep, jobs, row)
    return InProgress(blocks, answers, context, prefill_load, steady, rate)


@compiled
def _on_time_if_short(
    params: PackerParams, jobs: Rows, row: int, now: float, theta: Floats, pace: Pace, inside: InProgress
) -> bool:
    """Tell whether a row is on time if its answer is `lost_below_stds / 2` deviations short.

    inside: it and all others.
    """
    decodes = min(inside.answers, params.max_running)
    context = inside.context * decodes / max(inside.answers, 1)
    seconds = inside.prefill_load + seconds_of(theta, decodes, context, 0.0, 0.0)
    left = jobs["arrival"][row] + jobs["e2e"][row] - now - prompt_seconds(jobs, row, theta, pace)
    short = max(1.0 - params.caution.lost_below_stds / 2 * jobs["spread"][row], 0.0)
    return bool(seconds * short * jobs["tokens_left"][row] <= left)
