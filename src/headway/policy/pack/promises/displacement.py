"""Gives up requests that would take the place of several smaller ones. Compiled.

The selection compares the requests that are there. A large one for which there is room at that moment is kept, and
holds its KV while smaller ones arrive and are lost. So it is compared with those that were lost lately, too: within
`displaced_share` of the seconds that it takes itself. In revenue management such a rule is a
bid price: what a request takes is worth what others would have paid for it (Talluri and van Ryzin 1998).
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import PackerParams
from headway.policy.core.feasibility import Pace
from headway.policy.core.ranks import BEYOND
from headway.policy.pack.kernels import Rows
from headway.policy.pack.promises.outlook import (
    DISTANT,
    FAR,
    LOST,
    OTHER,
    Outlook,
    is_hopeless,
    prompt_seconds,
    size_of,
)
from headway.types import Floats, Ints

_LOSSES = 64  # that are remembered
_KEPT, _DISPLACES, _COUNTED = 1, 2, 3  # in `Jobs.displacement`


def no_losses() -> Floats:
    """Return the memory of a packer's losses, newest first, shape (3, 64): instants, -inf = none; sizes; weights."""
    return np.stack([np.full(_LOSSES, -np.inf), np.zeros(_LOSSES), np.zeros(_LOSSES)])


@compiled
def give_up_large(params: PackerParams, jobs: Rows, outlook: Outlook, now: float, theta: Floats, pace: Pace) -> Ints:
    """Make prompts LOST, in place, that would displace more than `displaced_most` smaller ones; return their rows.

    Also remembers which requests are lost by now that were kept before. One that never could be on time, had begun or
    was given up here does not show that there was no room for it; one beyond its tenant's fair share takes none from
    other tenants.
    """
    losses, keep, found, count = params.losses, params.keep, np.empty(outlook.rows.size, np.int64), 0
    _remember(losses, jobs, outlook, now, theta)
    for i in range(outlook.rows.size):
        row, level = outlook.rows[i], outlook.level[i]
        if level in (LOST, OTHER, FAR, DISTANT) or jobs["resumable"][row] or _has_begun(jobs, row):
            continue
        since = now - keep.displaced_share * _seconds(jobs, row, theta, pace)
        most = keep.displaced_most * jobs["weight"][row]
        displaces = _displaced(losses, _size(jobs, row), since, most) > most
        if displaces:
            outlook.level[i], outlook.start[i] = LOST, -np.inf
            found[count], count = row, count + 1
        if jobs["displacement"][row] != _COUNTED:
            jobs["displacement"][row] = _DISPLACES if displaces else _KEPT
    return found[:count]


@compiled
def _has_begun(jobs: Rows, row: int) -> bool:
    """Tell whether a row holds more than what the prefix cache has of it, or did."""
    return bool(jobs["running"][row] or jobs["output_tokens"][row] > 0 or jobs["saved"][row] > 0)


@compiled
def _remember(losses: Floats, jobs: Rows, outlook: Outlook, now: float, theta: Floats) -> None:
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if outlook.level[i] != LOST:
            continue
        waited = jobs["displacement"][row] == _KEPT and jobs["output_tokens"][row] == 0
        if waited and jobs["urgency"][row] != BEYOND and not is_hopeless(jobs, row, theta):
            losses[:, 1:] = losses[:, :-1].copy()
            losses[0, 0], losses[1, 0], losses[2, 0] = now, _size(jobs, row), jobs["weight"][row]
        jobs["displacement"][row] = _COUNTED


@compiled
def _seconds(jobs: Rows, row: int, theta: Floats, pace: Pace) -> float:
    """Return the seconds until all that was promised to a row is there."""
    return size_of(jobs, row, theta, pace) if _promises_answer(jobs, row) else prompt_seconds(jobs, row, theta, pace)


@compiled
def _promises_answer(jobs: Rows, row: int) -> bool:
    """Tell whether more than the first token was promised: what comes after that one can give way."""
    return bool(min(jobs["tpot"][row], jobs["e2e"][row]) < np.inf)


@compiled
def _size(jobs: Rows, row: int) -> float:
    """Return the KV x time of what was promised to a row, in tokens x tokens of its answer."""
    answer = jobs["output_tokens"][row] + jobs["tokens_left"][row] if _promises_answer(jobs, row) else 1.0
    return float(answer * (jobs["prompt"][row] + answer / 2))


@compiled
def _displaced(losses: Floats, size: float, since: float, most: float) -> float:
    """Return the weight of the requests lost since then that fit together into `size`: of the newest, up to `most`."""
    weight, k = 0.0, 0
    while k < losses.shape[1] and losses[0, k] > since and weight <= most:
        if losses[1, k] <= size:
            weight, size = weight + losses[2, k], size - losses[1, k]
        k += 1
    return weight
