"""Requests that would crash their engine are refused; those that engines died over are not run again."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.config import Broker, Engine, Sqlite
from headway.engines.vllm.fatal_fields import check_fields, fatal_fields, known_fields
from headway.engines.vllm.process.connection import EngineConnection
from headway.engines.vllm.process.limits import read_fatal
from headway.errors import RequestError
from tests.gateway import batches
from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, Fake, configuration, serving, until
from tests.gateway.test_background import begin, finished
from tests.gateway.test_request_ends import fakes

CHATTING: dict[str, Any] = {"messages": []}


def test_only_releases_and_devices_with_the_bug_are_in_the_table() -> None:
    assert fatal_fields("0.32.0", "cpu", ["bare workers"]) == ["seed"]
    assert fatal_fields("0.32.1", "cpu", ["drafts", "adapters"]) == ["top_k", "prompt_logprobs"]
    assert fatal_fields("0.32.0", "cuda", ["drafts", "adapters"]) == []
    assert fatal_fields("0.33.0", "cpu", ["drafts"]) == []
    assert known_fields(["seed", "of a later release"]) == ("seed",)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("seed", {"seed": 1}),
        ("seed", {"seed": 0, "temperature": 0.5}),
        ("seed", {"seed": "7", "temperature": "high"}),
        ("seed", {"seed": 7, "temperature": 10**400}),
        ("top_k", {"top_k": 5, "temperature": None}),
        ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("prompt_logprobs", {"echo": True, "logprobs": 1}),
        ("prompt_logprobs", {"echo": True} | CHATTING),
    ],
)
def test_what_would_crash_the_engine_is_refused(name: str, fields: dict[str, Any]) -> None:
    check_fields(fields, [])
    with pytest.raises(RequestError, match=name) as error:
        check_fields(fields, ["seed", "top_k", "prompt_logprobs"])
    assert (error.value.status, error.value.param) == (400, name)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": None},
        {"seed": -1},
        {"seed": 1, "temperature": 0},
        {"seed": 1, "temperature": "0.0"},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 5, "temperature": 0.0},
        {"echo": True},
        CHATTING,
    ],
)
def test_what_does_not_is_taken(fields: dict[str, Any]) -> None:
    check_fields(fields, ["seed", "top_k", "prompt_logprobs"])


@pytest.fixture
def fatal(tmp_path: Path) -> Fake:
    """An engine, not started yet, that says that a seed crashes it."""
    return Fake(tmp_path, options=("--fatal", "seed", "nonsense"))


def test_every_way_in_refuses_them(serve: Serve, fatal: Fake) -> None:
    try:
        fatal.start()
        with serve(fatal.url) as gateway:
            for more in ({}, {"stream": True}, {"background": True}):
                answer = gateway.post(gateway.chat(seed=1, **more))
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == ("seed", "unsupported_parameter")
            assert gateway.post(gateway.chat(seed=1, temperature=0)).status_code == 200
            seen = batches.ended(gateway, batches.begin(gateway, [batches.line("a", seed=1)]))
            assert seen["errors"]["data"][0]["code"] == "unsupported_parameter"
            assert fatal.last()["asked"] == 1
    finally:
        fatal.stop()


def test_one_that_was_accepted_before_the_engine_was_there(serve: Serve, fatal: Fake) -> None:
    try:
        with serve(fatal.url, ready=False) as gateway:
            id = begin(gateway, seed=1)
            fatal.start()
            assert "seed" in finished(gateway, id)["error"]["message"]
            assert fatal.last()["asked"] == 0
    finally:
        fatal.stop()


@pytest.mark.parametrize(("device", "status"), [("cpu", 400), (None, 200)])
def test_a_stock_engine_s_device_is_as_configured(serve: Serve, stock: Fake, device: str | None, status: int) -> None:
    with serve(stock.url, engine={"device": device}) as gateway:
        assert gateway.post(gateway.chat(seed=1)).status_code == status
        assert gateway.post(gateway.chat(top_k=5)).status_code == 200, "it has no drafts"
        assert gateway.post(gateway.chat(seed=1, temperature=0)).status_code == 200


@pytest.mark.parametrize(
    ("version", "page", "fields"),
    [
        ('{"version": "0.32.0"}', "", ("seed",)),
        ('{"version": "0.32.0"}', "vllm:spec_decode_num_drafts_total 0.0\n", ("seed", "top_k")),
        ('{"version": "0.32.0"}', "# TYPE vllm:lora_requests_info gauge\n", ("seed", "prompt_logprobs")),
        ('{"version": "0.33.0"}', "vllm:spec_decode_num_drafts_total 0.0\n", ()),
        ('{"version": 32}', "", ()),
        ("[]", "", ()),
        ("", "", ()),
    ],
)
async def test_what_a_stock_engine_tells_of_crashes_on_a_cpu(version: str, page: str, fields: tuple[str, ...]) -> None:
    engine = _Telling({"/version": version, "/metrics": page})
    assert await read_fatal(engine, Engine(url=engine.url, device="cpu"), None, 1.0) == fields
    assert await read_fatal(engine, Engine(url=engine.url), None, 1.0) == ()
    assert await read_fatal(engine, Engine(url=engine.url, device="cpu"), {"fatal": []}, 1.0) == (), "it knows better"


class _Telling(EngineConnection):
    """An engine that answers GET with these pages."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        super().__init__("e0", "http://127.0.0.1:1", 1.0, None)
        self._pages = pages

    async def get(self, path: str, seconds: float) -> bytes:
        return self._pages[path].encode()


def kill_twice(engine: Fake) -> None:
    """Let the engine die twice with the request that it holds, and start again after each death."""
    for _ in range(2):
        until(lambda: engine.last()["open"] == 1, 20)
        engine.stop()
        engine.start()


def test_a_request_that_kills_two_engines_kills_no_third(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url) as gateway, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.post, gateway.chat(**fakes(hold="death")))
        kill_twice(mortal)
        answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_killed")
        assert answer.headers["x-should-retry"] == "false"
        until(lambda: gateway.get("/ready").status_code == 200)
        assert gateway.post(gateway.chat()).status_code == 200
        assert mortal.last()["asked"] == 1, "the third engine has not seen it"
        assert gateway.metric('headway_engine_restarts_total{instance="e0"}') >= 2


def test_the_queue_remembers_it_over_restarts(tmp_path: Path, mortal: Fake) -> None:
    broker = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with serving(configuration(tmp_path, mortal.url, broker=broker)) as gateway:
        id = begin(gateway, **fakes(hold="death"))
        until(lambda: mortal.last()["open"] == 1)
        mortal.stop()
        until(lambda: gateway.controller.queued == 1)
    mortal.start()
    with serving(configuration(tmp_path, mortal.url, broker=broker)) as gateway:
        until(lambda: mortal.last()["open"] == 1)
        mortal.stop()
        assert "engine_killed" in str(until(lambda: gateway.jobs()[id][1]))


def test_one_whose_end_was_not_stored_is_not_run_again(tmp_path: Path, fake: Fake) -> None:
    """The gateway died between the second death and the end that it means."""
    with serving(configuration(tmp_path, DEAD), ready=False) as gateway:
        id = begin(gateway)
        for _ in range(2):
            gateway.do(gateway.inner.broker.attempt(id))
        broker = gateway.config.broker
    asked = fake.last()["asked"]
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        assert "engine_killed" in str(until(lambda: gateway.jobs()[id][1]))
        assert fake.last()["asked"] == asked
