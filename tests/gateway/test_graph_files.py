"""Demand graphs on disk: kept over restarts, one file per tenant and application, damaged ones set aside."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from headway.config import Broker, Config, Sqlite
from headway.errors import ConfigError
from headway.gateway.control.graph_files import GraphFiles, keep_graphs, read
from headway.policy.apps.demand import SHARED, Knowledge
from headway.policy.apps.graph import Graph, Visit, from_json
from tests.gateway.conftest import Serve
from tests.gateway.gateway import until


def graph(app: str = "agent", runs: int = 3) -> Graph:
    learned = Graph(app)
    for i in range(runs):
        learned.learn([Visit("plan", prompt=100.0 + i, output=20.0, parallel=1), Visit("tool", "web", seconds=2.0)])
    return learned


NAMES = [
    ("t", "agent"),
    ("t", "../../etc/passwd"),
    ("../x", "agent"),
    ("", "agent"),
    ("t", "a" * 128),
    ("t", "a" * 127 + "b"),
    ("t", "é \x00/"),
    ("T", "Agent"),
]


def test_every_tenant_and_application_has_a_file_in_the_directory(tmp_path: Path) -> None:
    files = GraphFiles(tmp_path / "graphs")
    for i, (tenant, app) in enumerate(NAMES):
        files.save(tenant, graph(app, i + 1))
    assert {key: one.runs for key, one in files.load().items()} == {key: i + 1 for i, key in enumerate(NAMES)}
    assert {path.parent for path in tmp_path.rglob("*.json")} == {tmp_path / "graphs"}
    assert not list(tmp_path.glob("*.json"))


def test_a_graph_survives_unchanged(tmp_path: Path) -> None:
    files = GraphFiles(tmp_path)
    files.save("t", graph())
    assert files.load()["t", "agent"].to_json() == graph().to_json()
    tenant, found = read(files.path("t", "agent"))
    assert (tenant, found.runs) == ("t", 3)


DAMAGED = {
    "empty": "",
    "half": json.dumps(graph().to_json())[:200],
    "not JSON": "hello",
    "a list": "[]",
    "deep": "[" * 100_000,
    "another version": json.dumps(graph().to_json() | {"version": 99}),
    "no units": json.dumps({"version": 1, "app": "agent", "runs": 1, "starts": []}),
    "an edge to nowhere": json.dumps(graph().to_json()).replace('"tool"]', '"gone"]'),
    "infinite": json.dumps(graph().to_json() | {"runs": math.inf}),
    "an ordinal of a million": json.dumps(graph().to_json()).replace("2.0, 0,", "2.0, 1000000,"),
    "negative": json.dumps(graph().to_json()).replace("2.0, 0,", "-2.0, 0,"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_set_aside(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    files = GraphFiles(tmp_path)
    files.save("t", graph("good"))
    bad = files.path("t", "agent")
    assert DAMAGED[what] != json.dumps(graph().to_json())
    bad.write_text(DAMAGED[what])
    assert list(files.load()) == [("t", "good")]
    assert not bad.exists()
    assert bad.with_name(bad.name + ".damaged").read_text() == DAMAGED[what]
    assert "headway apps export" in caplog.text
    assert "set aside" in caplog.text


async def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    files = GraphFiles(tmp_path)
    for app in ("old", "new"):
        files.save("t", graph(app))
    before = {path: path.stat().st_mtime_ns for path in files.paths()}
    knowledge = Knowledge()
    async with keep_graphs(knowledge, tmp_path):
        assert set(knowledge.graphs) == {("t", "old"), ("t", "new")}
        knowledge.learn("t", "new", [Visit("plan", prompt=1.0, output=1.0, parallel=1)])
    after = {path: path.stat().st_mtime_ns for path in files.paths()}
    assert [path for path in after if after[path] != before[path]] == [files.path("t", "new")]
    assert files.load()["t", "new"].runs == 4


async def test_a_tenant_that_makes_up_applications_forgets_its_own_and_fills_no_disk(tmp_path: Path) -> None:
    knowledge, visits = Knowledge(), [Visit("plan", prompt=1.0, output=1.0, parallel=1)]
    knowledge.learn("quiet", "agent", visits)
    async with keep_graphs(knowledge, tmp_path):
        for i in range(1000):
            knowledge.learn("loud", f"a{i}", visits)
    async with keep_graphs(knowledge, tmp_path):
        for i in range(1000, 1100):
            knowledge.learn("loud", f"a{i}", visits)
    found = GraphFiles(tmp_path).load()
    assert len(found) == len(knowledge.graphs) == 1024
    assert ("quiet", "agent") in found
    assert ("loud", "a0") not in found


async def test_a_disk_that_refuses_does_not_end_the_gateway(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    knowledge = Knowledge()
    with caplog.at_level(logging.ERROR):
        async with keep_graphs(knowledge, tmp_path / "file" / "graphs"):
            knowledge.put(SHARED, graph())
    assert "apps.dir" in caplog.text


async def test_nothing_is_kept_without_a_directory_or_a_planner_that_learns(tmp_path: Path) -> None:
    async with keep_graphs(None, tmp_path / "graphs"), keep_graphs(Knowledge(), None):
        pass
    assert GraphFiles(tmp_path / "graphs").paths() == []


def test_a_client_that_makes_up_units_does_not_let_a_graph_grow() -> None:
    learned = Graph("agent")
    for i in range(500):
        learned.learn([Visit(f"u{i}-{k}", prompt=1.0, output=1.0, parallel=1) for k in range(3)])
    assert len(learned.units) == 256
    assert from_json(json.dumps(learned.to_json()), "here").to_json() == learned.to_json()


def test_where_graphs_are_kept(tmp_path: Path) -> None:
    queue = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    assert Config(broker=queue).apps_dir == tmp_path / "queue.apps"
    assert Config(broker=Broker("memory")).apps_dir is None


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError, match="is larger than"):
        read(big)


def test_a_gateway_learns_and_a_new_one_knows(serve: Serve) -> None:
    final = {"x-headway-app": "agent", "x-headway-run": "r1", "x-headway-run-final": "true"}
    with serve(recipe="hermes") as gateway:
        gateway.post(gateway.chat(), headers=final)
        until(lambda: gateway.get("/v1/apps").json()["data"][0]["learned_runs"] == 1)
        queue, folder = gateway.config.broker, gateway.config.apps_dir
    assert folder is not None
    assert {key for key, _ in GraphFiles(folder).load().items()} == {("default", "agent")}
    with serve(recipe="hermes", broker=queue) as gateway:
        assert gateway.get("/v1/apps").json()["data"][0]["learned_runs"] == 1
