"""The live runs: what they attain, how they end, and that nothing of them is left behind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.policy.apps.demand import SAMPLES, Costs, Draw, Knowledge
from headway.policy.apps.graph import LLM, Graph, Visit
from headway.policy.apps.run import Run
from headway.policy.apps.runs import RankOptions, Runs
from headway.stages import Stage
from headway.types import Request

KEY = ("t", "app", "1")


def ask(id: str, unit: str = "a", run: str = "1", prompt: int = 100, **more: object) -> Request:
    stage = Stage("app", run, unit, **more)  # type: ignore[arg-type]
    return Request(id, "m", prompt, 100, 0.0, tenant="t", stage=stage)


def fixed(*seconds: float, most: int = 65_536, **by_run: float) -> Runs:
    """Runs whose demand from every visit on is equally likely to be one of these, or that of their name."""

    def futures(run: Run, costs: Costs) -> Draw:
        samples = np.resize(np.array(by_run.get(run.key[2], seconds), float), SAMPLES)
        return Draw(samples, samples, samples, np.full(SAMPLES, -1))

    runs = Runs(Knowledge(), RankOptions(), futures, most=most)
    runs.costs = Costs(0.0, 1.0, 0.0)
    return runs


def rank(runs: Runs, id: str | None = None) -> float:
    """Return the rank of a request's run, or of the only run."""
    (found,) = runs.rank[np.isfinite(runs.rank)] if id is None else [runs.rank[runs.run_of(id).slot]]
    return float(found)


def rank_at(runs: Runs, now: float) -> float:
    runs.refresh(now)
    return rank(runs)


def taught(runs: Runs) -> list[Visit]:
    graph = runs.knowledge.graphs["t", "app"]
    return [record.visit for unit in graph.units.values() for record in unit.records]


# ---- service


def test_the_rank_falls_by_what_the_run_attains() -> None:
    runs = fixed(10.0)
    runs.arrived(ask("r"), 1.0, 0.0)
    assert rank_at(runs, 0.0) == 10.0
    runs.started("r", 5.0)
    assert runs.refresh(5.5) == []  # less than a tenth of the demand
    assert [run.key for run in runs.refresh(7.0)] == [KEY]
    assert rank(runs) == 8.0


def test_the_rank_follows_the_service_of_requests_that_have_ended() -> None:
    """What they were served is known only at their end, when nothing of the run attains service any more."""
    runs = fixed(10.0)
    runs.arrived(ask("r1"), 1.0, 0.0)
    runs.arrived(ask("r2"), 1.0, 0.0)
    runs.refresh(0.0)
    runs.ended("r1", 4, 1.0)
    assert rank_at(runs, 1.0) == 6.0


def test_a_new_visit_attains_from_its_beginning_on_while_another_goes_on() -> None:
    runs = fixed(10.0)
    runs.arrived(ask("r1", "a"), 1.0, 0.0)
    runs.started("r1", 0.0)
    runs.arrived(ask("r2", "b"), 1.0, 6.0)
    assert rank_at(runs, 6.0) == 10.0
    runs.ended("r1", 9, 8.0)  # its first six seconds were attained before
    assert rank_at(runs, 8.0) == 8.0


def test_what_an_engine_lost_is_not_attained() -> None:
    runs = fixed(10.0)
    runs.arrived(ask("r"), 1.0, 0.0)
    runs.started("r", 0.0)
    runs.refresh(0.0)
    runs.returned("r", 4.0)
    runs.started("r", 6.0)
    assert rank_at(runs, 8.0) == 8.0
    runs.ended("r", 9, 15.0)
    assert rank_at(runs, 15.0) == 1.0


def test_a_run_without_any_demand_has_a_rank() -> None:
    runs = fixed(0.0)
    runs.unit_began(KEY, "tool", "python", 1.0)
    assert rank_at(runs, 1.0) == 0.0
    assert rank_at(runs, 2.0) == 1.0  # as long again as it has taken


# ---- the end of a run


def test_a_run_may_begin_long_after_the_epoch() -> None:
    runs = fixed(1.0)
    runs.arrived(ask("r"), 1.0, 1.8e9)
    assert rank_at(runs, 1.8e9) == 1.0


def test_a_run_that_is_ended_lives_until_its_requests_have_ended() -> None:
    runs = fixed(5.0)
    runs.arrived(ask("r1"), 1.0, 0.0)
    runs.arrived(ask("r2"), 1.0, 0.0)
    runs.end(KEY)
    runs.refresh(0.0)
    assert runs.run_of("r1").key == KEY
    assert rank(runs) == 5.0
    runs.ended("r1", 1, 1.0)
    assert len(runs) == 1
    runs.ended("r2", 1, 1.0)
    assert len(runs) == 0
    assert taught(runs) == [Visit("a", LLM, 100, 1, 2)]


def test_the_final_request_ends_the_run_also_when_it_is_not_the_last_one_to_end() -> None:
    runs = fixed(5.0)
    runs.arrived(ask("r1"), 1.0, 0.0)
    runs.arrived(ask("r2", final=True), 1.0, 0.0)
    runs.ended("r2", 1, 1.0)
    assert len(runs) == 1
    runs.ended("r1", 1, 2.0)
    assert len(runs) == 0


def test_a_request_after_the_end_begins_another_run() -> None:
    runs = fixed(5.0)
    runs.arrived(ask("r1", final=True), 1.0, 0.0)
    runs.ended("r1", 1, 1.0)
    runs.arrived(ask("r2"), 1.0, 2.0)
    runs.ended("r2", 1, 3.0)
    assert len(runs) == 1
    runs.end(KEY)
    assert len(runs) == 0
    assert runs.knowledge.graphs["t", "app"].runs == 2


@pytest.mark.parametrize("run", ["", None])
def test_a_request_without_a_run_is_a_run_of_its_own(run: str | None) -> None:
    runs = fixed(5.0)
    for id in ("r1", "r2"):
        request = ask(id, run="") if run == "" else Request(id, "m", 100, 100, 0.0, tenant="t")
        runs.arrived(request, 1.0, 0.0)
    assert len(runs) == 2
    runs.ended("r1", 1, 1.0)
    runs.ended("r2", 1, 1.0)
    assert len(runs) == 0


def test_a_run_with_a_request_that_had_no_answer_teaches_nothing() -> None:
    runs = fixed(5.0)
    runs.arrived(ask("r1"), 1.0, 0.0)
    runs.ended("r1", None, 1.0)
    runs.end(KEY)
    assert runs.knowledge.graphs == {}


def test_a_run_whose_tool_never_ends_teaches_nothing_when_it_is_ended() -> None:
    runs = fixed(5.0)
    runs.unit_began(KEY, "tool", "python", 0.0)
    runs.end(KEY)
    assert len(runs) == 0
    assert runs.knowledge.graphs == {}


def test_the_number_of_silent_runs_is_bounded() -> None:
    runs = fixed(5.0, most=10)
    for i in range(50):
        runs.arrived(ask(f"r{i}", run=f"{i}"), 1.0, float(i))
        runs.ended(f"r{i}", 1, float(i))
    assert len(runs) == 10
    assert runs.knowledge.graphs == {}, "a run that was cut short teaches nothing"
    for i in range(40, 50):
        runs.end(("t", "app", f"{i}"))
    assert len(runs) == 0, "the latest ones were left"


def test_a_run_that_never_ends_stays_small() -> None:
    runs = fixed(5.0)
    for i in range(3000):
        runs.arrived(ask(f"r{i}", unit=f"u{i}"), 1.0, float(i))
        run = runs.run_of(f"r{i}")
        runs.ended(f"r{i}", 1, float(i))
    assert run.steps == 3000
    assert len(run.visits) == len(run.visited) == 1000
    assert sum(run.visited.values()) == 1000


# ---- units outside the LLM


def test_a_unit_outside_the_llm_takes_from_its_begin_to_its_end() -> None:
    runs = fixed(5.0)
    runs.unit_began(KEY, "tool", "python", 1.0)
    assert rank_at(runs, 3.0) == 3.0
    runs.unit_ended(KEY, "tool", 3.5)
    assert rank_at(runs, 9.0) == 2.5
    runs.end(KEY)
    assert taught(runs) == [Visit("tool", "python", seconds=2.5)]


def test_parallel_units_of_one_name_are_one_visit() -> None:
    runs = fixed(5.0)
    runs.unit_began(KEY, "tool", "python", 1.0)
    runs.unit_began(KEY, "tool", "python", 2.0)
    runs.unit_ended(KEY, "tool", 3.0)
    assert rank_at(runs, 4.0) == 2.0
    runs.unit_ended(KEY, "tool", 5.0)
    assert rank_at(runs, 9.0) == 1.0
    runs.end(KEY)
    assert taught(runs) == [Visit("tool", "python", seconds=4.0)]


def test_an_end_that_nothing_has_begun_for_is_ignored() -> None:
    runs = fixed(5.0)
    runs.unit_ended(KEY, "tool", 1.0)
    runs.arrived(ask("r", "tool"), 1.0, 1.0)
    runs.unit_ended(KEY, "tool", 2.0)  # that is an LLM unit
    runs.unit_began(KEY, "tool", "python", 3.0)
    runs.unit_ended(KEY, "tool", 4.0)
    runs.unit_ended(KEY, "tool", 5.0)
    assert rank_at(runs, 9.0) == 4.0
    assert list(runs.run_of("r").open) == [("tool", False)]


def test_a_tool_may_be_called_like_an_llm_unit_or_its_backend() -> None:
    runs = fixed(5.0)
    runs.unit_began(KEY, "a", LLM, 0.0)
    runs.arrived(ask("r", "a"), 1.0, 1.0)
    runs.unit_ended(KEY, "a", 2.0)
    runs.ended("r", 7, 3.0)
    runs.end(KEY)
    assert taught(runs) == [Visit("a", LLM, seconds=2.0), Visit("a", LLM, 100, 7, 1)]


def test_a_unit_without_a_run_is_ignored() -> None:
    runs = fixed(5.0)
    runs.unit_began(("t", "app", ""), "tool", "python", 0.0)
    assert len(runs) == 0


def test_what_came_before_is_not_known_while_it_is_in_progress() -> None:
    runs = fixed(5.0)
    runs.arrived(ask("r1", "a"), 1.0, 0.0)
    runs.arrived(ask("r2", "b"), 1.0, 1.0)
    assert runs.run_of("r2").before is None
    runs.ended("r1", 7, 2.0)
    assert runs.run_of("r2").before == Visit("a", LLM, 100, 7, 1)


# ---- deadlines and aging


def slack(*seconds: float) -> Runs:
    runs = fixed(*seconds)
    runs.options = RankOptions("slack")
    return runs


def test_the_least_slack_goes_first_and_a_lost_run_last() -> None:
    runs = slack(2.0, 4.0)
    for run, target in (("1", 9.0), ("2", 6.0), ("late", 1.5), ("any", None)):
        runs.arrived(ask(run, run=run, target=target), 1.0, 100.0)
    runs.refresh(100.0)
    ranks = [rank(runs, run) for run in ("2", "1", "late", "any")]
    assert ranks[:2] == [2.0, 5.0]  # to begin at the latest, counted from the first run's beginning
    assert ranks[2] == ranks[3] > 1e9


def test_a_run_is_lost_when_time_has_passed() -> None:
    runs = slack(2.0, 4.0)
    runs.arrived(ask("r", target=6.0), 1.0, 0.0)
    runs.refresh(0.0)
    assert runs.refresh(3.9) == []
    assert [run.key for run in runs.refresh(4.1)] == [KEY]
    assert rank(runs) > 1e9
    assert runs.refresh(4.2) == []


def test_the_deadline_may_change_in_mid_run() -> None:
    runs = slack(2.0, 4.0)
    runs.arrived(ask("r1", target=6.0), 1.0, 0.0)
    assert rank_at(runs, 0.0) == 2.0
    runs.arrived(ask("r2", target=10.0), 1.0, 1.0)
    runs.refresh(1.0)
    assert runs.run_of("r1").target == 10.0
    assert rank(runs) == 6.0
    runs.arrived(ask("r3"), 1.0, 1.0)
    assert runs.run_of("r1").target == 10.0


def test_aging_puts_a_run_before_what_begins_later_than_its_rank_allows() -> None:
    runs = fixed(1.0, long=10.0)
    runs.options = RankOptions(aging=0.5)
    runs.arrived(ask("long", run="long"), 1.0, 5.0)
    runs.refresh(5.0)
    begin = {"early": 5.0 + 9.0 / 0.5 - 0.1, "late": 5.0 + 9.0 / 0.5 + 0.1}
    for run, now in begin.items():
        runs.arrived(ask(run, run=run), 1.0, now)
        runs.refresh(now)
    ranks = {run: rank(runs, run) for run in ("long", *begin)}
    assert ranks["early"] < ranks["long"] < ranks["late"]


def test_slots_are_reused() -> None:
    runs = fixed(5.0)
    for i in range(1000):
        runs.arrived(ask(f"r{i}", run=f"{i}", final=True), 1.0, float(i))
        runs.started(f"r{i}", float(i))
        runs.refresh(float(i))
        assert rank(runs) == 5.0
        runs.ended(f"r{i}", 1, i + 0.5)
    assert runs.rank.size == 64
    assert np.all(runs.rank == math.inf)


def test_futures_may_know_a_unit_that_no_graph_has() -> None:
    runs = fixed(5.0)
    runs.arrived(ask("r1", "a", final=True), 1.0, 0.0)
    runs.ended("r1", 1, 1.0)
    runs.arrived(ask("r2", "b"), 1.0, 2.0)
    runs.started("r2", 3.0)
    assert rank_at(runs, 3.0) == 5.0


def test_many_runs_live_side_by_side() -> None:
    runs = fixed(**{f"{i}": i + 1.0 for i in range(1000)})
    for i in range(1000):
        runs.arrived(ask(f"r{i}", run=f"{i}", final=True), 1.0, 0.0)
        runs.refresh(0.0)
    assert [rank(runs, f"r{i}") for i in range(1000)] == [i + 1.0 for i in range(1000)]
    for i in range(1000):
        runs.ended(f"r{i}", 1, 1.0)
    assert len(runs) == 0
    assert np.all(runs.rank == math.inf)


def test_a_graph_may_be_replaced_while_runs_draw_from_it() -> None:
    """What comes after a visit is an index into the units of the graph that it was drawn from."""
    graph = Graph("app")
    graph.learn([Visit("a", LLM, 10, 10, 1), Visit("b", LLM, 10, 10, 1), Visit("tool", "python", seconds=9.0)])
    runs = Runs(Knowledge(), RankOptions())
    runs.knowledge.put("t", graph)
    runs.arrived(ask("r", "b"), 1.0, 0.0)
    runs.refresh(0.0)
    other = Graph("app")
    other.learn([Visit("b", LLM, 10, 10, 1)])
    runs.knowledge.put("t", other)
    runs.started("r", 1.0)
    assert [due.resource.name for due in runs.prewarming.due(100.0)] == ["python"]
