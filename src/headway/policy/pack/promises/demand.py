"""Gives up the largest requests while more arrives than the engine can serve on time. Compiled.

The selection compares the requests that are there. A large one for which there is room at that moment is kept, and
holds its KV while smaller ones arrive and are lost. So the packer also counts what arrives, by size, and asks up to
which size it should keep requests if they go on arriving like that.

By Little's law a stream of requests holds KV and slots in proportion to the seconds of an iteration, and adds to these
seconds what each request computes. So from the arrivals up to a size follow the pace, KV and slots that they need, and
the share of them for which there are enough. The best limit is the size at which the most promises are kept. In revenue
management such a limit is a bid price, computed from forecast demand and known capacity (Talluri and van Ryzin 1998).
A limit that is learned from losses instead falls ever lower where losses go on however many are given up.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import PackerParams
from headway.policy.core.ranks import BEYOND
from headway.policy.forecast.latency.online import TELLING, prefill_of, seconds_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.kernels import Rows, missing_of
from headway.policy.pack.promises.outlook import DISTANT, FAR, KEPT, LOST, NOT_JUDGED, OTHER, TOO_LARGE, Outlook
from headway.types import Floats, Ints

_SIZES = 160  # steps of size, 8 per factor of two, from
_SMALLEST = 1e-4  # seconds of iterations that a request adds
# What the account has of each size: weights, seconds of iterations that the requests add, KV x tokens of the answer,
# tokens of answers; by weight, the tokens per second that promises need, and the seconds that each would take alone.
_WEIGHT, _SECONDS, _KV, _ANSWER, _SPEED, _ALONE = range(6)
_WINDOW_S, _WINDOW_LIVES = 5.0, 2.0  # demand is averaged over twice the mean seconds alone; at least 5 s
_FIRST_S = 2.0  # before so many seconds were counted, the rate is not known
# Times as much as the forecasts say is served, since answers that turn out to be long are given up.
_CAPACITY = 1.15
_KV_SHARE = 0.9  # of the KV is used on average: blocks are kept free for answers to grow
_DEADLINE_MARGIN = 1.2  # answers with a deadline run this much faster than it asks, for they have waited
_LEAST_WEIGHT = 1e-3  # of what is counted
_COUNTED = -1  # a verdict that is still to come


def no_demand() -> Floats:
    """Return the account of an engine to which nothing came, shape (6, 161).

    Rows: `_WEIGHT` to `_ALONE`, sums that decay; a column per size. The last column has the instant of the last
    arrival, inf = none yet, and the seconds over which the sums are.
    """
    demand = np.zeros((6, _SIZES + 1))
    demand[0, _SIZES] = np.inf
    return demand


@compiled
def give_up_large(params: PackerParams, jobs: Rows, outlook: Outlook, kv: KvBudget, now: float, theta: Floats) -> None:
    """Count and judge the requests that are new, and make prompts that are too large LOST, in place.

    Neither: what was promised nothing or is lost, or is not due for long (until it is). What is beyond its tenant's
    fair share is judged, but not counted, as it takes no time from others. A request is judged only once: if it were
    judged in each iteration while it waits, nearly every one would be kept, at a moment when the limit is high. One
    that begins all the same, in time that others leave, is kept. None is judged by a speed that is only a guess.
    """
    if params.taught[0] < TELLING:
        return
    found = False
    for i in range(outlook.rows.size):
        row = outlook.rows[i]
        if _is_new(jobs, row, outlook.level[i]):
            if jobs["urgency"][row] != BEYOND:
                _count(params.demand, jobs, row, now, theta, params.keep.growth_share, kv.size)
            jobs["verdict"][row], found = _COUNTED, True
    if found:
        _judge(params, jobs, outlook.rows, kv, theta)
    for i in range(outlook.rows.size):
        if _is_given_up(jobs, outlook.rows[i], outlook.level[i]):
            outlook.level[i], outlook.start[i] = LOST, -np.inf


@compiled
def _judge(params: PackerParams, jobs: Rows, rows: Ints, kv: KvBudget, theta: Floats) -> None:
    """Set the verdict on the rows that have just been counted, in place."""
    limit, slots = _SIZES, params.max_running * max(params.keep.turn_capacity, 1.0)
    if params.keep.limits_size:
        limit = best_limit(params.demand, theta, _KV_SHARE * kv.total * kv.size, slots)
    for row in rows:
        if jobs["verdict"][row] == _COUNTED:
            too_large = _step(jobs, row, theta) > limit and not _has_begun(jobs, row)
            jobs["verdict"][row] = TOO_LARGE if too_large else KEPT


@compiled
def _is_new(jobs: Rows, row: int, level: int) -> bool:
    """Tell whether a row is to be counted and judged now; turns of a session are not judged one by one."""
    waits = level in (LOST, OTHER, FAR, DISTANT) or jobs["resumable"][row]
    return bool(jobs["verdict"][row] == NOT_JUDGED and not waits)


@compiled
def _is_given_up(jobs: Rows, row: int, level: int) -> bool:
    return bool(jobs["verdict"][row] == TOO_LARGE and level not in (OTHER, FAR, DISTANT) and not _has_begun(jobs, row))


@compiled
def _has_begun(jobs: Rows, row: int) -> bool:
    """Tell whether a row holds more than what the prefix cache has of it, or did."""
    return bool(jobs["running"][row] or jobs["output_tokens"][row] > 0 or jobs["saved"][row] > 0)


@compiled
def _count(demand: Floats, jobs: Rows, row: int, now: float, theta: Floats, grow: float, block: int) -> None:
    """Add a row to the account, in place; what was counted before loses weight with time.

    grow: share of the KV into which an answer with a deadline grows that is kept free for it (`outlook.reserved_of`).
    block: tokens of a KV block.
    """
    sums, clock = demand[:, :_SIZES], demand[:, _SIZES]
    window = max(_WINDOW_S, _WINDOW_LIVES * sums[_ALONE].sum() / max(sums[_WEIGHT].sum(), _LEAST_WEIGHT))
    left = np.exp(-max(now - clock[0], 0.0) / window)
    sums *= left
    clock[0], clock[1] = now, clock[1] * left + window * (1.0 - left)
    answer, kv, seconds = _work(jobs, row, theta)
    weight, step = jobs["weight"][row], _step(jobs, row, theta)
    alone, token = prefill_of(theta, missing_of(jobs, row)), seconds_of(theta, 1.0, jobs["prompt"][row], 0.0, 0.0)
    sums[_WEIGHT, step] += weight
    sums[_SECONDS, step] += seconds
    reserve = grow * (kv - answer * jobs["prompt"][row]) if jobs["e2e"][row] < np.inf else 0.0
    sums[_KV, step] += kv + reserve - answer * min(block * jobs["shared"][row], jobs["prompt"][row])
    sums[_ANSWER, step] += answer
    time = max(jobs["e2e"][row] - alone, 1e-9)
    speed = max(1.0 / jobs["tpot"][row], _DEADLINE_MARGIN * answer / time)
    # A size is judged by its mean: a few that ask for more than an idle engine does would condemn all others of it.
    sums[_SPEED, step] += weight * min(speed, 1.0 / token)
    sums[_ALONE, step] += weight * (alone + answer * token)


@compiled
def _work(jobs: Rows, row: int, theta: Floats) -> tuple[float, float, float]:
    """Return the answer that was promised to a row in tokens, its KV x tokens, and the seconds that it adds.

    Where only the first token was promised, what comes after that one can give way.
    """
    answer, spread, missing = 1.0, 0.0, missing_of(jobs, row)
    if min(jobs["tpot"][row], jobs["e2e"][row]) < np.inf:
        answer, spread = jobs["output_tokens"][row] + jobs["tokens_left"][row], jobs["spread"][row]
    kv = answer * (jobs["prompt"][row] + answer * (1.0 + spread * spread) / 2)
    pairs = missing * (jobs["prompt"][row] - missing / 2)
    return answer, kv, seconds_of(theta, answer, kv, missing, pairs) - seconds_of(theta, 0.0, 0.0, 0.0, 0.0)


@compiled
def _step(jobs: Rows, row: int, theta: Floats) -> int:
    """Return the size of a row, as a column of the account: the seconds that it adds, divided by its weight."""
    size = _work(jobs, row, theta)[2] / jobs["weight"][row]
    return int(min(max(8.0 * np.log2(max(size, 1e-12) / _SMALLEST), 0.0), _SIZES - 1.0))


@compiled
def best_limit(demand: Floats, theta: Floats, kv: float, slots: float) -> int:
    """Return the largest size (`_step`) up to which requests should be kept; kv: tokens.

    For each limit, and each pace that some of the requests need, `kept` is the weight of those that it is enough for,
    times the share of all up to the limit that can be served at this pace.
    """
    steps = np.flatnonzero(demand[_WEIGHT, :_SIZES] > _LEAST_WEIGHT)
    rates = demand[:, steps] / (_CAPACITY * max(demand[1, _SIZES], _FIRST_S))
    base, paces = seconds_of(theta, 0.0, 0.0, 0.0, 0.0), np.empty(steps.size)
    for k in range(steps.size):
        paces[k] = rates[_WEIGHT, k] / max(rates[_SPEED, k], 1e-12)
    kept = np.zeros(steps.size)
    for j in range(steps.size):
        fast, seconds, held, answers = 0.0, 0.0, 0.0, 0.0
        for k in range(steps.size):
            fast += rates[_WEIGHT, k] * (paces[k] >= 0.999 * paces[j])
            seconds, held, answers = seconds + rates[_SECONDS, k], held + rates[_KV, k], answers + rates[_ANSWER, k]
            if k >= j and paces[j] > base:
                kept[k] = max(kept[k], fast * _share(base, paces[j], seconds, max(held / kv, answers / slots)))
    best, most = steps.size - 1, kept.max() if steps.size else 0.0
    while best >= 0 and kept[best] < most:
        best -= 1
    return _SIZES if best == steps.size - 1 else int(steps[best])


@compiled
def _share(base: float, pace: float, seconds: float, held: float) -> float:
    """Return the share of requests that an engine serves at `pace`, seconds of an iteration, or faster.

    A share x of them makes an iteration last base / (1 - x * seconds), for which it holds x times that of KV or slots.
    seconds: that all of them add to the iterations of a second. held: the larger of their shares of the engine's KV
    and slots, for each second of an iteration.
    """
    in_pace, with_room = (1.0 - base / pace) / max(seconds, 1e-12), 1.0 / max(base * held + seconds, 1e-12)
    return float(min(in_pace, with_room, 1.0))
