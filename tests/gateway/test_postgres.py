"""Gateways on one queue in PostgreSQL: any answers a poll, and takes over what another one's death leaves."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.peers import gateway_argv
from benchmarks.real.peers import serving as process
from headway.cli import doctor
from headway.config import Broker, Postgres, Sqlite, write
from headway.engines.vllm.process.launch import free_port
from tests.gateway.gateway import CHAT, SAY, WEB, Fake, configuration, serving, until
from tests.gateway.test_request_ends import fakes
from tests.helpers import postgres

pytestmark = pytest.mark.usefixtures("own_state")


def queue(folder: Path, url: str | None = None, lease_seconds: float = 6.0) -> Broker:
    """Return a new queue; the file names the folder of logs, and nothing is in it."""
    address = postgres.fresh(url)
    settings = Postgres(address.url, address.schema, 2.0)
    return Broker("postgres", 24.0, lease_seconds, Sqlite(str(folder / "none")), settings)


def start(stack: ExitStack, folder: Path, fake: Fake, broker: Broker, **more: Any) -> Any:
    """Start a gateway in a process of its own; return it."""
    folder.mkdir(exist_ok=True)
    config = configuration(folder, fake.url, broker=broker, **more)
    config = replace(config, server=replace(config.server, port=free_port()))
    (folder / "headway.toml").write_text(write(config))
    return stack.enter_context(process("gateway", gateway_argv(folder), config.server.port, "/ready", folder))


@contextmanager
def two_ports(folder: Path, fake: Fake, broker: Broker) -> Iterator[tuple[int, int]]:
    """Run two gateways in this process."""
    config = configuration(folder, fake.url, broker=broker)
    with serving(config) as first, serving(config) as second:
        yield first.config.server.port, second.config.server.port


def begin(port: int, key: str | None = None, **fields: Any) -> str:
    body = {"model": "smollm2", "messages": SAY, "max_tokens": 8, "background": True, **fields}
    headers = {} if key is None else {"idempotency-key": key}
    answer = WEB.post(f"http://127.0.0.1:{port}{CHAT}", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def look(port: int, id: str) -> dict[str, Any]:
    answer = WEB.get(f"http://127.0.0.1:{port}/v1/responses/{id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def completed(port: int, id: str) -> bool:
    seen = look(port, id)
    assert seen["status"] in ("queued", "completed"), seen
    return seen["status"] == "completed"


def test_a_gateway_answers_for_another_and_takes_over_from_a_killed_one(fake: Fake, tmp_path: Path) -> None:
    broker, before = queue(tmp_path), fake.last()["asked"]
    with ExitStack() as stack:
        first, second = (start(stack, tmp_path / name, fake, broker) for name in ("first", "second"))
        done, mine = begin(first.port), begin(second.port)
        held = [begin(first.port, **fakes(hold="postgres")) for _ in range(3)]
        until(lambda: completed(second.port, done), 20)
        assert look(second.port, done) == look(first.port, done), "with the answer, byte for byte"
        until(lambda: completed(first.port, mine), 20)
        assert {look(second.port, id)["status"] for id in held} == {"queued"}
        until(lambda: fake.last()["asked"] == before + 5, 20)
        first.process.kill()
        until(lambda: fake.last()["asked"] == before + 8, 30)  # the other one runs what was held
        fake.release("postgres")
        for id in held:
            until(lambda id=id: completed(second.port, id), 30)
        assert look(second.port, done)["status"] == "completed", "what had ended stays as it was"
    assert fake.last()["asked"] == before + 8, "what was done or another's is not run again"


def test_a_request_that_is_sent_to_two_gateways_is_accepted_once(fake: Fake, tmp_path: Path) -> None:
    before = fake.last()["asked"]
    with two_ports(tmp_path, fake, queue(tmp_path)) as ports, ThreadPoolExecutor(8) as clients:
        ids = set(clients.map(lambda i: begin(ports[i % 2], "once"), range(16)))
        assert len(ids) == 1
        for port in ports:
            until(lambda port=port: completed(port, min(ids)), 20)
    assert fake.last()["asked"] == before + 1


def test_a_response_is_cancelled_at_another_gateway(fake: Fake, tmp_path: Path) -> None:
    with two_ports(tmp_path, fake, queue(tmp_path, lease_seconds=3.0)) as (first, second):
        held = begin(first, **fakes(hold="cancelled"))
        until(lambda: fake.last()["open"] == 1, 20)
        answer = WEB.post(f"http://127.0.0.1:{second}/v1/responses/{held}/cancel")
        assert answer.status_code == 200, answer.text
        assert look(first, held)["status"] == look(second, held)["status"] == "cancelled"
        until(lambda: fake.last()["open"] == 0, 20)


def test_a_server_that_is_restarted_loses_nothing(fake: Fake, own: postgres.PrivateServer, tmp_path: Path) -> None:
    broker = queue(tmp_path, own.url, lease_seconds=30.0)
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        port = int(gateway.url.rsplit(":", 1)[1])
        held = begin(port, **fakes(hold="restarted"))
        until(lambda: fake.last()["body"]["vllm_xargs"]["headway_id"] == held)
        own.stop(signal.SIGQUIT)
        until(lambda: gateway.get("/ready").status_code == 503)
        assert re.search("connection|server", gateway.get("/ready").json()["broker"])
        refused = gateway.post(gateway.chat())
        assert refused.status_code == 503
        assert "The broker is out" in refused.json()["error"]["message"]
        assert str(own.port) not in refused.text + gateway.get("/ready").text
        assert gateway.get(f"/v1/responses/{held}").status_code == 503
        fake.release("restarted")
        until(lambda: gateway.get("/ready").json()["ends_not_stored"] == 1)
        own.start()
        until(lambda: gateway.get("/ready").status_code == 200, 20)
        assert completed(port, held)
        assert gateway.post(gateway.chat()).status_code == 200


def test_what_doctor_says_of_the_server(fake: Fake, own: postgres.PrivateServer, tmp_path: Path) -> None:
    config = configuration(tmp_path, fake.url, broker=queue(tmp_path, own.url))
    (file := tmp_path / "headway.toml").write_text(write(config))

    def found() -> doctor.Finding:
        return next(one for one in doctor.examine(file) if one.what == "queue")

    assert found().state == "good"
    own.stop()
    assert found().state == "bad"
    assert "cannot be reached" in found().found
    assert postgres.PASSWORD not in found().found + found().mend
