"""The iteration that follows from the levels: which requests compute, how many prompt tokens. Compiled.

Kept answers come first, then kept prompts as far as those answers can wait for them, then best effort and
lost requests as far as a tighter bound allows, so that the slack that answers have gained is there when a
prompt with a promise arrives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import PackerParams, PromisesConfig
from headway.policy.core.feasibility import Pace
from headway.policy.core.ranks import BEYOND
from headway.policy.core.sorting import before, pop, sort
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.kernels import CompiledStep, Rows, allocate, missing_of
from headway.policy.pack.promises.outlook import (
    ANSWER,
    FAR,
    HOPE,
    PROMPT,
    WAITS,
    Outlook,
    can_wait,
    lead_of,
    made_up_for,
    pace_to_catch_up,
    reserved_of,
    rest_of,
    until_gap,
)
from headway.policy.pack.promises.selection import Queue
from headway.types import Floats, Ints


class TimeLimits(NamedTuple):
    """The most seconds of an iteration.

    first: with a new prompt that is kept.
    plain: with other kept prompts.
    spare: with requests that are not kept.
    distant: with no others that are not kept than those whose deadline is distant.
    tpot: the tightest of the kept answers, inf = none.
    soonest: until the first of the promised first tokens is due, inf = none is to come.
    """

    first: float
    plain: float
    spare: float
    distant: float
    tpot: float
    soonest: float


@compiled
def seconds_allowed(
    params: PackerParams, jobs: Rows, outlook: Outlook, now: float, theta: Floats, usual: float, pace: Pace
) -> TimeLimits:
    """Return what the kept answers allow: none may miss its deadline, or fall behind its tpot.

    Only for a first token that would be late otherwise an answer falls behind, if it makes up for that
    (`outlook.made_up_for`).
    """
    soonest = _soonest(jobs, outlook, now)
    first = plain = _longest(params.keep, jobs, outlook, usual)
    tpot, deadline, share = np.inf, soonest, 1.0
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] == PROMPT:
            share = min(share, params.keep.leading_share)
        if outlook.level[i] != ANSWER:
            continue
        each = jobs["tpot"][row]
        if each < np.inf:
            lead = lead_of(params.keep, jobs, row, now)
            # One that is behind need not catch up at once; to stop all prompts for it would not save it.
            catch_up = pace_to_catch_up(params.keep, jobs, row, lead)
            gap = until_gap(params, jobs, row, now)
            rest = min(lead, gap)
            rest = rest if rest > pace.token else max(min(catch_up, gap), pace.token)
            plain = min(plain, rest)
            first = min(first, max(rest, min(lead + made_up_for(params.keep, jobs, row, pace), gap)))
            tpot = min(tpot, each)
            if lead < 2.0 * each:  # or it would never get ahead again
                share = min(share, params.keep.leading_share)
            if lead < params.caution.burst_lead_s:  # where promises are lost, a burst of prompts needs more
                share = min(share, params.keep.burst_share)
        left = jobs["arrival"][row] + jobs["e2e"][row] - now
        if 0.0 < left < np.inf:
            deadline = min(deadline, _each_until(params, jobs, row, left, pace))
    if first > plain and not _is_late(params, jobs, outlook, now, theta, max(plain, tpot)):
        first = plain
    spare = min(plain, usual, deadline, share * tpot)
    distant = min(spare, params.keep.distant_share * min(usual, tpot))
    return TimeLimits(first, min(plain, tpot), spare, distant, tpot, soonest)


@compiled
def _is_late(params: PackerParams, jobs: Rows, kept: Outlook, now: float, theta: Floats, limit: float) -> bool:
    """Tell whether a promised first token would be late in iterations of `limit` seconds."""
    decodes, context, tokens, ahead, rest = 0, 0.0, 0, 0.0, 0.0
    for i in range(kept.rows.size):
        row = kept.rows[i]
        if kept.level[i] <= ANSWER:
            decodes, context = decodes + 1, context + jobs["computed"][row]
        elif kept.level[i] == PROMPT and jobs["output_tokens"][row] == 0 and jobs["urgency"][row] != BEYOND:
            if tokens == 0:
                ahead, rest = float(jobs["computed"][row]), float(missing_of(jobs, row))
            tokens += missing_of(jobs, row)
            shape = Shape(decodes, context, tokens, ahead, rest, 0.0)
            if _seconds_beside(params, theta, shape, limit) > jobs["arrival"][row] + jobs["ttft"][row] - now:
                return True
    return False


@compiled
def usual_seconds(params: PackerParams, jobs: Rows, rows: Ints, theta: Floats) -> float:
    """Return the seconds of a usual iteration: `max_step`, or those of all decodes twice or with a chunk.

    Where even a plain iteration takes that long (a slow or busy machine), another must fit beside it.
    """
    decodes, context = 0, 0.0
    for row in rows:
        if jobs["running"][row] and missing_of(jobs, row) == 1:
            decodes, context = decodes + 1, context + jobs["computed"][row]
    token = seconds_of(theta, decodes, context, 0.0, 0.0)
    chunk = prefill_of(theta, params.min_chunk) - seconds_of(theta, 0.0, 0.0, 0.0, 0.0)
    return float(max(params.max_step, 2.0 * token, token + chunk))


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
def _longest(keep: PromisesConfig, jobs: Rows, outlook: Outlook, usual: float) -> float:
    """Return the seconds that no iteration should exceed, so that an arrival is seen in time.

    Beside prompts whose first token was promised it may be up to twice the usual: a share of the tightest
    ttft, as the next one like it has the time to wait. Each further iteration of a prompt costs it a base.
    """
    ttft = np.inf
    for i in range(outlook.rows.size):
        if outlook.level[i] == PROMPT and jobs["output_tokens"][outlook.rows[i]] == 0:
            ttft = min(ttft, jobs["ttft"][outlook.rows[i]])
    return float(min(max(keep.ttft_share * ttft, usual), 2.0 * usual)) if ttft < np.inf else usual


@compiled
def _each_until(params: PackerParams, jobs: Rows, row: int, left: float, pace: Pace) -> float:
    """Return the seconds per token that a deadline in `left` seconds allows, should the answer be long.

    Where even the kept answers alone are too slow for that, it counts as short: others could not save it.
    """
    tokens, spread = jobs["tokens_left"][row], jobs["spread"][row]
    each = left / max((1.0 + params.keep.long_answer_stds * spread) * tokens, 1.0)
    if each <= pace.token:
        each = left / max(max(1.0 - params.caution.lost_below_stds * spread, 0.0) * tokens, 1.0)
    return float(each)


_LEAST_CHUNK = 16  # prompt tokens
_GRAIN = 8  # tokens: the step of prompt sizes


class Shape(NamedTuple):
    """An iteration being built: decodes, their context, prompt tokens.

    first_computed, first_missing: tokens of the first kept prompt.
    other_computed: of the first other prompt.
    """

    decodes: int
    context: float
    prompt: int
    first_computed: float
    first_missing: float
    other_computed: float


# ---- answers that wait for others


@compiled
def take_turns(
    params: PackerParams,
    jobs: Rows,
    kept: Outlook,
    theta: Floats,
    limits: TimeLimits,
    now: float,
    pace: Pace,
    row_chunk: int,
) -> None:
    """Let the answers furthest ahead of their tpot wait (WAITS, in place) where the batch is too small.

    They keep their KV, so that costs nothing. Of the prompts those count that this iteration computes.
    """
    if kept.rows.size <= params.max_running:
        return
    chunk, count = _kept_iteration(params, jobs, kept, theta, limits, now, row_chunk)[0].prompt, 0
    for i in range(kept.rows.size):
        if kept.level[i] <= ANSWER:
            count += 1
        elif kept.level[i] in (PROMPT, HOPE) and chunk > 0:
            count, chunk = count + 1, chunk - missing_of(jobs, kept.rows[i])
    while count > params.max_running:
        best, most = -1, 2.0 * pace.token
        for i in range(kept.rows.size):
            silent = now - jobs["last"][kept.rows[i]] > 0.5 * params.max_gap
            if kept.level[i] == ANSWER and can_wait(jobs, kept.rows[i]) and not silent:
                lead = lead_of(params.keep, jobs, kept.rows[i], now)
                if lead > most:
                    best, most = i, lead
        if best < 0:
            return
        kept.level[best] = WAITS
        count -= 1


@compiled
def defer(jobs: Rows, kept: Outlook, deferred: Ints) -> None:
    """Let these answers wait (WAITS, in place), with their KV, unless their stream was silent for long."""
    waits = np.zeros(jobs["live"].size, np.bool_)
    waits[deferred] = True
    for i in range(kept.rows.size):
        if kept.level[i] == ANSWER and waits[kept.rows[i]]:
            kept.level[i] = WAITS


@compiled
def make_way(
    params: PackerParams, jobs: Rows, kept: Outlook, theta: Floats, limits: TimeLimits, now: float, pace: Pace
) -> None:
    """Defer answers (WAITS, in place) for a prompt whose first token would be late beside them.

    These are the answers that can wait as long as the prompt takes alone, if it is on time beside the others
    (SLOs-Serve, arXiv 2504.08784, so leaves out decodes that are not due). Only for a prompt whose ttft is
    of the order of an iteration: under overload, any prompt is computed at the last moment.
    """
    prompt = _most_urgent(jobs, kept) if params.keep.alone_share < np.inf else -1
    if prompt < 0:
        return
    row = kept.rows[prompt]
    alone = Shape(0, 0.0, missing_of(jobs, row), float(jobs["computed"][row]), float(missing_of(jobs, row)), 0.0)
    beside, _ = _beside(params, jobs, kept, now, pace, alone, -np.inf)
    takes = _seconds_beside(params, theta, beside, limits.first)
    seconds = _seconds(theta, alone)
    if beside.decodes == 0 or alone.prompt > params.budget or seconds > limits.soonest:
        return
    if takes <= max(limits.soonest, params.keep.alone_share * jobs["ttft"][row]):
        return
    wait = seconds + 2.0 * pace.token
    shape, least = _beside(params, jobs, kept, now, pace, alone, wait)
    if _seconds(theta, shape) > min(limits.soonest, least):
        return
    for i in range(kept.rows.size):
        if kept.level[i] == ANSWER and _rest_of(params, jobs, kept, i, now) > wait:
            kept.level[i] = WAITS


@compiled
def _most_urgent(jobs: Rows, kept: Outlook) -> int:
    """Return the place of the kept prompt whose first token is due soonest, -1 = none is to come."""
    best, soonest = -1, np.inf
    for i in range(kept.rows.size):
        row = kept.rows[i]
        if kept.level[i] == PROMPT and jobs["output_tokens"][row] == 0:
            due = jobs["arrival"][row] + jobs["ttft"][row]
            if due < soonest:
                best, soonest = i, due
    return best


@compiled
def _rest_of(params: PackerParams, jobs: Rows, kept: Outlook, i: int, now: float) -> float:
    """Return the seconds for which an answer can stand still."""
    row = kept.rows[i]
    rest = min(rest_of(params, jobs, row, now), jobs["last"][row] + params.max_gap - now)
    return float(min(rest, kept.start[i] - now) if jobs["e2e"][row] < np.inf else rest)


@compiled
def _beside(
    params: PackerParams, jobs: Rows, kept: Outlook, now: float, pace: Pace, prompt: Shape, wait: float
) -> tuple[Shape, float]:
    """Return the iteration of a prompt and answers that cannot wait for it, and the seconds they allow."""
    decodes, context, least = 0, 0.0, np.inf
    for i in range(kept.rows.size):
        row = kept.rows[i]
        if kept.level[i] == ANSWER:
            rest = _rest_of(params, jobs, kept, i, now)
            if rest > wait > -np.inf:
                continue
            slow = max(min(jobs["tpot"][row], until_gap(params, jobs, row, now)), pace.token)
            least = min(least, rest if rest > pace.token else slow)
        if kept.level[i] <= ANSWER:
            decodes, context = decodes + 1, context + jobs["computed"][row]
    return Shape(decodes, context, prompt.prompt, prompt.first_computed, prompt.first_missing, 0.0), float(least)


@compiled
def _seconds_beside(params: PackerParams, theta: Floats, shape: Shape, limit: float) -> float:
    """Return the seconds that a prompt takes beside answers that allow iterations of `limit` seconds."""
    whole = _seconds(theta, shape)
    if whole <= limit:
        return whole
    chunk = _largest(params, theta, shape, limit, _least_chunk(params, theta))
    return float(limit * np.ceil(shape.prompt / chunk))


# ---- the step


@compiled
def compose(
    params: PackerParams,
    jobs: Rows,
    kept: Outlook,
    queue: Queue,
    others: int,
    kv: KvBudget,
    theta: Floats,
    limits: TimeLimits,
    now: float,
) -> CompiledStep:
    """Return the step of the queue; others: rows that hold a slot and are not in it."""
    shape, fresh, limit = _kept_iteration(params, jobs, kept, theta, limits, now, kv.row_chunk)
    order, count, shape, spare = _chosen(params, jobs, queue, kv, theta, limits, limit, shape)
    chunk = max(shape.prompt, _fitting(params, theta, shape, spare))
    if shape.decodes == 0 or (fresh and not _yields(params, limits)):
        chunk = max(chunk, params.min_chunk)
    # One runs however long it takes: an engine that computes nothing would never come out of it.
    least = max(count, 1)
    most, budget = min(least, params.max_running), params.budget
    step = allocate(jobs, order, others, kv, most, budget, chunk, max(order.size - least, 0))
    if step.order.size == 0:  # nothing fits: any row that does is better than none
        order = _completed(jobs, queue, order, count)
        step = allocate(jobs, order, others, kv, most, budget, chunk, 0)
    return step


@compiled
def _kept_iteration(
    params: PackerParams, jobs: Rows, outlook: Outlook, theta: Floats, limits: TimeLimits, now: float, row_chunk: int
) -> tuple[Shape, bool, float]:
    """Return the iteration of the kept rows, whether a promised first token is to come, and the most seconds.

    The seconds are inf unless an urgent prompt limits them.
    """
    decodes, context, want, fresh, ahead, rest = 0, 0.0, 0, False, 0.0, 0.0
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] <= ANSWER:
            decodes, context = decodes + 1, context + jobs["computed"][row]
        elif outlook.level[i] == PROMPT or outlook.level[i] == HOPE:
            if want == 0:
                ahead, rest = float(jobs["computed"][row]), float(missing_of(jobs, row))
            want += missing_of(jobs, row)
            fresh |= jobs["output_tokens"][row] == 0
    shape = Shape(decodes, context, 0, ahead, rest, 0.0)
    if want == 0:
        return shape, fresh, np.inf
    limit = limits.first if fresh else limits.plain
    most, least = _until_urgent(params, jobs, outlook, theta, shape, limit, now, row_chunk)
    limit = min(limit, most)
    if _yields(params, limits):
        chunk = _fitting(params, theta, shape, limit)
    else:
        chunk = _largest(params, theta, shape, limit, params.min_chunk)
    return Shape(decodes, context, min(max(chunk, least), want), ahead, rest, 0.0), fresh, most


@compiled
def _until_urgent(
    params: PackerParams,
    jobs: Rows,
    kept: Outlook,
    theta: Floats,
    shape: Shape,
    limit: float,
    now: float,
    row_chunk: int,
) -> tuple[float, int]:
    """Return the most seconds of an iteration, and the prompt tokens that it has at least; inf, 0 = any.

    limit: the seconds that the kept answers allow.
    The first token that is due next comes out of this iteration if it can. Then others share the iteration
    only within a part of the time that is left, since forecasts of iterations err.
    """
    place = _most_urgent(jobs, kept)
    if place < 0 or params.keep.urgent_share == np.inf:
        return np.inf, 0
    row, tokens = kept.rows[place], 0
    for i in range(place + 1):
        if kept.level[i] == PROMPT or kept.level[i] == HOPE:
            tokens += missing_of(jobs, kept.rows[i])
    left = jobs["arrival"][row] + jobs["ttft"][row] - now
    takes = _seconds(theta, _with_prompt(shape, tokens))
    fits = shape.decodes + tokens <= params.budget and missing_of(jobs, row) <= row_chunk
    if not fits or takes > min(left, limit):
        return np.inf, 0
    return float(max(params.keep.urgent_share * left, takes)), tokens


@compiled
def _yields(params: PackerParams, limits: TimeLimits) -> bool:
    """Tell whether prompts wait until the answers in progress have gained the time for them.

    With even a small part of a prompt in each iteration, answers would fall behind a tight tpot together,
    and all be lost.
    """
    return params.keep.prompts_yield and limits.tpot < np.inf


@compiled
def _least_chunk(params: PackerParams, theta: Floats) -> int:
    """Return the prompt tokens that take half as long as an empty iteration, within bounds."""
    base = seconds_of(theta, 0.0, 0.0, 0.0, 0.0)
    each = (prefill_of(theta, params.min_chunk) - base) / params.min_chunk
    if each <= 0.0:
        return params.min_chunk
    return int(min(max(0.5 * base / each, float(_LEAST_CHUNK)), float(params.min_chunk)))


@compiled
def _with_prompt(shape: Shape, prompt: int) -> Shape:
    """Return the iteration with another number of prompt tokens."""
    return Shape(shape.decodes, shape.context, prompt, shape.first_computed, shape.first_missing, shape.other_computed)


@compiled
def _seconds(theta: Floats, shape: Shape) -> float:
    """Return the seconds of an iteration."""
    prompt = float(shape.prompt)
    pairs = shape.first_computed * min(prompt, shape.first_missing) + prompt * prompt / 2.0
    pairs += shape.other_computed * max(prompt - shape.first_missing, 0.0)
    return float(seconds_of(theta, shape.decodes, shape.context, prompt, pairs))


@compiled
def _largest(params: PackerParams, theta: Floats, shape: Shape, limit: float, least: int) -> int:
    """Return the most prompt tokens beside these decodes in an iteration of `limit` seconds.

    At least `least`, whatever the limit; at most what the budget leaves.
    """
    low, high = least, max(params.budget - shape.decodes, least)
    if _seconds(theta, _with_prompt(shape, high)) <= limit:
        return high
    while high - low > _GRAIN:  # seconds grow with the prompt, so halving finds the largest that fits
        middle = (low + high) // 2
        if _seconds(theta, _with_prompt(shape, middle)) <= limit:
            low = middle
        else:
            high = middle
    return low


@compiled
def _fitting(params: PackerParams, theta: Floats, shape: Shape, limit: float) -> int:
    """Return the prompt tokens that fit an iteration of these decodes in `limit` seconds, 0 = none."""
    chunk = _largest(params, theta, shape, limit, _least_chunk(params, theta))
    fits = _seconds(theta, _with_prompt(shape, chunk)) <= limit
    return chunk if shape.decodes == 0 or fits else 0


@compiled
def _chosen(
    params: PackerParams, jobs: Rows, queue: Queue, kv: KvBudget, theta: Floats, limits: TimeLimits, most: float,
    shape: Shape,
) -> tuple[Ints, int, Shape, float]:  # fmt: skip
    """Return the rows that may run, then those that pause with their KV unless others need it.

    Also how many may run, the iteration, and the seconds that it may take, at most `most`.
    """
    rows, keys, serial, heap = queue.rows, queue.keys, queue.serial, queue.newcomers
    order, pauses, size, paused = np.empty(rows.size, np.int64), np.empty(queue.sorted.size, np.int64), 0, 0
    blocks, at, waiting, spare = 0.0, 0, heap.size, min(limits.distant, most)
    while at < queue.sorted.size or waiting:
        if waiting and (at == queue.sorted.size or before(keys, serial, heap[0], queue.sorted[at])):
            row = rows[heap[0]]
            need = reserved_of(jobs, row, kv.size, params.keep.growth_share)
            if size >= params.max_running or (blocks + need > kv.total and size > 0):
                waiting = 0  # the batch is full, or no newcomer overtakes one that does not fit
                continue
            blocks, order[size], size = blocks + need, row, size + 1
            if queue.level[heap[0]] <= FAR:
                spare = min(limits.spare, most)
            waiting = pop(keys, serial, heap, waiting)
            continue
        row, level, at = rows[queue.sorted[at]], queue.level[queue.sorted[at]], at + 1
        runs = level <= HOPE
        if level == WAITS and not jobs["running"][row]:
            continue
        if level > WAITS:
            spare = min(limits.spare, most) if level <= FAR else spare
            shape, runs = _with(jobs, row, theta, spare, shape)
        blocks += reserved_of(jobs, row, kv.size, params.keep.growth_share)
        if runs:
            order[size], size = row, size + 1
        else:
            pauses[paused], paused = row, paused + 1
    order[size : size + paused] = pauses[:paused]
    return order[: size + paused], size, shape, spare


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
    first, missing, other = shape.first_computed, shape.first_missing, shape.other_computed
    if missing_of(jobs, row) > 1:  # its tokens come from what is left for prompts
        other = other if other > 0.0 else float(jobs["computed"][row])
        return Shape(shape.decodes, shape.context, shape.prompt, first, missing, other), True
    decodes, context = shape.decodes + 1, shape.context + jobs["computed"][row]
    more = Shape(decodes, context, shape.prompt, first, missing, other)
    if _seconds(theta, more) <= spare:
        return more, True
    return shape, False
