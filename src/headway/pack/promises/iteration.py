"""The iteration that follows from the levels: who computes, how many prompt tokens. Compiled.

Kept answers come first, then kept prompts as far as those answers can wait for them, then best effort and
lost requests as far as a tighter bound allows, so that the slack that answers have gained is there when a
prompt with a promise arrives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.core.engine_spec import PackerParams
from headway.core.feasibility import Pace
from headway.forecast.latency.online import seconds_of
from headway.memory.budget import KvBudget
from headway.pack.kernels import CompiledStep, Rows, allocate, largest_chunk, missing_of
from headway.pack.promises.outlook import ANSWER, HOPE, PROMPT, WAITS, Outlook, reserved_of
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
    first, tpot, deadline = params.max_step, np.inf, np.inf
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] != ANSWER:
            continue
        each = jobs["tpot"][row]
        if each < np.inf:
            slack = jobs["first"][row] + jobs["output_tokens"][row] * each - now
            # One that is behind catches up at its tpot; to stop all prompts for it would not save it.
            first = min(first, slack if slack > pace.token else max(each, pace.token))
            tpot = min(tpot, each)
        left = jobs["arrival"][row] + jobs["e2e"][row] - now
        if 0.0 < left < np.inf:
            least = max(1.0 - params.keep.doubt * jobs["spread"][row], 0.0) * jobs["tokens_left"][row]
            deadline = min(deadline, left / max(least, 1.0))
    plain = min(first, tpot)
    return Seconds(first, plain, min(first, deadline, params.keep.rest * tpot), tpot)


@compiled
def compose(
    params: PackerParams, jobs: Rows, outlook: Outlook, others: int, kv: KvBudget, theta: Floats, may: Seconds
) -> CompiledStep:
    """Return the step of the ranked rows; others: rows that hold a slot and are not among them."""
    shape, fresh = _kept(params, jobs, outlook, theta, may)
    order, count, shape = _chosen(params, jobs, outlook, kv, theta, may, shape)
    chunk = max(shape.prompt, _fitting(params, theta, shape, may.spare))
    if shape.decodes == 0 or fresh:
        chunk = max(chunk, params.min_chunk)
    return allocate(
        jobs, order, others, kv, min(count, params.max_running), params.budget, chunk, params.row_chunk
    )


@compiled
def _kept(
    params: PackerParams, jobs: Rows, outlook: Outlook, theta: Floats, may: Seconds
) -> tuple[Shape, bool]:
    """Return the iteration of the kept rows, and whether a promised first token is to come."""
    decodes, context, want, fresh = 0, 0.0, 0, False
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] == ANSWER:
            decodes, context = decodes + 1, context + jobs["computed"][row]
        elif outlook.level[i] == PROMPT or outlook.level[i] == HOPE:
            want += missing_of(jobs, row)
            fresh |= jobs["output_tokens"][row] == 0
    limit = may.first if fresh else may.plain
    return Shape(decodes, context, min(largest_chunk(params, theta, decodes, context, limit), want)), fresh


@compiled
def _fitting(params: PackerParams, theta: Floats, shape: Shape, limit: float) -> int:
    """Return the prompt tokens that fit an iteration of these decodes in `limit` seconds, 0 = none."""
    chunk = largest_chunk(params, theta, shape.decodes, shape.context, limit)
    seconds = seconds_of(theta, shape.decodes, shape.context, chunk, chunk * chunk // 2)
    return chunk if shape.decodes == 0 or seconds <= limit else 0


@compiled
def _chosen(
    params: PackerParams,
    jobs: Rows,
    outlook: Outlook,
    kv: KvBudget,
    theta: Floats,
    may: Seconds,
    shape: Shape,
) -> tuple[Ints, int, Shape]:
    """Return the rows with those that may run first, how many these are, and the iteration.

    Those behind pause where they hold KV, as long as no other row needs it.
    """
    n = outlook.rows.size
    order, size, back = np.empty(n, np.int64), 0, n
    blocks, stuck = 0.0, False
    for i in range(n):
        row, level = outlook.rows[i], outlook.level[i]
        need = reserved_of(params.keep, jobs, row, kv.size)
        running = jobs["running"][row]
        runs = level <= HOPE
        if level > WAITS and running:
            shape, runs = _with(jobs, row, theta, may.spare, shape)
        elif level > WAITS and not stuck:  # no newcomer overtakes one that does not fit
            runs = blocks + need <= kv.total or size == 0
            stuck = not runs
        if runs or running:
            blocks += need
        if runs:
            order[size], size = row, size + 1
        else:
            back -= 1
            order[back] = row
    order[size:] = order[size:][::-1].copy()
    return order, size, shape


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
