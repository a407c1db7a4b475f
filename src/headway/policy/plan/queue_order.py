"""What an order of request groups on virtual queues costs, and the search for a better one (QLM 7).

A `PlanProblem` holds what the completion time estimator says about every group on every instance. `cost_of`
walks along a virtual queue: a group starts when those ahead of it have drained so far that the batch has room
(equation 10's waiting), or when the model has been swapped. What a start costs is the number of requests that
are then expected to be late: the distribution of completion times is taken as a staircase of `LEVELS`, of
which the highest is that of equation 12 (P(p <= 0) > Delta). `search` improves an order by simulated
annealing over moves of groups and of runs of groups of one model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.core.pseudo_random import State, below, uniform
from headway.types import Floats, Ints

# Completion times are met with these probabilities; the share of requests that is late when a group starts
# too late for that one of them, but not for those before it.
LEVELS = (0.2, 0.4, 0.6, 0.8, 0.95)
LATE = (0.3, 0.2, 0.2, 0.175, 0.125)
# What else counts, per request: a second of lateness (at the first level), a second until it starts. Equation
# 13 sums the penalties alone; then ten requests a little late would weigh as much as one very late.
TARDY, WAITING = 0.1 / 60.0, 0.001 / 60.0
_COOLING = 1e-3  # temperature at the end, as a share of that at the beginning


class PlanProblem(NamedTuple):
    """Groups to be ordered on instances; I items, G instances, M models. Seconds count from now.

    An item is a request group, or what an instance runs already of one kind.

    size: (I,) requests. model: (I,) index. fixed: (I,) the instance that runs the item, -1 = a queued group.
    share: (G, I) seconds of a full batch that the item takes; inf = the instance cannot serve it.
    variance: (G, I) of `share`.
    room: (G, I) seconds of work that a batch holds at once: what is ahead delays a request by the rest.
    finish: (G, I) mean seconds from the last request's start to its end.
    first, last: (K, G, I) latest starts of its oldest and of its youngest request, by level; inf = no SLO.
    evict, leave: (I,) seconds lost when a running item is displaced, and when its model is swapped out.
    loaded: (G,) the model that each instance has, or is loading; -1 = one that no item asks for.
    ready: (G,) seconds until it takes work.
    swap: (G, M + 1, M) seconds until a model serves that is loaded after another one; inf = it cannot be.
        The last row is for a `loaded` of -1.
    z: (K,) standard deviations of the waiting time that a start must hold for, by level.
    away: requests yet to come that are late for each second in which an instance loads a model.
    """

    size: Floats
    model: Ints
    fixed: Ints
    share: Floats
    variance: Floats
    room: Floats
    finish: Floats
    first: Floats
    last: Floats
    evict: Floats
    leave: Floats
    loaded: Ints
    ready: Floats
    swap: Floats
    z: Floats
    away: float


class QueueOrder(NamedTuple):
    """Items in order on each instance: (G, I), of which the first `length` (G,) count."""

    items: Ints
    length: Ints

    def queue(self, g: int) -> list[int]:
        """Return the items of one instance."""
        items: list[int] = self.items[g, : self.length[g]].tolist()
        return items


def order_of(queues: list[list[int]], items: int) -> QueueOrder:
    """Return queues of items as one array."""
    out = QueueOrder(np.full((len(queues), max(items, 1)), -1), np.array([len(queue) for queue in queues]))
    for g, queue in enumerate(queues):
        out.items[g, : len(queue)] = queue
    return out


@compiled
def outlook(p: PlanProblem, g: int, items: Ints, length: int, seen: Floats) -> float:
    """Return the cost of an instance's queue.

    seen: (3, I) is set, for each of its items, to the seconds by which it is late at the highest level
    (negative = in time), when its model serves, and the seconds of work that are ahead of it from then on.
    """
    base = end = p.ready[g]
    ahead = variance = cost = 0.0
    model, displaced, swapped = p.loaded[g], False, False
    for k in range(length):
        i = items[k]
        if p.model[i] != model:
            seconds = p.swap[g, model, p.model[i]]
            base, ahead, model, swapped = end + seconds, 0.0, p.model[i], True
            cost += p.away * seconds
        if p.fixed[i] < 0:
            displaced = True
        elif swapped:
            ahead += p.leave[i]
        elif displaced and ahead + p.share[g, i] > p.room[g, i]:
            ahead += p.evict[i] * min((ahead + p.share[g, i] - p.room[g, i]) / p.share[g, i], 1.0)
        seen[1, i], seen[2, i] = base, ahead
        first, spread = base + max(ahead - p.room[g, i], 0.0), np.sqrt(variance)
        ahead += p.share[g, i]
        variance += p.variance[g, i]
        last, more = base + max(ahead - p.room[g, i], 0.0), np.sqrt(variance)
        end = max(end, last + p.finish[g, i])
        each = WAITING * last
        for level in range(len(LATE)):
            late = max(
                first + p.z[level] * spread - p.first[level, g, i], last + p.z[level] * more - p.last[level, g, i]
            )
            each += LATE[level] if late > 0 else 0.0
            each += TARDY * max(late, 0.0) if level == 0 else 0.0
        seen[0, i] = late
        cost += p.size[i] * each
    return cost


@compiled
def cost_of(p: PlanProblem, items: Ints, length: Ints) -> float:
    """Return the cost of a whole order; inf when an instance is to serve what it cannot."""
    return outlook_of_all(p, items, length, np.zeros((3, p.size.size)))


@compiled
def outlook_of_all(p: PlanProblem, items: Ints, length: Ints, seen: Floats) -> float:
    """Return the cost of a whole order, and set `seen` as `outlook` does."""
    total = 0.0
    for g in range(length.size):
        total += outlook(p, g, items[g], length[g], seen)
    return total


@compiled
def best_place(p: PlanProblem, items: Ints, length: Ints, i: int) -> tuple[int, int]:
    """Return the instance and the position at which adding an item costs least; (-1, 0) = no instance can.

    Tried are the positions at either end, those beside items of its model, and for up to 32 items all.
    """
    seen = np.zeros((3, p.size.size))
    best_g, best_at, least = -1, 0, np.inf
    for g in range(length.size):
        if not _able(p, g, i):
            continue
        n = length[g]
        trial = np.empty(n + 1, np.int64)
        before = outlook(p, g, items[g], n, seen)
        for at in range(n + 1):
            beside = (at > 0 and p.model[items[g, at - 1]] == p.model[i]) or (
                at < n and p.model[items[g, at]] == p.model[i]
            )
            if not (beside or at == 0 or at == n or n <= 32):
                continue
            trial[:at] = items[g, :at]
            trial[at] = i
            trial[at + 1 :] = items[g, at:n]
            more = outlook(p, g, trial, n + 1, seen) - before
            if more < least:
                best_g, best_at, least = g, at, more
    return best_g, best_at


@compiled
def _able(p: PlanProblem, g: int, i: int) -> bool:
    """Tell whether an instance can serve an item: it can have the model, and holds requests so long."""
    if p.fixed[i] >= 0:
        return bool(p.fixed[i] == g)
    here = p.model[i] == p.loaded[g] or p.swap[g, p.loaded[g], p.model[i]] < np.inf
    return bool(p.share[g, i] < np.inf and here)


@compiled
def insert(items: Ints, length: Ints, g: int, at: int, i: int) -> None:
    """Add an item to a queue."""
    for k in range(length[g], at, -1):
        items[g, k] = items[g, k - 1]
    items[g, at] = i
    length[g] += 1


@compiled
def greedy(p: PlanProblem) -> tuple[Ints, Ints]:
    """Return the order that adds the items by their latest start, each where it costs least."""
    items = np.full((p.loaded.size, max(p.size.size, 1)), -1)
    length = np.zeros(p.loaded.size, np.int64)
    urgency = np.empty(p.size.size)
    for i in range(p.size.size):
        urgency[i] = np.inf
        for g in range(p.loaded.size):
            if _able(p, g, i):
                urgency[i] = min(urgency[i], p.first[-1, g, i])
        if p.fixed[i] >= 0:
            urgency[i] = -np.inf  # what runs is there already
    for i in np.argsort(urgency, kind="mergesort"):
        g, at = best_place(p, items, length, i)
        if g >= 0:
            insert(items, length, g, at, i)
    return items, length


@compiled
def _take_out(items: Ints, length: Ints, g: int, at: int, count: int, block: Ints) -> None:
    """Move `count` items of a queue into `block`."""
    block[:count] = items[g, at : at + count]
    for k in range(at, length[g] - count):
        items[g, k] = items[g, k + count]
    length[g] -= count


@compiled
def _put_in(items: Ints, length: Ints, g: int, at: int, count: int, block: Ints) -> None:
    """Move the first `count` items of `block` into a queue."""
    for k in range(length[g] - 1, at - 1, -1):
        items[g, k + count] = items[g, k]
    items[g, at : at + count] = block[:count]
    length[g] += count


@compiled
def _run_at(p: PlanProblem, items: Ints, length: int, at: int) -> tuple[int, int]:
    """Return (begin, count) of the neighbouring items that share the model of the one at `at`."""
    begin, stop, model = at, at + 1, p.model[items[at]]
    while begin > 0 and p.model[items[begin - 1]] == model:
        begin -= 1
    while stop < length and p.model[items[stop]] == model:
        stop += 1
    return begin, stop - begin


@compiled
def _target(p: PlanProblem, items: Ints, length: int, model: int, random: State) -> int:
    """Return a position at random: any, or (every other time) one after an item of the same model."""
    at = below(random, length + 1)
    if uniform(random) < 0.5:
        for k in range(length):
            place = (at + k) % length
            if p.model[items[place]] == model:
                return int(place + 1)
    return at


@compiled
def _all_able(p: PlanProblem, g: int, block: Ints, count: int) -> bool:
    able = True
    for k in range(count):
        able = able and _able(p, g, block[k])
    return able


@compiled
def _block(p: PlanProblem, items: Ints, length: int, random: State) -> tuple[int, int]:
    """Return (begin, count) of what a move takes: an item, or a run of one model from an item of it on."""
    begin = below(random, length)
    if uniform(random) < 0.75:
        return begin, 1
    start, run = _run_at(p, items, length, begin)
    if uniform(random) < 0.5:
        begin = start
    return begin, start + run - begin


@compiled
def search(p: PlanProblem, items: Ints, length: Ints, moves: int, random: State) -> tuple[Ints, Ints, float]:
    """Return the best order found within that many moves, and its cost; the order given is not changed.

    A move takes an item, or a run of items of one model, elsewhere. Worse orders are accepted with the
    Metropolis probability.
    """
    items, length = items.copy(), length.copy()
    seen, costs = np.zeros((3, p.size.size)), np.zeros(length.size)
    for g in range(length.size):
        costs[g] = outlook(p, g, items[g], length[g], seen)
    total = costs.sum()
    best, best_items, best_length = total, items.copy(), length.copy()
    hot = 0.3 * p.size.sum() / max(p.size.size, 1)
    block = np.empty(max(p.size.size, 1), np.int64)
    for move in range(moves):
        a, b = below(random, length.size), below(random, length.size)
        if length[a] == 0:
            continue
        begin, count = _block(p, items[a], length[a], random)
        _take_out(items, length, a, begin, count, block)
        if not _all_able(p, b, block, count):
            _put_in(items, length, a, begin, count, block)
            continue
        at = _target(p, items[b], length[b], p.model[block[0]], random)
        _put_in(items, length, b, at, count, block)
        new_b = outlook(p, b, items[b], length[b], seen)
        new_a = 0.0 if a == b else outlook(p, a, items[a], length[a], seen)
        change = new_a + new_b - costs[b] - (0.0 if a == b else costs[a])
        if change <= 0 or uniform(random) < np.exp(-change / (hot * _COOLING ** (move / moves))):
            costs[a], costs[b] = new_a, new_b  # in this order: where a is b, the second counts
            total += change
            if total < best - 1e-9:
                best, best_items[:], best_length[:] = total, items, length
        else:
            _take_out(items, length, b, at, count, block)
            _put_in(items, length, a, begin, count, block)
    return best_items, best_length, best
