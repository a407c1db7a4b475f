"""`headway gateway`, `controller` and `agent` as processes over a real RabbitMQ, with a FAKE engine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from headway.cli.main import main
from headway.config import Key, Wire, write
from headway.engines.vllm.process.launch import free_port
from tests.gateway.gateway import CHAT, DEAD, OPERATOR, SAY, WEB, Fake, configuration, until
from tests.gateway.test_request_ends import fakes
from tests.helpers import rabbitmq


@dataclass
class Cluster:
    """Processes that share one configuration file."""

    folder: Path
    file: Path
    url: str
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, role: str, *more: str) -> None:
        self.ports.setdefault(name, free_port())
        argv = [sys.executable, "-m", "headway.cli", role, "-c", str(self.file), *more]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*argv, "--port", str(self.ports[name])],
                stdout=log,
                stderr=log,
                env=os.environ | {"HEADWAY_RABBITMQ_URL": self.url},
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(30)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ready(self, name: str) -> bool:
        try:
            return WEB.get(f"http://127.0.0.1:{self.ports[name]}/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def chat(self, name: str, **fields: object) -> httpx.Response:
        body = {"model": "smollm2", "messages": SAY, "max_tokens": 8, **fields}
        return WEB.post(f"http://127.0.0.1:{self.ports[name]}{CHAT}", json=body, timeout=60)

    def leads(self, name: str) -> bool:
        return bool(WEB.get(f"http://127.0.0.1:{self.ports[name]}/ready").json()["leads"])


@contextmanager
def cluster(folder: Path, fake: Fake, gateways: Sequence[str] = ("g1",), dead: int = 0) -> Iterator[Cluster]:
    """Yield a controller, an agent and gateways that are ready. dead: engines that do not answer, beside the fake."""
    config = configuration(folder, fake.url)
    another = replace(config.engines[0], url=DEAD, start_timeout_s=0.2)
    config = replace(config, engines=(*config.engines, *[another] * dead))
    wire = Wire("env:HEADWAY_RABBITMQ_URL", f"test-{secrets.token_hex(6)}", lease_seconds=3.0)
    file = folder / "headway.toml"
    file.write_text(write(replace(config, wire=wire)))
    made = Cluster(folder, file, rabbitmq.the_url())
    try:
        made.start("c1", "controller")
        made.start("a1", "agent", "--name", "a1")
        until(lambda: made.log("a1").count("did not answer") >= 3 * dead, 60)
        for name in gateways:
            made.start(name, "gateway")
        until(lambda: all(made.ready(name) for name in made.running if not dead or name != "a1"), 60)
        yield made
    except BaseException:
        for name in made.ports:
            print(f"--- {name}", made.log(name)[-3000:])
        raise
    finally:
        for name in [*made.running]:
            made.kill(name)


def test_each_part_may_die_and_no_request_is_lost(tmp_path: Path, fake: Fake) -> None:
    with cluster(tmp_path, fake, ("g1", "g2")) as made, ThreadPoolExecutor(40) as pool:
        until(lambda: made.chat("g1").status_code == 200, 30)
        assert made.chat("g2").status_code == 200
        asked = fake.last()["asked"]
        held = [pool.submit(made.chat, name, **fakes(hold="parts")) for name in ("g1", "g2") for _ in range(18)]
        until(lambda: fake.last()["asked"] >= asked + 32, 30)
        made.start("c2", "controller")
        until(lambda: made.ready("c2"), 30)
        assert made.leads("c1")
        assert not made.leads("c2")
        made.kill("c1")
        until(lambda: made.leads("c2"), 30)
        made.kill("a1")
        made.start("a1", "agent", "--name", "a1")
        fake.release("parts")
        assert [one.result(60).status_code for one in held] == [200] * 36
        assert fake.last()["asked"] == asked + 36, "each was sent once"
        until(lambda: made.ready("a1"), 30)
        assert made.chat("g1").status_code == 200
        assert made.kill("g1", signal.SIGTERM) in (0, -signal.SIGTERM)
        assert made.chat("g2").status_code == 200
        assert made.kill("c2", signal.SIGTERM) == 0
        assert made.kill("a1", signal.SIGTERM) == 0


def test_a_gateway_is_ready_while_an_engine_cannot_start_and_an_agent_that_is_to_end_drains_the_other(
    tmp_path: Path, fake: Fake
) -> None:
    with cluster(tmp_path, fake, dead=1) as made, ThreadPoolExecutor(2) as pool:
        until(lambda: "ready: smollm2 at" in made.log("g1"))
        for drain_s, delay in ("5", 0.2), ('"streams"', 0.8):
            if "a1" not in made.running:
                made.file.write_text(made.file.read_text().replace("drain_s = 5", f"drain_s = {drain_s}"))
                made.start("a1", "agent", "--name", "a1")
            stream = pool.submit(made.chat, "g1", stream=True, **fakes(delay=delay))
            until(lambda: fake.last()["open"] == 1, 30)
            ended = pool.submit(made.kill, "a1", signal.SIGTERM)
            assert stream.result(30).text.count("fake ") == 8, "it has gone on to its end"
            assert ended.result(30) == 0
        assert made.kill("g1", signal.SIGTERM) in (0, -signal.SIGTERM)


def test_a_controller_s_state_needs_the_operator_s_key(tmp_path: Path) -> None:
    wire = Wire("env:HEADWAY_RABBITMQ_URL", f"test-{secrets.token_hex(6)}")
    config = replace(configuration(tmp_path, "http://127.0.0.1:9"), wire=wire, keys=(Key("sk-alpha-123", "alpha"),))
    file = tmp_path / "headway.toml"
    file.write_text(write(config))
    made = Cluster(tmp_path, file, rabbitmq.the_url())
    made.start("c1", "controller")
    try:
        until(lambda: made.ready("c1"), 60)
        url = f"http://127.0.0.1:{made.ports['c1']}"
        assert WEB.get(f"{url}/metrics").status_code == 401
        assert WEB.get(f"{url}/ready").json() == {"ready": True}
        assert WEB.get(f"{url}/metrics", headers=OPERATOR).status_code == 200
    finally:
        made.kill("c1")


@pytest.mark.parametrize("role", ["gateway", "controller", "agent"])
def test_without_a_url_the_error_names_its_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    monkeypatch.delenv("HEADWAY_RABBITMQ_URL", raising=False)
    file = tmp_path / "headway.toml"
    file.write_text(write(configuration(tmp_path, "http://127.0.0.1:9")))
    with pytest.raises(SystemExit) as ended:
        main([role, "-c", str(file)])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "its URL is not set" in said
    assert "HEADWAY_RABBITMQ_URL" in said
