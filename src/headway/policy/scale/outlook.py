"""The promises that a number of equal engines keep of some traffic: its replay by the learned latency law.

The replay knows iterations, chunks of prompts, the batch limit, the token budget and KV. A request goes to the engine
with the least to do; there short prompts with little time left come first, as with the default packer. One that cannot
be on time any more leaves: it is served in time that others do not need. The replay knows no prefix caches: prompts
count what is computed of them. Hundreds of requests take milliseconds, so that it can be asked at run time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.types import Bools, Floats, Ints

PROMPT, OUTPUT, TTFT, TPOT, E2E = range(5)  # columns of `Traffic.requests`
_LONG = 1e6  # seconds until they are due, as it were, of prompts without a promise


class Traffic(NamedTuple):
    """Requests in the order of their arrival.

    gaps: (n,), seconds since the request before. requests: (n, 5), prompt tokens to compute, output tokens, and the
        promises `ttft`, `tpot`, `e2e` in seconds, inf = none.
    """

    gaps: Floats
    requests: Floats


class EngineSize(NamedTuple):
    """An engine. theta: as in `OnlineLatency`. budget: tokens per iteration. slots: batch limit. kv: tokens of KV."""

    theta: Floats
    budget: int
    slots: int
    kv: int


def kept(traffic: Traffic, engine: EngineSize, engines: int, load: float) -> float:
    """Return the share of the promises that so many engines keep of the traffic, `load` times as fast; 1 = none given.

    The traffic comes twice, and its second time counts: engines are as full as it makes them.
    """
    requests = np.concatenate([traffic.requests, traffic.requests])
    arrival = np.cumsum(np.concatenate([traffic.gaps, traffic.gaps])) / load
    promised = np.isfinite(requests[:, TTFT:]).any(1)
    promised[: len(traffic.gaps)] = False
    if not promised.any():
        return 1.0
    if engines < 1:
        return 0.0
    on_time, left = replay(arrival, requests, engine.theta, engine.budget, engine.slots, engine.kv, engines)
    return float(min(on_time[promised].mean(), 1.0 - left / len(traffic.gaps)))


class _Run(NamedTuple):
    """The requests in order of arrival (`Traffic`), the law, and what became of the requests."""

    arrival: Floats
    requests: Floats
    theta: Floats
    first: Floats
    on_time: Bools


class _Fleet(NamedTuple):
    """Engines in rows; (engines, slots) of what is inside: requests, prompt tokens to compute, those in the next
    iteration, output tokens to make. (engines,): how many are inside, tokens of KV reserved, and the time."""

    rows: Ints
    todo: Floats
    grant: Floats
    left: Floats
    inside: Ints
    held: Floats
    clock: Floats


@compiled
def replay(
    arrival: Floats, requests: Floats, theta: Floats, budget: int, slots: int, kv: int, engines: int
) -> tuple[Bools, int]:
    """Return which requests are on time, and by how many the queue has grown over the second half of them."""
    size, shape = arrival.size, (engines, slots)
    run = _Run(arrival, requests, theta, np.zeros(size), np.zeros(size, np.bool_))
    counts, held, clock = np.zeros(engines, np.int64), np.zeros(engines), np.zeros(engines)
    fleet = _Fleet(np.full(shape, -1), np.zeros(shape), np.zeros(shape), np.zeros(shape), counts, held, clock)
    queue = np.empty(size, np.int64)
    queued, came, ended = 0, 0, 0
    before, grown, middle = 0, 0, size // 2
    while ended < size:
        e = int(clock.argmin())
        now = clock[e]
        while came < size and arrival[came] <= now:
            queue[queued] = came
            queued, came = queued + 1, came + 1
            before = queued if came == middle else before
            grown = queued if came == size else grown
        # A request is taken by the engine that has the least to do before it.
        while queued and counts[e] < slots and _is_least(e, now, fleet, run):
            if held[e] + requests[queue[0], PROMPT] + requests[queue[0], OUTPUT] > kv and counts[e]:
                break
            _take(e, queue[0], fleet, run)
            queued -= 1
            for j in range(queued):
                queue[j] = queue[j + 1]
        upcoming = arrival[came] if came < size else np.inf
        if counts[e]:
            ended += _iterate(e, upcoming, queued, budget, fleet, run)
        else:
            clock[e] = upcoming if came < size and not queued else _after(e, upcoming, fleet)
    return run.on_time, max(grown - before, 0)


@compiled
def _take(e: int, row: int, fleet: _Fleet, run: _Run) -> None:
    """Put a request into an engine."""
    i = fleet.inside[e]
    prompt, output = run.requests[row, PROMPT], run.requests[row, OUTPUT]
    fleet.rows[e, i], fleet.todo[e, i], fleet.left[e, i] = row, prompt, output
    fleet.held[e] += prompt + output
    fleet.inside[e] += 1


@compiled
def _after(e: int, upcoming: float, fleet: _Fleet) -> float:
    """Return when an empty engine looks again: after the next of the others, or an arrival."""
    found = upcoming
    for other in range(fleet.clock.size):
        if other != e and fleet.clock[e] < fleet.clock[other] < found:
            found = fleet.clock[other]
    return float(found if np.isfinite(found) else fleet.clock[e] + 1.0)


@compiled
def _is_least(e: int, now: float, fleet: _Fleet, run: _Run) -> bool:
    """Tell whether no other engine has less to do: prompts that can be on time, and where none has any, answers."""
    mine = _ahead(e, now, fleet, run)
    for other in range(fleet.inside.size):
        theirs = _ahead(other, now, fleet, run)
        if theirs < mine or (theirs == mine and fleet.inside[other] < fleet.inside[e]):
            return False
    return True


@compiled
def _ahead(e: int, now: float, fleet: _Fleet, run: _Run) -> float:
    """Return the prompt tokens inside an engine whose promises are not lost yet."""
    tokens = 0.0
    for i in range(fleet.inside[e]):
        row = fleet.rows[e, i]
        if now <= run.arrival[row] + run.requests[row, TTFT]:
            tokens += fleet.todo[e, i]
    return tokens


@compiled
def _iterate(e: int, upcoming: float, queued: int, budget: int, fleet: _Fleet, run: _Run) -> int:
    """Run the next iteration of an engine, or the equal ones until something changes; return how many have ended."""
    now, theta, requests = fleet.clock[e], run.theta, run.requests
    decodes, context, guard, least = 0, 0.0, np.inf, np.inf
    for i in range(fleet.inside[e]):
        if fleet.todo[e, i] <= 0:
            row = fleet.rows[e, i]
            made = requests[row, OUTPUT] - fleet.left[e, i]
            decodes += 1
            context += requests[row, PROMPT] + made
            least = min(least, fleet.left[e, i])
            if run.first[row] - run.arrival[row] <= requests[row, TTFT]:  # else its promise is lost anyway
                guard = min(guard, requests[row, TPOT] * made - (now - run.first[row]))
    spare = np.inf
    if np.isfinite(guard) and decodes:
        spare = guard - seconds_of(theta, decodes, context, 0.0, 0.0)
    chunk, pairs = _chunk(e, float(budget - decodes), spare, fleet, run)
    times = 1.0
    if chunk == 0 and decodes:  # answers alone, until one ends or a request may come
        one = seconds_of(theta, decodes, context, 0.0, 0.0)
        times = least if queued == 0 else 1.0
        if upcoming < now + times * one:
            times = max(np.ceil((upcoming - now) / one), 1.0)
        context += decodes * (times - 1) / 2
    fleet.clock[e] = now + times * seconds_of(theta, decodes, context, chunk, pairs)
    return _advance(e, times, fleet, run)


@compiled
def _chunk(e: int, room: float, spare: float, fleet: _Fleet, run: _Run) -> tuple[float, float]:
    """Grant prompts tokens of the next iteration; return them and their pairs.

    room: tokens of the budget. spare: seconds that the answers' pace leaves.
    """
    base = seconds_of(run.theta, 0.0, 0.0, 0.0, 0.0)
    chunk, pairs = 0.0, 0.0
    fleet.grant[e, : fleet.inside[e]] = 0.0
    while room >= 1 and spare > 0:
        best = _first(e, fleet, run)
        if best < 0:
            break
        rest = fleet.todo[e, best]
        there = run.requests[fleet.rows[e, best], PROMPT] - rest
        alone = seconds_of(run.theta, 0.0, 0.0, rest, rest * there + rest * rest / 2) - base
        part = min(rest, room)
        if alone > spare:
            part = min(part, np.ceil(rest * spare / alone))
        fleet.grant[e, best] = part
        spare -= alone * part / rest
        room -= part
        chunk += part
        pairs += part * there + part * part / 2
    return chunk, pairs


@compiled
def _first(e: int, fleet: _Fleet, run: _Run) -> int:
    """Return the place of the prompt to compute next, short ones with little time left first; -1 = none is left."""
    best, least = -1, np.inf
    for i in range(fleet.inside[e]):
        if fleet.todo[e, i] > 0 and fleet.grant[e, i] == 0:
            row = fleet.rows[e, i]
            alone = prefill_of(run.theta, fleet.todo[e, i])
            slack = run.arrival[row] + min(run.requests[row, TTFT], run.requests[row, E2E]) - fleet.clock[e]
            if slack >= alone and alone * min(slack, _LONG) < least:
                best, least = i, alone * min(slack, _LONG)
    return best


@compiled
def _advance(e: int, times: float, fleet: _Fleet, run: _Run) -> int:
    """Count the iteration's tokens, note first tokens and ends; return how many have ended."""
    end, ended, i = fleet.clock[e], 0, 0
    while i < fleet.inside[e]:
        row = fleet.rows[e, i]
        prompt, output, ttft, tpot, e2e = run.requests[row]
        if fleet.todo[e, i] > 0:
            fleet.todo[e, i] -= fleet.grant[e, i]
            if fleet.todo[e, i] <= 0:
                run.first[row] = end
                fleet.left[e, i] -= 1
        else:
            fleet.left[e, i] -= times
        computing = fleet.todo[e, i] > 0
        lost = computing and end > run.arrival[row] + min(ttft, e2e)
        if not lost and (computing or fleet.left[e, i] > 0):
            i += 1
            continue
        first, took = run.first[row] - run.arrival[row], end - run.arrival[row]
        pace = (took - first) / max(output - 1, 1.0)
        run.on_time[row] = not lost and first <= ttft and pace <= tpot and took <= e2e
        fleet.held[e] -= prompt + output
        fleet.inside[e] -= 1
        last, ended = fleet.inside[e], ended + 1
        for column in (fleet.todo, fleet.grant, fleet.left):
            column[e, i] = column[e, last]
        fleet.rows[e, i] = fleet.rows[e, last]
    return ended
