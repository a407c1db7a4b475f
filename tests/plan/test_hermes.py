"""Hermes: runs by the work that they have left, through a real controller."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import (
    Arrived,
    Event,
    Failed,
    Finished,
    InstanceDown,
    InstanceUp,
    Learned,
    Returned,
    RunEnded,
    Started,
    Tick,
    UnitBegan,
    UnitEnded,
)
from headway.policy.apps.demand import SAMPLES, Costs, Draw, Knowledge, _walk
from headway.policy.apps.gittins import gittins, latest_start, mean_remaining
from headway.policy.apps.graph import Graph, Visit
from headway.policy.apps.run import Run
from headway.policy.apps.runs import RankOptions, Runs
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.plan.hermes import Hermes
from headway.policy.plan.service_costs import costs_of
from headway.policy.recipes.hermes import AGED
from headway.stages import Stage
from headway.types import Batch, Command, Rerank, Send, Slo
from tests.helpers.held import held
from tests.plan.place import Place, ask, instance

TENANT = "default"


def stage(run: str, unit: str = "u", **more: object) -> Stage:
    return Stage("app", run, unit, **more)  # type: ignore[arg-type]


def knowing(**seconds: float) -> Hermes:
    """A planner that knows how many seconds each run needs, by its name."""

    def futures(run: Run, costs: Costs) -> Draw:
        total = np.full(SAMPLES, seconds.get(run.key[2], 1.0))
        return Draw(total, total, total, np.full(SAMPLES, -1))

    return Hermes(RankOptions(), Knowledge(), futures)


# ---- order


def test_the_run_with_the_least_work_left_goes_first() -> None:
    place = Place(knowing(x=9.0, y=3.0, z=6.0), instance("e0", 1, lead=0))
    place.come(ask("first"))
    for run in "xyz":
        place.come(ask(run, stage=stage(run)))
    for now in range(4):
        place.end(next(iter(place.inside)), float(now))
    assert place.order == ["first", "y", "z", "x"]


def test_of_equal_ranks_the_first_come_is_first_served() -> None:
    place = Place(knowing(), instance("e0", 1, lead=0))
    for i in range(6):
        place.come(ask(f"r{i}", stage=stage(f"{i}")))
    for now in range(6):
        place.end(next(iter(place.inside)), float(now))
    assert place.order == [f"r{i}" for i in range(6)]


def test_a_request_carries_its_rank_and_gets_a_new_one_inside() -> None:
    place = Place(knowing(x=10.0), instance("e0", 4))
    assert place.come(ask("x1", stage=stage("x"))) == [Send("x1", "e0", 10.0)]
    assert place.notify(Started("x1"), 1.0) == []
    reranks = [command for command in place.notify(Tick(), 6.0) if isinstance(command, Rerank)]
    assert [(one.instance, list(one.ranks)) for one in reranks] == [("e0", ["x1"])]
    assert 4.0 < reranks[0].ranks["x1"] <= 5.0  # its prompt was served, too
    assert place.notify(Tick(), 6.1) == []


def test_a_queued_request_gets_its_new_rank_when_it_is_sent() -> None:
    place = Place(knowing(x=10.0), instance("e0", 1, lead=0))
    place.come(ask("x1", stage=stage("x")))
    place.come(ask("x2", stage=stage("x")))
    place.notify(Started("x1"), 1.0)
    place.notify(Tick(), 6.0)
    sent = [command for command in place.end("x1", 7.0) if isinstance(command, Send)]
    assert sent[0].id == "x2"
    assert sent[0].rank == place.core.planner.runs.rank[place.core.planner.runs.run_of("x2").slot] < 10.0


def test_plain_requests_are_learned_by_task() -> None:
    planner = Hermes(RankOptions())
    place = Place(planner, instance("e0", 1))
    for i, (task, answer) in enumerate((("short", 5), ("long", 500)) * 30):
        place.come(ask(f"r{i}", float(i), task=task, answer=answer))
        place.end(f"r{i}", i + 0.5)
    assert len(planner.runs) == 0
    assert {app for _, app in planner.knowledge.graphs} == {"plain short", "plain long"}
    place.come(ask("first", 100.0))
    for id, task in (("b", "long"), ("c", "short"), ("d", "long"), ("e", "short")):
        place.come(ask(id, 100.0, task=task, answer=1000))
    for now in range(5):
        place.end(next(iter(place.inside)), 101.0 + now)
    # Three places: what is there when the first one ends goes in by rank.
    assert place.order[60:] == ["first", "b", "c", "e", "d"]


def test_the_order_is_by_what_the_graph_says_of_the_rest() -> None:
    """Both runs have a like request; after it the application `big` has much more to do."""
    graphs = Knowledge()
    for app, more in (("big", 50), ("small", 1)):
        graph = Graph(app)
        for _ in range(50):
            graph.learn([Visit("u", prompt=10, output=10, parallel=1)] * more)
        graphs.put(TENANT, graph)
    place = Place(Hermes(RankOptions(), graphs), instance("e0", 1, lead=0))
    place.come(ask("first"))
    place.come(ask("big", stage=Stage("big", "1", "u")))
    place.come(ask("small", stage=Stage("small", "2", "u")))
    place.end("first", 1.0)
    assert place.order == ["first", "small"]


def test_a_run_s_end_leaves_its_queued_requests_in_the_queue() -> None:
    place = Place(knowing(), instance("e0", 1, lead=0))
    place.come(ask("a", stage=stage("1")))
    place.come(ask("b", stage=stage("2")))
    place.notify(RunEnded(TENANT, "app", "2"), 1.0)
    place.come(ask("c", 2.0, stage=stage("3")))
    place.end("a", 3.0)
    place.end("b", 4.0)
    assert place.order == ["a", "b", "c"]


def test_a_request_that_is_refused_ends_its_run() -> None:
    planner = knowing()
    place = Place(planner, instance("e0", 1, lead=0))
    place.come(ask("a", stage=stage("1")))
    place.come(ask("b", stage=stage("2", final=True), slo=Slo(e2e=5.0), drop=True))
    place.come(ask("c", slo=Slo(e2e=5.0), drop=True))
    refused = place.core.overdue(6.0).rejects
    assert {(reject.id, reject.reason) for reject in refused} == {("b", "infeasible"), ("c", "infeasible")}
    check(planner.runs, {"a"})
    assert len(planner.runs) == 1
    assert planner.knowledge.graphs == {}


# ---- costs


def seconds(batch: Batch) -> float:
    return 0.01 + 1e-3 * batch.decodes + 1e-4 * batch.prefill


def test_costs_are_those_of_a_full_batch() -> None:
    costs = costs_of(instance("e0", 40, latency=seconds))
    assert costs == pytest.approx((1e-4, 0.05, 40 * 1e-4))
    first = costs_of(instance("e0", 40))
    assert first.output > first.delay > first.prompt > 0.0, "not known yet"


def test_costs_are_never_negative() -> None:
    """A latency that is learned from few iterations may say that prompts make batches faster."""
    costs = costs_of(instance("e0", 40, latency=lambda batch: 0.5 - 1e-4 * batch.prefill))
    assert costs == (0.0, 0.5, 0.0)


def test_costs_follow_the_fleet() -> None:
    planner = Hermes(RankOptions())
    place = Place(planner, instance("e0", 40, latency=seconds))
    place.notify(Tick(), 0.0)
    assert planner.runs.costs.output == pytest.approx(0.05)
    place.notify(InstanceUp(instance("e1", 80, latency=seconds)), 1.0)
    assert planner.runs.costs.output == pytest.approx(0.07)


def test_costs_follow_what_engines_learn() -> None:
    """A real engine has no profile: its planner hears from it what an iteration takes."""
    planner = Hermes(RankOptions())
    place = Place(planner, instance("e0", 40))
    learned = OnlineLatency()
    learned.theta = learned.theta * 3.0
    before = planner.runs.costs
    place.notify(Learned("e0", learned.theta), 0.0)
    place.notify(Tick(), 0.0)
    assert planner.runs.costs == pytest.approx(tuple(3 * cost for cost in before))
    place.notify(Learned("e0", learned.theta * 1.05), 1.0)
    place.notify(Tick(), 1.0)
    assert planner.runs.costs == pytest.approx(tuple(3 * cost for cost in before)), "nearly the same"


# ---- no starvation


@settings(max_examples=10)
@given(st.floats(0.05, 2.0), st.integers(0, 2**32 - 1))
def test_with_aging_a_run_is_overtaken_only_by_what_begins_soon_after_it(aging: float, seed: int) -> None:
    """One server that is always short; every run is a request of a known number of seconds."""
    rng = np.random.default_rng(seed)
    needs = {f"{i}": float(rng.choice([0.5, 1.0, 8.0])) for i in range(60)}
    planner = knowing(**needs)
    planner.runs.options = RankOptions(aging=aging)
    place = Place(planner, instance("e0", 1, lead=0))
    began = {run: i * 0.3 for i, run in enumerate(needs)}
    for run, now in began.items():
        place.come(ask(run, now, stage=stage(run, final=True)))
        if rng.random() < 0.3:
            place.end(next(iter(place.inside)), now)
    while place.inside:
        place.end(next(iter(place.inside)), 100.0)
    for i, run in enumerate(place.order):
        overtaken = [other for other in place.order[i + 1 :] if began[other] < began[run]]
        assert all(began[run] <= began[other] + needs[other] / aging + 1e-9 for other in overtaken)


# ---- random programs


class World:
    """Drives a controller by random choices, and checks its planner after each."""

    def __init__(self, planner: Hermes) -> None:
        self.place = Place(planner, instance("e0", 2), instance("e1", 3, lead=0))
        self.planner, self.now, self.count = planner, 0.0, 0
        self.runs: set[str] = set()

    def event(self, kind: int, which: int) -> Event:
        """Return an event that may happen now."""
        inside, run, unit = sorted(self.place.inside), f"{which % 7}", f"u{which % 3}"
        id = inside[which % len(inside)] if inside else ""
        if inside and kind in (2, 3):
            return Started(id)
        if inside and kind in (4, 5, 6):
            return Finished(id, which)
        if inside and kind == 7:
            return Failed(id, "gone") if which % 2 else Returned(id)
        if kind == 8:
            return UnitBegan(TENANT, stage(run, unit), "llm" if which % 5 == 0 else "tool")
        if kind == 9:
            return UnitEnded(TENANT, stage(run, unit))
        if kind == 10:
            return RunEnded(TENANT, "app", run)
        if kind == 11:
            up = "e1" in self.place.core.cluster.instances
            return InstanceDown("e1") if up else InstanceUp(instance("e1", 3, lead=0))
        self.count += 1
        some = stage(run if which % 6 else "", unit, target=which if which % 4 else None, final=which % 11 == 1)
        return Arrived(ask(f"r{self.count}", self.now, stage=some if kind else None, prompt=which + 1))

    def step(self, kind: int, which: int, passed: float) -> None:
        self.now += passed
        event = self.event(kind, which)
        if isinstance(event, Finished | Failed | Returned):
            self.place.inside.pop(event.id)
        if isinstance(event, InstanceDown):
            lost = [id for id, at in self.place.inside.items() if at == event.id]
            self.notify(event)
            for id in lost:
                del self.place.inside[id]
                self.notify(Returned(id))
        else:
            self.notify(event)

    def notify(self, event: Event) -> list[Command]:
        before = dict(self.place.inside)
        commands = self.place.notify(event, self.now)
        sent = [command.id for command in commands if isinstance(command, Send)]
        assert len(set(sent)) == len(sent)
        assert not set(sent) & set(before), "sent while it is inside"
        ranks = [command.rank for command in commands if isinstance(command, Send)]
        for command in commands:
            if isinstance(command, Rerank):
                assert {before.get(id) for id in command.ranks} == {command.instance}
                ranks += command.ranks.values()
        assert np.isfinite(ranks).all()
        check(self.planner.runs, set(self.place.core.requests))
        return commands


def check(runs: Runs, requests: set[str]) -> None:
    """The columns agree with the runs, and nothing is kept of requests that have ended."""
    busy = {run.key: run for run in map(runs.run_of, requests)}
    assert {id for run in busy.values() for id in run.requests} == requests
    assert np.isfinite(runs.rank).sum() == len(runs) >= len({run.slot for run in busy.values()}) == len(busy)
    assert not np.isnan(runs.rank).any()
    assert not {one for one in held(runs) if re.fullmatch(r"r\d+", one)} - requests
    for run in busy.values():
        assert sum(visit.inside for visit in run.open.values() if not visit.outside) == len(run.requests)
        assert all(visit.inside > 0 for visit in run.open.values())


PROGRAMS = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 30), st.sampled_from([0.0, 0.1, 3.0, 300.0])), max_size=60
)


@pytest.mark.parametrize("options", [RankOptions(), AGED, RankOptions("slack"), RankOptions("mean", refine=False)])
@settings(max_examples=13)
@given(PROGRAMS)
def test_nothing_is_lost_or_left_behind(options: RankOptions, program: list[tuple[int, int, float]]) -> None:
    planner = Hermes(options)
    world = World(planner)
    for kind, which, passed in program:
        world.step(kind, which, passed)
    while world.place.inside:
        id = next(iter(world.place.inside))
        del world.place.inside[id]
        world.notify(Finished(id, 1))
    assert not world.place.core.requests
    for run in range(7):
        world.notify(RunEnded(TENANT, "app", f"{run}"))
    assert len(planner.runs) == 0


@pytest.mark.parametrize("rank", ["gittins", "mean", "slack"])
def test_a_host_compiles_all_that_ranks_need_before_it_serves(rank: str) -> None:
    functions = (gittins, mean_remaining, latest_start, _walk)
    planner = Hermes(RankOptions(rank))
    planner.prepare()
    compiled = [len(function.signatures) for function in functions]  # type: ignore[attr-defined]
    assert all(compiled)
    graph = Graph("app")
    graph.learn([Visit("u", prompt=10.0, output=10.0, parallel=2)])
    planner.knowledge.put(TENANT, graph)
    place = Place(planner, instance("e0", 4, latency=seconds))
    place.come(ask("a", stage=stage("x", target=5.0)))
    place.notify(Started("a"), 1.0)
    place.notify(Tick(), 2.0)
    place.end("a", 3.0)
    assert [len(function.signatures) for function in functions] == compiled  # type: ignore[attr-defined]
