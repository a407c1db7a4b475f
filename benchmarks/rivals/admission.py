"""SLOs-Serve's admission control (arXiv 2504.08784, 4, and the newer modes of its code). Compiled.

A request is admitted only if the plan stays legal: every admitted prompt is computed by its first deadline
while all admitted answers keep their pace. Both planners count seconds, by the learned latency, where the
paper counts tokens of a batch; an answer with a loose pace rides in few of the batches that the tightest
pace sets. `edf` is greedy over requests with any paces; `edf_sim` replays events and knows when answers end,
for requests with one pace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.forecast.latency.online import seconds_of
from headway.types import Bools, Floats

_SLIGHT = 1e-9


class Candidates(NamedTuple):
    """Prompts by first deadline, ascending, aligned: those admitted before, which stay, and new ones.

    due: instant of the first deadline. work: seconds of its prompt, without an iteration's base. pace:
    seconds per token, inf = none. context, left: tokens that its answer attends to, and has. kv: tokens of
    KV that it still takes. new: it may be declined.
    """

    due: Floats
    work: Floats
    pace: Floats
    context: Floats
    left: Floats
    kv: Floats
    new: Bools


class CurrentAnswers(NamedTuple):
    """The admitted answers in progress, aligned; the fields are those of `Candidates`."""

    due: Floats
    pace: Floats
    context: Floats
    left: Floats


class Load(NamedTuple):
    """The answers of a plan: tightest pace, answers per second, context tokens per second."""

    pace: float
    rate: float
    context: float


@compiled
def with_answer(load: Load, pace: float, context: float) -> Load:
    """Return the load with one more answer; one without a pace needs no share."""
    if pace == np.inf:
        return load
    return Load(min(load.pace, pace), load.rate + 1.0 / pace, load.context + context / pace)


@compiled
def spare_of(load: Load, theta: Floats, share: float) -> float:
    """Return the seconds for prompts in one batch of the tightest pace; below 0 the answers do not fit."""
    riders = seconds_of(theta, load.pace * load.rate, load.pace * load.context, 0.0, 0.0)
    return float(share * load.pace - riders)


@compiled
def planned(load: Load, seconds: float, theta: Floats, share: float) -> float:
    """Return the seconds of prompts that fit within that time while all answers keep their pace."""
    if load.pace == np.inf:
        return float(max(share * seconds - theta[0], 0.0))
    return float(np.floor(seconds / load.pace) * max(spare_of(load, theta, share), 0.0))


@compiled
def is_legal(all_: Candidates, chosen: Bools, load: Load, now: float, theta: Floats, share: float) -> bool:
    """Tell whether every chosen prompt is in time, and all answers then fit a batch of the tightest pace."""
    spare, finish = 0.0, now
    for i in range(all_.due.size):
        if not chosen[i]:
            continue
        if all_.due[i] > finish:
            spare, finish = spare + planned(load, all_.due[i] - finish, theta, share), all_.due[i]
        spare -= all_.work[i]
        if spare < -_SLIGHT:
            return False
        load = with_answer(load, all_.pace[i], all_.context[i])
    return bool(load.pace == np.inf or spare_of(load, theta, share) >= 0.0)


@compiled
def edf(all_: Candidates, answers: CurrentAnswers, room: float, now: float, theta: Floats, share: float) -> Bools:
    """Return which candidates are admitted, greedily by first deadline.

    room: tokens of KV that are free or held by best effort. share: of each batch's time that is planned.
    Where those admitted before do not fit by themselves, every new one is declined.
    """
    load = Load(np.inf, 0.0, 0.0)
    for j in range(answers.pace.size):
        load = with_answer(load, answers.pace[j], answers.context[j])
    chosen = ~all_.new
    for i in range(all_.due.size):
        room -= all_.kv[i] if chosen[i] else 0.0
    if not is_legal(all_, chosen, load, now, theta, share):
        return chosen
    for i in range(all_.due.size):
        if all_.new[i] and all_.kv[i] <= room:
            chosen[i] = True
            chosen[i] = is_legal(all_, chosen, load, now, theta, share)
            room -= all_.kv[i] if chosen[i] else 0.0
    return chosen


@compiled
def edf_sim(all_: Candidates, answers: CurrentAnswers, room: float, now: float, theta: Floats, share: float) -> Bools:
    """Return which candidates are admitted; each new one is tried by a replay of all events to come."""
    chosen = ~all_.new
    for i in range(all_.due.size):
        if all_.new[i]:
            chosen[i] = True
            chosen[i] = _replays(all_, chosen, answers, room, now, theta, share)
    return chosen


@compiled
def _replays(
    all_: Candidates, chosen: Bools, answers: CurrentAnswers, room: float, now: float, theta: Floats, share: float
) -> bool:
    """Tell whether the chosen are in time: prompts at their deadlines, answers until their last token."""
    n, m = all_.due.size, answers.due.size
    pace = min(all_.pace.min() if n else np.inf, answers.pace.min() if m else np.inf)
    at, what = np.empty(2 * n + m), np.empty(2 * n + m, np.int64)
    for i in range(n):
        end = all_.due[i] + all_.left[i] * pace
        at[i], what[i] = all_.due[i] if chosen[i] else np.inf, i
        at[n + i], what[n + i] = end if chosen[i] else np.inf, n + i
    for j in range(m):
        at[2 * n + j], what[2 * n + j] = answers.due[j] + answers.left[j] * pace, 2 * n + j
    clock, spare, load = now, 0.0, Load(np.inf, 0.0, 0.0)
    for j in range(m):
        load = with_answer(load, pace, answers.context[j])
    for k in np.argsort(at):
        if at[k] == np.inf:
            break
        fits, clock, spare = _advance(load, clock, at[k], spare, theta, share)
        event = what[k]
        if event >= n:
            context = all_.context[event - n] if event < 2 * n else answers.context[event - 2 * n]
            load = _without(load, pace, context)
            room += all_.kv[event - n] if event < 2 * n else context
            continue
        spare, room = spare - all_.work[event], room - all_.kv[event]
        if spare < 0.0:  # the rest of the time until the deadline is a batch of prompts alone
            taken = min(max(at[k] - clock - theta[0], 0.0), -spare)
            clock, spare = clock + taken + theta[0], spare + taken
        if not fits or spare < -_SLIGHT or room < 0.0:
            return False
        load = with_answer(load, pace, all_.context[event])
    return True


@compiled
def _advance(
    load: Load, clock: float, until: float, spare: float, theta: Floats, share: float
) -> tuple[bool, float, float]:
    """Return whether the answers fit, and clock and spare seconds after the batches until that instant."""
    if load.pace == np.inf or until <= clock:
        return True, clock, spare
    free = spare_of(load, theta, share)
    batches = np.floor((until - clock) / load.pace)
    return bool(free >= 0.0), clock + batches * load.pace, spare + batches * max(free, 0.0)


@compiled
def _without(load: Load, pace: float, context: float) -> Load:
    """Return the load without an answer of the one pace."""
    rate = load.rate - 1.0 / pace
    if rate < 0.5 / pace:
        return Load(np.inf, 0.0, 0.0)
    return Load(load.pace, rate, max(load.context - context / pace, 0.0))
