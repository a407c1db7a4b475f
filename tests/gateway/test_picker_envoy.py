"""The endpoint picker behind a real Envoy, which forwards to FAKE engines (`make envoy`)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.config import Picker
from headway.engines.vllm.process.launch import free_port
from testing.servers import envoy
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, WEB, Fake, Gateway, until
from tests.gateway.test_request_ends import events, fakes
from tests.gateway.test_stop import stop

pytestmark = pytest.mark.skipif(envoy.PROGRAM is None, reason="no envoy here: make envoy")
Proxied = Callable[..., AbstractContextManager[tuple[Gateway, str]]]


def address(engine: Fake) -> tuple[str, int]:
    return "127.0.0.1", engine.port


@pytest.fixture
def proxied(serve: Serve, fake: Fake, tmp_path: Path) -> Proxied:
    """Return what opens a gateway with a picker, and an Envoy in front of it; yields both, Envoy by its URL."""

    @contextmanager
    def open(*engines: Fake, **fields: Any) -> Iterator[tuple[Gateway, str]]:
        port, engines = free_port(), engines or (fake,)
        with (
            serve(*(one.url for one in engines), picker=Picker(port), **fields) as gateway,
            envoy.running(tmp_path, port, [address(one) for one in engines]) as url,
        ):
            until(gateway.all_up)
            until(lambda: models(url) == 200, 30)
            yield gateway, url

    return open


def models(url: str) -> int | None:
    """Return the status of a request for the models, None = Envoy does not listen yet."""
    try:
        return WEB.get(f"{url}/v1/models").status_code
    except httpx.HTTPError:
        return None


def ask(gateway: Gateway, url: str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    return WEB.post(url + CHAT, json=gateway.chat(**fields), headers=headers)


def test_answers_and_streams_pass_envoy_and_are_accounted(proxied: Proxied, fake: Fake) -> None:
    with proxied() as (gateway, url):
        mine = {"authorization": "Bearer sk-client", "x-data-parallel-rank": "1", "x-session-id": "s", "cookie": "c"}
        answer = ask(gateway, url, headers=mine)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
        assert answer.headers["x-headway-class"] == "default"
        seen = fake.last()["headers"]
        assert seen["x-gateway-destination-endpoint"] == f"127.0.0.1:{fake.port}"
        assert not mine.keys() & seen.keys()
        assert fake.last()["body"]["vllm_xargs"]["headway_id"] == answer.headers["x-request-id"]
        stream = ask(gateway, url, stream=True)
        assert (stream.status_code, events(stream)[-1]) == (200, "[DONE]")
        until(lambda: gateway.metric('headway_tokens_total{kind="output"') == 16)
        assert [end for end, _ in gateway.jobs().values()] == ["done", "done"]
        translated = WEB.post(f"{url}/v1/messages", json=gateway.chat())
        assert translated.json()["type"] == "message"
        assert fake.last()["path"] == CHAT


def test_a_large_body_and_a_long_stream_pass(proxied: Proxied) -> None:
    with proxied(server={"max_body_kib": 4096}) as (gateway, url):
        text = "word " * 200_000
        answer = ask(gateway, url, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=64)
        assert answer.status_code == 200
        stream = ask(gateway, url, stream=True, **(fakes(tokens=2000) | {"max_tokens": 2000}))
        assert len(events(stream)) >= 2000
        refused = WEB.post(url + CHAT, content=b" " * 5_000_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


def test_requests_wait_in_envoy_until_an_engine_has_room(proxied: Proxied, fake: Fake) -> None:
    """Also for longer than Envoy's `message_timeout`, 0.2 s unless configured."""
    with proxied(recipe="edf", engine={"max_running": 1}) as (gateway, url), ThreadPoolExecutor(8) as pool:
        window = gateway.controller.cluster.instances["e0"].window
        held = [pool.submit(ask, gateway, url, **fakes(hold="envoy")) for _ in range(window)]
        until(lambda: fake.last()["open"] == window)
        batch = pool.submit(ask, gateway, url, service_tier="batch")
        until(lambda: gateway.controller.queued == 1)
        urgent = pool.submit(ask, gateway, url, service_tier="chat")
        assert urgent.result(10).status_code == 200  # it goes before what is held
        time.sleep(1.0)
        assert not batch.done()
        assert gateway.controller.queued == 1
        fake.release("envoy")
        assert [one.result(10).status_code for one in (*held, batch)] == [200] * (window + 1)


def test_a_client_that_leaves_frees_its_place(proxied: Proxied, fake: Fake) -> None:
    with proxied(recipe="edf", engine={"max_running": 1}) as (gateway, url):
        before = fake.last()["aborted"]

        async def leave() -> None:
            async with httpx.AsyncClient() as web:
                body = gateway.chat(stream=True, **fakes(hold="gone"))
                asking = [asyncio.create_task(web.post(url + CHAT, json=body, timeout=30)) for _ in range(4)]
                await asyncio.to_thread(until, lambda: len(gateway.controller.requests) == 4)
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

        asyncio.run(leave())
        until(lambda: not gateway.controller.requests)
        until(lambda: fake.last()["open"] == 0)
        assert fake.last()["aborted"] > before
        assert {reason for _, reason in gateway.jobs().values()} == {"client_gone: disconnected"}
        assert ask(gateway, url).status_code == 200


def test_only_endpoints_of_the_subset_get_requests(proxied: Proxied, fake: Fake, others: list[Fake]) -> None:
    with proxied(fake, *others) as (gateway, url):
        for one in others:
            before = one.last()["asked"]
            answers = [ask(gateway, url, headers={envoy.SUBSET: f"127.0.0.1:{one.port}"}) for _ in range(5)]
            assert [answer.status_code for answer in answers] == [200] * 5
            assert one.last()["asked"] == before + 5
        none = ask(gateway, url, headers={envoy.SUBSET: "127.0.0.1:1"})
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_endpoint")


def test_errors_are_in_openais_shape(proxied: Proxied, mortal: Fake) -> None:
    with proxied(mortal) as (gateway, url):
        for content in (b"{", None):
            bad = WEB.post(url + CHAT, content=content)
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_json")
        refused = ask(gateway, url, **fakes(end="400"))
        assert (refused.status_code, "error" in refused.json()) == (400, True)
        failed = ask(gateway, url, stream=True, **fakes(end="error"))
        assert "error" in json.dumps(events(failed))
        mortal.stop()
        answer = ask(gateway, url)
        assert (answer.status_code, "error" in answer.json()) == (503, True)
        until(lambda: ask(gateway, url).json()["error"]["code"] == "no_endpoint")


def test_an_envoy_that_does_not_stream_bodies_is_told_so(serve: Serve, fake: Fake, tmp_path: Path) -> None:
    port = free_port()
    with serve(picker=Picker(port)) as gateway, envoy.running(tmp_path, port, [address(fake)], body="NONE") as url:
        until(lambda: models(url) == 500, 30)
        answer = ask(gateway, url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "processing_mode")


def test_five_hundred_streams_at_once(proxied: Proxied) -> None:
    with proxied(engine={"max_running": 512}, server={"max_queued": 1000}) as (gateway, url):

        async def all_of_them() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=500)
            async with httpx.AsyncClient(limits=limits, timeout=120) as web:
                bodies = [gateway.chat(stream=True) for _ in range(500)]
                return await asyncio.gather(*(web.post(url + CHAT, json=body) for body in bodies))

        ended = asyncio.run(all_of_them())
        assert {answer.status_code for answer in ended} == {200}
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in ended)
        until(lambda: gateway.metric('headway_tokens_total{kind="output"') == 500 * 8)


def test_what_is_refused_after_it_was_forwarded_leaves_its_engine(proxied: Proxied, fake: Fake) -> None:
    with proxied(engine={"request_timeout_s": 1.0}) as (gateway, url):
        before = fake.last()["aborted"]
        for stream in (False, True):
            late = ask(gateway, url, stream=stream, **fakes(hold="refused late"))
            assert (late.status_code, late.json()["error"]["code"]) == (504, "engine_timeout")
        until(lambda: fake.last()["aborted"] == before + 2)
        broken = ask(gateway, url, stream=True, **fakes(tokens=40, delay=0.1) | {"max_tokens": 40})
        assert broken.status_code == 200
        assert events(broken)[-2]["error"]["code"] == "engine_timeout"
        until(lambda: fake.last()["open"] == 0)
        assert ask(gateway, url).status_code == 200


@pytest.mark.parametrize("drain", ["streams", 0])
def test_the_end_of_the_gateway_is_that_of_envoys_requests(proxied: Proxied, fake: Fake, drain: object) -> None:
    with ThreadPoolExecutor(1) as pool, proxied(server={"drain_s": drain}) as (gateway, url):
        held = pool.submit(ask, gateway, url, **fakes(hold=f"end {drain}"))
        until(lambda: fake.last()["open"] == 1)
        stop(gateway)
        until(gateway.server._state.stopping.is_set)
        if drain:
            fake.release(f"end {drain}")
            assert held.result(10).status_code == 200
        else:
            assert (held.result(10).status_code, held.result().json()["error"]["code"]) == (503, "gateway_stopped")
    until(lambda: fake.last()["open"] == 0)
