"""The promises that a number of equal engines keep of some traffic: its replay by the learned latency law.

The replay knows iterations, chunks of prompts, the batch limit, the token budget and KV, and takes requests as they
are due, those that cannot be on time any more last. It knows neither queues per engine nor prefix caches: prompts
count what is computed of them. Hundreds of requests take milliseconds, so that it can be asked at run time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.types import Bools, Floats, Ints

PROMPT, OUTPUT, TTFT, TPOT, E2E = range(5)  # columns of `Traffic.requests`


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


@compiled
def replay(
    arrival: Floats, requests: Floats, theta: Floats, budget: int, slots: int, kv: int, engines: int
) -> tuple[Bools, int]:
    """Return which requests are on time, and by how many the queue has grown over the second half of them."""
    size = arrival.size
    on_time = np.zeros(size, np.bool_)
    first = np.zeros(size)
    rows = np.full((engines, slots), -1)  # the requests inside
    todo = np.zeros((engines, slots))  # their prompt tokens to compute
    left = np.zeros((engines, slots))  # and output tokens to make
    inside = np.zeros(engines, np.int64)
    held = np.zeros(engines)  # tokens of KV, reserved
    clock = np.zeros(engines)
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
        # Requests are taken by the engines with the fewest, while a chunk's room is left for their prompts.
        fair = -(-(inside.sum() + min(queued, 1)) // engines)
        room = float(budget)
        pending = 0.0
        for i in range(inside[e]):
            pending += todo[e, i]
        while queued and pending < room and inside[e] < min(slots, fair):
            k = _next(queue, queued, arrival, requests, theta, now)
            row = queue[k]
            need = requests[row, PROMPT] + requests[row, OUTPUT]
            if held[e] + need > kv and inside[e]:
                break
            for j in range(k, queued - 1):
                queue[j] = queue[j + 1]
            queued -= 1
            i = inside[e]
            rows[e, i], todo[e, i], left[e, i] = row, requests[row, PROMPT], requests[row, OUTPUT]
            held[e] += need
            inside[e] += 1
            pending += requests[row, PROMPT]
            fair = -(-(inside.sum() + min(queued, 1)) // engines)
        if not inside[e]:
            clock[e] = arrival[came] if came < size and not queued else _after(clock, e, arrival, came)
            continue
        upcoming = arrival[came] if came < size else np.inf
        clock[e], done = _iterate(e, now, upcoming, queued, rows, todo, left, inside, held, requests, theta, budget,
                                  arrival, first, on_time)  # fmt: skip
        ended += done
    return on_time, max(grown - before, 0)


@compiled
def _after(clock: Floats, e: int, arrival: Floats, came: int) -> float:
    """Return when an empty engine looks again: after the next of the others, or an arrival."""
    found = arrival[came] if came < arrival.size else np.inf
    for other in range(clock.size):
        if other != e and clock[other] > clock[e] and clock[other] < found:
            found = clock[other]
    return float(found if np.isfinite(found) else clock[e] + 1.0)


@compiled
def _next(queue: Ints, queued: int, arrival: Floats, requests: Floats, theta: Floats, now: float) -> int:
    """Return the place in the queue of the request that is due first among those that can be on time, else 0."""
    best, least = 0, np.inf
    for k in range(queued):
        row = queue[k]
        due = arrival[row] + min(requests[row, TTFT], requests[row, E2E])
        if due < least and due >= now + prefill_of(theta, requests[row, PROMPT]):
            best, least = k, due
    return best


@compiled
def _iterate(
    e: int, now: float, upcoming: float, queued: int, rows: Ints, todo: Floats, left: Floats, inside: Ints,
    held: Floats, requests: Floats, theta: Floats, budget: int, arrival: Floats, first: Floats, on_time: Bools,
) -> tuple[float, int]:  # fmt: skip
    """Run the next iteration of engine e, or the equal ones until something changes; return its end and the ended."""
    decodes, context, guard, least = 0, 0.0, np.inf, np.inf
    for i in range(inside[e]):
        if todo[e, i] <= 0:
            row = rows[e, i]
            decodes += 1
            context += requests[row, PROMPT] + requests[row, OUTPUT] - left[e, i]
            made = requests[row, OUTPUT] - left[e, i]
            guard = min(guard, requests[row, TPOT] * made - (now - first[row]))
            least = min(least, left[e, i])
    chunk, pairs = _chunk(e, decodes, context, guard, rows, todo, inside, requests, theta, budget)
    times = 1.0
    if chunk == 0 and decodes:  # answers alone, until one ends or a request may come
        one = seconds_of(theta, decodes, context, 0.0, 0.0)
        times = least if queued == 0 else 1.0
        if upcoming < now + times * one:
            times = max(np.ceil((upcoming - now) / one), 1.0)
        context += decodes * (times - 1) / 2
    end = now + times * seconds_of(theta, decodes, context, chunk, pairs)
    return end, _advance(e, end, chunk, times, rows, todo, left, inside, held, requests, arrival, first, on_time)


@compiled
def _chunk(
    e: int, decodes: int, context: float, guard: float, rows: Ints, todo: Floats, inside: Ints,
    requests: Floats, theta: Floats, budget: int,
) -> tuple[float, float]:  # fmt: skip
    """Return the prompt tokens of the next iteration, as many as keep the answers' pace, and their pairs."""
    room, spare = float(budget - decodes), np.inf
    if np.isfinite(guard) and decodes:
        spare = guard - seconds_of(theta, decodes, context, 0.0, 0.0)
    chunk, pairs = 0.0, 0.0
    for i in range(inside[e]):
        if todo[e, i] <= 0 or room < 1 or spare <= 0:
            continue
        there = requests[rows[e, i], PROMPT] - todo[e, i]
        rest = todo[e, i]
        alone = seconds_of(theta, 0.0, 0.0, rest, rest * there + rest * rest / 2) - seconds_of(theta, 0.0, 0.0, 0.0, 0.0)
        part = min(rest, room)
        if alone > spare:
            part = min(part, max(rest * spare / alone, 1.0))
        spare -= alone * part / rest
        room -= part
        chunk += part
        pairs += part * there + part * part / 2
    return np.floor(chunk), pairs


@compiled
def _advance(
    e: int, end: float, chunk: float, times: float, rows: Ints, todo: Floats, left: Floats, inside: Ints,
    held: Floats, requests: Floats, arrival: Floats, first: Floats, on_time: Bools,
) -> int:  # fmt: skip
    """Count the iteration's tokens, note first tokens and ends; return how many have ended."""
    ended, i = 0, 0
    while i < inside[e]:
        row = rows[e, i]
        if todo[e, i] > 0:
            part = min(todo[e, i], chunk)
            todo[e, i] -= part
            chunk -= part
            if todo[e, i] <= 0:
                first[row] = end
                left[e, i] -= 1
        else:
            left[e, i] -= times
        if todo[e, i] > 0 or left[e, i] > 0:
            i += 1
            continue
        ttft, e2e = first[row] - arrival[row], end - arrival[row]
        tpot = (e2e - ttft) / max(requests[row, OUTPUT] - 1, 1.0)
        on_time[row] = ttft <= requests[row, TTFT] and tpot <= requests[row, TPOT] and e2e <= requests[row, E2E]
        held[e] -= requests[row, PROMPT] + requests[row, OUTPUT]
        inside[e] -= 1
        last, ended = inside[e], ended + 1
        rows[e, i], todo[e, i], left[e, i] = rows[e, last], todo[e, last], left[e, last]
    return ended
