"""One engine with all requests in its queue, and forecasts of a stated accuracy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.ecoserve_setup import DATA, instance, workload
from benchmarks.papers.ecoserve_tables import sustained
from benchmarks.papers.recipes import find
from benchmarks.papers.trial import Provisioned, trial
from headway.errors import ConfigError
from headway.policy.forecast.lengths.padding import Padded
from headway.simulate.forecasts import Noisy, Oracle
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import single


def test_the_stated_accuracy_is_what_padding_reaches() -> None:
    n = 20_000
    load = single(np.arange(n, dtype=float), 10, np.full(n, 200))
    noisy = Noisy.of(load, 0.775, 0.10, np.random.default_rng(0))
    padded = Padded(noisy, 0.775)
    within = [padded.forecast(load.request(i)).mean >= 200 for i in range(0, n, 10)]
    assert np.mean(within) == pytest.approx(0.775, abs=0.03)
    ratio = noisy.forecast(load.request(0)).quantile(0.775) / (200 * noisy.factors[0])
    assert ratio == pytest.approx(1.10, abs=0.01)


def test_the_oracle_knows() -> None:
    load = single(np.arange(3.0), 10, np.array([5, 7, 9]))
    assert [Oracle(load).forecast(load.request(i)).mean for i in range(3)] == [5, 7, 9]


@pytest.mark.parametrize(("accuracy", "padding"), [(0.5, 0.1), (1.0, 0.1), (0.8, 0.0)])
def test_impossible_predictors_are_refused(accuracy: float, padding: float) -> None:
    with pytest.raises(ConfigError, match="No predictor"):
        Noisy.of(single(np.zeros(1), 1, 1), accuracy, padding, np.random.default_rng(0))


def test_the_errors_have_the_stated_shares() -> None:
    n = 20_000
    load = single(np.arange(n, dtype=float), 10, np.full(n, 400))
    made = Provisioned.of(load, 0.775, 0.0262, 0.0930, np.random.default_rng(0))
    assert made.shares == pytest.approx((0.775, 0.0262, 0.0930), abs=0.005)
    assert made.times(1.1).shares[0] > made.shares[0], "more padding, fewer too short"
    assert made.forecast(load.request(7)).samples.tolist() == [made.lengths[7]]


@pytest.mark.parametrize(
    ("accuracy", "over", "under"), [(0.0, 0.1, 0.1), (1.0, 0.1, 0.1), (0.8, 0.4, 0.1), (0.8, 0.1, -0.1)]
)
def test_impossible_shares_are_refused(accuracy: float, over: float, under: float) -> None:
    with pytest.raises(ConfigError, match="No predictor"):
        Provisioned.of(single(np.zeros(1), 1, 1), accuracy, over, under, np.random.default_rng(0))


def test_same_seed_same_outcome_and_every_request_ends() -> None:
    data = DATA[0]
    load = workload(data, 30.0, 10.0, 3)
    first, again = (trial("ecoserve", data, 30.0, load, 3) for _ in range(2))
    assert (first.jct, first.ssr, first.kv, first.counts) == (again.jct, again.ssr, again.kv, again.counts)
    assert first.throughput > 0
    assert 0 < first.kv <= 1


def test_without_a_gateway_stock_order_gives_the_outcome_of_the_simulation() -> None:
    """With a window that holds all of them, the gateway of `simulate/run.py` adds only bookkeeping."""
    data = DATA[0]
    load = workload(data, 5.0, 6.0, 1)
    alone = trial("vllm", data, 5.0, load, 1)
    load = replace(load, models=(instance().instance.model,))
    whole = Simulation(find("vllm"), [instance()], load, fast=False).run()
    assert alone.jct == pytest.approx(float((whole.end - load.arrival).mean()), rel=0.02)


def test_sustained_is_interpolated_between_rates() -> None:
    assert sustained([1, 2, 4], [0.05, 0.09, 0.11], 0.1) == pytest.approx(3.0)
    assert sustained([1, 2], [0.05, 0.06], 0.1) == 2.0
    assert sustained([1, 2], [0.2, 0.3], 0.1) is None


@pytest.mark.parametrize("name", ["ecoserve", "ecoserve-oracle"])
def test_the_simulation_gives_a_recipe_the_forecasts_it_is_meant_for(name: str) -> None:
    load = workload(DATA[0], 5.0, 6.0, 1)
    load = replace(load, models=(instance().instance.model,))
    simulation = Simulation(find(name), [instance()], load)
    assert type(simulation.lengths) is (Oracle if name.endswith("oracle") else Padded)
    outcome = simulation.run()
    assert np.isfinite(outcome.end).all()
