"""The promises that a number of equal engines keep of some traffic: its replay by the learned latency law.

The replay knows iterations, chunks of prompts, the batch limit, the token budget and KV. A request goes to the engine
with the least to do; there short prompts with little time left come first, as with the default packer. One that cannot
be on time any more leaves: it is served in time that others do not need. It knows no prefix caches: prompts count what is computed of them. Hundreds of requests take
milliseconds, so that it can be asked at run time.
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
    grant = np.zeros((engines, slots))  # those in the next iteration
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
        # A request is taken by the engine that has the least to do before it.
        while queued and inside[e] < slots and _is_least(e, now, rows, todo, inside, arrival, requests):
            row = queue[0]
            need = requests[row, PROMPT] + requests[row, OUTPUT]
            if held[e] + need > kv and inside[e]:
                break
            queued -= 1
            for j in range(queued):
                queue[j] = queue[j + 1]
            i = inside[e]
            rows[e, i], todo[e, i], left[e, i] = row, requests[row, PROMPT], requests[row, OUTPUT]
            held[e] += need
            inside[e] += 1
        if not inside[e]:
            clock[e] = arrival[came] if came < size and not queued else _after(clock, e, arrival, came)
            continue
        upcoming = arrival[came] if came < size else np.inf
        clock[e], done = _iterate(e, now, upcoming, queued, rows, todo, grant, left, inside, held, requests, theta, budget,
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
def _is_least(e: int, now: float, rows: Ints, todo: Floats, inside: Ints, arrival: Floats, requests: Floats) -> bool:
    """Tell whether no other engine has less to do: prompts that can be on time, and where none has any, answers."""
    mine = _ahead(e, now, rows, todo, inside, arrival, requests)
    for other in range(inside.size):
        theirs = _ahead(other, now, rows, todo, inside, arrival, requests)
        if theirs < mine or (theirs == mine and inside[other] < inside[e]):
            return False
    return True


@compiled
def _ahead(e: int, now: float, rows: Ints, todo: Floats, inside: Ints, arrival: Floats, requests: Floats) -> float:
    """Return the prompt tokens inside an engine whose promises are not lost yet."""
    tokens = 0.0
    for i in range(inside[e]):
        if now <= arrival[rows[e, i]] + requests[rows[e, i], TTFT]:
            tokens += todo[e, i]
    return tokens


@compiled
def _iterate(
    e: int, now: float, upcoming: float, queued: int, rows: Ints, todo: Floats, grant: Floats, left: Floats, inside: Ints,
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
            if first[row] - arrival[row] <= requests[row, TTFT]:  # else its promise is lost anyway
                guard = min(guard, requests[row, TPOT] * made - (now - first[row]))
            least = min(least, left[e, i])
    chunk, pairs = _chunk(e, now, decodes, context, guard, rows, todo, grant, inside, arrival, requests, theta, budget)
    times = 1.0
    if chunk == 0 and decodes:  # answers alone, until one ends or a request may come
        one = seconds_of(theta, decodes, context, 0.0, 0.0)
        times = least if queued == 0 else 1.0
        if upcoming < now + times * one:
            times = max(np.ceil((upcoming - now) / one), 1.0)
        context += decodes * (times - 1) / 2
    end = now + times * seconds_of(theta, decodes, context, chunk, pairs)
    return end, _advance(e, end, times, rows, todo, grant, left, inside, held, requests, arrival, first, on_time)


@compiled
def _chunk(
    e: int, now: float, decodes: int, context: float, guard: float, rows: Ints, todo: Floats, grant: Floats,
    inside: Ints, arrival: Floats, requests: Floats, theta: Floats, budget: int,
) -> tuple[float, float]:  # fmt: skip
    """Grant prompts tokens of the next iteration, as many as keep the answers' pace; return them and their pairs."""
    base = seconds_of(theta, 0.0, 0.0, 0.0, 0.0)
    room, spare = float(budget - decodes), np.inf
    if np.isfinite(guard) and decodes:
        spare = guard - seconds_of(theta, decodes, context, 0.0, 0.0)
    chunk, pairs = 0.0, 0.0
    grant[e, : inside[e]] = 0.0
    while room >= 1 and spare > 0:
        best, least = -1, np.inf
        for i in range(inside[e]):
            if todo[e, i] > 0 and grant[e, i] == 0:
                row = rows[e, i]
                alone = prefill_of(theta, todo[e, i])
                slack = arrival[row] + min(requests[row, TTFT], requests[row, E2E]) - now
                key = alone * min(slack, _LONG)
                if slack >= alone and key < least:
                    best, least = i, key
        if best < 0:
            break
        rest, there = todo[e, best], requests[rows[e, best], PROMPT] - todo[e, best]
        alone = seconds_of(theta, 0.0, 0.0, rest, rest * there + rest * rest / 2) - base
        part = min(rest, room)
        if alone > spare:
            part = min(part, np.ceil(rest * spare / alone))
        grant[e, best] = part
        spare -= alone * part / rest
        room -= part
        chunk += part
        pairs += part * there + part * part / 2
    return chunk, pairs


@compiled
def _advance(
    e: int, end: float, times: float, rows: Ints, todo: Floats, grant: Floats, left: Floats, inside: Ints,
    held: Floats, requests: Floats, arrival: Floats, first: Floats, on_time: Bools,
) -> int:  # fmt: skip
    """Count the iteration's tokens, note first tokens and ends; return how many have ended."""
    ended, i = 0, 0
    while i < inside[e]:
        row = rows[e, i]
        if todo[e, i] > 0:
            todo[e, i] -= grant[e, i]
            if todo[e, i] <= 0:
                first[row] = end
                left[e, i] -= 1
        else:
            left[e, i] -= times
        lost = todo[e, i] > 0 and end > arrival[row] + min(requests[row, TTFT], requests[row, E2E])
        if not lost and (todo[e, i] > 0 or left[e, i] > 0):
            i += 1
            continue
        ttft, e2e = first[row] - arrival[row], end - arrival[row]
        tpot = (e2e - ttft) / max(requests[row, OUTPUT] - 1, 1.0)
        on_time[row] = (
            not lost and ttft <= requests[row, TTFT] and tpot <= requests[row, TPOT] and e2e <= requests[row, E2E]
        )
        held[e] -= requests[row, PROMPT] + requests[row, OUTPUT]
        inside[e] -= 1
        last, ended = inside[e], ended + 1
        rows[e, i], todo[e, i], left[e, i] = rows[e, last], todo[e, last], left[e, last]
        grant[e, i] = grant[e, last]
    return ended
