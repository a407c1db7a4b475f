"""Runs of applications in virtual time: their steps in order, on the seconds that engines take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from headway.events import Arrived, Event, Finished, RunEnded, Started, UnitBegan, UnitEnded
from headway.policy.apps.demand import Knowledge
from headway.policy.apps.graph import LLM, Graph
from headway.policy.apps.runs import RankOptions
from headway.policy.core.cluster import Cluster
from headway.policy.core.controller import Controller
from headway.policy.plan.hermes import Hermes
from headway.policy.recipes.hermes import HERMES, variant
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.simulate.replay import Replayed, oracle, replay
from headway.simulate.run import InstanceSpec
from headway.simulate.workload.application_models import generated
from headway.simulate.workload.applications import Applications, AppRun, Step, applications, draw
from headway.types import Batch, Plan, Rerank
from tests.simulate.machines import machine

EACH = 0.1  # seconds of an iteration


def llm(unit: str, *lengths: tuple[int, int]) -> Step:
    return Step(unit, LLM, lengths)


def tool(unit: str, seconds: float) -> Step:
    return Step(unit, "python", seconds=seconds)


def apps_of(*steps: Sequence[Step], at: Sequence[float] = (), target: float = math.inf) -> Applications:
    arrival = np.array(at or np.zeros(len(steps)), float)
    runs = [AppRun("app", tuple(some)) for some in steps]
    return applications(runs, arrival, "default", np.full(len(runs), target))


def run_alone(*steps: Step, at: float = 0.0, **more: float) -> Replayed:
    return replay(find("vllm"), [machine("e0", each=EACH, running=8)], apps_of(steps, at=[at]), **more)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Event]]:
    """Everything that the controller is told."""
    seen: list[tuple[float, Event]] = []
    note = Controller.note

    def noting(self: Controller, event: Event, now: float) -> bool:
        seen.append((now, event))
        return note(self, event, now)

    monkeypatch.setattr(Controller, "note", noting)
    return seen


# ---- one run


def test_a_run_alone_takes_what_its_steps_take() -> None:
    # One iteration for the prompt of up to 256 tokens, which makes the first token.
    done = run_alone(llm("a", (10, 5)), tool("t", 2.5), llm("b", (300, 3)), at=7.0)
    assert done.end == pytest.approx([7 + 0.5 + 2.5 + 0.4])


@dataclass(frozen=True)
class Hand:
    """Iterations of 10 ms, 1 ms per answer in progress and 0.1 ms per prompt token."""

    def seconds(self, batch: Batch) -> float:
        return 0.01 + 1e-3 * batch.decodes + 1e-4 * batch.prefill

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


@pytest.mark.parametrize("recipe", ["vllm", "hermes"])
def test_a_run_alone_takes_its_iterations_by_the_latency_model(recipe: str) -> None:
    spec = replace(machine("e0", running=8), latency=Hand())
    steps = (llm("a", (100, 5)), llm("b", (50, 2), (60, 2)))
    done = replay(find(recipe), [spec], apps_of(steps))
    first = 0.02 + 4 * 0.011
    # The first of two parallel requests begins at once, the second joins in the next iteration.
    second = 0.015 + (0.01 + 0.001 + 0.006) + 0.011
    assert done.end == pytest.approx([first + second])


def test_parallel_requests_share_iterations() -> None:
    done = run_alone(llm("a", *[(10, 5)] * 6))
    assert done.end == pytest.approx([6 * EACH])
    assert done.outcome.iterations == 6


def test_the_next_step_waits_for_the_last_of_parallel_requests() -> None:
    done = run_alone(llm("a", (10, 2), (10, 9)), llm("b", (10, 1)))
    assert done.outcome.end == pytest.approx([0.2, 1.0, 1.1])


def test_steps_are_told_in_order_and_the_run_ends_once(events: list[tuple[float, Event]]) -> None:
    run_alone(llm("a", (10, 2), (10, 3)), tool("t", 2.0), llm("a", (10, 1)), pause=0.5)
    told = [(type(event), round(now, 6)) for now, event in events[1:] if not isinstance(event, Started)]
    assert told == [
        (Arrived, 0.0),
        (Arrived, 0.0),
        (Finished, 0.2),
        (Finished, 0.4),
        (UnitBegan, 0.9),
        (UnitEnded, 2.9),
        (Arrived, 3.4),
        (Finished, 3.5),
        (RunEnded, 3.5),
    ]
    stages = [event.request.stage for _, event in events if isinstance(event, Arrived)]
    assert [(stage.app, stage.run, stage.unit) for stage in stages if stage] == [("app", "0", "a")] * 3
    assert [now for now, event in events if isinstance(event, Started)] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("last", [llm("b", (10, 1)), tool("t", EACH)])
def test_there_is_a_pause_between_steps_and_none_after_the_last(last: Step) -> None:
    assert run_alone(llm("a", (10, 1)), last, pause=2.0).end == pytest.approx([2 * EACH + 2.0])


def test_overheads_delay_every_request() -> None:
    spec = replace(machine("e0", each=EACH), request_overhead=0.01, token_overhead=0.002)
    done = replay(find("hermes"), [spec], apps_of([llm("a", (10, 2)), llm("b", (10, 1))]))
    assert done.end == pytest.approx([0.3 + 2 * 0.012])


def test_a_run_outside_the_llm_needs_no_engine() -> None:
    assert run_alone(tool("t", 3.0), tool("u", 0.0)).end.tolist() == [3.0]


def test_a_cold_backend_is_part_of_a_unit_s_seconds() -> None:
    done = run_alone(tool("t", 5.0), cold_s={"python": 2.0})  # type: ignore[arg-type]
    assert done.end.tolist() == [5.0]
    assert (done.pool.units, done.pool.hits, done.pool.used, done.pool.waited) == (1, 0, 3.0, 2.0)


def test_requests_have_until_the_deadline_of_their_run(events: list[tuple[float, Event]]) -> None:
    apps = apps_of([llm("a", (10, 5)), llm("b", (10, 30)), llm("c", (10, 1))], at=[2.0], target=3.0)
    replay(find("hermes-ddl"), [machine("e0", each=EACH)], apps)
    asked = [event.request for _, event in events if isinstance(event, Arrived)]
    assert [request.slo.e2e for request in asked] == pytest.approx([3.0, 2.5, 1e-3])  # the last is late
    assert {request.stage.target for request in asked if request.stage} == {3.0}


def test_time_may_end_before_the_runs() -> None:
    done = replay(
        find("hermes"),
        [machine("e0", each=EACH)],
        apps_of([llm("a", (10, 5))], [llm("a", (10, 5))], at=[0.0, 9.0]),
        until=5.0,
    )
    assert done.end[0] == pytest.approx(0.5)
    assert math.isnan(done.end[1])


# ---- many runs


def fleet(count: int = 1) -> list[InstanceSpec]:
    return [
        replace(machine(f"e{i}", running=8, blocks=1500, longest=16_384), latency=Hand(), budget=2048)
        for i in range(count)
    ]


def mixed(seed: int, count: int = 12) -> Applications:
    rng = np.random.default_rng(seed)
    pool = generated(4, rng)
    shares = {"EV": 1.0, "KBQAV": 1.0, "CC": 1.0, "CG": 1.0, "PE": 0.3, "ALFWI": 0.3}
    runs = draw(pool, count, rng, shares)
    target = rng.uniform(5, 60, count)
    return applications(runs, np.sort(rng.uniform(0, 5, count)), "default", target)


@pytest.mark.parametrize("name", ["vllm", "parrot", "vtc", "edf", *HERMES])
def test_every_run_is_completed_and_the_same_every_time(name: str) -> None:
    one, same = (replay(find(name), fleet(2), mixed(0)) for _ in range(2))
    assert np.isfinite(one.end).all()
    assert np.isfinite(one.outcome.end).all()
    assert np.array_equal(one.end, same.end)
    assert np.array_equal(one.outcome.first, same.outcome.first)
    apps = mixed(0)
    for run in range(len(apps)):
        assert one.outcome.end[apps.rows[run][0] : apps.rows[run][-1]].max() <= one.end[run] + 1e-9


@pytest.mark.parametrize("learned", [False, True])
def test_an_oracle_s_runs_are_completed(learned: bool) -> None:
    """Also when the graphs know some of the units only, or other ones."""
    apps, knowledge = mixed(1), Knowledge()
    for run in apps.runs if learned else ():
        graph = Graph(run.app)
        graph.learn(run.visits[:1])
        knowledge.put(run.app, graph)
    recipe = variant("oracle", "true demands", RankOptions(), knowledge, futures=oracle(apps))
    assert np.isfinite(replay(recipe, fleet(), apps).end).all()


def kept(recipe: Recipe) -> tuple[Recipe, list[Hermes]]:
    """Return the same recipe, and a list of the planners that it makes."""
    planners: list[Hermes] = []

    def planner() -> Hermes:
        planners.append(recipe.planner())  # type: ignore[arg-type]
        return planners[-1]

    return replace(recipe, planner=planner), planners


@pytest.mark.parametrize("name", HERMES)
def test_no_run_is_left_behind(name: str) -> None:
    recipe, planners = kept(find(name))
    apps = mixed(2)
    replay(recipe, fleet(), apps)
    assert len(planners[0].runs) == 0
    graphs = planners[0].knowledge.graphs
    assert {app: graph.runs for (_, app), graph in graphs.items()} == {
        app: sum(run.app == app for run in apps.runs) for app in {run.app for run in apps.runs}
    }


def test_what_is_learned_is_what_was_replayed() -> None:
    recipe, planners = kept(find("hermes"))
    steps = (llm("a", (10, 4), (20, 6)), tool("t", 2.5), llm("a", (30, 1)))
    replay(recipe, fleet(), apps_of(steps))
    (graph,) = planners[0].knowledge.graphs.values()
    expected = Graph("app")
    expected.learn(AppRun("app", steps).visits)
    assert graph == expected


def test_short_runs_overtake_long_ones_once_they_are_known() -> None:
    """Two applications take turns on an engine of one place; after some runs Hermes knows which is short."""
    long, short = [llm("long", (10, 60))], [llm("short", (10, 3))]
    runs = [AppRun("long" if i % 2 else "short", tuple(long if i % 2 else short)) for i in range(40)]
    apps = applications(runs, np.arange(40) * 0.5, "default")
    ends = {name: replay(find(name), [machine("e0", each=EACH, running=1)], apps).end for name in ("vllm", "hermes")}
    acts = {name: (end - apps.arrival).mean() for name, end in ends.items()}
    assert acts["hermes"] < 0.7 * acts["vllm"]


def test_ranks_change_inside_the_engine_while_requests_run() -> None:
    seen: list[Rerank] = []

    class Noted(Hermes):
        def plan(self, cluster: Cluster, now: float) -> Plan:
            plan = super().plan(cluster, now)
            seen.extend(plan.rerank)
            return plan

    busy = [llm("a", (10, 200))]  # 20 s, of which 14.2 s are a tenth of the longest guess
    apps = apps_of(busy, busy, busy, at=[0.0, 0.0, 16.0])
    recipe = replace(find("hermes"), planner=lambda: Noted(RankOptions()))
    replay(recipe, [machine("e0", each=EACH, running=1)], apps)
    assert "r0" in seen[0].ranks
    assert all(math.isfinite(rank) for rerank in seen for rank in rerank.ranks.values())
