"""The simulator refuses requests of classes that drop as the gateway does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.errors import ConfigError
from headway.policy.core.engine_spec import PromisesConfig
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.pack.promises.outlook import LOST, in_progress, outlook_of, pace_of
from headway.policy.recipes.registry import find
from headway.prefix import Prefix
from headway.simulate import fleet
from headway.simulate.instance import SimulatedInstance
from headway.simulate.loop import Loop
from headway.simulate.outcome import Observer
from headway.simulate.run import Failure, InstanceSpec, Outcome, Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, concat, make, poisson
from headway.types import Slo
from headway.whatif.experiment import records
from tests.simulate.machines import at, machine, together

CHAT, CODE = Slo(ttft=1.5, tpot=0.15), Slo(e2e=20.0)


def gpu(count: int = 1, **more: Any) -> list[InstanceSpec]:
    return fleet.build([fleet.Spec("opt-13b-a100", count, "default", **more)])


def overload(seed: int = 0, *, drop: bool = True, seconds: float = 60.0) -> Workload:
    """Several times what one instance can do."""
    rng = np.random.default_rng(seed)
    classes = [
        TrafficClass("chat", 0.5, CHAT, drop=drop),
        TrafficClass("code", 0.3, CODE, drop=drop),
        TrafficClass("batch", 0.2),
    ]
    workload = make(classes, poisson(24.0, seconds, rng), rng)
    return workload.take(workload.prompt + workload.output <= 2048)


def run(recipe: str, workload: Workload, **more: Any) -> Outcome:
    return Simulation(find(recipe), more.pop("instances", gpu()), workload, **more).run()


def kept(workload: Workload, outcome: Outcome) -> int:
    return sum(record.met for record in records(workload, outcome) if record.tier != "batch")


@pytest.mark.parametrize("recipe", ["vllm", "slack", "headway", "ecoserve"])
def test_what_is_dropped_has_no_token_and_everything_else_is_answered(recipe: str) -> None:
    workload = overload()
    outcome = run(recipe, workload)
    dropped = np.isnan(outcome.end)
    assert 0 < np.count_nonzero(dropped) == outcome.infeasible
    assert np.isnan(outcome.first[dropped]).all()
    assert workload.drop[dropped].all()
    assert outcome.shed == outcome.failed == 0
    late = (outcome.first - workload.arrival - workload.ttft)[workload.drop == 1]
    assert np.nanmax(late) < 0.5, "only a token that its iteration made meanwhile comes late"


def test_the_rest_keeps_more_promises() -> None:
    found = {drop: run("slack", overload(drop=drop)) for drop in (False, True)}
    assert kept(overload(), found[True]) > kept(overload(), found[False])


def test_reports_count_what_is_dropped_as_late() -> None:
    workload = overload(seconds=30.0)
    outcome = run("headway", workload)
    told = records(workload, outcome)
    assert sum(record.status == 429 for record in told) == outcome.infeasible > 0
    assert not any(record.met for record in told if record.status == 429)


def test_the_compiled_loop_leaves_such_a_workload_to_the_other() -> None:
    workload = overload(seconds=45.0)
    fast, slow = run("headway", workload), run("headway", workload, fast=False)
    np.testing.assert_array_equal(fast.end, slow.end)
    assert fast.infeasible == slow.infeasible > 0


class _Watch(Observer):
    """Keeps each instance's engine."""

    def __init__(self) -> None:
        self.engines: dict[int, SimulatedEngine] = {}

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        self.engines[instance] = engine


@pytest.mark.parametrize("recipe", ["headway", "ecoserve", "bros", "srtf", "vllm-v0-swap"])
def test_engines_are_empty_in_the_end(recipe: str) -> None:
    watch, workload = _Watch(), overload(seconds=30.0)
    instances = gpu(2, kv_tokens=6000, max_running=24)
    outcome = Simulation(find(recipe), instances, workload).run(observer=watch)
    assert outcome.infeasible > 0
    assert len(watch.engines) == 2
    for engine in watch.engines.values():
        assert len(engine.jobs) == 0
        assert engine.free == engine.blocks
        assert int(engine.usage["held_slots"]) == 0


def test_only_what_its_packer_has_given_up_is_refused_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's arithmetic is the default packer's."""
    drop, levels = SimulatedInstance.drop, list[int]()

    def judged(self: SimulatedInstance, id: str) -> None:
        jobs, theta = self.engine.jobs, self.learned.theta
        if id in jobs:
            pace = pace_of(jobs.data, in_progress(PromisesConfig(), jobs.data, jobs.rows(), now[0]), theta)
            levels.append(outlook_of(params, jobs.data, jobs.row_of[id], now[0], theta, pace)[0])
        drop(self, id)

    monkeypatch.setattr(SimulatedInstance, "drop", judged)
    params = find("headway").packer(gpu()[0].engine_spec(OnlineLatency())).params  # type: ignore[union-attr]
    now = _clock(monkeypatch)
    run("headway", overload())
    assert len(levels) > 50
    assert set(levels) == {LOST}


def _clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose item is the instant of the last answer of an engine."""
    now, answer = [0.0], Loop._answer

    def noted(self: Loop, instance: SimulatedInstance, at: float) -> bool:
        now[0] = at
        return answer(self, instance, at)

    monkeypatch.setattr(Loop, "_answer", noted)
    return now


def test_what_no_idle_engine_could_do_is_refused_at_once() -> None:
    rng = np.random.default_rng(0)
    warm = make([TrafficClass("warm")], poisson(2.0, 30.0, rng), rng)
    warm = warm.take(warm.prompt + warm.output <= 2048)
    strict = at(60.0, prompt=1900, output=5, slo=Slo(ttft=0.05))
    loose = at(60.0, prompt=1900, output=5, slo=Slo(ttft=5.0))
    for workload, refused in ((strict, 1), (loose, 0)):
        both = together(warm, _dropping(workload))
        outcome = run("headway", both)
        assert outcome.infeasible == refused
        assert np.count_nonzero(outcome.instance == -1) == refused, "it was never sent"


def _dropping(workload: Workload) -> Workload:
    return replace(workload, drop=np.ones(len(workload), np.int64))


def test_a_failed_instance_s_requests_are_refused_while_they_wait() -> None:
    workload = _dropping(at(*np.arange(20) * 0.1, output=20, slo=Slo(ttft=2.0)))
    outcome = run("vllm", workload, instances=[machine("e0", running=2)], failures=[Failure("e0", 1.0, 30.0)])
    assert outcome.infeasible == np.count_nonzero(np.isnan(outcome.end)) > 0


@pytest.mark.parametrize("overhead", [0.0, 0.05])
def test_a_planner_that_takes_time_and_a_way_to_the_engine(overhead: float) -> None:
    """A request may be refused after it was planned and before it is sent."""
    instances = [
        replace(machine(f"e{i}", each=0.1, running=2), request_overhead=overhead, token_overhead=overhead)
        for i in range(2)
    ]
    workload = _dropping(at(*np.arange(120) * 0.02, output=10, slo=Slo(ttft=0.5)))
    outcome = run("slack", workload, instances=instances, plan_seconds=lambda queued: 0.11)
    ended = np.isfinite(outcome.end)
    assert outcome.infeasible == np.count_nonzero(~ended) > 20
    assert np.count_nonzero(ended) > 5


@pytest.mark.parametrize("known", [True, False])
def test_a_prompt_of_which_one_engine_holds_most_is_on_time(known: bool) -> None:
    """Computed from its beginning it would take 0.32 s. No request has found anything in a cache before it."""
    history = {"prefix": np.zeros(1, int), "prefixes": (Prefix("history", 1800),)}
    first = replace(at(5.0, prompt=1900), **history)
    again = _dropping(replace(at(8.0, prompt=1900, slo=Slo(ttft=0.1)), **(history if known else {})))
    workload = concat(at(*np.arange(40) * 0.05, prompt=20, output=20), first, again).sorted()
    outcome = run("headway", workload, instances=gpu(2, prefix_caching=True))
    assert outcome.infeasible == (not known)
    if known:
        assert outcome.first[-1] - workload.arrival[-1] < 0.1


def test_a_class_that_drops_needs_something_to_be_too_late_for() -> None:
    with pytest.raises(ConfigError, match="Give its SLO a ttft or an e2e"):
        TrafficClass("chat", slo=Slo(tpot=0.1), drop=True)
