"""The order of groups: what it costs by hand, and the search against every order and against HiGHS."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.core.pseudo_random import seeded
from headway.policy.plan.queue_order import (
    LATE,
    LEVELS,
    TARDY,
    WAITING,
    PlanProblem,
    QueueOrder,
    best_place,
    cost_of,
    greedy,
    order_of,
    outlook_of_all,
    search,
)
from headway.policy.plan.stochastic import solve


def problem(
    size: list[float],
    model: list[int],
    due: list[float],
    *,
    loaded: tuple[int, ...] = (0,),
    each: float = 1.0,
    swap: float = 5.0,
    room: float = 0.0,
    finish: float = 2.0,
    z: float = 0.0,
    spread: float = 0.0,
    needs: tuple[float, ...] = (0.0,) * len(LEVELS),
) -> PlanProblem:
    """Groups of requests that take `each` seconds anywhere; due = latest start, less `needs` by level."""
    items, instances = len(size), len(loaded)
    every = np.ones((instances, items))
    share = every * np.array(size) * each
    last = np.stack([every * (np.array(due) - seconds) for seconds in needs])
    return PlanProblem(
        np.array(size, float),
        np.array(model),
        np.full(items, -1),
        share,
        every * np.array(size) * spread**2,
        every * room,
        every * finish,
        last,
        last,
        np.zeros(items),
        np.zeros(items),
        np.array(loaded),
        np.zeros(instances),
        np.full((instances, max(model) + 2, max(model) + 1), swap),
        z * np.linspace(0.0, 1.0, len(LEVELS)),
        0.0,
    )


def drawn(seed: int, items: int, instances: int, z: float = 0.0) -> PlanProblem:
    rng = np.random.default_rng(seed)
    models = int(rng.integers(1, 4))
    speed = rng.uniform(0.5, 2.0, instances)[:, None]
    plain = problem(
        rng.integers(1, 20, items).astype(float).tolist(),
        rng.integers(0, models, items).tolist(),
        rng.uniform(-5, 60, items).tolist(),
        loaded=tuple(rng.integers(0, models, instances).tolist()),
        each=float(rng.uniform(0.1, 1.0)),
        room=float(rng.uniform(0, 5)),
        z=z,
        spread=0.3 if z else 0.0,
        needs=tuple(np.sort(rng.uniform(0, 20, len(LEVELS))).tolist()),
    )
    return plain._replace(
        share=plain.share * speed,
        last=plain.last + rng.uniform(0, 10, items),
        ready=rng.uniform(0, 3, instances),
        away=float(rng.uniform(0, 0.1)),
        swap=plain.swap * rng.uniform(0.1, 3.0, plain.swap.shape),
    )


def every_order(p: PlanProblem) -> float:
    """Return the least cost of all orders."""
    items, instances = p.size.size, p.loaded.size
    best = math.inf
    for permutation in itertools.permutations(range(items)):
        for cuts in itertools.combinations_with_replacement(range(items + 1), instances - 1):
            edges = [0, *cuts, items]
            queues = [list(permutation[a:b]) for a, b in itertools.pairwise(edges)]
            order = order_of(queues, items)
            best = min(best, float(cost_of(p, order.items, order.length)))
    return best


def searched(p: PlanProblem, moves: int = 5000) -> tuple[QueueOrder, float]:
    items, length, cost = search(p, *greedy(p), moves, seeded(0))
    return QueueOrder(items, length), float(cost)


def test_the_cost_of_an_order_by_hand() -> None:
    p = problem([10, 5], [0, 1], [100.0, 12.0])
    order = order_of([[0, 1]], 2)
    seen = np.zeros((3, 2))
    cost = outlook_of_all(p, order.items, order.length, seen)
    # The first starts at 0, its last request at 10 and ends at 12; the swap takes 5; the other starts at 17.
    np.testing.assert_allclose(seen, [[-90.0, 10.0], [0.0, 17.0], [0.0, 0.0]])
    assert cost == pytest.approx(10 * WAITING * 10 + 5 * (sum(LATE) + TARDY * 10 + WAITING * 22))


def test_what_a_swap_costs_depends_on_both_models() -> None:
    p = problem([1, 1, 1], [0, 1, 2], [1000.0] * 3, finish=0.0)
    seconds = np.array([[[0.0, 3.0, 50.0], [2.0, 0.0, 40.0], [30.0, 30.0, 0.0], [7.0, 8.0, 9.0]]])
    p = p._replace(swap=seconds, away=0.1)

    def begins(order: list[int], loaded: int = 0) -> tuple[list[float], float]:
        placed, seen = order_of([order], 3), np.zeros((3, 3))
        cost = outlook_of_all(p._replace(loaded=np.array([loaded])), placed.items, placed.length, seen)
        return [float(seen[1, i]) for i in order], float(cost)

    assert begins([0, 1, 2])[0] == [0.0, 1 + 3, 1 + 3 + 1 + 40]
    assert begins([1, 0, 2])[0] == [3.0, 3 + 1 + 2, 3 + 1 + 2 + 1 + 50]
    assert begins([1, 0, 2], loaded=-1)[0][0] == 8.0
    assert begins([2, 1, 0])[1] > begins([1, 0, 2])[1] > begins([0, 1, 2])[1], "requests come meanwhile"
    assert begins([0])[1] == pytest.approx(WAITING * 1.0)


def test_a_batch_with_room_starts_at_once() -> None:
    p = problem([4, 4], [0, 0], [100.0, 100.0], room=6.0)
    order, seen = order_of([[0, 1]], 2), np.zeros((3, 2))
    outlook_of_all(p, order.items, order.length, seen)
    np.testing.assert_allclose(seen[0], [-100.0, 2.0 - 100.0])


def test_uncertain_work_ahead_makes_a_deadline_earlier() -> None:
    order, seen = order_of([[0, 1]], 2), np.zeros((3, 2))
    p = problem([10, 5], [0, 0], [100.0, 100.0], z=2.0, spread=0.5)
    outlook_of_all(p, order.items, order.length, seen)
    assert seen[0, 1] == pytest.approx(15.0 + 2.0 * math.sqrt(15 * 0.25) - 100.0)


def test_what_runs_is_displaced_at_a_price() -> None:
    p = problem([4, 4], [0, 0], [100.0, 100.0], room=5.0)
    p = p._replace(fixed=np.array([0, -1]), evict=np.array([3.0, 0.0]))
    seen = np.zeros((3, 2))
    before, after = order_of([[0, 1]], 2), order_of([[1, 0]], 2)
    outlook_of_all(p, before.items, before.length, seen)
    assert seen[0, 0] == -100.0
    outlook_of_all(p, after.items, after.length, seen)
    # Of its 4 seconds 3 do not fit beside the other group.
    assert seen[0, 0] == 4.0 + 3.0 * 3 / 4 + 4.0 - 5.0 - 100.0


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_the_best_of_all_orders(seed: int) -> None:
    p = drawn(seed, items=5, instances=1 + seed % 2, z=1.28 * (seed % 3 == 0))
    assert searched(p)[1] <= every_order(p) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_program_proves_the_search_right(seed: int) -> None:
    p = drawn(100 + seed, items=4, instances=1 + seed % 2)
    cost = searched(p)[1]
    start = order_of([list(range(4)), *([[]] * (p.loaded.size - 1))], 4)
    solution = solve(p, start, time_limit=60.0)
    assert solution.proved
    assert solution.cost == pytest.approx(cost, rel=2e-4, abs=1e-6)
    assert sorted(i for g in range(p.loaded.size) for i in solution.order.queue(g)) == [0, 1, 2, 3]


def test_what_the_program_holds_to_be_safe_is_safe() -> None:
    """With chance constraints it looks at the tangent of the root: it may lose more, never promise more."""
    for seed in range(3):
        p = drawn(200 + seed, items=4, instances=1, z=1.28)
        solution = solve(p, order_of([[0, 1, 2, 3]], 4), time_limit=60.0)
        assert solution.cost >= searched(p)[1] - 1e-9
        assert solution.cost <= cost_of(p, *order_of([[0, 1, 2, 3]], 4)) + 1e-9


def test_a_program_without_time_returns_where_it_began() -> None:
    p = drawn(1, items=6, instances=2)
    start = order_of([[0, 1, 2], [3, 4, 5]], 6)
    solution = solve(p, start, time_limit=0.0)
    assert solution.cost <= cost_of(p, start.items, start.length)
    assert not solution.proved
    assert sorted(solution.order.queue(0) + solution.order.queue(1)) == list(range(6))


@settings(deadline=None, max_examples=13)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 4))
def test_the_search_loses_no_group_and_never_gets_worse(seed: int, items: int, instances: int) -> None:
    p = drawn(seed, items, instances)
    begin = greedy(p)
    order, cost = searched(p, 1000)
    assert sorted(i for g in range(instances) for i in order.queue(g)) == list(range(items))
    assert cost <= cost_of(p, *begin) + 1e-9
    assert cost == pytest.approx(cost_of(p, order.items, order.length), abs=1e-6)


@settings(deadline=None, max_examples=13)
@given(st.integers(0, 10_000), st.integers(0, 6), st.integers(1, 3))
def test_a_new_group_goes_where_it_costs_least(seed: int, placed: int, instances: int) -> None:
    p, rng = drawn(seed, placed + 1, instances), np.random.default_rng(seed)
    queues: list[list[int]] = [[] for _ in range(instances)]
    for i in range(placed):
        queues[int(rng.integers(instances))].append(i)
    order = order_of(queues, placed + 1)
    g, at = best_place(p, order.items, order.length, placed)
    costs = {}
    for where in range(instances):
        for position in range(len(queues[where]) + 1):
            trial = [list(queue) for queue in queues]
            trial[where].insert(position, placed)
            costs[where, position] = cost_of(p, *order_of(trial, placed + 1))
    assert costs[g, at] == pytest.approx(min(costs.values()))


def test_an_instance_that_cannot_load_a_model_gets_none_of_it() -> None:
    p = problem([1, 1], [0, 1], [10.0, 10.0], loaded=(0, 1))
    p = p._replace(swap=np.full((2, 3, 2), np.inf))
    order, _ = searched(p)
    assert (order.queue(0), order.queue(1)) == ([0], [1])
    alone = p._replace(loaded=np.array([0]), swap=np.full((1, 3, 2), np.inf))
    assert best_place(alone, *order_of([[]], 2), 1) == (-1, 0)
