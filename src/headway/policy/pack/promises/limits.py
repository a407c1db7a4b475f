"""How long an iteration may take, by the requests that are kept. Compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import PackerParams, PromisesConfig
from headway.policy.core.feasibility import Pace
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.policy.pack.kernels import Rows, missing_of
from headway.policy.pack.promises.outlook import ANSWER, PROMPT, Outlook, lead_of, pace_to_catch_up, rest_of, until_gap
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
    params: PackerParams, jobs: Rows, outlook: Outlook, now: float, usual: float, pace: Pace
) -> TimeLimits:
    """Return what the kept answers allow: none may fall behind its tpot, or its deadline."""
    soonest = _soonest(jobs, outlook, now)
    first, tpot, deadline = _longest(params.keep, jobs, outlook, usual), np.inf, soonest
    share = 1.0
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
            rest = rest_of(params, jobs, row, now)
            slow = max(min(catch_up, until_gap(params, jobs, row, now)), pace.token)
            first = min(first, rest if rest > pace.token else slow)
            tpot = min(tpot, each)
            if lead < 2.0 * each:  # or it would never get ahead again
                share = min(share, params.keep.leading_share)
            if lead < params.caution.burst_lead_s:  # where promises are lost, a burst of prompts needs more
                share = min(share, params.keep.burst_share)
        left = jobs["arrival"][row] + jobs["e2e"][row] - now
        if 0.0 < left < np.inf:
            deadline = min(deadline, _each_until(params, jobs, row, left, pace))
    spare = min(first, usual, deadline, share * tpot)
    distant = min(spare, params.keep.distant_share * min(usual, tpot))
    return TimeLimits(first, min(first, tpot), spare, distant, tpot, soonest)


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
