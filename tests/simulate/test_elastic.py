"""Simulated fleets whose engines come, drain, stop and fail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.config import Scale
from headway.errors import ConfigError
from headway.policy.recipes.registry import find
from headway.simulate.elastic import by_promises
from headway.simulate.fleet import spec
from headway.simulate.instance import InstanceSpec
from headway.simulate.loop import Loop
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload, single
from headway.types import Slo

HEADWAY = find("headway")


def fleet(count: int, start_s: float = 20.0, mtbf_s: float = math.inf) -> list[InstanceSpec]:
    text = f"llama-2-70b-a100-tp4:{count},max_model_len=8192,host_kv_gib=0,model=m"
    return [replace(one, start_s=start_s, mtbf_s=mtbf_s) for one in spec(text).instances()]


def traffic(*phases: tuple[float, float, float]) -> Workload:
    """Return even arrivals at a rate between two instants, of each phase."""
    at = np.concatenate([np.arange(low, high, 1 / rate) for low, high, rate in phases])
    rng = np.random.default_rng(0)
    prompts, answers = rng.integers(200, 2400, at.size), rng.integers(20, 300, at.size)
    return single(at, prompts, answers, slo=Slo(ttft=3.0, tpot=0.1), model="m")


def run(work: Workload, begin: int, scale: Scale, **options: Any) -> tuple[Outcome, list[tuple[float, int, int]]]:
    """Return the outcome, and when how many engines were there and wanted, where these differ."""
    decided: list[tuple[float, int, int]] = []

    def decide(loop: Loop, model: str, now: float, have: int) -> int:
        count = options.get("wanted", by_promises)(loop, model, now, have)
        if count != have:
            decided.append((now, have, count))
        return int(count)

    known = {name: value for name, value in options.items() if name != "wanted"}
    simulation = Simulation(HEADWAY, fleet(begin), work, scale={"m": scale}, decide=decide, **known)
    return simulation.run(), decided


def test_a_golden_run() -> None:
    """An engine, four and a half times the load from 200 s on, and half an engine's from 400 s on."""
    work = traffic((0, 200, 1.0), (200, 400, 4.5), (400, 700, 0.5))
    outcome, decided = run(work, 1, Scale(max=6, start_s=20.0))
    tpot = (outcome.end - outcome.first) / np.maximum(work.output - 1, 1)
    kept = (outcome.first - work.arrival <= work.ttft) & (tpot <= work.tpot)
    assert decided == [(210, 1, 2), (435, 2, 1)], "two keep all"
    assert kept.mean() == pytest.approx(0.9632, abs=1e-4)
    assert outcome.engine_s == pytest.approx(935.9, abs=0.1)


def test_engines_cost_from_their_start_until_they_have_stopped() -> None:
    work = traffic((0, 120, 1.0))
    schedule = {30.0: 3, 60.0: 1}

    def wanted(loop: Loop, model: str, now: float, have: int) -> int:
        return schedule.get(now, have)

    outcome, decided = run(work, 1, Scale(max=3), wanted=wanted)
    assert decided == [(30.0, 1, 3), (60.0, 3, 1)]
    assert np.isfinite(outcome.end).all(), "streams of draining engines go on"
    end = float(outcome.end.max())
    assert end + 2 * 30 <= outcome.engine_s <= end + 2 * 60
    assert set(np.unique(outcome.instance).tolist()) == {0, 1, 2}


def test_an_engine_that_is_not_needed_any_more_before_it_is_up_stops_at_once() -> None:
    def wanted(loop: Loop, model: str, now: float, have: int) -> int:
        return {30.0: 2, 40.0: 1}.get(now, have)

    outcome, _ = run(traffic((0, 120, 0.5)), 1, Scale(max=2), wanted=wanted)
    assert outcome.engine_s == pytest.approx(float(outcome.end.max()) + 10, abs=0.1)


def test_to_zero_and_back() -> None:
    outcome, decided = run(traffic((0, 60, 1.0), (400, 460, 1.0)), 1, Scale(max=2, min=0, share=0.9, start_s=20.0))
    assert np.isfinite(outcome.end).all()
    assert [pair for _, *pair in decided if 0 in pair] == [[1, 0], [0, 1]]
    first = outcome.first[60] - 400
    assert 20 <= first <= 30, "the first request after the silence waits for a start"
    assert outcome.engine_s < 250


def test_engines_fail_at_random_times_and_start_again() -> None:
    work = traffic((0, 300, 1.0))
    outcome = Simulation(HEADWAY, fleet(2, mtbf_s=60.0), work, seed=3).run()
    again = Simulation(HEADWAY, fleet(2, mtbf_s=60.0), work, seed=3).run()
    assert outcome.failures >= 3
    assert np.isfinite(outcome.end).all()
    assert np.array_equal(outcome.end, again.end), "by the seed"


def test_a_fixed_fleet_costs_its_engines_until_the_end() -> None:
    for count in (1, 2):
        outcome = Simulation(HEADWAY, fleet(count), traffic((0, 60, 1.0))).run()
        assert outcome.engine_s == pytest.approx(count * float(outcome.end.max()), rel=1e-3)


@pytest.mark.parametrize(
    ("scale", "said"), [({"other": Scale(max=2)}, "no instance serves"), ({"m": Scale(max=3, min=2)}, "not between")]
)
def test_what_cannot_scale_is_refused(scale: dict[str, Scale], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Simulation(HEADWAY, fleet(1), traffic((0, 10, 1.0)), scale=scale).run()
