"""Planner time is virtual time; no instance idles; EDF meets what can be met; planners agree with theory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.policy.recipes import default
from headway.policy.recipes.baselines import ROUTERS
from headway.policy.recipes.registry import RECIPES, find
from headway.simulate import run as loop
from headway.simulate.run import Simulation
from headway.simulate.workload.traces import Lengths
from headway.simulate.workload.traffic import TrafficClass, Workload, make, single
from headway.types import Slo
from tests.simulate.machines import at, machine, random_traffic, together

EVERY = [*RECIPES, *ROUTERS]
_ROUTED = ("round-robin", "least-loaded", "random", "shepherd")
PULLING = [name for name in EVERY if find(name).planner().pull and name not in _ROUTED]


def test_what_is_sent_is_sent_when_the_planner_has_thought() -> None:
    outcome = Simulation(
        find("vllm"), [machine("e0", each=1.0)], at(0.0, output=1), plan_seconds=lambda n: 0.25 * n
    ).run()
    assert outcome.end[0] == 1.25
    assert outcome.planning == 0.25


def test_the_planner_does_not_run_twice_at_once() -> None:
    """The first plan takes from 0 to 1; what came meanwhile is in the second, from 1 to 2, not before."""
    seen: list[int] = []

    def think(queued: int) -> float:
        seen.append(queued)
        return 1.0

    workload = at(0.0, 0.1, 0.2, output=1)
    outcome = Simulation(find("vllm"), [machine("e0", each=0.01)], workload, plan_seconds=think).run()
    assert seen == [1, 2]
    # r1 begins at 2.0, r2 with the next iteration: an idle engine does not wait for more to come.
    np.testing.assert_allclose(outcome.end, [1.01, 2.01, 2.02])
    assert outcome.planning == 2.0


@pytest.mark.parametrize("recipe", EVERY)
def test_thinking_longer_ends_later_and_loses_nothing(recipe: str) -> None:
    workload, nodes = random_traffic(5, ("m",), 60, 5.0), [machine("e0", "m"), machine("e1", "m", running=2)]
    ends = []
    for each in (0.0, 0.5):
        outcome = Simulation(find(recipe), nodes, workload, plan_seconds=lambda n, each=each: each).run()  # type: ignore[misc]
        assert np.isfinite(outcome.end).all()
        ends.append(float(outcome.end.mean()))
    assert ends[0] < ends[1]


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_impossible_thinking_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError):
        Simulation(find("vllm"), [machine("e0")], at(0.0), plan_seconds=lambda n: seconds).run()


@pytest.mark.parametrize("recipe", EVERY)
def test_same_input_same_run(recipe: str) -> None:
    workload = random_traffic(7, ("m", "n"), 60, 6.0)
    nodes = [machine("e0", "m"), machine("e1", "n", "m", running=2), machine("e2", "m", running=1)]
    runs = [Simulation(find(recipe), nodes, workload).run() for _ in range(2)]
    np.testing.assert_array_equal(runs[0].end, runs[1].end)
    np.testing.assert_array_equal(runs[0].instance, runs[1].instance)


@pytest.mark.parametrize("recipe", PULLING)
@settings(max_examples=5)
@given(st.integers(0, 999), st.integers(1, 3), st.floats(0.5, 8.0))
def test_no_instance_idles_while_a_request_waits_that_it_could_serve(
    recipe: str, seed: int, count: int, span: float
) -> None:
    nodes = [machine(f"e{i}", "mnm"[i], running=1 + i) for i in range(count)]
    workload = random_traffic(seed, ("m", "n")[: min(count, 2)], 40, span)
    checked = 0

    class Watched(loop.ElasticLoop):
        def _drain(self, now: float) -> None:
            nonlocal checked
            super()._drain(now)
            backlog = self.controller.cluster.backlog
            waiting = {int(code) for code in backlog.model[backlog.live & ~backlog.sent]}
            for instance in self.instances.values():
                code = self.controller.cluster.code(instance.variant.instance.model)
                assert instance.running is not None or code not in waiting
                checked += code in waiting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "ElasticLoop", Watched)
        patch.setattr(default, "_AHEAD", 2)  # else 40 requests fit inside
        Simulation(find(recipe), nodes, workload, fast=False).run()
    assert checked or span > 1, "nobody ever waited"


JOBS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=6)


def feasible(jobs: list[tuple[int, int]]) -> bool:
    """Tell by trying every order whether unit jobs (first slot, last slot) have slots of their own."""
    for order in itertools.permutations(jobs):
        slot = 0
        for first, last in order:
            slot = max(slot, first)
            if slot > last:
                break
            slot += 1
        else:
            return True
    return False


@given(JOBS)
def test_edf_meets_all_deadlines_of_unit_jobs_if_any_order_does(jobs: list[tuple[int, int]]) -> None:
    """One server, jobs of one second: EDF is optimal. Fillers keep the server on whole seconds.

    A job that comes at release + 0.5 may run from release + 1 on, and must have ended `room` seconds later.
    """
    arrivals = [release + 0.5 for release, _ in jobs]
    parts = [
        at(when, prompt=1, output=1, slo=Slo(e2e=room + 0.5)) for when, (_, room) in zip(arrivals, jobs, strict=True)
    ]
    workload = together(at(*[0.0] * 20, prompt=1, output=1), *parts)
    outcome = Simulation(find("edf"), [machine("e0", each=1.0, running=1)], workload).run()
    promised = np.isfinite(workload.e2e)
    met = (outcome.end <= workload.arrival + workload.e2e)[promised].all()
    assert met == feasible([(release + 1, release + room) for release, room in jobs])


def tenants(floods: str) -> Workload:
    """One tenant asks for 60 answers at once, the other for one each second."""
    many = single(np.zeros(60), 50, 10, tenant=floods)
    return together(many, single(np.arange(1.0, 9.0), 50, 10, tenant="modest"))


def test_vtc_protects_the_modest_tenant_from_the_flood() -> None:
    workload = tenants("greedy")
    modest = np.array(workload.tenants)[workload.tenant] == "modest"
    waits: dict[str, Any] = {
        name: float((outcome.first - workload.arrival)[modest].mean())
        for name in ("vllm", "vtc")
        for outcome in [Simulation(find(name), [machine("e0", each=0.2, running=2)], workload).run()]
    }
    assert waits["vtc"] < 0.3 * waits["vllm"]


def test_parrot_serves_an_older_application_run_first() -> None:
    """Four runs of three requests each; under load only Parrot lets an older run's later steps overtake."""
    crew = TrafficClass(
        "crew", lengths=Lengths(np.array([10]), np.array([4]), "one request"), requests_per_run=3, concurrent_runs=4
    )
    workload = make([crew], np.arange(24) * 0.01, np.random.default_rng(0))
    ages = np.array([int(workload.request(i).stage.run.split(".")[1]) for i in range(24)])  # type: ignore[union-attr]
    order = {
        name: np.argsort(Simulation(find(name), [machine("e0", each=0.5, running=1)], workload).run().first)
        for name in ("vllm", "parrot")
    }
    np.testing.assert_array_equal(order["vllm"], np.arange(24))
    inside = machine("e0", running=1).instance.window  # sent before anything had to wait
    later = order["parrot"][inside:]
    np.testing.assert_array_equal(later, sorted(later, key=lambda row: (ages[row], row)))
    assert (np.diff(later) < 0).any()


def test_what_is_shed_has_no_end_and_is_counted() -> None:
    chat = single(np.linspace(0, 5, 30), 50, 20, slo=Slo(ttft=1.0))
    bulk = single(np.linspace(0, 5, 40), 50, 20, priority=5, tier="bulk")
    workload = together(chat, bulk)
    outcome = Simulation(find("llm-d-like"), [machine("e0", each=0.1, running=2)], workload).run()
    ended = np.isfinite(outcome.end)
    assert ended[workload.priority == 0].all()
    assert outcome.shed == np.count_nonzero(~ended) > 0
    assert np.isnan(outcome.first[~ended]).all()
