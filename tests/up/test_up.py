"""`headway up` on a Ray cluster of two local nodes: parts find their nodes, move when one goes, and end."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray.cluster_utils import Cluster  # type: ignore[import-untyped, unused-ignore]

from headway.cluster.up.cluster import Actors, connected
from headway.cluster.up.parts import HOST, parts_of, template
from headway.cluster.up.supervisor import PartState
from headway.config import Config, Engine, Up, Wire
from headway.config import Server as ServerConfig
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
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


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    options = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "resources": {f"{NODE}0": 1}})
    del options["include_dashboard"]
    cluster.second = cluster.add_node(**options, resources={f"{NODE}1": 1})
    cluster.another = lambda: cluster.add_node(**options, resources={f"{NODE}1": 1})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[list[Fake]]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    started = [Fake(folder).start() for folder in folders]
    yield started
    for fake in started:
        fake.stop()


def test_parts_move_when_a_node_goes_and_end_together(
    nodes: Cluster, fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_RABBITMQ_URL", rabbitmq.the_url())
    wire = Wire("env:HEADWAY_RABBITMQ_URL", f"test-{secrets.token_hex(6)}", lease_seconds=3.0)
    base = configuration(tmp_path, fakes[0].url)
    engines = tuple(
        replace(base.engines[0], url=fake.url, resources={"cpus": 0.5, f"{NODE}{i}": 1.0})
        for i, fake in enumerate(fakes)
    )
    up = Up(nodes.address, gateways=1, controllers=1, cpus=0.5, memory_gib=0.1)
    server = replace(base.server, port=free_port())
    config = replace(base, wire=wire, engines=engines, up=up, server=server)

    def chat(state: PartState) -> int:
        body = {"model": "smollm2", "messages": SAY, "max_tokens": 8}
        return int(WEB.post(f"http://{state.host}:{state.port}{CHAT}", json=body, timeout=30).status_code)

    with connected(config) as actors:
        try:
            first = actors.up(told)
            assert set(first) == {"agent-0", "agent-1", "controller-0", "gateway-0"}
            assert chat(first["gateway-0"]) == 200
            again = actors.up(told)
            assert {name: one.pid for name, one in again.items()} == {name: one.pid for name, one in first.items()}
            psutil.Process(first["controller-0"].pid).kill()
            until(lambda: actors.up(told)["controller-0"].restarts == 1, 60)
            until(lambda: chat(first["gateway-0"]) == 200, 30)
            nodes.remove_node(nodes.second, allow_graceful=False)
            until(lambda: not psutil.pid_exists(first["agent-1"].pid), 60)
            assert chat(first["gateway-0"]) == 200, "by the other engine"
            nodes.another()
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
