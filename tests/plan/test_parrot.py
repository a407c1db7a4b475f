"""Parrot: an application run is served as a whole, by the arrival of its first request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.policy.plan.baselines.parrot import Parrot
from headway.stages import Stage
from tests.helpers.held import held
from tests.plan.place import Place, ask, instance


def stage(run: str) -> Stage:
    return Stage("app", run, "unit")


def test_a_late_stage_goes_before_runs_that_came_after_its_own() -> None:
    place = Place(Parrot(), instance("e0", 1, lead=0))
    place.come(ask("x1", 0.0, stage=stage("x")))
    place.come(ask("y1", 1.0, stage=stage("y")))
    place.come(ask("alone", 2.0))
    place.come(ask("x2", 3.0, stage=stage("x")))
    for now in range(4, 8):
        place.end(next(iter(place.inside)), float(now))
    assert place.order == ["x1", "x2", "y1", "alone"]


def test_a_run_is_remembered_while_none_of_its_requests_is_here() -> None:
    place = Place(Parrot(), instance("e0", 1, lead=0))
    place.come(ask("x1", 0.0, stage=stage("x")))
    place.end("x1", 1.0)
    for i in range(3):
        place.come(ask(f"y{i}", 2.0 + i, stage=stage("y")))
    place.come(ask("x2", 9.0, stage=stage("x")))
    place.end("y0", 10.0)
    assert place.order[-1] == "x2"


def test_runs_of_two_tenants_are_two_runs() -> None:
    place = Place(Parrot(), instance("e0", 1, lead=0))
    place.come(ask("a1", 0.0, stage=stage("x"), tenant="a"))
    place.come(ask("b1", 1.0, stage=stage("y"), tenant="b"))
    place.come(ask("b2", 2.0, stage=stage("x"), tenant="b"))
    place.end("a1", 3.0)
    assert place.order[-1] == "b1"


def test_the_number_of_runs_remembered_is_bounded() -> None:
    planner = Parrot(remembered=3)
    place = Place(planner, instance("e0", 1))
    for i in range(10):
        place.come(ask(f"r{i}", float(i), stage=stage(f"run{i}")))
    assert len([name for name in held(planner) if name.startswith("run")]) == 3


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_the_queue_is_served_by_the_runs_beginnings(runs: list[int]) -> None:
    place = Place(Parrot(), instance("e0", 1, lead=0))
    place.come(ask("first", -1.0))
    began: dict[int, float] = {}
    for i, run in enumerate(runs):
        began.setdefault(run, float(i))
        place.come(ask(f"r{i}", float(i), stage=stage(str(run)) if run else None))
    while place.inside:
        place.end(next(iter(place.inside)), 100.0)
    served = [int(id[1:]) for id in place.order[1:]]
    expected = sorted(range(len(runs)), key=lambda i: (began[runs[i]] if runs[i] else float(i), i))
    assert served == expected
