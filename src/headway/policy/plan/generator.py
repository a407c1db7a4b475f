"""QLM's plan generator: what an order of the groups makes late, and a search for a better one (QLM 5, 7)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.policy.core.pseudo_random import seeded
from headway.policy.plan import stochastic
from headway.policy.plan.queue_order import (
    LEVELS,
    PlanProblem,
    QueueOrder,
    best_place,
    cost_of,
    greedy,
    insert,
    order_of,
    outlook_of_all,
    search,
)
from headway.policy.plan.situation import Situation
from headway.types import Floats

_MOVES = 5_000, 300, 100_000  # of the search: at least, per item, at most
# A new order must cost this much less than the old one, or groups would go to and fro: a share, and requests
# (unless an instance idles or is about to load a model: then there is nothing to lose).
_BETTER, _BETTER_BY = 0.05, 0.5
_SEED = 0


class Seen(NamedTuple):
    """What the estimator says of an order: its cost, and rows late, base, ahead of (3, I)."""

    cost: float
    late: Floats
    base: Floats
    ahead: Floats

    def waiting(self, i: int) -> tuple[float, float]:
        """Return when an item's model serves, and the seconds of work that are ahead of it from then on."""
        return float(self.base[i]), float(self.ahead[i])


class Shortage(NamedTuple):
    """By how much the capacity is short under the best plan found.

    requests: that will be late. seconds: by which the latest of them is.
    """

    requests: int = 0
    seconds: float = 0.0


def see(situation: Situation, order: QueueOrder | None = None) -> Seen:
    """Return the outlook of an order; None = of the queues as they are."""
    order = order or situation.order
    seen = np.full((3, len(situation.items)), -np.inf)
    cost = outlook_of_all(situation.problem, order.items, order.length, seen)
    return Seen(float(cost), *seen)


def shortage(situation: Situation, seen: Seen) -> Shortage:
    """Return how many requests will be late and by how much."""
    late = np.flatnonzero(seen.late > 0)
    if not late.size:
        return Shortage()
    return Shortage(int(situation.problem.size[late].sum()), float(seen.late[late].max()))


def improve(situation: Situation, exact: int, time_limit: float, *, eager: bool) -> QueueOrder | None:
    """Return a better order than the queues have, None = there is none worth the change.

    exact: items up to which the stochastic program is solved by HiGHS, within `time_limit` seconds.
    eager: any better order is worth the change: an instance idles, or is about to load a model for long.
    """
    problem, before = situation.problem, situation.order
    placed = int(before.length.sum()) == len(situation.items)
    starts = [QueueOrder(*greedy(problem)), *([before] if placed else [])]
    starts = [start for start in starts if int(start.length.sum()) == len(situation.items)] or starts[:1]
    best = min(starts, key=lambda start: float(cost_of(problem, start.items, start.length)))
    items, length, cost = search(problem, best.items, best.length, moves_of(len(situation.items)), seeded(_SEED))
    found = QueueOrder(items, length)
    if len(situation.items) <= exact and int(length.sum()) == len(situation.items):
        solution = stochastic.solve(problem, found, time_limit)
        found, cost = solution.order, solution.cost
    limit = float(cost_of(problem, before.items, before.length)) * (1 - _BETTER) - (0.0 if eager else _BETTER_BY)
    if placed and cost > limit:
        return None
    return found


def moves_of(items: int) -> int:
    """Return how many moves the search makes for this number of items."""
    least, each, most = _MOVES
    return min(least + each * items, most)


def prepare() -> None:
    """Compile what orders groups, which takes seconds."""
    one, table = np.ones(1), np.ones((1, 1))
    levels = np.ones((len(LEVELS), 1, 1))
    problem = PlanProblem(
        one,
        np.zeros(1, np.int64),
        np.full(1, -1),
        table,
        table,
        table,
        table,
        levels,
        levels,
        one,
        one,
        np.zeros(1, np.int64),
        one,
        np.ones((1, 2, 1)),
        np.zeros(len(LEVELS)),
        0.0,
    )
    items, length = order_of([[]], 1)
    g, at = best_place(problem, items, length, 0)
    insert(items, length, g, at, 0)
    outlook_of_all(problem, items, length, np.zeros((3, 1)))
    search(problem, *greedy(problem), 10, seeded(_SEED))
