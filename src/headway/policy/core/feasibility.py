"""Whether a promise can still be kept: what a request takes at least, and when it must start at the latest.

Compiled, for the default packer (`policy/pack/promises/outlook.py`) and for the controller's refusals
(`policy/core/drops.py`): what one gives up as lost is what the other refuses.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.compiled import compiled_within
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.types import Floats

_CONTEXT = 512.0  # tokens of an answer's context while the engine is empty


class Pace(NamedTuple):
    """The answers in progress that were promised something, and what an iteration of them takes.

    decodes: how many.
    token: seconds of an iteration of them alone; of a single answer while there are none.
    base: seconds of an empty iteration.
    mean: seconds of an iteration on average, with the prompts of those that follow these answers.
    """

    decodes: int
    token: float
    base: float
    mean: float


@compiled_within
def pace_at(theta: Floats, decodes: int, context: float) -> Pace:
    """Return the pace of so many answers with so many tokens of context together."""
    token = seconds_of(theta, max(decodes, 1), max(context, _CONTEXT), 0.0, 0.0)
    return Pace(decodes, token, seconds_of(theta, 0.0, 0.0, 0.0, 0.0), token)


@compiled_within
def next_token_seconds(theta: Floats, missing: int, base: float) -> float:
    """Return the seconds until the next token of a request that has the engine for itself.

    missing: tokens that must be computed for it. base: `Pace.base`.
    """
    return prefill_of(theta, missing) if missing > 1 else base


@compiled_within
def least_answer(doubt: float, spread: float, answer: float) -> float:
    """Return the seconds that an answer takes if it is as short as can be expected.

    doubt: deviations below the expected answer. spread: `Jobs.spread`. answer: seconds of the expected one.
    """
    return float(max(1.0 - doubt * spread, 0.0) * answer)


@compiled_within
def last_start(arrival: float, ttft: float, e2e: float, prompt: float, answer: float) -> float:
    """Return the last instant at which a request can go on and be on time; inf if it has neither SLO.

    ttft, e2e: seconds, inf = none. prompt: seconds until its next token. answer: seconds of all that follow.
    """
    return float(min(arrival + ttft - prompt, arrival + e2e - prompt - answer))
