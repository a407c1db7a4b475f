"""The work that is left of a run: against means in closed form, and by what the run has shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from headway.policy.apps.demand import (
    BUCKETS,
    SAMPLES,
    UNKNOWN,
    Costs,
    Demand,
    Draw,
    Known,
    _tables,
    bucket,
    correlation_of,
)
from headway.policy.apps.graph import END, LLM, Graph, Record, Visit
from headway.types import Floats

COSTS = Costs(0.001, 0.1, 0.001)
SEEDS = range(100)  # 12,800 walks


def llm(unit: str, prompt: float = 100.0, output: float = 10.0, parallel: int = 1) -> Visit:
    return Visit(unit, LLM, prompt, output, parallel)


def tool(unit: str, seconds: float = 1.0) -> Visit:
    return Visit(unit, "python", seconds=seconds)


def graph_of(count: int, run: Callable[[np.random.Generator], list[Visit]], seed: int = 0) -> Graph:
    graph, rng = Graph("app"), np.random.default_rng(seed)
    for _ in range(count):
        graph.learn(run(rng))
    return graph


def draws(
    graph: Graph,
    unit: str,
    *,
    visited: dict[str, int] | None = None,
    before: Visit | None = None,
    known: Known | None = None,
    costs: Costs = COSTS,
) -> Draw:
    """Return the draws of many seeds as one."""
    demand, parts = Demand(graph), list[Draw]()
    for seed in SEEDS:
        part = demand.draw(unit, visited or {}, before, known or Known(), costs, seed)
        assert part is not None
        parts.append(part)
    return Draw(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def near(values: Floats, mean: float) -> bool:
    """Tell whether a mean is within five standard errors."""
    return bool(abs(values.mean() - mean) <= 5 * values.std() / np.sqrt(values.size) + 1e-9)


# ---- means


def test_a_visit_costs_its_tokens_and_its_seconds() -> None:
    graph = graph_of(1, lambda rng: [llm("a", 1000, 20), tool("t", 3.0), llm("b", 100, 10, parallel=4)])
    draw = draws(graph, "a")
    assert draw.visit == pytest.approx(1 + 2)
    assert draw.total == pytest.approx(3 + 3 + 4 * (0.1 + 1))
    # Parallel prompts are computed one after another, their answers at the same time.
    assert draw.path == pytest.approx(3 + 3 + 4 * 0.1 + 1)
    assert set(draw.after.tolist()) == {1}
    assert draws(graph, "b").total == pytest.approx(4.4)


def test_a_chain_takes_the_sum_of_its_units_means() -> None:
    def run(rng: np.random.Generator) -> list[Visit]:
        return [llm("a", 100, rng.exponential(50)), tool("t", rng.exponential(4)), llm("b", 100, 20)]

    graph = graph_of(1000, run)
    outputs = np.mean([record.visit.output for record in graph.units["a"].records])
    seconds = np.mean([record.visit.seconds for record in graph.units["t"].records])
    assert near(draws(graph, "a").total, 0.1 + outputs * 0.1 + seconds + 2.1)
    assert near(draws(graph, "t").total, seconds + 2.1)


def test_branches_count_by_their_shares() -> None:
    def run(rng: np.random.Generator) -> list[Visit]:
        then = rng.choice(3, p=[0.2, 0.3, 0.5])
        return [tool("a"), *([[], [tool("b", 10)], [tool("c", 2)]][then])]

    graph = graph_of(1000, run)
    shares, draw = graph.units["a"].next_units, draws(graph, "a")
    assert near(draw.total, 1 + 10 * shares["b"] + 2 * shares["c"])
    for index, name in ((-1, END), (1, "b"), (2, "c")):
        assert near((draw.after == list(graph.units).index(name) if name else draw.after == index) * 1.0, shares[name])


def test_a_loop_that_is_left_by_chance_takes_the_geometric_mean_number_of_rounds() -> None:
    graph = graph_of(1000, lambda rng: [tool("a")] * rng.geometric(0.25))
    assert draws(graph, "a").total.mean() == pytest.approx(4, rel=0.1)
    # It has no memory: after three rounds as many are to come as at first.
    assert draws(graph, "a", visited={"a": 3}).total.mean() == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize("done", [0, 3, 7])
def test_a_loop_of_known_length_is_walked_to_its_end(done: int) -> None:
    graph = graph_of(100, lambda rng: [llm("a", 100, 9), tool("t", 1)] * 8)
    assert draws(graph, "a", visited={"a": done, "t": done}).total == pytest.approx((8 - done) * 2)


def test_beyond_every_recorded_round_the_last_ones_are_drawn_from() -> None:
    graph = graph_of(100, lambda rng: [tool("a")] * 8)
    # The last 20 records are those of the last rounds, all of them.
    assert draws(graph, "a", visited={"a": 30}).total == pytest.approx(1)


def test_an_endless_loop_ends() -> None:
    graph = graph_of(30, lambda rng: [tool("a"), tool("b")])
    unit = graph.units["b"]
    for i, record in enumerate(unit.records):
        unit.records[i] = dataclasses.replace(record, after="a")
    assert draws(graph, "a").total == pytest.approx(1000)


# ---- what is known


def test_a_unit_that_is_not_known_has_no_demand() -> None:
    graph = graph_of(3, lambda rng: [tool("a")])
    assert Demand(graph).draw("b", {}, None, Known(), COSTS, 0) is None


def test_the_same_seed_draws_the_same() -> None:
    demand = Demand(graph_of(100, lambda rng: [tool("a", rng.exponential())]))
    one, same, other = (demand.draw("a", {}, None, Known(), COSTS, seed) for seed in (1, 1, 2))
    assert one is not None
    assert same is not None
    assert other is not None
    assert np.array_equal(one.total, same.total)
    assert not np.array_equal(one.total, other.total)
    assert one.total.shape == (SAMPLES,)


def test_a_visit_s_known_requests_take_the_place_of_drawn_ones() -> None:
    graph = graph_of(50, lambda rng: [llm("a", 100, 10, parallel=2), llm("b", 100, 10, parallel=2)])
    draw = draws(graph, "a", known=Known(5, 1000.0))
    assert draw.visit == pytest.approx(5 * 1 + 1)
    assert draw.total == pytest.approx(5 * (1 + 1) + 2 * (0.1 + 1))


def test_the_visit_before_is_carried_along_the_walk() -> None:
    """The width of the first unit is known; it is also that of the last."""

    def run(rng: np.random.Generator) -> list[Visit]:
        width = int(rng.integers(1, 11))
        return [llm("a", 0, 0, width), llm("b", 0, 0, width), llm("c", 0, 10, width)]

    graph = graph_of(500, run)
    assert draws(graph, "a", known=Known(7, 0.0)).total == pytest.approx(7)
    assert draws(graph, "b", before=llm("a", 0, 0, 3)).total == pytest.approx(3)


# ---- correlations

MASKS = ("input on input", "input on output", "output on output", "output on own input", "parallelism")


def related(which: int | None, noise: float, count: int = 300) -> list[Record]:
    """Return records in which one pair of numbers is related."""
    rng, out = np.random.default_rng(1), []
    for _ in range(count):
        before, mine = rng.uniform(10, 1000, 2), rng.uniform(10, 1000, 2)
        wide = rng.integers(1, 50, 2)
        error = noise * rng.normal(0, 300)
        if which in (0, 1):
            mine[0] = before[which] + error
        elif which == 2:
            mine[1] = before[1] + error
        elif which == 3:
            mine[1] = mine[0] + error
        elif which == 4:
            wide[1] = max(wide[0] + error / 20, 1)
        out.append(Record(llm("b", *mine, int(wide[1])), 0, llm("a", *before, int(wide[0])), END))
    return out


@pytest.mark.parametrize("which", range(5), ids=MASKS)
def test_a_correlation_is_found(which: int) -> None:
    assert correlation_of(related(which, 0.3)).masks == tuple(i == which for i in range(5))


def test_what_is_not_related_is_not_found() -> None:
    assert correlation_of(related(None, 0.0)).masks == (False,) * 5


@pytest.mark.parametrize("which", range(5), ids=MASKS)
def test_a_weak_correlation_is_not_found(which: int) -> None:
    """The coefficient is about 0.3."""
    assert correlation_of(related(which, 3.0)).masks == (False,) * 5


def test_a_negative_correlation_is_not_found() -> None:
    records = [Record(llm("a", float(i), float(100 - i)), 0, None, END) for i in range(1, 100)]
    assert correlation_of(records).masks == (False,) * 5


@pytest.mark.parametrize("count", [1, 9])
def test_few_records_show_no_correlation(count: int) -> None:
    assert correlation_of(related(3, 0.0, count)).masks == (False,) * 5


def test_records_without_a_visit_before_have_no_bucket_for_it() -> None:
    some = correlation_of([Record(llm("a", 10), 0, None, END), Record(llm("a", 20), 0, tool("t"), END)])
    assert (some.buckets[:, :3] == UNKNOWN).all()
    assert some.buckets[:, 3].tolist() == [0, BUCKETS - 1]


def test_buckets_are_of_equal_width_and_the_outermost_are_open() -> None:
    edges = np.linspace(0, 100, BUCKETS + 1)[1:-1]
    values = np.array([-5.0, 0.0, 9.9, 10.0, 55.0, 99.0, 100.0, 1e9, np.nan])
    assert bucket(values, edges).tolist() == [0, 0, 0, 1, 5, 9, 9, 9, UNKNOWN]


@pytest.mark.parametrize("value", [150.0, 550.0, 950.0])
def test_what_a_run_has_shown_narrows_its_demand(value: float) -> None:
    def run(rng: np.random.Generator) -> list[Visit]:
        size = rng.uniform(0, 1000)
        return [llm("a", size, 0), llm("b", size * rng.uniform(0.9, 1.1), 0)]

    graph, costs = graph_of(1000, run), Costs(1.0, 0.0, 1.0)
    wide, narrow = draws(graph, "b", costs=costs), draws(graph, "b", before=llm("a", value), costs=costs)
    assert narrow.total.std() < wide.total.std() / 4
    assert narrow.total.mean() == pytest.approx(value, abs=50)
    # The first unit's own size tells of the second one's as well.
    ahead = draws(graph, "a", known=Known(1, value), costs=costs)
    assert ahead.total.mean() == pytest.approx(2 * value, abs=60)


def test_the_prompt_of_a_visit_narrows_its_answer() -> None:
    def run(rng: np.random.Generator) -> list[Visit]:
        size = rng.uniform(0, 1000)
        return [llm("a", size, size * rng.uniform(0.9, 1.1))]

    graph, costs = graph_of(1000, run), Costs(0.0, 1.0, 0.0)
    assert draws(graph, "a", known=Known(1, 850.0), costs=costs).total.mean() == pytest.approx(850, abs=30)
    assert draws(graph, "a", costs=costs).total.mean() == pytest.approx(500, abs=60)


def test_what_is_not_correlated_narrows_nothing() -> None:
    graph = graph_of(1000, lambda rng: [llm("a", rng.uniform(0, 9)), llm("b", rng.uniform(0, 9), 0)])
    one, all = draws(graph, "b", before=llm("a", 1.0)), draws(graph, "b")
    assert one.total.mean() == pytest.approx(all.total.mean(), rel=0.02)
    assert one.total.std() == pytest.approx(all.total.std(), rel=0.05)


def test_records_that_fit_are_equally_likely() -> None:
    """Ten of twenty rounds fit, all behind one another: none is drawn more often than the others."""
    graph = graph_of(1, lambda rng: [llm("a", i + 0.0, (i // 10) * 1000 + i) for i in range(20)])
    demand = Demand(graph)
    masks = correlation_of(list(graph.units["a"].records)).masks
    assert masks == (True, True, True, True, False)
    bucket_of_19 = [
        i for i, one in enumerate(demand._tables.buckets.tolist()) if one == demand._tables.buckets[19].tolist()
    ]
    assert bucket_of_19 == [18, 19]
    draw = draws(graph, "a", visited={"a": 30}, before=llm("a", 18.0, 1018), known=Known(1, 19.0))
    outputs, counts = np.unique(draw.visit, return_counts=True)
    assert outputs.size == 2
    assert counts.min() / counts.sum() == pytest.approx(0.5, abs=0.05)


# ---- few samples


def test_a_condition_that_no_record_fits_is_dropped() -> None:
    def run(rng: np.random.Generator) -> list[Visit]:
        size = float(rng.choice([10, 1000]))
        return [llm("a", size, 0), llm("b", size, 0)]

    graph, costs = graph_of(200, run), Costs(1.0, 0.0, 1.0)
    between = draws(graph, "b", before=llm("a", 500.0), costs=costs).total
    assert set(between.tolist()) == {10.0, 1000.0}
    assert between.mean() == pytest.approx(draws(graph, "b", costs=costs).total.mean(), rel=0.1)


def test_rounds_with_few_records_borrow_from_those_around_them() -> None:
    """Of 100 runs one has more than two rounds."""
    lengths = [2] * 99 + [5]
    graph = Graph("app")
    for count in lengths:
        graph.learn([tool("a", 1.0)] * (count - 1) + [tool("a", 3.0)])
    tables = _tables(list(graph.units.values()), {"a": 0})
    spans = (tables.end - tables.begin)[0].tolist()
    assert spans[:2] == [100, 100]
    assert min(spans) >= 20
    assert max(spans[2:]) <= 40
    assert set(draws(graph, "a", visited={"a": 3}).visit.tolist()) == {1.0, 3.0}


def test_all_records_are_drawn_from_when_there_are_few() -> None:
    graph = graph_of(1, lambda rng: [tool("a", 1.0), tool("a", 2.0), tool("a", 3.0)])
    tables = _tables(list(graph.units.values()), {"a": 0})
    assert (tables.end - tables.begin == 3).all()


def test_one_run_is_enough_to_draw_from() -> None:
    graph = graph_of(1, lambda rng: [llm("a"), tool("t"), llm("b")])
    assert np.isfinite(draws(graph, "a", known=Known(3, 5.0)).total).all()
