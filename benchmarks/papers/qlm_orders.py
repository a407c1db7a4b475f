"""The plan generator's search beside the exact solution and HiGHS (QLM 7), on small plans of two instances.

An order's cost is the sum over the instances, so the best order of all is found instance by instance: the least
cost of every subset of the groups that may be there, then the best way to divide them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.qlm_estimates import crowd, filled
from benchmarks.papers.qlm_workloads import FIVE, RUNNING, QlmSetting
from headway.policy.core.pseudo_random import seeded
from headway.policy.plan.generator import moves_of
from headway.policy.plan.qlm import Generated
from headway.policy.plan.queue_order import PlanProblem, QueueOrder, greedy, outlook, search
from headway.policy.plan.stochastic import solve
from headway.policy.recipes.recipe import Recipe

SOLVER_S = 5.0  # for the stochastic program
_SETTING = QlmSetting("small plans", (("a100", 2),), FIVE[:2], 1.0, 1.0)
_QUEUED = (60, 400)  # requests, at least and at most
_MOST = 10  # items of the largest plans, so that all orders can be tried


@dataclass(frozen=True, slots=True)
class PlanOrders:
    """The costs of the search's order, of that of HiGHS, and of the best order.

    items: groups, and what runs. proved: HiGHS proved its own to be the best of the program.
    """

    items: int
    search: float
    program: float
    best: float
    proved: bool

    @property
    def search_gap_pct(self) -> float:
        """Return how much more the search's order costs than the best, in %."""
        return 100 * (self.search / self.best - 1)

    @property
    def program_gap_pct(self) -> float:
        """Return how much more the order of HiGHS costs than the best, in %."""
        return 100 * (self.program / self.best - 1)


def plan_orders(recipe: Recipe, count: int, seed: int, seconds: float = SOLVER_S) -> Iterator[PlanOrders]:
    """Yield the costs for the first `count` plans of at most `_MOST` items. seconds: time limit of HiGHS."""
    problems = (_problem(recipe, number) for number in itertools.count(seed))
    for problem in itertools.islice((one for one in problems if one.size.size <= _MOST), count):
        *_, cost = search(problem, *greedy(problem), moves_of(problem.size.size), seeded(0))
        solution = solve(problem, QueueOrder(*greedy(problem)), seconds)
        yield PlanOrders(problem.size.size, float(cost), solution.cost, best_cost(problem), solution.proved)


def _problem(recipe: Recipe, seed: int) -> PlanProblem:
    """Return the plan generator's first problem with two full instances and a queue for two models."""
    queued = int(np.random.default_rng(seed).integers(*_QUEUED))
    requests = [*crowd(_SETTING.models, queued, 2 * RUNNING, seed)]
    timed, core = filled(recipe, _SETTING, requests)
    now, work = requests[-1].arrival, None
    while work is None:  # until a request is predicted to be late
        now += 1.0
        work = timed.planner.deliberate(core.cluster, now)
    generated = work()
    assert isinstance(generated, Generated)
    return generated.situation.problem


def best_cost(p: PlanProblem) -> float:
    """Return the least cost of all orders. p: with at most about 10 items."""
    free = np.flatnonzero(p.fixed < 0).tolist()
    least = {0: 0.0}  # by the set of items placed on the instances so far
    for g in range(p.loaded.size):
        here = {mask: _least(p, g, mask, free) for mask in range(1 << len(free))}
        both = ((a | b, before + here[b]) for a, before in least.items() for b in here if not a & b)
        least = {}
        for mask, cost in both:
            least[mask] = min(least.get(mask, math.inf), cost)
    return least[(1 << len(free)) - 1]


def _least(p: PlanProblem, g: int, mask: int, free: list[int]) -> float:
    """Return the least cost of an instance's queue of its running item and a set of other items."""
    mine = [i for k, i in enumerate(free) if mask >> k & 1]
    seen = np.zeros((3, p.size.size))
    orders = itertools.permutations([*np.flatnonzero(p.fixed == g).tolist(), *mine])
    return min(float(outlook(p, g, np.array(order, np.int64), len(order), seen)) for order in orders)
