"""Warm-ups in the gateway: one at a time for a resource, told to the planner, kept until used or given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headway import clock
from headway.cluster.backends.port import BackendError, HeldWorker
from headway.config import Tier
from headway.events import Event, Prewarmed
from headway.gateway.control.prewarm import Warmer, Warmups
from headway.gateway.watch.run_metrics import PrewarmMetrics
from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ARRIVAL
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.default import DEFAULT
from headway.stages import Prewarm, Resource
from headway.types import Request
from tests.gateway.conftest import Serve
from tests.gateway.gateway import until

FOR_EVER = 1e12
KIND = "backend"


@dataclass
class Scripted(Warmer):
    """Warms when it is let, and tells what was let go of."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    fresh: bool = True
    shared: bool = True
    began: list[str] = field(default_factory=list)
    held: list[HeldWorker] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def key(self, command: Prewarm) -> Hashable | None:
        name = command.resource.name
        if name == "unknown":
            return None
        return name if self.shared else object()

    async def warm(self, command: Prewarm) -> HeldWorker | None:
        name = command.resource.name
        self.began.append(name)
        await self.go.wait()
        if self.error is not None:
            raise self.error

        async def release() -> None:
            self.released.append(name)

        self.held.append(HeldWorker(asyncio.Event(), release, self.fresh))
        return None if name == "full" else self.held[-1]

    def used(self, request: Request) -> None:
        for held in self.held:
            held.used.set()


class World:
    """Warm-ups with one scripted warmer."""

    def __init__(self, **script: Any) -> None:
        self.registry = CollectorRegistry()
        self.told: list[Prewarmed] = []
        self.warmer = Scripted(**script)
        self.warmups = Warmups(self.told.append, PrewarmMetrics(self.registry))
        self.warmups.warmers[KIND] = self.warmer

    def put(self, name: str = "box", until: float = FOR_EVER, kind: Any = KIND) -> None:
        self.warmups.put(Prewarm("tenant", Resource(kind, name), until))

    def count(self, outcome: str, kind: str = KIND) -> float:
        name = "headway_prewarm_end_total" if outcome in ("used", "wasted") else "headway_prewarm_total"
        return self.registry.get_sample_value(name, {"kind": kind, "outcome": outcome}) or 0.0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_is_warmed_is_told_and_kept_until_it_is_used() -> None:
    world = World()
    world.put()
    await settle()
    assert (world.warmer.began, world.told) == (["box"], [])
    world.warmer.go.set()
    await settle()
    assert [(one.resource, one.seconds >= 0) for one in world.told] == [(Resource(KIND, "box"), True)]
    assert world.warmer.released == []
    world.warmups.used(Request("r", "m", 1, 1, 0.0))
    await settle()
    assert world.warmer.released == ["box"]
    assert [world.count(outcome) for outcome in ("warmed", "used", "wasted", "failed")] == [1, 1, 0, 0]
    assert (world.registry.get_sample_value("headway_prewarm_idle_seconds_total", {"kind": KIND}) or 0) > 0


async def test_what_nothing_uses_is_let_go_of_when_its_time_is_over() -> None:
    world = World()
    world.warmer.go.set()
    world.put(until=clock.now() - 1)
    await settle()
    assert world.warmer.released == ["box"]
    assert [world.count(outcome) for outcome in ("warmed", "used", "wasted")] == [1, 0, 1]


async def test_a_second_command_prolongs_the_first() -> None:
    world = World()
    world.put(until=clock.now() - 1)
    world.put()
    world.warmer.go.set()
    await settle()
    assert (world.warmer.began, world.warmer.released) == (["box"], [])
    assert [world.count(outcome) for outcome in ("warmed", "kept")] == [1, 1]
    await world.warmups.close()
    assert world.warmer.released == ["box"]
    world.put()
    await settle()
    assert world.warmer.began == ["box", "box"]
    await world.warmups.close()


async def test_a_resource_that_serves_one_unit_is_warmed_once_for_each_command() -> None:
    world = World(shared=False)
    world.put()
    world.put()
    await settle()
    assert world.warmer.began == ["box", "box"]
    await world.warmups.close()


async def test_what_was_warm_already_teaches_the_planner_nothing() -> None:
    world = World(fresh=False)
    world.warmer.go.set()
    world.put()
    await settle()
    assert world.told == []
    assert [world.count(outcome) for outcome in ("warmed", "kept")] == [0, 1]
    await world.warmups.close()


@pytest.mark.parametrize("error", [BackendError("No room.", "Make some."), RuntimeError("a bug")])
async def test_failures_are_logged_and_counted(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    world = World(error=error)
    world.warmer.go.set()
    with caplog.at_level(logging.WARNING, "headway.gateway"):
        world.put()
        await settle()
    assert "backend 'box' is not warm" in caplog.text
    assert [world.count(outcome) for outcome in ("warmed", "failed")] == [0, 1]
    world.put()
    await settle()
    assert world.warmer.began == ["box", "box"], "it is tried again"


async def test_what_cannot_be_warmed_is_skipped() -> None:
    world = World()
    world.warmer.go.set()
    for name, kind in (("unknown", KIND), ("full", KIND), ("lora", "adapter")):
        world.put(name, kind=kind)
    await settle()
    assert (world.count("skipped"), world.count("skipped", "adapter")) == (2, 1)
    assert (world.warmer.began, world.told) == (["full"], [])


async def test_there_are_only_so_many_at_a_time() -> None:
    world = World()
    for i in range(300):
        world.put(f"box {i}")
    await settle()
    assert len(world.warmer.began) == 256
    assert world.count("skipped") == 44
    await world.warmups.close()
    assert world.warmups._until == {}


# ---- in a gateway


class Told(Ordered):
    """A planner that keeps what it is told of warm resources."""

    def __init__(self) -> None:
        super().__init__(ARRIVAL)
        self.told: list[Prewarmed] = []

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        super().on(event, cluster, now)
        if isinstance(event, Prewarmed):
            self.told.append(event)


RECIPE = replace(DEFAULT["vllm"], name="told", planner=Told)


def test_the_gateway_carries_out_a_plan_s_warm_ups(serve: Serve) -> None:
    resource = Resource(KIND, "box")

    async def execute() -> Scripted:
        warmer = Scripted()
        warmer.go.set()
        dispatcher.warmups.warmers[KIND] = warmer
        dispatcher.control.execute([Prewarm("default", resource, FOR_EVER)])
        return warmer

    with serve(recipe="tests.gateway.test_prewarm:RECIPE") as gateway:
        dispatcher = gateway.inner.dispatcher
        warmer = gateway.do(execute())
        planner = gateway.controller.planner
        assert isinstance(planner, Told)
        assert until(lambda: [one.resource for one in planner.told]) == [resource]
        assert warmer.released == []
        assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: warmer.released == ["box"])
        assert gateway.metric('headway_prewarm_end_total{kind="backend",outcome="used"}') == 1


@pytest.mark.parametrize("recipe", ["headway", "hermes"])
def test_classes_say_how_readily_is_warmed(serve: Serve, recipe: str) -> None:
    classes = {"default": Tier(), "premium": Tier(prewarm=0.1), "cold": Tier(prewarm=2.0)}
    with serve(recipe=recipe, classes=classes) as gateway:
        prewarming = gateway.controller.planner.prewarming
        assert prewarming is not None
        assert prewarming.options.effectiveness == {"default": 0.5, "premium": 0.1, "cold": 2.0}
