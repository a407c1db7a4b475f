"""A planner that takes its time does not hold up the gateway, and a stale plan does no harm."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from benchmarks.real.planning_overhead import Deliberate
from headway import clock
from headway.events import Arrived, Event, Failed, InstanceDown, InstanceUp
from headway.gateway import tasks
from headway.gateway.control.control import Planning
from headway.policy.core.cluster import Cluster
from headway.policy.core.controller import Controller
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.qlm import Qlm
from headway.policy.recipes.default import DEFAULT
from headway.types import Command, Instance, Plan, Request, Send, Slo
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, until
from tests.gateway.test_background import begin, finished
from tests.gateway.test_request_ends import hanging

THINKING = "tests.gateway.test_planning:RECIPE"
SLEEPING = "benchmarks.real.planning_overhead:SLEEPING"


class Thinking(Deliberate):
    """Returns a plan when `go` is set.

    began: plans begun so far. running: plans under way now, most: at most.
    """

    began = running = most = 0
    go = threading.Event()

    @staticmethod
    def reset() -> None:
        Thinking.began = Thinking.running = Thinking.most = 0
        Thinking.go = threading.Event()

    def make(self, cluster: Cluster, now: float) -> Plan:
        plan, go = super().make(cluster, now), Thinking.go
        Thinking.began, Thinking.running = Thinking.began + 1, Thinking.running + 1
        Thinking.most = max(Thinking.most, Thinking.running)
        try:
            assert go.wait(30), "the test never let the planner go on"
            return plan
        finally:
            Thinking.running -= 1


RECIPE = replace(DEFAULT["vllm"], name="thinking", planner=Thinking)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    Thinking.reset()
    yield
    Thinking.go.set()  # no thread of a test outlives it


# ---- in a gateway


def test_every_request_is_answered_once(serve: Serve, fake: Fake) -> None:
    asked = fake.last()["asked"]
    with serve(recipe=SLEEPING) as gateway, ThreadPoolExecutor(16) as pool:
        bodies = [gateway.chat(stream=i % 2 == 0) for i in range(40)]
        answers = list(pool.map(gateway.post, bodies))
        ids = [begin(gateway) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 40
        assert all(answer.text.count("fake ") == 8 for answer in answers[::2])
        assert {finished(gateway, id)["status"] for id in ids} == {"completed"}
        until(lambda: {state for state, _ in gateway.jobs().values()} == {"done"})
        assert gateway.controller.requests == {}
    assert fake.last()["asked"] == asked + 45, "none was lost or sent twice"


def test_other_endpoints_answer_while_it_plans(serve: Serve, fake: Fake) -> None:
    with serve(recipe=THINKING) as gateway, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.post, gateway.chat())
        until(lambda: Thinking.running == 1)
        id = begin(gateway)
        assert gateway.get("/v1/models").status_code == 200
        assert gateway.get("/health").status_code == 200
        assert gateway.get(f"/v1/responses/{id}").json()["status"] == "queued"
        assert gateway.post(gateway.chat(model="unknown")).status_code == 404
        assert gateway.metric("headway_queue_length") == 2
        assert Thinking.running == 1, "all of that while one plan was being made"
        assert not asked.done()
        Thinking.go.set()
        assert asked.result().status_code == 200
        assert finished(gateway, id)["status"] == "completed"
        assert Thinking.most == 1, "one plan at a time"


def test_a_request_that_is_cancelled_meanwhile_is_not_sent(serve: Serve, fake: Fake) -> None:
    asked = fake.last()["asked"]
    with serve(recipe=THINKING) as gateway:
        id = begin(gateway)
        until(lambda: Thinking.running == 1)
        assert gateway.post(None, f"/v1/responses/{id}/cancel").json()["status"] == "cancelled"
        with hanging(gateway):
            until(lambda: gateway.controller.queued == 1)
        until(lambda: gateway.controller.queued == 0)  # that client left
        last = begin(gateway)
        Thinking.go.set()
        assert finished(gateway, last)["status"] == "completed"
        assert gateway.jobs()[id] == ("failed", "cancelled")
    assert fake.last()["asked"] == asked + 1


def test_an_instance_that_goes_down_meanwhile_gets_nothing(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url, recipe=THINKING) as gateway:
        id = begin(gateway)
        until(lambda: Thinking.running == 1)
        mortal.stop()
        until(lambda: not gateway.controller.cluster.instances)
        Thinking.go.set()
        until(lambda: Thinking.running == 0)
        assert gateway.get(f"/v1/responses/{id}").json()["status"] == "queued"
        mortal.start()
        assert finished(gateway, id)["status"] == "completed"
        assert mortal.last()["asked"] == 1


def test_stopping_does_not_wait_for_the_plan(serve: Serve) -> None:
    with serve(recipe=THINKING) as gateway:
        id = begin(gateway)
        until(lambda: Thinking.running == 1)
    assert Thinking.running == 1
    assert gateway.jobs() == {id: ("open", None)}, "the next start runs it"
    Thinking.go.set()
    until(lambda: Thinking.running == 0)


# ---- the loop itself


def instance(id: str) -> Instance:
    return Instance(id, "m", max_running=4, blocks_total=100, block_size=16, max_model_len=100)


def request(id: str) -> Request:
    return Request(id, "m", 5, 5, 0.0)


class Broken(Thinking):
    """A planner that fails once."""

    failed = False

    def make(self, cluster: Cluster, now: float) -> Plan:
        if not Broken.failed:
            Broken.failed = True
            raise ZeroDivisionError("no plan")
        return super().make(cluster, now)


async def planned(count: int, *later: Event) -> list[Command]:
    """Plan for one request, tell events while it is planned for; return the first `count` commands."""
    out: list[Command] = []
    loop = Planning(Controller(Thinking(), TaskLengths()), out.extend)
    async with tasks.running(loop.run):
        loop.note(InstanceUp(instance("a")))
        loop.note(Arrived(request("r0")))
        await asyncio.to_thread(until, lambda: Thinking.running == 1)
        for event in later:
            loop.note(event)
        Thinking.go.set()
        await asyncio.to_thread(until, lambda: len(out) >= count and Thinking.running == 0)
    return out


async def test_what_happens_meanwhile_leads_to_one_more_plan() -> None:
    sent = await planned(4, *(Arrived(request(f"r{i}")) for i in range(1, 4)))
    assert sent == [Send(f"r{i}", "a") for i in range(4)]
    assert Thinking.began == 2, "three events, one more plan"


async def test_an_instance_that_was_replaced_meanwhile_gets_nothing() -> None:
    assert await planned(1, InstanceDown("a"), InstanceUp(instance("b"))) == [Send("r0", "b")]


async def test_a_request_that_failed_meanwhile_is_not_sent() -> None:
    sent = await planned(1, Failed("r0", "cancelled"), Arrived(request("r1")))
    assert sent == [Send("r1", "a")]


async def test_a_planner_that_fails_is_logged_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    out: list[Command] = []
    loop = Planning(Controller(Broken(), TaskLengths()), out.extend)
    Thinking.go.set()
    async with tasks.running(loop.run):
        loop.note(InstanceUp(instance("a")))
        loop.note(Arrived(request("r0")))
        await asyncio.to_thread(until, lambda: "the planner failed" in caplog.text)
        loop.note(Arrived(request("r1")))
        await asyncio.to_thread(until, lambda: len(out) == 2)
    assert out == [Send("r0", "a"), Send("r1", "a")]


async def test_a_short_capacity_is_logged_and_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway.gateway")
    planner, out = Qlm(), list[Command]()
    planner.prepare()  # compiles
    loop = Planning(Controller(planner, TaskLengths()), out.extend)
    async with tasks.running(loop.run):
        loop.note(InstanceUp(instance("a")))
        for i in range(40):
            loop.note(Arrived(replace(request(f"r{i}"), arrival=clock.now(), slo=Slo(e2e=0.5))))
        await asyncio.to_thread(until, lambda: "capacity is short" in caplog.text)
        assert planner.gauges["short_requests"] > 30
        for i in range(40):
            loop.note(Failed(f"r{i}", "cancelled"))
        await asyncio.to_thread(until, lambda: "suffices again" in caplog.text)
    assert planner.gauges == {"request_groups": 0, "short_requests": 0, "short_seconds": 0}


def test_what_the_planner_sees_is_in_the_metrics(serve: Serve) -> None:
    with serve(recipe="qlm") as gateway, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(gateway.post, [gateway.chat() for _ in range(24)]))
        assert [answer.status_code for answer in answers] == [200] * 24
        page = gateway.get("/metrics").text
    assert "headway_plan_request_groups 0.0" in page
    assert "headway_plan_short_requests 0.0" in page
