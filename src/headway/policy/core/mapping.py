"""A priority mapping: the order of requests and their batches, with its goodput G (SLO-aware 3.1).

An engine runs the batches one after another. Requests of a batch begin together; the batch lasts as long as
its slowest request (equation 11). Prefill and decode are linear in the batch size b (equations 14 to 16), so
each request has a slope and a base for both, and G = requests that meet their SLO / sum of all latencies.

A move changes at most two batches; what lies behind them only begins earlier or later. `tried` therefore
computes the two batches anew and, for the others, counts who still has slack for that shift.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled, compiled_inline
from headway.policy.forecast.latency.laws import SloAware
from headway.types import Floats, Ints

_NONE_MET = 1e-9  # requests: of two mappings that meet no SLO, the one with the smaller latency is better

# What a request takes alone in the engine, and what it was promised, in seconds; in a batch of b:
# prefill_slope * b + prefill_base for its prefill, execution_slope * b + execution_base with its decode.
# ttft, e2e: from now to the SLO, inf = none. widest: the largest batch in which the tpot is kept; below 1 =
# the SLO cannot be met, or there is none. waited: since its arrival, which counts in its latency.
COST = np.dtype(
    [
        ("prefill_slope", float),
        ("prefill_base", float),
        ("execution_slope", float),
        ("execution_base", float),
        ("ttft", float),
        ("e2e", float),
        ("widest", float),
        ("waited", float),
    ],
    align=True,
)
_PLACE = np.dtype([("request", int), ("batch", int)], align=True)
_BATCH = np.dtype([("first", int), ("start", float), ("seconds", float), ("spent", float)], align=True)
_SUMS = np.dtype([("batches", int), ("met", int), ("latency", float)], align=True)
Records = NDArray[np.void]


class Targets(NamedTuple):
    """SLOs of requests, in seconds, inf = none, below 0 = missed.

    ttft, e2e: from now to the first and to the last token.
    tpot: per token of the answer.
    """

    ttft: Floats
    tpot: Floats
    e2e: Floats


class Mapping(NamedTuple):
    """A mapping of n requests in its working form.

    Four arrays and no more: numba counts references to each of them in every call.

    places: by position: the request, and its batch. Requests of a batch are neighbours.
    batches: of each batch: the position of its first request, when it begins, how long it lasts, and the sum
        of its requests' times. Behind the last batch is one more: n, and when all has ended.
    slack: by position: how much later the request could begin and meet its SLO; negative = it does not.
    sums: number of batches, requests that meet their SLO, sum of latencies (one record).
    """

    places: Records
    batches: Records
    slack: Floats
    sums: Records


class Tried(NamedTuple):
    """A mapping in which two batches, `left` before `right`, have changed, before it is kept.

    *_seconds, *_spent: of the two batches as they are now.
    between, behind: by how much the batches between them and behind them begin later.
    met, latency: of the whole mapping.
    """

    left: int
    right: int
    left_seconds: float
    left_spent: float
    right_seconds: float
    right_spent: float
    between: float
    behind: float
    met: int
    latency: float


def costs_of(law: SloAware, missing: Ints, context: Ints, output: Floats, targets: Targets, waited: Floats) -> Records:
    """Return the costs of requests by the law (equations 14 to 19), as records of `COST`.

    missing: prompt tokens to compute before the next token, 0 = none.
    context: tokens before the first of the `output` tokens that are still to come.
    """
    prompts = (missing > 0).astype(float)
    attended = output * context + output * (output + 1) / 2
    slope = law.decode_alpha * attended + law.decode_beta * output
    base = law.decode_gamma * attended + law.decode_delta * output
    spare = np.where(targets.tpot == np.inf, np.inf, targets.tpot * output - base)
    widest = np.where(spare < slope, 0.0, spare / np.maximum(slope, np.finfo(float).tiny))
    none = np.minimum(np.minimum(targets.ttft, targets.tpot), targets.e2e) == np.inf
    costs = np.zeros(missing.size, COST)
    costs["prefill_slope"] = prompts * (law.prefill_alpha * missing + law.prefill_beta)
    costs["prefill_base"] = prompts * (law.prefill_gamma * missing + law.prefill_delta)
    costs["execution_slope"] = costs["prefill_slope"] + slope
    costs["execution_base"] = costs["prefill_base"] + base
    costs["ttft"], costs["e2e"], costs["waited"] = targets.ttft, targets.e2e, waited
    costs["widest"] = np.where(none, 0.0, widest)
    return costs


@compiled
def empty(size: int) -> Mapping:
    """Return a mapping for `size` requests that `refill` or `copy` must set."""
    return Mapping(np.zeros(size, _PLACE), np.zeros(size + 2, _BATCH), np.zeros(size), np.zeros(1, _SUMS))


@compiled_inline
def refill(costs: Records, mapping: Mapping, order: Ints, limit: int) -> None:
    """Make a mapping the order with all batches as large as possible."""
    batches = 0
    for position in range(order.size):
        mapping.places[position]["request"] = order[position]
        if position % limit == 0:
            mapping.batches[batches]["first"] = position
            batches += 1
    mapping.batches[batches]["first"] = order.size
    mapping.sums[0]["batches"] = batches
    evaluate(costs, mapping)


@compiled
def copy(source: Mapping, target: Mapping) -> None:
    """Copy all columns."""
    batches = source.sums[0]["batches"]
    target.places[:] = source.places
    target.batches[: batches + 1] = source.batches[: batches + 1]
    target.slack[:] = source.slack
    target.sums[0] = source.sums[0]


def set_sizes(costs: Records, mapping: Mapping, order: Ints, sizes: Ints) -> None:
    """Make a mapping the order in batches of these sizes."""
    mapping.places["request"] = order
    mapping.batches["first"][: sizes.size + 1] = np.concatenate([[0], np.cumsum(sizes)])
    mapping.sums["batches"] = sizes.size
    evaluate(costs, mapping)


@compiled_inline
def value_of(mapping: Mapping) -> float:
    """Return the G of a mapping, in requests per second of latency (equation 2)."""
    return (mapping.sums[0]["met"] + _NONE_MET) / mapping.sums[0]["latency"]  # type: ignore[no-any-return]


@compiled_inline
def reaches(met: int, latency: float, least: float) -> bool:
    """Tell whether G is at least so much, without a division: it is asked for every move."""
    return met + _NONE_MET >= least * latency


@compiled_inline
def execution(costs: Records, request: int, size: int) -> float:
    """Return the seconds of a request in a batch of `size`, without waiting (equation 17)."""
    return costs[request]["execution_slope"] * size + costs[request]["execution_base"]  # type: ignore[no-any-return]


@compiled_inline
def last_start(costs: Records, request: int, size: int) -> float:
    """Return the last start, in seconds from now, at which a request meets its SLO in a batch of `size`."""
    cost = costs[request]
    if size > cost["widest"]:
        return -np.inf
    prefill = cost["prefill_slope"] * size + cost["prefill_base"]
    whole = cost["execution_slope"] * size + cost["execution_base"]
    return min(cost["ttft"] - prefill, cost["e2e"] - whole)  # type: ignore[no-any-return]


@compiled
def evaluate(costs: Records, mapping: Mapping) -> None:
    """Compute everything anew from the requests' order and the batches' first positions."""
    now, latency, met = 0.0, costs["waited"].sum(), 0
    batches = mapping.sums[0]["batches"]
    for k in range(batches):
        begin, end = mapping.batches[k]["first"], mapping.batches[k + 1]["first"]
        seconds, spent = _run(costs, mapping, begin, end)
        mapping.batches[k]["start"], mapping.batches[k]["seconds"] = now, seconds
        mapping.batches[k]["spent"] = spent
        _seat(costs, mapping, k)
        met += met_in(mapping, k)
        latency += (end - begin) * now + spent
        now += seconds
    mapping.batches[batches]["start"] = now
    mapping.sums[0]["met"], mapping.sums[0]["latency"] = met, latency


@compiled_inline
def _run(costs: Records, mapping: Mapping, begin: int, end: int) -> tuple[float, float]:
    """Return how long the batch of these positions lasts, and the sum of its requests' times."""
    longest, spent = 0.0, 0.0
    for position in range(begin, end):
        seconds = execution(costs, mapping.places[position]["request"], end - begin)
        longest = max(longest, seconds)
        spent += seconds
    return longest, spent


@compiled_inline
def _lost(slack: Floats, begin: int, end: int, shift: float) -> int:
    """Return how many of these positions fewer meet their SLO when they begin later by `shift`."""
    lost = 0
    for position in range(begin, end):
        lost += int(slack[position] >= 0.0) - int(slack[position] >= shift)
    return lost


@compiled_inline
def _met(costs: Records, mapping: Mapping, begin: int, end: int, start: float) -> int:
    """Return how many requests of a batch of these positions that begins at `start` meet their SLO."""
    met = 0
    for position in range(begin, end):
        met += last_start(costs, mapping.places[position]["request"], end - begin) >= start
    return met


@compiled_inline
def met_in(mapping: Mapping, batch: int) -> int:
    """Return how many requests of a batch meet their SLO."""
    met = 0
    for position in range(mapping.batches[batch]["first"], mapping.batches[batch + 1]["first"]):
        met += mapping.slack[position] >= 0.0
    return met


@compiled_inline
def tried(costs: Records, mapping: Mapping, left: int, right: int, grew: int, old: int, least: float) -> Tried:
    """Return what became of a mapping by a change of two batches.

    mapping: its places and `first` are changed already, all else is still as it was.
    grew: requests that went from the right batch to the left one.
    old: requests of both batches that met their SLO before.
    least: G that the change must reach; for less, `met` may be too large.
    """
    one, two, size = mapping.batches[left], mapping.batches[right], mapping.places.size
    a, b = one["first"], mapping.batches[left + 1]["first"]
    c, d = two["first"], mapping.batches[right + 1]["first"]
    left_seconds, left_spent = _run(costs, mapping, a, b)
    right_seconds, right_spent = _run(costs, mapping, c, d)
    between = left_seconds - one["seconds"]
    behind = between + right_seconds - two["seconds"]
    latency = mapping.sums[0]["latency"] + left_spent + right_spent - one["spent"] - two["spent"]
    latency += grew * (one["start"] - two["start"]) + between * (d - b) + behind * (size - d)
    met = mapping.sums[0]["met"] - old + _met(costs, mapping, a, b, one["start"])
    met += _met(costs, mapping, c, d, two["start"] + between)
    # Later starts can only lose requests: what is not good enough without that needs no count.
    if between < 0 or behind < 0 or reaches(met, latency, least):
        met -= _lost(mapping.slack, b, c, between) + _lost(mapping.slack, d, size, behind)
    parts = (left_seconds, left_spent, right_seconds, right_spent)
    return Tried(left, right, *parts, between, behind, met, latency)


@compiled_inline
def keep(costs: Records, mapping: Mapping, change: Tried) -> None:
    """Bring all columns up to date with a change; a batch that has become empty is removed."""
    batches, left, right = mapping.batches, change.left, change.right
    batches[left]["seconds"], batches[left]["spent"] = change.left_seconds, change.left_spent
    batches[right]["seconds"], batches[right]["spent"] = change.right_seconds, change.right_spent
    for k in range(left + 1, right + 1):
        batches[k]["start"] += change.between
    for k in range(right + 1, mapping.sums[0]["batches"] + 1):
        batches[k]["start"] += change.behind
    for position in range(batches[left + 1]["first"], batches[right]["first"]):
        mapping.slack[position] -= change.between
    for position in range(batches[right + 1]["first"], mapping.slack.size):
        mapping.slack[position] -= change.behind
    mapping.sums[0]["met"], mapping.sums[0]["latency"] = change.met, change.latency
    _seat(costs, mapping, left)
    _seat(costs, mapping, right)
    if batches[right]["first"] == batches[right + 1]["first"]:
        _remove(mapping, right)
    if batches[left]["first"] == batches[left + 1]["first"]:
        _remove(mapping, left)


@compiled_inline
def _seat(costs: Records, mapping: Mapping, batch: int) -> None:
    """Set batch and slack of the positions of a batch."""
    begin, end = mapping.batches[batch]["first"], mapping.batches[batch + 1]["first"]
    for position in range(begin, end):
        mapping.places[position]["batch"] = batch
        last = last_start(costs, mapping.places[position]["request"], end - begin)
        mapping.slack[position] = last - mapping.batches[batch]["start"]


@compiled_inline
def _remove(mapping: Mapping, batch: int) -> None:
    """Remove an empty batch."""
    batches = mapping.sums[0]["batches"]
    for k in range(batch, batches):
        mapping.batches[k] = mapping.batches[k + 1]
    for position in range(mapping.batches[batch]["first"], mapping.places.size):
        mapping.places[position]["batch"] -= 1
    mapping.sums[0]["batches"] = batches - 1
