"""Simulated annealing of a priority mapping (SLO-aware 4.3, Algorithm 1).

Two start points, three moves, and a temperature that falls level by level. Read literally, line 36 of the
algorithm accepts a worse mapping when exp(-(f_new - f) / T) < rand, which is never, as the left side is above
1: that is hill climbing, and its T (500 to 20) has no unit of G. Here a worse mapping is accepted with
probability exp(-n * loss / T), loss = the share of G that it loses. T is thus in requests: at T = 0.2 a
mapping that loses a fifth of a request's worth of G is accepted once in e times.
"""

from __future__ import annotations

from math import ceil, log
from typing import NamedTuple

import numpy as np

from headway.compiled import compiled, compiled_in_place, compiled_inline
from headway.policy.core import mapping as maps
from headway.policy.core.mapping import Mapping, Records, value_of
from headway.policy.core.pseudo_random import State, below, seeded, uniform
from headway.types import Bools, Floats, Ints

_SQUEEZE, _DELAY = 0, 1
_MOST = 1000  # moves at each temperature
_WIDE = 8  # requests in a batch from which on a move takes as long as they are many
_LEAST_HOT = 0.03  # requests
MOST_ANNEALED = 128  # requests of one engine whose order is searched; the others go by deadline


class Schedule(NamedTuple):
    """The temperatures, in requests, and how many moves are tried at each.

    moves: moves tried at each temperature (the paper's iterations).
    hot, cold: first temperature and the one below which the search ends (T_0 and T_thres).
    decay: factor from one temperature to the next, below 1 (tau).
    """

    moves: int
    hot: float
    cold: float
    decay: float = 0.93

    @property
    def levels(self) -> int:
        """Return the number of temperatures."""
        return ceil(log(self.cold / self.hot) / log(self.decay))

    @classmethod
    def of(cls, size: int, limit: int) -> Schedule:
        """Return a schedule for so many requests in batches of at most `limit`.

        Chosen by measurement (docs/papers.md) for about 0.1 ms at 10 requests and less than 10 ms at 1,000:
        more moves for more requests, fewer where a large batch makes each of them slow, and less heat for
        more requests, as there is no time to cool down slowly.
        """
        moves = min(4 * size + 5, _MOST) / max(1.0, min(limit, size) / _WIDE)
        hot = max(3.0 / max(size, 1) ** 0.75, _LEAST_HOT)
        return cls(max(int(moves), 1), hot, hot / 10)


@compiled
def anneal(costs: Records, arrived: Ints, limit: int, schedule: Schedule, seed: int) -> tuple[Ints, Ints]:
    """Return an order of the requests and the sizes of its batches, at most `limit` each.

    costs: records of `mapping.COST`. arrived: the requests in order of arrival.
    The result is never worse than arrival order or shortest first, in batches as large as possible.
    """
    best, unbeatable = best_start(costs, arrived, limit)
    if not unbeatable:
        now = maps.empty(arrived.size)
        maps.copy(best, now)
        _search(costs, now, best, limit, schedule, seed)
    sizes = np.empty(best.sums[0]["batches"], np.int64)
    for k in range(sizes.size):
        sizes[k] = best.batches[k + 1]["first"] - best.batches[k]["first"]
    return best.places["request"].copy(), sizes


@compiled
def best_start(costs: Records, arrived: Ints, limit: int) -> tuple[Mapping, bool]:
    """Return the better of arrival order and shortest first, in batches as large as possible.

    And whether it is the best there is: shortest first in batches of one with all SLOs met (4.3). In larger
    batches even that can be beaten, as other sizes of the batches may give smaller latencies.
    """
    shortest = maps.empty(arrived.size)
    seconds = np.empty(arrived.size)
    for i in range(arrived.size):
        seconds[i] = maps.execution(costs, arrived[i], limit)
    maps.refill(costs, shortest, arrived[np.argsort(seconds, kind="mergesort")], limit)
    first = maps.empty(arrived.size)
    maps.refill(costs, first, arrived, limit)
    unbeatable = limit == 1 and shortest.sums[0]["met"] == arrived.size
    better = value_of(first) > value_of(shortest) and not unbeatable
    return first if better else shortest, unbeatable


@compiled
def _search(costs: Records, now: Mapping, best: Mapping, limit: int, schedule: Schedule, seed: int) -> None:
    """Anneal `now`; `best` receives the best mapping seen."""
    random = seeded(seed)
    temperature, size = schedule.hot, now.places.size
    value = top = value_of(now)
    while temperature > schedule.cold:
        maps.evaluate(costs, now)  # so that rounding errors do not add up
        for _ in range(schedule.moves):
            least = value * (1.0 + temperature / size * np.log(uniform(random)))
            if _move(costs, now, limit, random, least):
                value = value_of(now)
                if value > top:
                    top = value
                    maps.copy(now, best)
        temperature *= schedule.decay


@compiled_in_place
def _move(costs: Records, now: Mapping, limit: int, random: State, least: float) -> bool:
    """Try one of the three moves; keep it, and return True, when G is then at least `least`.

    Where a request cannot be moved to the batch before or after its own, two change places instead.
    """
    batches, size = now.batches, now.places.size
    position = below(random, size)
    batch = now.places[position]["batch"]
    kind = below(random, 3) if limit > 1 else 2
    if kind == _SQUEEZE and batch > 0 and batches[batch]["first"] - batches[batch - 1]["first"] < limit:
        return _squeeze(costs, now, position, batch, least)
    if kind == _DELAY and _has_place(now, batch, limit):
        return _delay(costs, now, position, batch, least)
    other = below(random, size)
    if now.places[other]["batch"] == batch:
        return False
    return _exchange(costs, now, min(position, other), max(position, other), least)


@compiled_inline
def _has_place(now: Mapping, batch: int, limit: int) -> bool:
    """Tell whether a request of a batch can go to the next one, which may be a new one behind the last."""
    batches = now.batches
    if batch == now.sums[0]["batches"] - 1:
        return bool(batches[batch + 1]["first"] - batches[batch]["first"] > 1)
    return bool(batches[batch + 2]["first"] - batches[batch + 1]["first"] < limit)


@compiled_in_place
def _squeeze(costs: Records, now: Mapping, position: int, batch: int, least: float) -> bool:
    """Move a request into the batch before its own."""
    old = maps.met_in(now, batch - 1) + maps.met_in(now, batch)
    begin = now.batches[batch]["first"]
    _swap(now, position, begin)
    now.batches[batch]["first"] += 1
    change = maps.tried(costs, now, batch - 1, batch, 1, old, least)
    if maps.reaches(change.met, change.latency, least):
        maps.keep(costs, now, change)
        return True
    now.batches[batch]["first"] -= 1
    _swap(now, position, begin)
    return False


@compiled_in_place
def _delay(costs: Records, now: Mapping, position: int, batch: int, least: float) -> bool:
    """Move a request into the batch after its own."""
    if batch == now.sums[0]["batches"] - 1:
        _append(now)
    old = maps.met_in(now, batch) + maps.met_in(now, batch + 1)
    end = now.batches[batch + 1]["first"] - 1
    _swap(now, position, end)
    now.batches[batch + 1]["first"] -= 1
    change = maps.tried(costs, now, batch, batch + 1, -1, old, least)
    if maps.reaches(change.met, change.latency, least):
        maps.keep(costs, now, change)
        return True
    now.batches[batch + 1]["first"] += 1
    _swap(now, position, end)
    if now.batches[batch + 1]["first"] == now.batches[batch + 2]["first"]:  # the new one
        now.sums[0]["batches"] -= 1
    return False


@compiled_inline
def _append(now: Mapping) -> None:
    """Add an empty batch behind the last."""
    batches = now.sums[0]["batches"]
    now.batches[batches + 1] = now.batches[batches]
    now.batches[batches]["seconds"], now.batches[batches]["spent"] = 0.0, 0.0
    now.sums[0]["batches"] = batches + 1


@compiled_in_place
def _exchange(costs: Records, now: Mapping, position: int, other: int, least: float) -> bool:
    """Exchange two requests of different batches, the one at `position` in the earlier one."""
    left, right = now.places[position]["batch"], now.places[other]["batch"]
    old = maps.met_in(now, left) + maps.met_in(now, right)
    _swap(now, position, other)
    change = maps.tried(costs, now, left, right, 0, old, least)
    if maps.reaches(change.met, change.latency, least):
        maps.keep(costs, now, change)
        return True
    _swap(now, position, other)
    return False


@compiled_inline
def _swap(now: Mapping, position: int, other: int) -> None:
    one = now.places[position]["request"]
    now.places[position]["request"] = now.places[other]["request"]
    now.places[other]["request"] = one


def sequence(
    costs: Records, due: Floats, promised: Bools, limit: int, seed: int, most: int = MOST_ANNEALED
) -> tuple[Ints, int]:
    """Return the order in which an engine should serve its requests, given in order of arrival, and its first batch.

    The first batch is the number of requests that the search puts into it, `limit` where nothing is searched.

    costs: records of `mapping.COST`, with due (instants) and promised (it has an SLO) of the same requests.
    The first `most` of the promised ones by their deadline are annealed, those that are lost even in a batch
    of their own behind all others; the rest follows in that order, and then what was promised nothing, by
    arrival.
    """
    rows = np.flatnonzero(promised)
    by_due = rows[np.lexsort((due[rows], _is_lost(costs[rows])))]
    head = np.sort(by_due[:most])
    order, first = head, 1 if head.size else limit
    if head.size > 1:
        order, sizes = anneal(costs, head, limit, Schedule.of(head.size, limit), seed)
        first = int(sizes[0])
    return np.concatenate([order, by_due[most:], np.flatnonzero(~promised)]), first


def _is_lost(costs: Records) -> Bools:
    """Tell which requests cannot meet their SLO even when they begin now, alone."""
    prefill = costs["prefill_slope"] + costs["prefill_base"]
    whole = costs["execution_slope"] + costs["execution_base"]
    return np.asarray((costs["ttft"] < prefill) | (costs["e2e"] < whole) | (costs["widest"] < 1))
