"""Every request ends once, whatever happens to client, engine or broker, and the broker says how."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from headway.config import Broker
from headway.engines.vllm.process.answers import begins_answer
from headway.engines.vllm.process.connection import EngineConnection
from headway.errors import HeadwayError
from headway.gateway.budget import AnswerBudget
from headway.gateway.requests.engine_response import EngineResponse
from headway.gateway.requests.path import RequestPath
from headway.store.queue import MemoryBroker
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, DEAD, SAY, Fake, Gateway, until


def fakes(**how: Any) -> dict[str, Any]:
    """Return the field that steers the fake engine's answer."""
    return {"vllm_xargs": {f"fake_{name}": value for name, value in how.items()}}


def events(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream: JSON, or the text [DONE]."""
    texts = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@contextmanager
def hanging(gateway: Gateway, content: bytes | None = None, **fields: Any) -> Iterator[socket.socket]:
    """Send a request and keep the connection; leaving the block hangs up."""
    body = content or json.dumps(gateway.chat(**fields)).encode()
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    with socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=10) as line:
        line.sendall(head + body)
        yield line


# ---- the queue


def test_a_full_queue_refuses(serve: Serve) -> None:
    with serve(DEAD, ready=False, server={"max_queued": 2}) as gateway:
        with hanging(gateway), hanging(gateway, stream=True):
            until(lambda: gateway.controller.queued == 2)
            refused = gateway.post(gateway.chat())
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-headway-dropped-reason"] == "queue_full"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert gateway.metric('headway_dropped_total{reason="queue_full",tenant="default"}') == 1
            assert gateway.metric("headway_queue_length") == 2
            assert len(gateway.jobs()) == 2, "what is refused is not stored"
            with gateway.client() as client, pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="smollm2", messages=SAY)  # type: ignore[arg-type]
        until(lambda: gateway.controller.queued == 0)
        assert gateway.metric('headway_dropped_total{reason="queue_full",tenant="default"}') == 2


def crowd(gateway: Gateway, pool: ThreadPoolExecutor, size: int, name: str) -> list[Future[httpx.Response]]:
    """Ask for held answers one after another: one that came earlier and is queued later is sent at once."""
    core = gateway.controller
    asked = []
    for _ in range(size):
        asked.append(pool.submit(gateway.post, gateway.chat(**fakes(hold=name))))
        until(lambda: len(core.requests) == len(asked))
    return asked


def test_what_does_not_fit_inside_waits(serve: Serve, fake: Fake) -> None:
    with serve(recipe="slack", engine={"max_running": 1}) as gateway, ThreadPoolExecutor(8) as pool:
        window = gateway.controller.cluster.instances["e0"].window
        asked = crowd(gateway, pool, 8, "crowd")
        until(lambda: fake.last()["open"] == window)
        assert gateway.controller.queued == 8 - window
        fake.release("crowd")
        assert [one.result().status_code for one in asked] == [200] * 8


def test_the_urgent_overtake_those_who_wait(serve: Serve, fake: Fake) -> None:
    with serve(recipe="slack", engine={"max_running": 1}) as gateway, ThreadPoolExecutor(8) as pool:
        window = gateway.controller.cluster.instances["e0"].window
        easy = crowd(gateway, pool, 6, "easy")
        until(lambda: fake.last()["open"] == window)
        urgent = pool.submit(gateway.post, gateway.chat(), headers={"x-slo-e2e-ms": "60000"})
        assert urgent.result().status_code == 200
        assert gateway.controller.queued == 6 - window, "answered before any of them, none let go"
        fake.release("easy")
        assert [one.result().status_code for one in easy] == [200] * 6


# ---- the client leaves


def test_leaving_while_queued(serve: Serve) -> None:
    with serve(DEAD, ready=False) as gateway:
        with hanging(gateway, stream=True):
            until(lambda: gateway.controller.queued == 1)
        state, reason = gateway.newest()
        assert (state, str(reason).split(":")[0]) == ("failed", "client_gone")
        assert gateway.controller.queued == 0
        assert (
            gateway.metric(
                'headway_requests_total{class="default",model="smollm2",outcome="cancelled",tenant="default"}'
            )
            == 1
        )


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_the_engine_works(gateway: Gateway, fake: Fake, stream: bool) -> None:
    aborted = fake.last()["aborted"]
    with hanging(gateway, stream=stream, max_tokens=500, **fakes(tokens=500, delay=0.05)) as line:
        until(lambda: fake.last()["open"] == 1)
        if stream:
            until(lambda: b"fake " in line.recv(65536))
    state, reason = gateway.newest()
    assert (state, str(reason).split(":")[0]) == ("failed", "client_gone")
    until(lambda: fake.last()["aborted"] == aborted + 1)
    assert fake.last()["open"] == 0
    until(lambda: not gateway.inner.dispatcher.in_flight)
    assert gateway.controller.requests == {}


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_right_after_the_last_byte_is_a_complete_answer(gateway: Gateway, stream: bool) -> None:
    """Many clients hang up the moment they have all they need."""
    done = 'headway_requests_total{class="default",model="smollm2",outcome="finished",tenant="default"}'
    before = gateway.metric(done)
    for _ in range(20):
        with hanging(gateway, stream=stream) as line:
            seen = b""
            while (b"[DONE]" if stream else b"usage") not in seen:
                seen += line.recv(65536)
        assert gateway.newest() == ("done", None)
    assert gateway.metric(done) == before + 20


def test_a_client_that_reads_slowly_holds_up_only_itself(gateway: Gateway) -> None:
    with hanging(gateway, stream=True, max_tokens=1500, **fakes(tokens=1500)) as line:
        until(lambda: gateway.post(gateway.chat()).status_code == 200)
        seen = b""
        while b"[DONE]" not in seen:
            seen += line.recv(4096)
    assert seen.count(b"fake ") == 1500


# ---- the engine leaves


def test_an_engine_that_dies_before_the_first_byte(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url) as gateway, ThreadPoolExecutor(2) as pool:
        ask = fakes(hold="death")
        asked = [pool.submit(gateway.post, gateway.chat(stream=stream, **ask)) for stream in (False, True)]
        until(lambda: mortal.last()["open"] == 2)
        mortal.stop()
        until(lambda: gateway.controller.queued == 2)
        assert gateway.get("/ready").status_code == 503
        mortal.start()
        mortal.release("death")
        whole, streamed = (one.result() for one in asked)
        assert whole.json()["choices"][0]["message"]["content"] == "fake " * 8
        assert events(streamed)[-1] == "[DONE]"
        assert mortal.last()["asked"] == 2, "each was run again once"
        assert [state for state, _ in until(lambda: closed(gateway))] == ["done", "done"]
        assert gateway.metric('headway_requeue_seconds_count{reason="engine_gone"}') == 2


def test_requests_for_an_engine_that_is_gone_wait_for_it(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url) as gateway, ThreadPoolExecutor(1) as pool:
        mortal.stop()
        asked = pool.submit(gateway.post, gateway.chat())  # the gateway has not noticed yet that it is gone
        until(lambda: gateway.controller.queued == 1)
        mortal.start()
        assert asked.result().status_code == 200


def test_an_engine_that_dies_too_often(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url, server={"max_attempts": 1}) as gateway, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.post, gateway.chat(stream=True, **fakes(hold="ever")))
        until(lambda: mortal.last()["open"] == 1)
        mortal.stop()
        answer = asked.result()
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        state, reason = gateway.newest()
        assert (state, str(reason).split(":")[0]) == ("failed", "engine_killed")


@pytest.mark.parametrize("end", ["cut", "short"])
def test_an_engine_that_leaves_in_mid_stream(gateway: Gateway, end: str) -> None:
    answer = gateway.post(gateway.chat(stream=True, **fakes(end=end)))
    assert answer.status_code == 200
    *tokens, error, done = events(answer)
    assert len(tokens) == 1 + 4
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert done == "[DONE]"
    state, reason = gateway.newest()
    assert (state, str(reason).split(":")[0]) == ("failed", "engine_gone")
    assert gateway.post(gateway.chat()).status_code == 200, "one broken connection is no dead engine"


def test_the_client_library_sees_the_broken_stream(gateway: Gateway) -> None:
    with gateway.client() as client, pytest.raises(openai.APIError, match="went away"):
        list(
            client.chat.completions.create(
                model="smollm2",
                messages=SAY,
                stream=True,
                extra_body=fakes(end="cut"),  # type: ignore[call-overload]
            )
        )


def test_an_engine_that_reports_an_error_in_mid_stream(gateway: Gateway) -> None:
    answer = gateway.post(gateway.chat(stream=True, **fakes(end="error")))
    *_, error, done = events(answer)
    assert "asked to fail" in error["error"]["message"]
    assert done == "[DONE]"
    state, reason = gateway.newest()
    assert (state, str(reason).split(":")[0]) == ("failed", "engine_failed")


def test_an_answer_that_breaks_off_before_it_is_whole_is_tried_again(gateway: Gateway, fake: Fake) -> None:
    asked = fake.last()["asked"]
    answer = gateway.post(gateway.chat(**fakes(end="cut")))
    assert answer.status_code == 503
    assert fake.last()["asked"] == asked + gateway.config.server.max_attempts
    assert gateway.get("/ready").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 500])
def test_refusals_of_a_live_engine_come_through(gateway: Gateway, fake: Fake, status: int, stream: bool) -> None:
    """A 500 is this request's fault when the engine is well: it must not take the engine out for others."""
    asked = fake.last()["asked"]
    answer = gateway.post(gateway.chat(stream=stream, **fakes(end=str(status))))
    assert answer.status_code == status
    assert "asked to fail" in answer.json()["error"]["message"]
    state, reason = gateway.newest()
    assert (state, str(reason).split(":")[0]) == ("failed", "engine_refused")
    assert fake.last()["asked"] == asked + 1
    assert gateway.get("/ready").status_code == 200


def closed(gateway: Gateway) -> list[tuple[str, str | None]] | None:
    """Return how all requests ended, None as long as one is open."""
    ends = list(gateway.jobs().values())
    return None if any(state == "open" for state, _ in ends) else ends


# ---- the queue on disk fails


def test_a_broker_that_is_out_refuses(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def out(*_: Any) -> None:
        raise HeadwayError("The broker is out: disk full.", "Make room.", status=503, kind="server_error")

    with serve(broker=Broker(kind="memory")) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBroker, "put", out)
            answer = gateway.post(gateway.chat())
            assert answer.status_code == 503
            assert "disk full" in answer.json()["error"]["message"]
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBroker, "done", out)
            for stream in (True, False):
                answer = gateway.post(gateway.chat(stream=stream))
                assert answer.status_code == 200, "the answer is there, only its end is not on record"
                assert "fake " in answer.text
        until(lambda: not gateway.controller.requests)
        assert gateway.post(gateway.chat()).status_code == 200


def test_a_bug_of_ours_is_an_error_in_openai_s_shape(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("oops")

    for owner, name in ((RequestPath, "check_capacity"), (RequestPath, "open")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            answer = gateway.post(gateway.chat())
        assert answer.status_code == 500
        assert "oops" in answer.json()["error"]["message"]
    until(lambda: not gateway.controller.requests)


# ---- the gateway itself leaves


def test_stopping_ends_what_is_open(serve: Serve, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as gateway:
        gateway.server.config.timeout_graceful_shutdown = 1
        with hanging(gateway, stream=True, max_tokens=900, **fakes(tokens=900, delay=0.1)):
            until(lambda: fake.last()["open"] == 1)
            gateway.server.should_exit = True
            state, reason = gateway.newest()
    assert (state, reason) == ("failed", "gateway_stopped")
    until(lambda: fake.last()["open"] == 0)


def listens(gateway: Gateway) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", gateway.config.server.port)) == 0


def test_an_answer_on_its_way_is_finished_first(serve: Serve, fake: Fake) -> None:
    with serve() as gateway, hanging(gateway, **fakes(hold="exit")) as line:
        until(lambda: fake.last()["open"] == 1)
        gateway.server.should_exit = True
        until(lambda: not listens(gateway))  # it is stopping, and the answer has not begun
        fake.release("exit")
        seen = b""
        while part := line.recv(65536):
            seen += part
    assert b'"finish_reason":"length"' in seen
    assert gateway.newest() == ("done", None)


async def test_many_clients_at_once(gateway: Gateway) -> None:
    """Streams and whole answers, some clients leaving early: every request ends, none is left inside."""

    async def ask(client: httpx.AsyncClient, i: int) -> str:
        body = gateway.chat(stream=i % 2 == 0, **fakes(delay=0.005))
        try:
            timeout = 0.02 if i % 7 == 0 else 30
            answer = await client.post(gateway.url + CHAT, json=body, timeout=timeout)
        except httpx.TimeoutException:
            return "left"
        return "whole" if answer.text.count("fake ") == 8 else answer.text

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=200)) as client:
        ends = await asyncio.gather(*(ask(client, i) for i in range(150)))
    assert set(ends) <= {"left", "whole"}
    await asyncio.to_thread(until, lambda: closed(gateway))
    assert gateway.controller.requests == {}
    assert gateway.inner.dispatcher.in_flight == {}
    assert threading.active_count() < 40


NO_TOKENS = [
    b": ping\n\n",
    b"event: ping\n\n",
    b"retry: 1000\n\n",
    b"data:\n\n",
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":0}}\n\n',
]
BEGINNINGS = [
    b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"Hi"}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"error":{"message":"x"}}\n\n',
    b"data: [DONE]\n\n",
    b"data: {not json\n\n",
    b"<h1>\n\n",
]


def test_an_answer_begins_with_its_first_content() -> None:
    assert [event for event in NO_TOKENS if begins_answer(event.removesuffix(b"\n\n"))] == []
    assert [event for event in BEGINNINGS if not begins_answer(event.removesuffix(b"\n\n"))] == []


class _Chunks:
    """An engine's response whose bytes come in these chunks."""

    def __init__(self, *chunks: bytes) -> None:
        self.content, self._chunks, self.headers = self, [*chunks, b""], {}

    async def read(self, most: int) -> bytes:
        return self._chunks.pop(0)


def response(*chunks: bytes) -> EngineResponse:
    http: Any = _Chunks(*chunks)
    return EngineResponse(200, True, "e0", AnswerBudget(2**20).of("e0"), http, http)


@pytest.mark.parametrize("before", NO_TOKENS[1:])
def test_what_comes_before_the_first_content_is_kept(before: bytes) -> None:
    content = BEGINNINGS[0]
    whole = before + NO_TOKENS[0] + content
    for at in range(1, len(whole)):
        seen = response(whole[:at], whole[at:], b"data: more")
        assert asyncio.run(seen._first_event()) == before + content


def test_the_rest_of_a_comment_is_silence() -> None:
    seen = response(b": pi", b"ng\n\n", b"data: {", b"}\n\n", b"\n")

    async def silent() -> list[bool]:
        found = []
        while await seen.read():
            found.append(seen._silent_since is not None)
        return found

    assert asyncio.run(silent()) == [True, True, False, False, True]


def test_comments_of_an_engine_are_no_tokens(serve: Serve) -> None:
    """Engines send them so that proxies do not take a stream for dead."""
    with serve() as gateway:
        answer = gateway.post(gateway.chat(stream=True, **fakes(pings=6)))
        assert answer.text.endswith("data: [DONE]\n\n")
        until(lambda: gateway.metric("headway_stream_gap_seconds_count{") == 1)
        ttft, gap = gateway.metric("headway_ttft_seconds_sum{"), gateway.metric("headway_stream_gap_seconds_sum{")
        assert ttft >= 0.5
        assert ttft + gap >= 1.0, "the first token may be read late"


async def test_a_connection_that_breaks_between_two_requests_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """As when an engine is killed."""
    answered = b'{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}'
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answered))
            await asyncio.sleep(0.1)  # so that the response begins before its body comes
            writer.write(answered)
        await done.wait()
        now = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        writer.transport.abort()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        engine = EngineConnection("e0", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        engine.connect()
        for _ in range(2):
            whole = await EngineResponse.open("e0", engine.open("/", [b"{}"]), AnswerBudget(2**20), stream=False)
            assert whole.head == answered
            (connection,) = engine._sockets
            await whole.close()
        done.set()
        server.close()
        await asyncio.to_thread(until, lambda: connection.fileno() < 0)
        assert not await engine.lives()
    del whole
    gc.collect()
    assert "never retrieved" not in caplog.text
    await engine.disconnect()
