"""The benchmark on Ray nodes: what it asks of a node, what it counts as lost, how clients try again.

Its parts are tried elsewhere: `headway up` on two Ray nodes in tests/up, deaths in tests/gateway/roles.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from benchmarks.real import nodes
from benchmarks.real.fleet import FleetTrial
from headway.cluster.up.cluster import Actors
from headway.cluster.up.parts import parts_of
from headway.config import Model
from headway.engines.vllm.process.launch import free_port
from headway.types import Slo
from headway.whatif.load import generator
from headway.whatif.load.records import Call, Record
from headway.whatif.output.results import save
from tests.gateway.gateway import Fake, configuration, serving

MODELS = (Model("/m/smollm2", "a"), Model("/m/near", "b"), Model("/m/short", "c"))
TRIAL = FleetTrial(MODELS, ("headway",), rate=1.0, duration=30.0)
CALL = Call(0.0, "fast", "Say something.", 8, slo=Slo(e2e=20.0))
GONE = Record("fast", 1.0, 1.0, None, None, 0, 0, np.array([], np.float32), None, "disconnected: x", Slo(e2e=20.0))
GOOD = replace(GONE, first=2.0, last=2.0, status=200, error=None, output_tokens=8)


def test_each_engine_asks_for_a_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_RABBITMQ_URL", "amqp://x")
    monkeypatch.setenv("HEADWAY_POSTGRES_URL", "postgresql://x")
    config = nodes.configuration(TRIAL, "nodes", "10.0.0.1:6379")
    Actors(ray, config)  # all variables are known
    agents = [part for part in parts_of(config) if part.name.startswith("agent")]
    assert [dict(part.custom) for part in agents] == [{"headway_node_0": 1.0}, {"headway_node_1": 1.0}]
    assert [engine.name for engine in config.engines] == ["a", "b"]
    assert set(config.engines[0].served) == {"a", "b", "c"}


def test_what_is_lost_and_what_is_answered_twice() -> None:
    seen = nodes.NodesSeen([GOOD, GONE, GOOD])
    seen.history.looks["x"] = [("queued", ""), ("completed", "1"), ("completed", "2")]
    seen.history.looks["y"] = [("queued", "")]
    assert seen.lost == 2
    found = {(row.id, row.setting): row.ours for row in nodes.rows("headway", seen)}
    assert found["nodes.lost", "all"] == 2
    assert found["nodes.twice", "all"] == 1
    assert found["nodes.attainment", "fast"] == pytest.approx(200 / 3)


def test_it_is_written(tmp_path: Path) -> None:
    seen = nodes.NodesSeen([GOOD], kills=[(5.0, "agent")])
    save(nodes.main.report(nodes.result(TRIAL, seen)), tmp_path, {"nodes": nodes.plot(seen)})
    assert json.loads((tmp_path / "report.json").read_text())["bench"] == "nodes"
    assert "agent after 5 s" in (tmp_path / "report.html").read_text()


def test_clients_go_to_the_other_gateway_when_one_is_gone(tmp_path: Path) -> None:
    seen, call = nodes.NodesSeen(), replace(CALL, model="smollm2", tier="chat")

    async def send(urls: list[str]) -> None:
        async with generator.session(4) as http:
            start = asyncio.get_running_loop().time()
            await nodes._foreground(http, urls, 0, call, start, seen)
            await nodes._background(http, urls, 0, replace(call, tier="batch"), start, seen)
        await nodes._collect(urls[1:], seen)

    fake = Fake(tmp_path).start()
    try:
        with serving(configuration(tmp_path, fake.url)) as gateway:
            asyncio.run(send([f"http://127.0.0.1:{free_port()}", gateway.url]))
    finally:
        fake.stop()
    assert [record.ok for record in seen.records] == [True]
    assert seen.again == 2
    assert (len(seen.history.looks), seen.lost, seen.verdict.twice) == (1, 0, 0)
