"""The default recipe's order: promises first, and best effort in which short runs overtake long ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Arrived, Finished, InstanceDown, InstanceUp, RunEnded, Started
from headway.policy.apps.demand import SAMPLES, Costs, Draw, Knowledge
from headway.policy.apps.run import Run
from headway.policy.core.controller import Controller
from headway.policy.core.ranks import ATTAINABLE, SOFT
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.ordered import Ordered
from headway.policy.plan.run_order import RunOrder
from headway.policy.plan.service_costs import costs_of
from headway.stages import Resource, Stage
from headway.types import Send, Slo
from tests.helpers.held import held
from tests.plan.place import Place, ask, instance

STRETCH = 10.0


def stage(run: str, app: str = "app") -> Stage:
    return Stage(app, run, "u")


def knowing(**seconds: float) -> RunOrder:
    """A planner that knows how many seconds each run needs, by its name."""

    def futures(run: Run, costs: Costs) -> Draw:
        total = np.full(SAMPLES, seconds.get(run.key[2], 1.0))
        return Draw(total, total, total, np.full(SAMPLES, -1))

    return RunOrder(ATTAINABLE, stretch=STRETCH, knowledge=Knowledge(), futures=futures)


def drain(place: Place, now: float) -> list[str]:
    """End what is inside, one at a time, until all is done; return the order in which requests were sent."""
    while place.inside:
        place.end(next(iter(place.inside)), now)
    return place.order


def test_a_short_run_overtakes_a_long_one_that_began_before() -> None:
    place = Place(knowing(long=9.0, short=3.0), instance("e0", 1, lead=0))
    place.come(ask("first"))
    place.come(ask("long", 1.0, stage=stage("long")))
    place.come(ask("short", 2.0, stage=stage("short")))
    assert drain(place, 3.0) == ["first", "short", "long"]


def test_runs_are_ranked_once_what_that_needs_is_compiled() -> None:
    """Until then their requests stand where they came; afterwards the planner knows what happened to them."""
    planner = knowing(long=9.0, short=3.0)
    planner.prepare()
    place = Place(planner, instance("e0", 1, lead=0))
    place.come(ask("first"))
    assert not planner.thinks
    assert place.core.deliberate(0.5) is None, "no run has come"
    place.come(ask("long", 1.0, stage=stage("long")))
    place.come(ask("short", 2.0, stage=stage("short")))
    assert planner.thinks
    place.end("first", 2.5)
    assert place.order == ["first", "long"]
    work = place.core.deliberate(3.0)
    assert work is not None
    place.end("long", 3.5)
    place.notify(RunEnded("default", "app", "long"), 3.6)
    place.note(place.core.conclude(work(), 4.0))
    assert not planner.thinks
    assert len(planner.runs) == 1, "the other one has ended"
    place.come(ask("long again", 5.0, stage=stage("long")))
    place.come(ask("short again", 6.0, stage=stage("short")))
    assert drain(place, 7.0) == ["first", "long", "short", "short again", "long again"]


def test_none_is_overtaken_by_what_begins_much_later() -> None:
    place = Place(knowing(long=9.0, short=3.0), instance("e0", 1, lead=0))
    place.come(ask("first"))
    place.come(ask("long", 1.0, stage=stage("long")))
    place.come(ask("short", 1.0 + STRETCH * 6.0 + 0.1, stage=stage("short")))
    assert drain(place, 100.0) == ["first", "long", "short"]


def test_a_later_step_stands_where_its_run_began() -> None:
    place = Place(knowing(), instance("e0", 1, lead=0))
    place.come(ask("a1", 0.0, stage=stage("a")))
    place.come(ask("b1", 1.0, stage=stage("b")))
    place.come(ask("c1", 2.0, stage=stage("c")))
    place.end("a1", 3.0)
    place.come(ask("a2", 4.0, stage=stage("a")))
    assert drain(place, 5.0) == ["a1", "b1", "a2", "c1"]


def test_promises_and_soft_targets_have_one_order() -> None:
    """The short run is due ten seconds after it began, before both deadlines; the batch, after them."""
    place = Place(knowing(short=0.1), instance("e0", 1, lead=0))
    place.come(ask("first", slo=Slo(e2e=10.0)))
    place.come(ask("short", 1.0, stage=stage("short")))
    place.come(ask("due", 2.0, slo=Slo(e2e=50.0), stage=stage("long")))
    place.come(ask("batch", 2.0, slo=Slo(soft=600.0)))
    place.come(ask("sooner", 3.0, slo=Slo(e2e=40.0)))
    assert drain(place, 4.0) == ["first", "short", "sooner", "due", "batch"]


def test_engines_are_told_where_requests_of_runs_stand() -> None:
    place = Place(knowing(run=2.0), instance("e0", 4))
    assert place.come(ask("before", 5.0)) == [Send("before", "e0")]
    [send] = place.come(ask("run", 6.0, stage=stage("run")))
    assert isinstance(send, Send)
    assert send.soft is not None
    assert send.soft > SOFT, "behind where its run began, as it still needs service"
    assert place.come(ask("after", 10.0)) == [Send("after", "e0")]
    [late] = place.come(ask("promised", 16.0, slo=Slo(ttft=1.0), stage=stage("run")))
    assert isinstance(late, Send)
    assert late.soft == pytest.approx(send.soft - SOFT - 10.0 + 1.0), "lost, it counts as its run"


def test_runs_are_compared_with_what_a_request_without_a_run_needs() -> None:
    """A run that needs as much as the others' mean stands where it began, like each of those."""
    costs = costs_of(instance("e0", 1, lead=0))
    mean = 10 * costs.delay + 10 * costs.output
    place = Place(knowing(same=mean, larger=mean + 0.2), instance("e0", 1, lead=0))
    place.come(ask("first"))
    place.come(ask("larger", 1.0, stage=stage("larger")))
    place.come(ask("plain", 2.0))
    place.come(ask("same", 2.5, stage=stage("same")))
    place.come(ask("late", 3.5))
    assert drain(place, 4.0) == ["first", "plain", "same", "larger", "late"]


events = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(0.0, 3.0), st.booleans()), max_size=40)


@given(events=events)
def test_without_runs_it_is_the_order_of_what_is_due(events: list[tuple[int, int, float, bool]]) -> None:
    """A request without a promise stands where one with a deadline of ten seconds would."""
    places = [
        Place(planner, instance("e0", 2, lead=1), instance("e1", 1, lead=0))
        for planner in (RunOrder(ATTAINABLE), Ordered(ATTAINABLE))
    ]
    for place, plain in zip(places, (Slo(), Slo(e2e=SOFT)), strict=True):
        play(place, events, runs=False, plain=plain)
    assert places[0].order == places[1].order


@given(events=events)
def test_whatever_comes_is_sent_once_and_forgotten(events: list[tuple[int, int, float, bool]]) -> None:
    planner = RunOrder(ATTAINABLE)
    place = Place(planner, instance("e0", 2, lead=1), instance("e1", 1, lead=0))
    play(place, events, runs=True)
    for _ in range(len(place.requests)):
        for id in list(place.inside):
            place.end(id, 1e6)
    assert not place.queued
    assert sorted(place.order) == sorted(place.requests)
    for run in range(5):
        place.notify(RunEnded("default", "app", str(run)), 1e6)
    assert not len(planner.runs)
    assert not set(place.requests) & held(planner)


def play(place: Place, events: list[tuple[int, int, float, bool]], *, runs: bool, plain: Slo | None = None) -> None:
    """Let requests come and go: (what, which run or request, seconds later, promised)."""
    now = 0.0
    for i, (what, which, later, promised) in enumerate(events):
        now += later
        if what < 3:
            slo = Slo(e2e=5.0 + 10 * which) if promised else plain or Slo()
            more = {"stage": stage(str(which))} if runs and what else {}
            place.come(ask(f"r{i}", now, slo=slo, **more))  # type: ignore[arg-type]
        elif place.inside:
            place.end(sorted(place.inside)[which % len(place.inside)], now)


def test_a_lost_instance_gives_its_requests_back_in_the_same_order() -> None:
    place = Place(knowing(a=5.0, b=1.0), instance("e0", 2), instance("e1", 1, lead=0))
    for i, run in enumerate("abab"):
        place.come(ask(f"{run}{i}", float(i), stage=stage(run)))
    place.notify(InstanceDown("e0"), 5.0)
    assert set(place.requests) == set(place.inside) | set(place.queued)


def test_the_host_is_not_woken_for_ever_for_a_run_that_has_ended() -> None:
    planner = RunOrder(ATTAINABLE)
    controller = Controller(planner, TaskLengths())
    controller.on(InstanceUp(instance("e0", 4)), 0.0)
    planner.runs.prewarming.learn(Resource("prefix", "app/b"), 0.1)  # it is planned for later, not at once
    now = 0.0
    for run in "12":
        for unit in "ab":
            now += 1.0
            asked = replace(ask(run + unit, now), stage=Stage("app", run, unit, None, unit == "b"))
            for event in (Arrived(asked), Started(asked.id), Finished(asked.id, 400)):
                controller.on(event, now)
    assert not planner.runs
    assert controller.next_check < now + 60.0, "one is planned"
    assert controller.decide(now + 60.0) == []
    assert controller.next_check == math.inf
