"""Which of the waiting requests are kept, and which of those are admitted now. Compiled.

Under overload not every promise can be kept. Moore and Hodgson's rule (1968) keeps as many as possible on
one machine: take requests by their latest start, and whenever one of them would start too late, give up the
largest so far. Here time, KV and slots are three machines: a request takes a share of each for as long as it
is in progress, and its size is what it takes of the scarcest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.core.engine_spec import KeepOptions, PackerParams
from headway.core.sorting import pop, push
from headway.forecast.latency.online import seconds_of
from headway.memory.budget import KvBudget
from headway.pack.kernels import Rows
from headway.pack.promises.outlook import (
    ANSWER,
    HOPE,
    LOST,
    PROMPT,
    WAITS,
    Outlook,
    Pace,
    blocks_of,
    prompt_seconds,
    rent,
    reserved_of,
)
from headway.types import Floats

_LEAST_SHARE = 0.1  # of the time that prompts get beside answers, at least
_RESOURCES = 3  # time, KV, slots


class InProgress(NamedTuple):
    """The kept requests in progress, and those admitted so far.

    blocks: KV that they will hold, as admission counts it.
    answers: how many.
    context: cached tokens halfway through what is left of their answers.
    rents: seconds of prompts per iteration.
    tpot: the tightest, inf = none.
    """

    blocks: float
    answers: int
    context: float
    rents: float
    tpot: float


@compiled
def select(
    params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, now: float, theta: Floats, pace: Pace,
    tpot: float,
) -> None:  # fmt: skip
    """Change the level of prompts that are given up (LOST) or have no room yet (WAITS), in place.

    tpot: the tightest of the kept answers, inf = none.
    """
    inside = _in_progress(params, jobs, outlook, kv, theta, pace, tpot)
    if params.keep.selects:
        _keep_most(params, jobs, outlook, kv, now, theta, pace, inside)
    _admit(params, jobs, outlook, kv, now, theta, pace, inside)


# ---- the largest set of requests that can be on time


@compiled
def _keep_most(
    params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, now: float, theta: Floats, pace: Pace,
    inside: InProgress,
) -> None:  # fmt: skip
    n = outlook.rows.size
    free = np.array([0.0, 1.0 - inside.blocks / kv.total, 1.0 - inside.answers / params.max_running])
    share = max(1.0 - pace.token / inside.tpot, _LEAST_SHARE) if pace.decodes else 1.0
    largest, serial, heap, size = np.empty((3, n)), -jobs["serial"][outlook.rows], np.empty(n, np.int64), 0
    need, kept = np.zeros((n, 2, _RESOURCES)), np.zeros((2, _RESOURCES))
    for i in range(n):
        if outlook.level[i] != PROMPT:
            continue
        row = outlook.rows[i]
        _demand(params, jobs, row, kv, theta, pace, share, need[i])
        kept += need[i]
        if not jobs["running"][row]:
            largest[0, i], largest[1, i] = -jobs["urgency"][row], -need[i, 0].max()
            largest[2, i] = -jobs["priority"][row]
            size = push(largest, serial, heap, size, i)
        while size and outlook.level[i] == PROMPT and now + _wait(kept, need[i], free) > outlook.start[i]:
            worst, size = heap[0], pop(largest, serial, heap, size)
            outlook.level[worst] = LOST
            kept -= need[worst]


@compiled
def _demand(
    params: PackerParams, jobs: Rows, row: int, kv: KvBudget, theta: Floats, pace: Pace, share: float,
    need: Floats,
) -> None:  # fmt: skip
    """Set what a row needs of each resource: need[0] in seconds of all of it, need[1] as a share."""
    prompt = prompt_seconds(jobs, row, theta, pace)
    need[0, 0] = (prompt - pace.base) / share + pace.base
    if jobs["running"][row]:
        return
    life = need[0, 0] + jobs["tokens_left"][row] * pace.token
    need[1, 1] = blocks_of(jobs, row, 0.5, kv.size) / kv.total
    need[1, 2] = 1.0 / params.max_running
    need[0, 1:] = life * need[1, 1:]


@compiled
def _wait(kept: Floats, own: Floats, free: Floats) -> float:
    """Return the seconds until the last of the kept can start.

    kept: what all of them need, it included; own: what it needs itself; free: shares that are free now.
    Prompts are computed one after another. KV and slots that are free are there at once; beyond them a
    request waits until the share that it lacks has been released, at the rate at which those ahead end.
    """
    wait = kept[0, 0] - own[0, 0]
    for k in range(1, _RESOURCES):
        if kept[1, k] > free[k]:
            wait = max(wait, kept[0, k] * (1.0 - max(free[k], 0.0) / kept[1, k]))
    return float(wait)


# ---- admission


@compiled
def _admit(
    params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, now: float, theta: Floats, pace: Pace,
    inside: InProgress,
) -> None:  # fmt: skip
    """Admit kept prompts as long as answers in progress keep their pace and KV; the doubtful after them.

    A prompt that finds no KV lets smaller ones pass; one that finds no time does not.
    """
    full = False
    for level in (PROMPT, HOPE):
        for i in range(outlook.rows.size):
            row = outlook.rows[i]
            if outlook.level[i] != level or jobs["running"][row]:
                continue
            more = _with(inside, jobs, row, reserved_of(params.keep, jobs, row, kv.size), theta, pace)
            seconds = more.rents + seconds_of(theta, more.answers, more.context, 0.0, 0.0)
            paced = not params.keep.paces or seconds <= params.keep.fill * more.tpot
            room = more.blocks <= kv.total and more.answers <= params.max_running
            if level == HOPE and not (paced and _may(params.keep, jobs, row, now, theta, pace, seconds)):
                outlook.level[i] = LOST
            elif inside.answers and (full or not (paced and room)):
                outlook.level[i], full = WAITS, full or not paced
            else:
                inside = more


@compiled
def _with(inside: InProgress, jobs: Rows, row: int, blocks: float, theta: Floats, pace: Pace) -> InProgress:
    """Return the requests in progress with one more."""
    return InProgress(
        inside.blocks + blocks, inside.answers + 1,
        inside.context + jobs["prompt"][row] + jobs["output_tokens"][row] + jobs["tokens_left"][row] / 2,
        inside.rents + rent(jobs, row, theta, pace), min(inside.tpot, jobs["tpot"][row]),
    )  # fmt: skip


@compiled
def _in_progress(
    params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, theta: Floats, pace: Pace, tpot: float
) -> InProgress:
    """Return the kept requests that hold a slot."""
    blocks, answers, context, rents = 0.0, 0, 0.0, 0.0
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] == ANSWER or (outlook.level[i] == PROMPT and jobs["running"][row]):
            blocks += reserved_of(params.keep, jobs, row, kv.size)
            answers += 1
            context += jobs["computed"][row] + jobs["tokens_left"][row] / 2
            rents += rent(jobs, row, theta, pace)
    return InProgress(blocks, answers, context, rents, tpot)


@compiled
def _may(
    keep: KeepOptions, jobs: Rows, row: int, now: float, theta: Floats, pace: Pace, seconds: float
) -> bool:
    """Tell whether a row can be on time at `seconds` per token if its answer is one deviation short."""
    left = jobs["arrival"][row] + jobs["e2e"][row] - now - prompt_seconds(jobs, row, theta, pace)
    short = max(1.0 - keep.doubt / 2 * jobs["spread"][row], 0.0)
    return bool(seconds * short * jobs["tokens_left"][row] <= left)
