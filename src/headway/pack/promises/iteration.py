"""The iteration that follows from the levels: who computes, how many prompt tokens. Compiled.

Kept answers come first, then kept prompts as far as those answers can wait for them, then best effort and
lost requests as far as a tighter bound allows, so that the slack that answers have gained is there when a
prompt with a promise arrives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.core.engine_spec import KeepOptions, PackerParams
from headway.core.feasibility import Pace
from headway.core.sorting import before, pop, sort
from headway.forecast.latency.online import seconds_of
from headway.memory.budget import KvBudget
from headway.pack.kernels import CompiledStep, Rows, allocate, largest_chunk, missing_of
from headway.pack.promises.outlook import ANSWER, HOPE, PROMPT, WAITS, Outlook, can_wait, lead_of, reserved_of
from headway.pack.promises.queue import Queue
from headway.types import Floats, Ints


class Seconds(NamedTuple):
    """What an iteration may take.

    first: where a first token is to come that was promised.
    plain: otherwise.
    spare: with best effort and lost requests.
    tpot: the tightest of the kept answers, inf = none.
    """

    first: float
    plain: float
    spare: float
    tpot: float


class Shape(NamedTuple):
    """An iteration being built: decodes, their context, prompt tokens."""

    decodes: int
    context: float
    prompt: int


@compiled
def seconds_allowed(params: PackerParams, jobs: Rows, outlook: Outlook, now: float, pace: Pace) -> Seconds:
    """Return what the kept answers allow: none may fall behind its tpot, or its deadline."""
    # Where even a plain iteration takes that long (a slow or busy machine), another must fit beside it.
    usual = max(params.max_step, 2.0 * pace.token)
    first, tpot, deadline = _longest(params.keep, jobs, outlook, usual), np.inf, _soonest(jobs, outlook, now)
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] != ANSWER:
            continue
        each = jobs["tpot"][row]
        if each < np.inf:
            lead = lead_of(params.keep, jobs, row, now)
            # One that is behind catches up at its tpot; to stop all prompts for it would not save it.
            first = min(first, lead if lead > pace.token else max(each, pace.token))
            tpot = min(tpot, each)
        left = jobs["arrival"][row] + jobs["e2e"][row] - now
        if 0.0 < left < np.inf:
            deadline = min(deadline, _each_until(params.keep, jobs, row, left, pace))
    return Seconds(first, min(first, tpot), min(first, usual, deadline, params.keep.rest * tpot), tpot)


@compiled
def _soonest(jobs: Rows, outlook: Outlook, now: float) -> float:
    """Return the seconds until the first of the promised first tokens is due; inf = none is to come.

    What fills up an iteration must not make the first tokens late that come out of it.
    """
    left = np.inf
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] == PROMPT and jobs["output_tokens"][row] == 0:
            left = min(left, jobs["arrival"][row] + jobs["ttft"][row] - now)
    return float(left)


@compiled
def _longest(keep: KeepOptions, jobs: Rows, outlook: Outlook, usual: float) -> float:
    """Return the seconds that no iteration should exceed, so that an arrival is seen in time.

    Beside prompts whose first token was promised it may be up to twice the usual: a share of the tightest
    ttft, as the next one like it has the time to wait. Each further iteration of a prompt costs it a base.
    """
    ttft = np.inf
    for i in range(outlook.rows.size):
        if outlook.level[i] == PROMPT and jobs["output_tokens"][outlook.rows[i]] == 0:
            ttft = min(ttft, jobs["ttft"][outlook.rows[i]])
    return float(min(max(keep.wait * ttft, usual), 2.0 * usual)) if ttft < np.inf else usual


@compiled
def _each_until(keep: KeepOptions, jobs: Rows, row: int, left: float, pace: Pace) -> float:
    """Return the seconds per token that a deadline in `left` seconds allows, should the answer be long.

    Where even the kept answers alone are too slow for that, it counts as short: others could not save it.
    """
    tokens, spread = jobs["tokens_left"][row], jobs["spread"][row]
    each = left / max((1.0 + keep.long * spread) * tokens, 1.0)
    if each <= pace.token:
        each = left / max(max(1.0 - keep.doubt * spread, 0.0) * tokens, 1.0)
    return float(each)


@compiled
def take_turns(
    params: PackerParams, jobs: Rows, kept: Outlook, theta: Floats, may: Seconds, now: float, pace: Pace
) -> None:
    """Let the answers furthest ahead of their tpot wait (WAITS, in place) where the batch is too small.

    They keep their KV, so that costs nothing. Of the prompts those count that this iteration computes.
    """
    if kept.rows.size <= params.max_running:
        return
    chunk, count = _kept(params, jobs, kept, theta, may)[0].prompt, 0
    for i in range(kept.rows.size):
        if kept.level[i] <= ANSWER:
            count += 1
        elif kept.level[i] in (PROMPT, HOPE) and chunk > 0:
            count, chunk = count + 1, chunk - missing_of(jobs, kept.rows[i])
    while count > params.max_running:
        best, most = -1, 2.0 * pace.token
        for i in range(kept.rows.size):
            silent = now - jobs["last"][kept.rows[i]] > 0.5 * params.keep.gap
            if kept.level[i] == ANSWER and can_wait(jobs, kept.rows[i]) and not silent:
                lead = lead_of(params.keep, jobs, kept.rows[i], now)
                if lead > most:
                    best, most = i, lead
        if best < 0:
            return
        kept.level[best] = WAITS
        count -= 1


@compiled
def compose(
    params: PackerParams, jobs: Rows, kept: Outlook, queue: Queue, others: int, kv: KvBudget, theta: Floats,
    may: Seconds,
) -> CompiledStep:  # fmt: skip
    """Return the step of the queue; others: rows that hold a slot and are not in it."""
    shape, fresh = _kept(params, jobs, kept, theta, may)
    order, count, shape = _chosen(params, jobs, queue, kv, theta, may, shape)
    chunk = max(shape.prompt, _fitting(params, theta, shape, may.spare))
    if shape.decodes == 0 or (fresh and not _yields(params, may)):
        chunk = max(chunk, params.min_chunk)
    # One runs however long it takes: an engine that computes nothing would never come out of it.
    most, budget, each = min(max(count, 1), params.max_running), params.budget, params.row_chunk
    while True:
        step = allocate(jobs, order, others, kv, most, budget, chunk, each)
        if step.order.size or order.size == queue.rows.size:
            return step
        order = _completed(jobs, queue, order, count)  # nothing fits: any row that does is better than none


@compiled
def _kept(
    params: PackerParams, jobs: Rows, outlook: Outlook, theta: Floats, may: Seconds
) -> tuple[Shape, bool]:
    """Return the iteration of the kept rows, and whether a promised first token is to come."""
    decodes, context, want, fresh = 0, 0.0, 0, False
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] <= ANSWER:
            decodes, context = decodes + 1, context + jobs["computed"][row]
        elif outlook.level[i] == PROMPT or outlook.level[i] == HOPE:
            want += missing_of(jobs, row)
            fresh |= jobs["output_tokens"][row] == 0
    limit = may.first if fresh else may.plain
    if _yields(params, may):
        chunk = _fitting(params, theta, Shape(decodes, context, 0), limit)
    else:
        chunk = largest_chunk(params, theta, decodes, context, limit)
    return Shape(decodes, context, min(chunk, want)), fresh


@compiled
def _yields(params: PackerParams, may: Seconds) -> bool:
    """Tell whether prompts wait until the answers in progress have gained the time for them.

    With even a small part of a prompt in each iteration, answers would fall behind a tight tpot together,
    and all be lost.
    """
    return params.keep.yields and may.tpot < np.inf


@compiled
def _fitting(params: PackerParams, theta: Floats, shape: Shape, limit: float) -> int:
    """Return the prompt tokens that fit an iteration of these decodes in `limit` seconds, 0 = none."""
    chunk = largest_chunk(params, theta, shape.decodes, shape.context, limit)
    seconds = seconds_of(theta, shape.decodes, shape.context, chunk, chunk * chunk // 2)
    return chunk if shape.decodes == 0 or seconds <= limit else 0


@compiled
def _chosen(
    params: PackerParams, jobs: Rows, queue: Queue, kv: KvBudget, theta: Floats, may: Seconds, shape: Shape
) -> tuple[Ints, int, Shape]:
    """Return the rows that may run and those that hold KV, how many the former are, and the iteration.

    Those behind pause where they hold KV, as long as no other row needs it.
    """
    rows, keys, serial, heap = queue.rows, queue.keys, queue.serial, queue.newcomers
    order, pauses, size, paused = np.empty(rows.size, np.int64), np.empty(queue.sorted.size, np.int64), 0, 0
    blocks, at, waiting = 0.0, 0, heap.size
    while at < queue.sorted.size or waiting:
        if waiting and (at == queue.sorted.size or before(keys, serial, heap[0], queue.sorted[at])):
            row = rows[heap[0]]
            need = reserved_of(jobs, row, kv.size, params.keep.grow)
            if blocks + need > kv.total and size > 0:
                waiting = 0  # no newcomer overtakes one that does not fit
                continue
            blocks, order[size], size = blocks + need, row, size + 1
            waiting = pop(keys, serial, heap, waiting)
            continue
        row, level, at = rows[queue.sorted[at]], queue.level[queue.sorted[at]], at + 1
        runs = level <= HOPE
        if level == WAITS and not jobs["running"][row]:
            continue
        if level > WAITS:
            shape, runs = _with(jobs, row, theta, may.spare, shape)
        blocks += reserved_of(jobs, row, kv.size, params.keep.grow)
        if runs:
            order[size], size = row, size + 1
        else:
            pauses[paused], paused = row, paused + 1
    order[size : size + paused] = pauses[:paused]
    return order[: size + paused], size, shape


@compiled
def _completed(jobs: Rows, queue: Queue, order: Ints, count: int) -> Ints:
    """Return `order`, of which `count` rows may run, and behind it all others, which wait."""
    every, size, at = np.empty(queue.rows.size, np.int64), order.size, 0
    every[:size] = order
    for place in sort(queue.keys, queue.serial, np.arange(queue.rows.size)):
        row = queue.rows[place]
        if at < count and row == order[at]:
            at += 1
        elif not jobs["running"][row]:
            every[size], size = row, size + 1
    return every


@compiled
def _with(jobs: Rows, row: int, theta: Floats, spare: float, shape: Shape) -> tuple[Shape, bool]:
    """Return the iteration with a row that holds KV, and whether it may run: a decode if the time allows."""
    if missing_of(jobs, row) > 1:
        return shape, True  # its tokens come from what is left for prompts
    more = Shape(shape.decodes + 1, shape.context + jobs["computed"][row], shape.prompt)
    pairs = shape.prompt * shape.prompt // 2
    if seconds_of(theta, more.decodes, more.context, more.prompt, pairs) <= spare:
        return more, True
    return shape, False
