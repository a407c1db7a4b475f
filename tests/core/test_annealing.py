"""Priority mappings: incremental goodput against one from scratch, moves, starts, and exact solvers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.exhaustive import exact, exhaustive
from headway.policy.core import annealing
from headway.policy.core import mapping as maps
from headway.policy.core.annealing import Schedule, anneal, best_start, sequence
from headway.policy.core.mapping import Mapping, Records, Targets, costs_of
from headway.policy.forecast.latency.laws import PUBLISHED, SloAware, sampled
from headway.policy.forecast.latency.online import OnlineLatency
from headway.types import Batch

# (prompt tokens, output tokens, its kind of SLO, how tight it is)
Drawn = tuple[int, int, int, float]
drawn = st.tuples(st.integers(1, 2000), st.integers(1, 600), st.integers(0, 3), st.floats(0.5, 8.0))
requests = st.lists(drawn, min_size=1, max_size=12)


def costs(asks: list[Drawn], waited: float = 0.0) -> Records:
    """Chat (TTFT and TPOT), code (e2e), all three, or none; `tight` scales them all."""
    prompt, output = np.array([a[0] for a in asks]), np.array([float(a[1]) for a in asks])
    kind, tight = np.array([a[2] for a in asks]), np.array([a[3] for a in asks])
    targets = Targets(
        np.where((kind == 0) | (kind == 2), 2.0 * tight, np.inf),
        np.where((kind == 0) | (kind == 2), 0.02 * tight, np.inf),
        np.where((kind == 1) | (kind == 2), 5.0 * tight, np.inf),
    )
    return costs_of(PUBLISHED, prompt, prompt, output, targets, np.full(prompt.size, waited))


def few(seed: int, count: int) -> Records:
    rng = np.random.default_rng(seed)
    sizes = zip(rng.integers(1, 800, count), rng.integers(1, 500, count), strict=True)
    return costs([(int(p), int(o), int(rng.integers(0, 2)), float(rng.uniform(2, 6))) for p, o in sizes])


def start(cost: Records, limit: int) -> Mapping:
    mapping = maps.empty(cost.size)
    maps.refill(cost, mapping, np.arange(cost.size), limit)
    return mapping


def sizes(mapping: Mapping) -> list[int]:
    return np.diff(mapping.batches["first"][: int(mapping.sums["batches"][0]) + 1]).tolist()


def by_hand(cost: Records, order: list[int], batches: list[int]) -> tuple[int, float]:
    """SLOs met and the sum of latencies, equations 3 to 17 as they are written."""
    met, latency, now, place = 0, 0.0, 0.0, 0
    for size in batches:
        ends = []
        for i in order[place : place + size]:
            one = cost[i]
            prefill = one["prefill_slope"] * size + one["prefill_base"]
            whole = one["execution_slope"] * size + one["execution_base"]
            met += now + prefill <= one["ttft"] and now + whole <= one["e2e"] and size <= one["widest"]
            latency += now + whole + one["waited"]
            ends.append(now + whole)
        now, place = max(ends), place + size
    return met, latency


# ---- the incremental evaluation


@given(requests, st.integers(1, 5), st.integers(0, 999), st.floats(0.0, 1.0))
@settings(max_examples=50)
def test_after_any_moves_all_columns_are_those_of_a_full_evaluation(
    asks: list[Drawn], limit: int, seed: int, share: float
) -> None:
    """Whatever share of G a move may lose: 1 = all moves are kept, 0 = only those that lose nothing."""
    cost = costs(asks, waited=0.5)
    now, random = start(cost, limit), np.array([seed + 1], np.uint64)
    for _ in range(60):
        annealing._move(cost, now, limit, random, maps.value_of(now) * (1 - share))
        order, batches = now.places["request"].tolist(), sizes(now)
        assert sorted(order) == list(range(len(asks)))
        assert sum(batches) == len(asks)
        assert min(batches) >= 1
        assert max(batches) <= limit
        assert now.places["batch"].tolist() == np.repeat(np.arange(len(batches)), batches).tolist()
    again = maps.empty(cost.size)
    maps.set_sizes(cost, again, now.places["request"], np.array(sizes(now)))
    count = len(sizes(now))
    for name in ("start", "seconds", "spent"):
        np.testing.assert_allclose(now.batches[name][:count], again.batches[name][:count], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(now.slack, again.slack, rtol=1e-9, atol=1e-6)
    assert now.sums["latency"][0] == pytest.approx(float(again.sums["latency"][0]))
    if np.abs(again.slack).min() > 1e-6:
        assert now.sums["met"][0] == again.sums["met"][0]
        assert by_hand(cost, order, batches)[0] == again.sums["met"][0]
    assert by_hand(cost, order, batches)[1] == pytest.approx(float(again.sums["latency"][0]))


def test_the_costs_are_the_papers_equations() -> None:
    """Sum over the tokens of an answer, one by one (equation 16)."""
    prompt, output, size = 300, 7, 3
    cost = costs([(prompt, output, 2, 1.0)])
    law = PUBLISHED
    prefill = law.prefill_alpha * size * prompt + law.prefill_beta * size
    prefill += law.prefill_gamma * prompt + law.prefill_delta
    decode = sum(
        law.decode_alpha * size * length + law.decode_beta * size + law.decode_gamma * length + law.decode_delta
        for length in range(prompt + 1, prompt + output + 1)
    )
    assert maps.execution(cost, 0, size) == pytest.approx(prefill + decode)
    one_token = decode / output
    for size_now, kept in ((int(cost["widest"][0]), True), (int(cost["widest"][0]) + 1, False)):
        slope, base = (cost["execution_slope"] - cost["prefill_slope"])[0], cost["execution_base"][0]
        assert bool((slope * size_now + base - cost["prefill_base"][0]) / output <= 0.02) is kept
    assert one_token > 0.015  # Table 2: 15.85 ms and more


def test_what_was_promised_nothing_meets_nothing() -> None:
    cost = costs([(10, 10, 3, 1.0)])
    assert start(cost, 1).sums["met"][0] == 0


# ---- the search


@given(requests, st.integers(1, 5), st.integers(0, 99))
def test_the_result_is_a_mapping_and_never_worse_than_both_starts(asks: list[Drawn], limit: int, seed: int) -> None:
    cost, arrived = costs(asks), np.arange(len(asks))
    order, batches = anneal(cost, arrived, limit, Schedule.of(len(asks), limit), seed)
    assert sorted(order.tolist()) == arrived.tolist()
    assert batches.sum() == len(asks)
    assert batches.min() >= 1
    assert batches.max() <= limit
    found = maps.empty(cost.size)
    maps.set_sizes(cost, found, order, batches)
    seconds = [maps.execution(cost, i, limit) for i in range(cost.size)]
    for begin in (arrived, np.argsort(seconds, kind="stable")):
        mapping = maps.empty(cost.size)
        maps.refill(cost, mapping, begin, limit)
        assert maps.value_of(found) >= maps.value_of(mapping) * (1 - 1e-9)
    again = anneal(cost, arrived, limit, Schedule.of(len(asks), limit), seed)
    assert [order.tolist(), batches.tolist()] == [part.tolist() for part in again]


@pytest.mark.parametrize(("count", "limit"), [(3, 1), (5, 1), (7, 1), (4, 2), (6, 2), (6, 4), (5, 5)])
def test_within_one_per_cent_of_the_best(count: int, limit: int) -> None:
    for seed in range(12):
        cost = few(seed, count)
        order, batches = anneal(cost, np.arange(count), limit, Schedule(200, 1.0, 0.05), seed)
        found = maps.empty(count)
        maps.set_sizes(cost, found, order, batches)
        best = exhaustive(cost, limit)
        assert 0.99 * best <= maps.value_of(found) <= best * (1 + 1e-6)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_two_exact_solvers_agree(count: int) -> None:
    for seed in range(10):
        assert exhaustive(few(seed, count), 1) == pytest.approx(exact(few(seed, count)))


def test_larger_batches_only_add_choices() -> None:
    best = [exhaustive(few(3, 5), limit) for limit in (1, 2, 5)]
    assert best == sorted(best)


def test_shortest_first_is_the_start_where_it_meets_more() -> None:
    """Figure 3 of the paper: in order of arrival the long one makes the short one late."""
    cost = costs([(100, 600, 1, 8.0), (100, 10, 1, 0.5)])
    assert best_start(cost, np.arange(2), 1)[0].places["request"].tolist() == [1, 0]


def test_a_strict_request_that_cannot_be_met_goes_last() -> None:
    """Figure 5 of the paper: its deadline is the earliest, and giving it up saves the two others."""
    cost = costs([(100, 300, 1, 0.5), (100, 300, 1, 1.2), (100, 300, 1, 2.2)])
    order, _ = anneal(cost, np.arange(3), 1, Schedule.of(3, 1), 0)
    assert order.tolist() == [1, 2, 0]


def test_a_batch_is_split_where_its_size_would_break_the_tpot() -> None:
    """Figure 4 of the paper."""
    law = SloAware(0, 0, 0, 0.01, 0, 0.02, 0, 0.0)  # a token takes 20 ms for each request of the batch
    out = np.full(3, 50.0)
    never = np.full(3, np.inf)
    cost = costs_of(law, np.full(3, 5), np.full(3, 5), out, Targets(never, np.full(3, 0.045), never), 0 * out)
    _, batches = anneal(cost, np.arange(3), 3, Schedule.of(3, 3), 0)
    assert max(batches) <= 2


# ---- schedules and sequences


@given(st.integers(1, 5000), st.integers(1, 512))
def test_a_schedule_is_bounded(size: int, limit: int) -> None:
    schedule = Schedule.of(size, limit)
    assert 1 <= schedule.moves <= 1000
    assert schedule.cold < schedule.hot
    assert schedule.hot * schedule.decay**schedule.levels <= schedule.cold * (1 + 1e-9)
    assert schedule.hot * schedule.decay ** (schedule.levels - 1) > schedule.cold


def test_beyond_the_most_that_are_annealed_the_order_is_by_deadline_and_best_effort_is_last() -> None:
    cost = costs([(10, 10, 1, 8.0)] * 6)
    due = np.array([6.0, 5.0, 4.0, 3.0, 2.0, np.inf])
    order, first = sequence(cost, due, np.isfinite(due), 1, 0, most=2)
    assert sorted(order[:2].tolist()) == [3, 4]
    assert order[2:].tolist() == [2, 1, 0, 5]
    assert first == 1
    none, first = sequence(cost[:0], due[:0], due[:0] > 0, 4, 0)
    assert (none.size, first) == (0, 4)


def test_lost_requests_do_not_keep_others_from_being_annealed() -> None:
    cost = costs([(10, 300, 1, 0.5)] * 3 + [(10, 100, 1, 8.0)] * 2)
    due = np.array([1.0, 2.0, 3.0, 40.0, 39.0])
    order, _ = sequence(cost, due, due > 0, 1, 0, most=2)
    assert sorted(order[:2].tolist()) == [3, 4]
    assert order[2:].tolist() == [0, 1, 2]


# ---- the law


def test_a_sampled_law_is_near_its_model() -> None:
    latency = OnlineLatency()
    law = sampled(latency.seconds, 16)
    for size, length in ((1, 300), (4, 700), (16, 1500)):
        decode = law.decode_alpha * size * length + law.decode_beta * size
        decode += law.decode_gamma * length + law.decode_delta
        assert decode == pytest.approx(latency.seconds(Batch(size, size * length, 0)), rel=0.02)


def test_the_published_law_takes_three_seconds_for_a_request_of_code() -> None:
    """The paper's own figure for an average request (5.1); 180 tokens as the benchmark assumes."""
    cost = costs_of(
        PUBLISHED,
        np.array([40]),
        np.array([40]),
        np.array([180.0]),
        Targets(*(np.array([math.inf]) for _ in range(3))),
        np.zeros(1),
    )
    assert 2.7 < maps.execution(cost, 0, 1) < 3.3
