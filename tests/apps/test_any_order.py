"""Whatever order requests, reports and ends arrive in: nothing is lost, runs are bounded and counted once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.recipes import PATHS
from headway.events import (
    Arrived,
    Event,
    Failed,
    Finished,
    InstanceUp,
    Returned,
    RunEnded,
    Started,
    UnitBegan,
    UnitEnded,
)
from headway.policy.apps.account import EndedRun, RunAccount
from headway.policy.core.controller import Controller
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.hermes import Hermes
from headway.policy.recipes.registry import find, names
from headway.stages import Prewarm, Stage
from headway.types import Instance, Request, Rerank, Send

UNITS, RUNS = ("plan", "act", "search"), ("r0", "r1", "r2", "")
ACTS = ("arrive", "start", "finish", "fail", "give back", "begin unit", "end unit", "end run", "silence")
PROGRAM = st.lists(
    st.tuples(
        st.sampled_from(ACTS), st.integers(0, 3), st.integers(0, 2), st.booleans(), st.sampled_from([0.0, 0.5, 30.0])
    ),
    max_size=60,
)


class Host:
    """Tells controller and account what happens, as the gateway's dispatcher does."""

    def __init__(self, recipe: str) -> None:
        self.now, self.serial = 1000.0, 0
        self.core = Controller(find(recipe).planner(), TaskLengths())
        self.account = RunAccount(600.0)
        self.ended: list[EndedRun] = []
        self.begun: Counter[tuple[str, str, str]] = Counter()
        self.open: dict[str, Request] = {}
        self.inside: set[str] = set()
        self.notify(InstanceUp(Instance("e0", "m", 2, 1000, 16, 4096)))

    def notify(self, event: Event) -> None:
        ended = self.account.note(event, self.now)
        if not isinstance(event, RunEnded):
            self.note(event)
        self.end(ended)

    def end(self, ended: list[EndedRun]) -> None:
        self.ended += ended
        for run in ended:
            self.note(RunEnded(*run.key))

    def note(self, event: Event) -> None:
        for command in self.core.on(event, self.now):
            if isinstance(command, Send):
                assert command.id not in self.inside
                self.inside.add(command.id)
            elif isinstance(command, Rerank):
                assert set(command.ranks) <= self.inside
            else:
                assert isinstance(command, Prewarm)

    def act(self, act: str, run: int, unit: int, flag: bool, wait: float) -> None:
        self.now += wait
        stage = Stage("agent", RUNS[run], UNITS[unit], 20.0 if flag else None, final=flag and unit == 0)
        key = ("default", "agent", RUNS[run])
        if act == "arrive":
            self.serial += 1
            one = Request(f"q{self.serial}", "m", 50, 20, self.now, stage=stage)
            self.open[one.id] = one
            self.begin(key if RUNS[run] else ("default", "agent", one.id))
            self.notify(Arrived(one))
        elif act in ("start", "give back"):
            inside = sorted(self.inside)
            if inside:
                id = inside[unit % len(inside)]
                if act == "give back":
                    self.inside.discard(id)
                self.notify(Started(id) if act == "start" else Returned(id))
        elif act in ("finish", "fail"):
            anywhere = sorted(self.inside if act == "finish" else self.open)
            if anywhere:
                self.leave(anywhere[unit % len(anywhere)], answered=act == "finish", client=flag)
        elif act == "begin unit":
            self.begin(key)
            self.notify(UnitBegan("default", stage, "tool"))
        elif act == "end unit":
            self.notify(UnitEnded("default", stage))
        elif act == "end run":
            self.notify(RunEnded(*key))
        else:
            self.now += 601
            self.end(self.account.expire(self.now))

    def begin(self, key: tuple[str, str, str]) -> None:
        self.begun[key] += self.account.live(key) is None

    def leave(self, id: str, *, answered: bool, client: bool) -> None:
        del self.open[id]
        self.inside.discard(id)
        self.notify(Finished(id, 9) if answered else Failed(id, "client_gone" if client else "engine_gone"))


@pytest.mark.parametrize("recipe", ["hermes", "hermes-aged", "hermes-ddl", "headway", "parrot"])
@settings(max_examples=20)
@given(program=PROGRAM)
def test_any_order(recipe: str, program: list[tuple[str, int, int, bool, float]]) -> None:
    host = Host(recipe)
    for step in program:
        host.act(*step)
        assert set(host.core.requests) == set(host.open)
        assert len(host.inside) == len(host.core.requests) - host.core.queued
        assert sum(host.account.live_by_app("default").values()) <= len(host.open) + len(RUNS)
    while host.open:
        assert host.inside, "a queued request is sent when there is room"
        host.leave(min(host.inside), answered=True, client=False)
    host.now += 601
    host.end(host.account.expire(host.now))
    assert Counter(run.key for run in host.ended) == +host.begun, "each run that began is counted once"
    assert not host.account.live_by_app("default")
    if isinstance(host.core.planner, Hermes):
        assert len(host.core.planner.runs) == 0


@pytest.mark.parametrize("recipe", [*names(), *PATHS])
def test_every_planner_bears_the_events_of_runs(recipe: str) -> None:
    core = Controller(find(recipe).planner(), TaskLengths())
    core.on(InstanceUp(Instance("e0", "m", 2, 1000, 16, 4096)), 0.0)
    stage = Stage("agent", "r", "search")
    for event in (UnitBegan("t", stage, "tool"), UnitEnded("t", stage), RunEnded("t", "agent", "r")):
        assert core.on(event, 1.0) == []
