"""Engines that hang: requests are computed elsewhere or again, once, and what has begun gets its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.config import Broker, Config, Engine, Server, Sqlite
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CLASSES, OPERATOR, SAY, Fake, Gateway, serving, until
from tests.gateway.hostile import Hostile
from tests.gateway.swapping import Swapping, make_model, use_fake_engines
from tests.gateway.test_request_ends import closed, events, fakes, hanging
from tests.gateway.test_status import families

SOON = {"health_timeout_s": 2.0}  # less, and a busy machine is late itself
PATIENCE = 40.0  # seconds for engines to start and stop on a machine with all cores busy


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process and all of its group until the block ends."""
    os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if psutil.pid_exists(pid):
            os.killpg(pid, signal.SIGCONT)


def pid(engine: Fake) -> int:
    assert engine.child is not None
    assert engine.child.process is not None
    return engine.child.process.pid


def test_requests_of_a_stopped_engine_are_computed_again(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url, engine=SOON) as gateway, ThreadPoolExecutor(2) as pool:
        ask = fakes(hold="again")
        asked = [pool.submit(gateway.post, gateway.chat(stream=stream, **ask)) for stream in (False, True)]
        until(lambda: mortal.last()["open"] == 2)
        with stopped(pid(mortal)):
            until(lambda: gateway.controller.queued == 2, PATIENCE)
            assert gateway.get("/ready").status_code == 503
        until(lambda: mortal.last()["aborted"] == 2, PATIENCE)  # what it was asked before is let go
        mortal.release("again")
        whole, streamed = (one.result() for one in asked)
        assert whole.json()["choices"][0]["message"]["content"] == "fake " * 8
        assert streamed.text.count("fake ") == 8
        assert events(streamed)[-1] == "[DONE]"
        assert mortal.last()["asked"] == 4, "each was run again once"
        assert [state for state, _ in until(lambda: closed(gateway))] == ["done", "done"]


def test_metrics_come_without_those_of_stopped_engines(serve: Serve, fake: Fake, mortal: Fake) -> None:
    """Both stopped ones are asked at once: one after the other they would outlast the test's patience."""
    late = {"health_timeout_s": 60.0, "silence_timeout_s": 60.0}
    with serve(mortal.url, mortal.url, fake.url, engine=late) as gateway:
        with stopped(pid(mortal)):
            found = families(gateway)
        assert [value for *_, value in found["headway_engine_up"]] == [1, 1, 1]
        scraped = {labels["instance"]: value for _, labels, value in found["headway_engine_scraped"]}
        assert scraped == {"e0": 0, "e1": 0, "e2": 1}
        assert {labels["instance"] for _, labels, _ in found["vllm:num_preemptions"]} == {"e2"}
        assert {value for *_, value in families(gateway)["headway_engine_scraped"]} == {1}


def test_requests_of_a_stopped_engine_are_computed_elsewhere(serve: Serve, fake: Fake, mortal: Fake) -> None:
    with serve(mortal.url, fake.url, engine=SOON) as gateway, ThreadPoolExecutor(4) as pool:
        before = fake.last()["asked"]
        asked = [pool.submit(gateway.post, gateway.chat(**fakes(hold="elsewhere"))) for _ in range(4)]
        until(lambda: mortal.last()["open"] + fake.last()["open"] == 4)
        assert mortal.last()["open"], "it has its share"
        with stopped(pid(mortal)):
            until(lambda: fake.last()["open"] == 4, PATIENCE)
            fake.release("elsewhere")
            assert [one.result().status_code for one in asked] == [200] * 4
        assert fake.last()["asked"] >= before + 4, "more, if this process was too late to read an answer in time"
        until(lambda: mortal.last()["open"] == 0, PATIENCE)
        assert {state for state, _ in until(lambda: closed(gateway))} == {"done"}


def test_a_stream_of_a_stopped_engine_ends_with_an_error(serve: Serve, mortal: Fake) -> None:
    slow = fakes(tokens=500, delay=0.05)
    options: dict[str, Any] = {"engine": SOON, "server": {"max_resumes": 0}}
    with serve(mortal.url, **options) as gateway, hanging(gateway, stream=True, max_tokens=500, **slow) as line:
        seen = b""
        while b"fake " not in seen:
            seen += line.recv(65536)
        with stopped(pid(mortal)):
            line.settimeout(PATIENCE)
            while b"[DONE]" not in seen:
                seen += line.recv(65536)
            state, reason = gateway.newest()
        error = seen.split(b"data: ")[-2]
        assert error.startswith(b'{"error": {"message": "The engine e0 went away.')
        assert (state, str(reason).split(":")[0]) == ("failed", "engine_gone")
        until(lambda: mortal.last()["aborted"] == 1, PATIENCE)
        assert gateway.post(gateway.chat(), timeout=PATIENCE).status_code == 200


def test_a_core_that_hangs_is_noticed_behind_a_server_that_is_well(serve: Serve) -> None:
    with (
        Hostile(scheduler=True).running() as engine,
        ThreadPoolExecutor(1) as pool,
        serve(engine.url, engine={"silence_timeout_s": 2.0}) as gateway,
    ):
        engine.thawed.clear()
        asked = pool.submit(gateway.post, gateway.chat(), timeout=PATIENCE)
        until(lambda: gateway.controller.queued == 1, PATIENCE)
        said = gateway.get("/ready", headers=OPERATOR).text
        assert "its core ended no iteration within 2 s" in said or "its first question" in said
        engine.thawed.set()
        assert asked.result().status_code == 200


def test_a_request_that_takes_too_long_gets_its_end(serve: Serve, fake: Fake) -> None:
    with serve(engine={"request_timeout_s": 1.0}) as gateway:
        answer = gateway.post(gateway.chat(**fakes(hold="ever")))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "engine_timeout"
        state, reason = gateway.newest()
        assert (state, str(reason).split(":")[0]) == ("failed", "engine_timeout")
        begun = gateway.post(gateway.chat(stream=True, max_tokens=500, **fakes(tokens=500, delay=0.1)))
        *tokens, error, done = events(begun)
        assert tokens
        assert (error["error"]["code"], done) == ("engine_timeout", "[DONE]")
        until(lambda: fake.last()["open"] == 0)
        assert gateway.get("/ready").status_code == 200, "the engine itself is well"
        assert gateway.post(gateway.chat()).status_code == 200


# ---- a child


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swapping]:
    """A gateway that has started its engine, a FAKE one, itself."""
    use_fake_engines(monkeypatch)
    engine = Engine(str(make_model(tmp_path, "a")), max_running=8, health_timeout_s=1.0)
    queue = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite"), "normal"))
    with serving(Config("slack", Server(), (engine,), broker=queue, classes=CLASSES)) as gateway:
        yield Swapping(**vars(gateway))


def test_a_child_that_hangs_is_ended_and_started_again(child: Swapping) -> None:
    old = child.engine.child.process.pid  # type: ignore[union-attr]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(_held, child, stream) for stream in (False, True)]
        until(lambda: child.fake("/last")["open"] == 2)
        with stopped(old):
            until(lambda: child.engine.restarts == 1 and child.engine.up.is_set(), PATIENCE)
        assert not psutil.pid_exists(old), "it cannot go on beside the new one"
        until(lambda: child.fake("/last")["open"] == 2, PATIENCE)
        child.fake("/release/child")
        whole, streamed = (one.result() for one in asked)
        assert whole.json()["choices"][0]["message"]["content"] == "fake " * 8
        assert streamed.text.count("fake ") == 8
        assert child.fake("/last")["asked"] == 2
        assert [state for state, _ in until(lambda: closed(child))] == ["done", "done"]


def _held(gateway: Gateway, stream: bool) -> Any:
    ask = {"model": "a", "messages": SAY, "max_tokens": 8, "stream": stream, **fakes(hold="child")}
    return gateway.post(ask, timeout=PATIENCE)
