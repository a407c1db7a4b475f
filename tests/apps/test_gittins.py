"""The ranks of runs against theory: the Gittins index, remaining time, least slack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.apps.gittins import gittins, latest_start, mean_remaining
from headway.types import Floats

TENTH = 10  # a budget must complete this part of the samples left


def rank(samples: Floats | list[float], attained: float = 0.0) -> float:
    return float(gittins(np.sort(np.array([samples], float)), np.array([attained]), np.arange(1))[0])


def quantiles(inverse: Callable[[Floats], Floats], n: int = 20_000) -> Floats:
    """Return n equally likely values of the distribution with this inverse survival function."""
    return inverse(1 - (np.arange(n) + 0.5) / n)


def exponential(survival: Floats) -> Floats:
    return -np.log(survival)


def weibull(shape: float) -> Callable[[Floats], Floats]:
    return lambda survival: (-np.log(survival)) ** (1 / shape)


def pareto(survival: Floats) -> Floats:
    return survival ** (-1 / 1.5) - 1


def brute_force(samples: list[float], attained: float) -> float:
    """Return Equation 1 over every budget that completes a tenth of the samples left."""
    left = np.array([x - attained for x in samples if x > attained])
    budgets = [*left, *np.linspace(left.min() / 2, 2 * left.max(), 200)]
    return min(
        np.minimum(left, budget).mean() / (left <= budget).mean()
        for budget in budgets
        if (left <= budget).sum() >= math.ceil(left.size / TENTH)
    )


# ---- shapes


@pytest.mark.parametrize("attained", [0.0, 0.3, 1.0, 2.5])
def test_the_rank_of_an_exponential_demand_is_its_mean_whatever_it_has_attained(attained: float) -> None:
    assert rank(quantiles(exponential), attained) == pytest.approx(1.0, abs=0.01)


def test_the_rank_of_random_samples_tends_to_that_of_their_distribution() -> None:
    """Of the first few samples alone the infimum would be noise between 0 and 1, however many there are."""
    rng = np.random.default_rng(0)
    for n, error in ((128, 0.3), (1000, 0.12), (20_000, 0.03)):
        ranks = [rank(rng.exponential(size=n)) for _ in range(200)]
        assert np.sqrt(np.mean((np.array(ranks) - 1) ** 2)) < error


@pytest.mark.parametrize("inverse", [pareto, weibull(0.5)])
def test_on_a_decreasing_hazard_the_rank_rises_with_service(inverse: Callable[[Floats], Floats]) -> None:
    """The longer it has run, the longer it will still run: foreground-background is optimal."""
    ranks = [rank(quantiles(inverse), attained) for attained in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert ranks == sorted(ranks)
    assert ranks[-1] > 2 * ranks[0]


def test_on_a_hyperexponential_demand_the_rank_rises_with_service() -> None:
    samples = [*quantiles(exponential, 9_000), *(100 * quantiles(exponential, 1_000))]
    ranks = [rank(samples, attained) for attained in (0.0, 1.0, 3.0, 6.0)]
    assert ranks == sorted(ranks)
    assert ranks[0] < 2.0
    assert ranks[-1] > 50.0


@pytest.mark.parametrize("inverse", [weibull(3.0), lambda survival: 2 - survival])
def test_on_an_increasing_hazard_the_rank_falls_with_service(inverse: Callable[[Floats], Floats]) -> None:
    """It is then the mean that is left: once begun, a job is finished."""
    samples = quantiles(inverse)
    for attained in (0.0, 0.4, 0.8):
        left = samples[samples > attained] - attained
        assert rank(samples, attained) == pytest.approx(left.mean(), rel=0.01)
    assert rank(samples, 0.8) < rank(samples, 0.4) < rank(samples, 0.0)


@given(st.floats(0.1, 1e4), st.floats(0.0, 0.99))
def test_the_rank_of_a_known_demand_is_the_remaining_time(demand: float, share: float) -> None:
    assert rank([demand] * 128, share * demand) == pytest.approx(demand * (1 - share))


def test_the_rank_of_a_run_that_has_outlived_its_samples_is_what_it_has_taken() -> None:
    assert rank([1.0, 2.0], 2.0) == 2.0
    assert rank([1.0, 2.0], 7.0) == 7.0


SAMPLES = st.lists(st.integers(1, 40).map(float), min_size=1, max_size=30)


@given(SAMPLES, st.floats(0.0, 1.0))
def test_the_rank_is_the_infimum_over_budgets(samples: list[float], share: float) -> None:
    attained = share * max(samples) * 0.999
    assert rank(samples, attained) == pytest.approx(brute_force(samples, attained))


@given(SAMPLES, st.floats(0.0, 0.99), st.floats(1e-3, 1e3))
def test_the_rank_scales_with_the_unit_of_time(samples: list[float], share: float, unit: float) -> None:
    attained = math.floor(share * max(samples)) + 0.5
    scaled = [sample * unit for sample in samples]
    assert rank(scaled, attained * unit) == pytest.approx(rank(samples, attained) * unit)


def test_only_the_rows_that_are_asked_for_are_computed() -> None:
    samples, attained = np.array([[1.0, 1.0], [5.0, 5.0], [3.0, 3.0]]), np.array([0.0, 1.0, 2.0])
    assert gittins(samples, attained, np.array([2, 1])).tolist() == [1.0, 4.0]


# ---- optimality: one preemptive server, all jobs there from the start, service in whole units

Job = Mapping[int, float]  # demand -> probability
State = tuple[int | None, ...]  # service attained by each job, None = it has ended
Index = Callable[[Job, int], float]


def ends(job: Job, attained: int) -> float:
    """Return the probability that the next unit of service ends the job."""
    left = sum(p for demand, p in job.items() if demand > attained)
    return job.get(attained + 1, 0.0) / left


def cost_of(jobs: tuple[Job, ...], choose: Callable[[State], list[int]]) -> float:
    """Return the least expected sum of completion times when one of the chosen jobs is served at a time."""

    @cache
    def cost(state: State) -> float:
        live = [i for i, attained in enumerate(state) if attained is not None]
        if not live:
            return 0.0
        return len(live) + min(after(state, i) for i in choose(state))

    def after(state: State, i: int) -> float:
        attained = state[i]
        assert attained is not None
        p = ends(jobs[i], attained)
        done, more = (*state[:i], None, *state[i + 1 :]), (*state[:i], attained + 1, *state[i + 1 :])
        return p * cost(done) + (1 - p) * (cost(more) if p < 1 else 0.0)

    return cost((0,) * len(jobs))


def anything(state: State) -> list[int]:
    return [i for i, attained in enumerate(state) if attained is not None]


def lowest(jobs: tuple[Job, ...], index: Index) -> Callable[[State], list[int]]:
    def choose(state: State) -> list[int]:
        live = {i: index(jobs[i], attained) for i, attained in enumerate(state) if attained is not None}
        return [min(live, key=live.__getitem__)]

    return choose


def by_gittins(job: Job, attained: int) -> float:
    return rank(rows_of(job), float(attained))


def by_mean(job: Job, attained: int) -> float:
    samples, service = np.array([rows_of(job)]), np.array([float(attained)])
    return float(mean_remaining(samples, service, np.arange(1))[0])


def rows_of(job: Job) -> list[float]:
    return [float(demand) for demand, p in job.items() for _ in range(round(10 * p))]


def jobs_of(weights: list[int], demands: list[int]) -> Job:
    """Return a job whose probabilities are tenths, so that samples describe it exactly."""
    shares = np.diff(sorted({0, *weights, 10}))
    return dict(zip(demands, (shares / 10).tolist(), strict=False))


JOB = st.builds(
    jobs_of, st.lists(st.integers(1, 9), max_size=2), st.permutations(list(range(1, 7))).map(lambda p: p[:3])
)


@settings(max_examples=50)
@given(st.lists(JOB, min_size=2, max_size=3))
def test_no_policy_has_a_lower_mean_completion_time(jobs: list[Job]) -> None:
    some = tuple(jobs)
    best = cost_of(some, anything)
    assert cost_of(some, lowest(some, by_gittins)) == pytest.approx(best)


def test_remaining_time_by_the_mean_is_not_optimal() -> None:
    """As in the paper's figure 7: a higher mean, but a fair chance to end soon."""
    steady, varied = {10: 1.0}, {1: 0.3, 15: 0.7}
    assert by_mean(steady, 0) < by_mean(varied, 0)
    assert by_gittins(varied, 0) < by_gittins(steady, 0)
    jobs = (steady, varied)
    best = cost_of(jobs, anything)
    assert cost_of(jobs, lowest(jobs, by_gittins)) == pytest.approx(best)
    assert cost_of(jobs, lowest(jobs, by_mean)) > best + 0.5


def test_the_brute_force_agrees_with_an_order_that_is_known() -> None:
    """Shortest first on known demands: 1 + 3 + 6."""
    jobs: tuple[Job, ...] = ({3: 1.0}, {1: 1.0}, {2: 1.0})
    assert cost_of(jobs, anything) == 1 + 3 + 6
    assert cost_of(jobs, lambda state: anything(state)[:1]) == 3 + 4 + 6


# ---- the other ranks


def test_mean_remaining_is_the_mean_minus_what_was_attained_even_below_zero() -> None:
    samples = np.array([[1.0, 3.0], [2.0, 8.0]])
    ranks = mean_remaining(samples, np.array([0.5, 6.0]), np.array([1, 0]))
    assert ranks.tolist() == [-1.0, 1.5]


def starts(due: float, now: float, attained: float = 0.0) -> float:
    rows = np.arange(1)
    return float(latest_start(np.array([[2.0, 3.0, 5.0]]), np.array([attained]), np.array([due]), now, rows)[0])


def test_the_latest_start_is_the_deadline_minus_the_worst_case_left() -> None:
    assert starts(10.0, 0.0) == 5.0
    assert starts(10.0, 0.0, attained=1.5) == 6.5
    assert starts(10.0, 4.0, attained=9.0) == 10.0  # it has outlived its samples: the end is near


def test_a_run_that_cannot_be_in_time_has_no_latest_start() -> None:
    assert starts(10.0, 8.0) == 5.0  # in the best case
    assert math.isnan(starts(10.0, 8.1))
    assert starts(10.0, 8.1, attained=0.2) == pytest.approx(5.2)
    assert math.isnan(starts(10.0, 10.1, attained=9.0))


def test_a_run_without_a_deadline_may_start_at_any_time() -> None:
    assert starts(math.inf, 1e9) == math.inf


@pytest.mark.parametrize("due", list(product([4.0, 6.0, 9.0, 11.0], repeat=2)))
def test_the_order_is_by_slack(due: tuple[float, float]) -> None:
    paths, now = np.array([[1.0, 3.0], [2.0, 2.5]]), 0.5
    first = latest_start(paths, np.zeros(2), np.array(due), now, np.arange(2))
    slack = np.array(due) - now - paths[:, -1]  # Equation 2
    assert np.argsort(first, kind="stable").tolist() == np.argsort(slack, kind="stable").tolist()
