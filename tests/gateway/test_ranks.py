"""A rank travels: with `Send` in the request's metadata, with `Rerank` in a control message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.real.planning_overhead import ByArrival
from headway.engines.vllm.process.client import VllmEngine
from headway.errors import EngineError
from headway.policy.core.cluster import Cluster
from headway.policy.recipes.default import DEFAULT
from headway.types import Plan, Rerank
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until


class Ranked(ByArrival):
    """Sends every request with rank 7."""

    def plan(self, cluster: Cluster, now: float) -> Plan:
        plan = super().plan(cluster, now)
        return replace(plan, send=[replace(send, rank=7.0) for send in plan.send])


RECIPE = replace(DEFAULT["vllm"], name="ranked", planner=Ranked)


def test_the_rank_of_a_send_is_in_the_metadata(serve: Serve, fake: Fake) -> None:
    with serve(recipe="tests.gateway.test_ranks:RECIPE") as gateway:
        assert gateway.post(gateway.chat()).status_code == 200
        assert fake.last()["body"]["vllm_xargs"]["headway_urgency"] == 7.0


def rerank(gateway: Gateway, *ranks: dict[str, float]) -> None:
    """Execute one `Rerank` each, all before the event loop goes on."""

    async def execute() -> None:
        gateway.inner.dispatcher.control.execute([Rerank("e0", one) for one in ranks])

    gateway.do(execute())


def test_the_newest_ranks_reach_the_engine_in_one_message(gateway: Gateway, engines: Callable[..., None]) -> None:
    messages: list[Any] = []

    async def control(_: VllmEngine, message: dict[str, Any], seconds: float = 10) -> dict[str, Any]:
        if message["op"] != "state":  # whether it is alive is asked all the time
            messages.append((message["op"], message["values"]))
        return {}

    engines("control", control)
    rerank(gateway, {"hw-1": 1.0}, {"hw-1": 2.0, "hw-2": 3.0})
    until(lambda: messages)
    assert messages == [("urgency", {"hw-1": 2.0, "hw-2": 3.0})]


def test_an_engine_that_refuses_ranks_is_logged_and_asked_again(
    gateway: Gateway, engines: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Mapping[str, float]] = []

    async def refuse(_: VllmEngine, ranks: Mapping[str, float]) -> None:
        told.append(ranks)
        raise EngineError("No scheduler here.", "Use another engine.")

    engines("rerank", refuse)
    rerank(gateway, {"hw-1": 1.0})
    until(lambda: "No scheduler here" in caplog.text)
    rerank(gateway, {"hw-1": 2.0})
    until(lambda: len(told) == 2)
    assert told[1] == {"hw-1": 2.0}
