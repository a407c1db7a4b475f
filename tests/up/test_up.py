"""`headway up` on a Ray cluster of two local nodes: parts find their nodes, move when one goes, and end."""

from __future__ import annotations

import os
import secrets
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray.cluster_utils import Cluster  # type: ignore[import-untyped, unused-ignore]

from headway.cluster.up.cluster import Actors, connected
from headway.cluster.up.parts import HOST, PYTHON, TEMPLATE, agents_of, parts_of, template, with_copies
from headway.cluster.up.supervisor import PartState
from headway.config import Config, Engine, Scale, Up, Wire, parse
from headway.config import Server as ServerConfig
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError, EngineError
from tests.gateway.gateway import CHAT, SAY, WEB, Fake, configuration, until
from tests.helpers import rabbitmq

NODE = "headway_node"  # custom resources of the nodes: NODE0, NODE1


def told(name: str, state: PartState | None) -> None:
    """Ignore it."""


def test_parts_ask_for_what_they_need() -> None:
    resources = {"gpus": 2.0, "memory_gib": 3.0, "a100": 0.5}
    config = Config(engines=(Engine(), Engine(resources=resources)), up=Up(gateways=2, controllers=1, cpus=0.5))
    found = {part.name: part for part in parts_of(config)}
    assert list(found) == ["agent-0", "agent-1", "controller-0", "gateway-0", "gateway-1"]
    assert found["agent-1"].needs() == "1 CPU, 2 GPU, 3 GiB, 0.5 a100"
    assert found["gateway-1"].needs() == "0.5 CPU, 1 GiB"
    assert [found[name].port for name in ("gateway-0", "gateway-1")] == [8000, 8001]
    assert found["agent-0"].digest("a") != found["agent-0"].digest("b") != found["agent-1"].digest("b")


def test_parts_listen_where_others_reach_them() -> None:
    config = Config()
    assert template(config).count(f'host = "{HOST}"') == 2
    everywhere = replace(config, server=ServerConfig(host="0.0.0.0"))
    assert template(everywhere).count('host = "0.0.0.0"') == 1


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="need RabbitMQ"), connected(Config()):
        pass
    wired = Config(wire=Wire("env:HEADWAY_NOT_SET"), up=Up(address="127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"no Ray cluster at '127.0.0.1:1'.*ray start"), connected(wired):
        pass
    with pytest.raises(ConfigError, match="names the environment variable HEADWAY_NOT_SET"):
        Actors(ray, wired)


def test_a_model_that_scales_has_copies_and_a_command() -> None:
    scale = {"a": Scale(max=3, starts_engines=True), "b": Scale(max=3, command=("true",)), "c": Scale(max=4)}
    engines = (Engine("/a", gpus=1, cards="0", id="first"), Engine("/b"), Engine("/a", url="http://x", served_name="a"))
    config = with_copies(Config(engines=engines, scale=scale))
    assert list(config.named) == ["first", "e1", "e2", "e3"]
    assert config.engines[3] == replace(engines[0], id=None, cards="1")
    assert [part.name for part in agents_of(config, "a")] == ["agent-0", "agent-2", "agent-3"]
    again = parse(tomllib.loads(template(config)))
    assert not again.scale["a"].starts_engines
    command = f"{PYTHON} -m headway.cli up --config {TEMPLATE} --engines {{model}}={{wanted}}"
    assert " ".join(again.scale["a"].command or ()) == command
    assert again.scale["b"] == scale["b"]
    assert template(with_copies(again)) == template(config), "so that its parts are those that run"


def test_a_model_that_scales_begins_with_its_configured_agents_and_keeps_those_that_run() -> None:
    engines = (Engine("/a"), Engine("/b"), Engine("/a"))
    config = Config(engines=engines, scale={"a": Scale(max=4, starts_engines=True)}, up=Up(gateways=1, controllers=1))
    rest = {"agent-1", "controller-0", "gateway-0"}
    for running, agents in (({"agent-1"}, {"agent-0", "agent-2"}), ({"agent-3"}, {"agent-3"})):
        there = SimpleNamespace(util=SimpleNamespace(list_named_actors=lambda names=running: [*names]))
        assert {part.name for part in Actors(there, config).parts()} == rest | agents


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        root = str(Path(__file__).parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
        cluster = Cluster(initialize_head=True, head_node_args={**node(0), "include_dashboard": False})
        yield cluster
        cluster.shutdown()


def node(number: int) -> dict[str, Any]:
    """Return the options of a node. Ray starts a worker process for each CPU before any is asked for."""
    return {"num_cpus": 3, "object_store_memory": 80 << 20, "resources": {f"{NODE}{number}": 1}}


@pytest.fixture
def nodes(ray_cluster: Cluster) -> Cluster:
    """The cluster, with both of its nodes."""
    if not ray_cluster.worker_nodes:
        ray_cluster.add_node(**node(1))
    return ray_cluster


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Fake]]:
    started = [Fake(tmp_path_factory.mktemp("fake")).start() for _ in range(2)]
    yield started
    for fake in started:
        fake.stop()


def on_nodes(nodes: Cluster, fakes: list[Fake], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return a configuration of an engine on each node."""
    monkeypatch.setenv("HEADWAY_RABBITMQ_URL", rabbitmq.the_url())
    wire = Wire("env:HEADWAY_RABBITMQ_URL", f"test-{secrets.token_hex(6)}", lease_seconds=3.0)
    base = configuration(folder, fakes[0].url)
    engines = tuple(
        replace(base.engines[0], url=fake.url, resources={"cpus": 0.5, f"{NODE}{i}": 1.0})
        for i, fake in enumerate(fakes)
    )
    up = Up(nodes.address, gateways=1, controllers=1, cpus=0.5, memory_gib=0.1)
    return replace(base, wire=wire, engines=engines, up=up, server=replace(base.server, port=free_port()))


def chat(state: PartState) -> int:
    body = {"model": "smollm2", "messages": SAY, "max_tokens": 8}
    return int(WEB.post(f"http://{state.host}:{state.port}{CHAT}", json=body, timeout=60).status_code)


def test_agents_follow_the_number_wanted(
    nodes: Cluster, fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To none while nothing comes, and back for a request that waits; by hand; as far as there are nodes."""
    config = on_nodes(nodes, fakes, tmp_path, monkeypatch)
    config = replace(config, scale={"smollm2": Scale(max=2, min=0, start_s=1.0, starts_engines=True)})
    with connected(config, ask_s=3.0) as actors:
        agents = lambda: {name for name in actors._names() if name.startswith("agent")}  # noqa: E731

        def both() -> bool:
            """Two agents answer; on a busy machine a process takes longer to start than `ask_s`."""
            with suppress(EngineError):
                actors.scale("smollm2", 2)
                return True
            return False

        try:
            states = actors.up(told)
            until(lambda: not agents(), 60)
            assert chat(states["gateway-0"]) == 200
            assert agents() == {"agent-0"}
            until(lambda: not agents(), 60)
            until(both, 60)
            assert agents() == {"agent-0", "agent-1"}
            nodes.remove_node(*nodes.worker_nodes, allow_graceful=False)
            with pytest.raises(EngineError, match=r"agent-1 has no node yet; it needs 0.5 CPU, 1 headway_node1"):
                until(lambda: actors.scale("smollm2", 2), 60)

            def left() -> bool:
                with suppress(EngineError):  # until Ray knows that the node is gone
                    actors.scale("smollm2", 1)
                return agents() == {"agent-0"}

            until(left, 90)
            with pytest.raises(ConfigError, match="has 2 engines of 'smollm2', not 3"):
                actors.scale("smollm2", 3)
        finally:
            actors.down(told)


def test_an_agent_that_does_not_answer_is_not_killed_and_one_without_a_node_is(
    nodes: Cluster, fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long agents may drain."""
    config = on_nodes(nodes, fakes, tmp_path, monkeypatch)
    nowhere = replace(config.engines[0], resources={"nowhere": 1.0})
    config = replace(config, engines=(*config.engines, nowhere), server=replace(config.server, drain_s="streams"))
    with connected(config, ask_s=3.0) as actors:
        try:
            for part in actors.parts()[:3]:
                actors._ensure(part)
            pid = actors._ready(actors.parts()[1:2], told)["agent-1"].pid
            supervisor = psutil.Process(pid).parent()
            supervisor.suspend()
            try:
                with pytest.raises(EngineError, match="agent-1 must stop, but does not answer"):
                    actors.scale("smollm2", 1)
                assert psutil.pid_exists(pid)
            finally:
                supervisor.resume()
            until(lambda: actors._names() == ["agent-0"], 60)
            actors._ensure(actors.parts()[2])
        finally:
            actors.down(told)


def test_parts_move_when_a_node_goes_and_end_together(
    nodes: Cluster, fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_nodes(nodes, fakes, tmp_path, monkeypatch)
    engines = config.engines
    with connected(config, ask_s=3.0) as actors:
        try:
            first = actors.up(told)
            assert set(first) == {"agent-0", "agent-1", "controller-0", "gateway-0"}
            assert chat(first["gateway-0"]) == 200
            again = actors.up(told)
            assert {name: one.pid for name, one in again.items()} == {name: one.pid for name, one in first.items()}
            psutil.Process(first["controller-0"].pid).kill()
            until(lambda: actors.up(told)["controller-0"].restarts == 1, 60)
            until(lambda: chat(first["gateway-0"]) == 200, 30)
            nodes.remove_node(*nodes.worker_nodes, allow_graceful=False)
            until(lambda: not psutil.pid_exists(first["agent-1"].pid), 60)
            assert chat(first["gateway-0"]) == 200, "by the other engine"
            nodes.add_node(**node(1))
            moved = actors.up(told)["agent-1"]
            assert moved.pid != first["agent-1"].pid
            less = Actors(ray, replace(config, engines=engines[:1]))
            after = less.up(told)
            assert set(after) == {"agent-0", "controller-0", "gateway-0"}
            assert after["gateway-0"].digest != first["gateway-0"].digest
            assert chat(after["gateway-0"]) == 200
        finally:
            actors.down(told)
        pids = {one.pid for one in (*first.values(), *after.values(), moved)}
        deadline = time.monotonic() + 20
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
