"""Overflow in the simulator: promises that would be lost are kept for money, within the budget."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.policy.core.overflow import HOUR
from headway.policy.recipes.registry import find
from headway.simulate import fleet
from headway.simulate.run import Outcome, Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Slo
from headway.whatif.experiment import Mixed, records, simulate
from tests.simulate.machines import at

AWAY = "opt-13b-a100,model=default,price_prompt=1,price_answer=3,overflow_classes=chat"


@cache
def burst() -> Workload:
    """Several times what one instance can do."""
    rng = np.random.default_rng(0)
    classes = [TrafficClass("chat", 0.7, Slo(ttft=1.5, tpot=0.15)), TrafficClass("batch", 0.3)]
    workload = make(classes, poisson(24.0, 40.0, rng), rng)
    return workload.take(workload.prompt + workload.output <= 2048)


@cache
def run(away: str | None, recipe: str = "headway") -> Outcome:
    specs = [fleet.spec("opt-13b-a100,model=default"), *([fleet.spec(away)] if away else [])]
    return Simulation(find(recipe), fleet.build(specs), burst()).run()


def kept(outcome: Outcome) -> int:
    return sum(record.met for record in records(burst(), outcome) if record.tier == "chat")


def spent(outcome: Outcome) -> float:
    work, there = burst(), outcome.instance == 1
    return float(work.prompt[there].sum() + 3 * work.output[there].sum()) / 1e6


def test_money_keeps_promises_and_best_effort_stays() -> None:
    alone, rich = run(None), run(AWAY)
    assert kept(alone) < 0.9 * kept(rich)
    assert np.isfinite(rich.end).all()
    there = rich.instance == 1
    assert (burst().tier[there] == burst().tiers.index("chat")).all()
    assert there.sum() <= 1.25 * (kept(rich) - kept(alone)), "hardly any of them would have been on time here"


@pytest.mark.parametrize("recipe", ["headway", "edf", "vllm", "slack", "ecoserve"])
@pytest.mark.parametrize("budget", [0.005, 0.05])
def test_no_budget_is_exceeded(budget: float, recipe: str) -> None:
    """The run is shorter than an hour, so all of it counts."""
    assert burst().arrival[-1] < HOUR
    outcome = run(f"{AWAY},hourly_budget={budget}", recipe)
    assert 0 < spent(outcome) <= budget
    assert np.isfinite(outcome.end).all()


def test_the_result_says_what_went_and_for_how_much() -> None:
    specs = (fleet.spec("opt-13b-a100,model=default"), fleet.spec(AWAY))
    found = simulate(["headway"], Mixed(specs), burst(), bar=False)
    count = (run(AWAY).instance == 1).sum()
    assert f", {count} requests to e1 for {spent(run(AWAY)):.4g} units" in found.events["headway"]


def test_a_model_needs_an_engine_that_serves_everything() -> None:
    with pytest.raises(ConfigError, match="no instance serves"):
        Simulation(find("headway"), fleet.build([fleet.spec(AWAY)]), at(0.0)).run()
