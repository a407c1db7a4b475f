"""The endpoint picker by Envoy's messages over gRPC: decisions, limits, accounts (docs/picker.md)."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc.aio
import pytest

from headway.config import Key, Picker, Tls, parse
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.events import InstanceDown, InstanceUp
from headway.gateway import tasks
from headway.gateway.picker.messages import NOT_SERVING, SERVING
from headway.gateway.picker.server import picking
from headway.types import Instance, Loadable
from testing.servers.certificates import Authority
from tests.gateway.conftest import Serve
from tests.gateway.ext_proc import Call, Channel, chat, connected, head, whole
from tests.gateway.gateway import DEAD, Fake, Gateway, until
from tests.gateway.test_engines import order, states
from tests.gateway.test_stop import stop

Opened = tuple[Gateway, Channel]
Open = Callable[..., Any]
STREAM = [b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'] * 3
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def opened(serve: Serve) -> Open:
    """Return what opens a gateway with a picker, and a connection to that."""

    @asynccontextmanager
    async def open(*urls: str, max_streams: int = 600, **fields: Any) -> AsyncIterator[Opened]:
        port = free_port()
        with serve(*urls, picker=Picker(port, max_streams), **fields) as gateway:
            async with connected(port) as channel:
                yield gateway, channel

    return open


async def soon(true: Callable[[], Any]) -> None:
    await asyncio.to_thread(until, true)


def one_by_one() -> dict[str, Any]:
    """Return settings of an engine that has one request at a time."""
    return {"recipe": "edf", "engine": {"max_running": 1}}


async def finished(call: Call) -> None:
    """Answer a request that was forwarded, to its end."""
    await call.answer(whole())
    await call.answered()


# ---- the way of one request


async def test_a_request_is_forwarded_to_its_engine_with_metadata_for_the_scheduler(opened: Open, fake: Fake) -> None:
    async with opened() as (gateway, channel):
        call = await channel.asked(chat(), authorization="Bearer sk-client", x_slo_ttft_ms="500")
        sent = await call.forwarded()
        assert sent.address == fake.url.removeprefix("http://")
        assert sent.headers[":path"] == "/v1/chat/completions"
        assert set(sent.removed) == {"authorization", "content-length", "x-api-key", "x-slo-ttft-ms"}
        assert sent.fields["vllm_xargs"]["headway_ttft"] == 0.5
        id = sent.headers["x-request-id"]
        assert id in gateway.controller.requests
        await call.answer(whole(5))
        headers, body = await call.answered()
        assert (headers["x-request-id"], json.loads(body)) == (id, json.loads(whole(5)))
        await soon(lambda: not gateway.controller.requests)
        assert gateway.newest() == ("done", None)
        await soon(lambda: gateway.metric('headway_tokens_total{kind="output"') == 5)


async def test_an_engine_gets_no_headers_of_the_client_that_could_command_it(opened: Open) -> None:
    passed = {"accept": "*/*", "x_forwarded_for": "10.0.0.1", "x_request_id": "mine", "traceparent": "00-1"}
    taken = {"X_data_parallel_rank": "1", "X_Session_ID": "s", "cookie": "c", "user_agent": "curl", "x_headway_a": "0"}
    async with opened(engine={"api_key": "sk-engine"}) as (_, channel):
        sent = await (await channel.asked(**passed, **taken)).forwarded()
        removed = {name.lower().replace("_", "-") for name in taken}
        assert set(sent.removed) == {"content-length", "x-api-key", *removed}
        assert sent.headers["authorization"] == "Bearer sk-engine"
        assert sent.headers["x-request-id"] != "mine"


async def test_background_requests_are_the_gateways_own_whatever_the_proxy_allows(opened: Open, fake: Fake) -> None:
    async with opened() as (gateway, channel):
        answer = await (await channel.asked(chat(background=True), subset=["10.0.0.1:80"])).immediate()
        assert answer.status == 202
        assert await asyncio.to_thread(gateway.newest) == ("done", None)


async def test_a_body_may_come_in_parts_and_end_with_trailers(opened: Open) -> None:
    async with opened() as (_, channel):
        text = "x" * 150_000
        body = chat(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=64)
        for trailers in (False, True):
            call = await channel.asked(body, parts=7, trailers=trailers)
            sent = await call.forwarded()
            assert sent.fields["messages"][0]["content"] == text
            await finished(call)


async def test_a_stream_is_passed_on_as_it_comes_and_accounted(opened: Open) -> None:
    async with opened() as (gateway, channel):
        call = await channel.asked(chat(stream=True))
        sent = await call.forwarded()
        assert sent.fields["stream_options"] == {"include_usage": True}
        await call.send(response_headers=head({":status": "200", "content-type": "text/event-stream"}))
        for part in STREAM:
            await call.send(response_body={"body": part})
        assert (await call.read()).WhichOneof("response") == "response_headers"
        assert (await call.read()).response_body.response.body_mutation.streamed_response.body.endswith(STREAM[0])
        await soon(lambda: not gateway.controller.cluster.backlog.pending.any())
        await call.send(response_body={"body": USAGE + DONE, "end_of_stream": True})
        rest = b""
        while (message := await call.read()) is not grpc.aio.EOF:
            rest += message.response_body.response.body_mutation.streamed_response.body
        assert rest == b"".join(STREAM[1:]) + DONE  # the client has not asked for usage
        await soon(lambda: gateway.metric('headway_tokens_total{kind="output"') == 7)


async def test_an_answer_may_have_trailers(opened: Open) -> None:
    async with opened() as (_, channel):
        call = await channel.asked()
        await call.forwarded()
        await call.send(response_headers=head({":status": "200", "content-type": "application/json"}))
        await call.send(response_body={"body": whole()})
        await call.send(response_trailers={})
        kinds = []
        while (message := await call.read()) is not grpc.aio.EOF:
            kinds.append(message.WhichOneof("response"))
        assert kinds == ["response_headers", "response_body", "response_body", "response_trailers"]


async def test_other_apis_are_translated(opened: Open) -> None:
    async with opened() as (_, channel):
        body = {"model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        call = await channel.asked(body, path="/v1/messages")
        assert (await call.forwarded()).headers[":path"] == "/v1/chat/completions"
        await call.answer(whole())
        _, answer = await call.answered()
        assert json.loads(answer)["type"] == "message"


async def test_what_needs_no_engine_is_answered_at_once(opened: Open) -> None:
    async with opened() as (_, channel):
        answer = await (await channel.got("/v1/models")).immediate()
        assert (answer.status, json.loads(answer.body)["data"][0]["id"]) == (200, "smollm2")
        assert (await (await channel.got("/metrics")).immediate()).status == 404


async def test_an_answer_that_is_too_long_for_envoy_is_refused(opened: Open) -> None:
    async with opened(server={"max_answer_mib": 1}) as (gateway, channel):
        lines = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat()}) + "\n"
        for size, status in ((2**19, 200), (2**21, 502)):
            files = {"file": ("a.jsonl", lines * (size // len(lines)))}
            made = gateway.post(path="/v1/files", files=files, data={"purpose": "batch"})
            answer = await (await channel.got(f"/v1/files/{made.json()['id']}/content")).immediate()
            assert answer.status == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_request_without_a_body_is_refused_at_once(opened: Open, path: str) -> None:
    async with opened() as (_, channel), asyncio.timeout(10):
        answer = await (await channel.begun(path=path, end=True)).immediate()
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")


# ---- decisions


async def test_a_request_waits_for_its_engine_and_an_urgent_one_overtakes(opened: Open) -> None:
    async with opened(**one_by_one()) as (gateway, channel):
        window = gateway.controller.cluster.instances["e0"].window
        inside = [await channel.asked(chat(service_tier="batch")) for _ in range(window)]
        for call in inside:
            await call.forwarded()
        batch = await channel.asked(chat(service_tier="batch"))
        await soon(lambda: gateway.controller.queued == 1)
        urgent = await channel.asked(chat(service_tier="chat"))
        first = asyncio.create_task(urgent.forwarded())
        await soon(lambda: len(gateway.controller.requests) == window + 2)
        last = asyncio.create_task(batch.forwarded())
        await asyncio.sleep(0.3)
        assert not last.done()
        await first
        for call in (*inside, urgent):
            await finished(call)
        await last
        await finished(batch)


async def test_a_client_that_leaves_frees_its_place(opened: Open) -> None:
    async with opened(**one_by_one()) as (gateway, channel):
        window = gateway.controller.cluster.instances["e0"].window
        inside = [await channel.asked() for _ in range(window)]
        for call in inside:
            await call.forwarded()
        waits, next_one = await channel.asked(), await channel.asked()
        await soon(lambda: gateway.controller.queued == 2)
        waits.call.cancel()
        await soon(lambda: gateway.controller.queued == 1)
        inside[0].call.cancel()
        await next_one.forwarded()
        gone = "client_gone: disconnected"
        await soon(lambda: [reason for _, reason in gateway.jobs().values()].count(gone) == 2)
        assert gateway.inner.dispatcher.engines["e0"]._open == window


async def test_a_client_that_leaves_by_half_is_no_lost_engine(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as (gateway, channel):
        call = await channel.asked()
        await call.forwarded()
        await call.call.done_writing()
        assert await asyncio.to_thread(gateway.newest) == ("failed", "client_gone: disconnected")
        assert await call.read() is grpc.aio.EOF
        assert await call.call.code() is grpc.StatusCode.OK
        assert "went away" not in caplog.text
        half = await channel.begun()
        await half.call.done_writing()
        assert await half.read() is grpc.aio.EOF


async def test_a_proxy_that_takes_nothing_is_left(opened: Open) -> None:
    body = chat(messages=[{"role": "user", "content": "word " * 200_000}], truncate_prompt_tokens=64)
    limits = {"write_timeout_s": 0.5, "max_body_kib": 2**14}
    async with opened(server=limits) as (gateway, _), connected(gateway.config.picker.port or 0, window=False) as slow:
        await slow.asked(body, parts=40)
        await soon(gateway.jobs)
        assert await asyncio.to_thread(gateway.newest) == ("failed", "client_gone: disconnected")
        await soon(lambda: not gateway.controller.requests)


async def answering(channel: Channel) -> Call:
    """Return a new request that was forwarded."""
    call = await channel.asked()
    await call.forwarded()
    return call


async def test_only_endpoints_that_the_proxy_allows_are_named(opened: Open, fake: Fake, others: list[Fake]) -> None:
    urls = [fake.url, *(one.url for one in others)]
    addresses = [url.removeprefix("http://") for url in urls]
    async with opened(*urls) as (gateway, channel):
        await soon(gateway.all_up)
        for subset in ([addresses[2]], [addresses[1], "10.0.0.1:80"], f"{addresses[0]}, {addresses[1]}", addresses):
            for _ in range(6):
                call = await channel.asked(subset=subset)
                assert (await call.forwarded()).address in subset
                await finished(call)
        for none in ([], ["10.0.0.1:80"]):
            answer = await (await channel.asked(subset=none)).immediate()
            assert (answer.status, answer.error["code"]) == (503, "no_endpoint")


async def test_what_waits_for_one_endpoint_keeps_no_others_waiting(
    opened: Open, fake: Fake, others: list[Fake]
) -> None:
    urls = [fake.url, others[0].url]
    async with opened(*urls, **one_by_one()) as (gateway, channel):
        await soon(gateway.all_up)
        window, only = gateway.controller.cluster.instances["e0"].window, [fake.url.removeprefix("http://")]
        bound = [await channel.asked(subset=only) for _ in range(window + 3)]
        for call in bound[:window]:
            await call.forwarded()
        await soon(lambda: gateway.controller.queued == 3)
        for _ in range(3):
            free = await channel.asked()
            assert (await free.forwarded()).address not in only
            await finished(free)
        for call in bound[:3]:
            await finished(call)
        for call in bound[window:]:
            assert (await call.forwarded()).address in only


async def test_a_recipe_that_keeps_to_no_subset_refuses_one(opened: Open, fake: Fake, others: list[Fake]) -> None:
    async with opened(fake.url, others[0].url, recipe="llm-d-like") as (gateway, channel):
        await soon(gateway.all_up)
        answer = await (await channel.asked(subset=[fake.url.removeprefix("http://")])).immediate()
        assert (answer.status, answer.error["code"]) == (503, "subset_unsupported")


async def test_a_planner_that_has_taken_over_keeps_to_no_subset(opened: Open, fake: Fake, others: list[Fake]) -> None:
    """The recipe's other planner is at work since an engine could load another model, also when that has left."""
    able = Instance("x", "n", 2, 60, 16, 2048, loaded=Loadable("n", 1.0, 1.0, 2048))
    async with opened(fake.url, others[0].url) as (gateway, channel):
        await soon(gateway.all_up)
        gateway.loop.call_soon_threadsafe(gateway.inner.dispatcher.control.notify, InstanceUp(able))
        await asyncio.to_thread(until, lambda: not gateway.controller.planner.restricts, 120)
        gateway.loop.call_soon_threadsafe(gateway.inner.dispatcher.control.notify, InstanceDown("x"))
        answer = await (await channel.asked(subset=[fake.url.removeprefix("http://")])).immediate()
        assert (answer.status, answer.error["code"]) == (503, "subset_unsupported")


async def test_a_queued_request_keeps_to_its_subset_when_the_planner_changes(
    opened: Open, fake: Fake, others: list[Fake]
) -> None:
    able = Instance("x", "n", 2, 60, 16, 2048, loaded=Loadable("n", 1.0, 1.0, 2048))
    async with opened(fake.url, others[0].url) as (gateway, channel), asyncio.timeout(120):
        await soon(gateway.all_up)
        notify = gateway.inner.dispatcher.control.notify
        gateway.loop.call_soon_threadsafe(notify, InstanceDown("e0"))
        await soon(lambda: "e0" not in gateway.controller.cluster.instances)
        waits = await channel.asked(subset=[fake.url.removeprefix("http://")])
        await soon(lambda: gateway.controller.queued == 1)
        gateway.loop.call_soon_threadsafe(notify, InstanceUp(able))
        answer = await waits.immediate()
        assert (answer.status, answer.error["code"]) == (503, "subset_unsupported")
        assert gateway.newest()[1] == f"model_unavailable: {answer.error['message'].partition(' Use ')[0]}"


@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_request_whose_endpoint_has_lost_its_address_goes_to_another_allowed_one(
    opened: Open, fake: Fake, others: list[Fake], attempts: int, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [one.url.removeprefix("http://") for one in (fake, *others[:2])]
    fields = one_by_one() | {"server": {"max_attempts": attempts}}
    async with opened(fake.url, *(one.url for one in others[:2]), **fields) as (gateway, channel):
        await soon(gateway.all_up)
        window, first, second = gateway.controller.cluster.instances["e0"].window, list[Call](), list[Call]()
        for calls, address in ((first, addresses[0]), (second, addresses[1])):
            for _ in range(window):
                calls.append(await channel.asked(subset=[address]))
                await calls[-1].forwarded()
        waits = await channel.asked(subset=addresses[:2])
        await soon(lambda: gateway.controller.queued == 1)
        engine = gateway.inner.dispatcher.engines["e0"]
        gateway.loop.call_soon_threadsafe(setattr, engine, "url", "http://gone.invalid")
        await finished(first[0])
        if attempts == 1:
            answer = await waits.immediate()
            assert (answer.status, answer.error["code"]) == (503, "no_address")
            assert answer.error["message"].startswith("The proxy has no address for the engine e0.")
            assert gateway.newest()[1] == "no_address: The proxy has no address for the engine e0."
            assert "went away" not in caplog.text
            return
        await soon(lambda: [one.engines for one in gateway.controller.requests.values()].count(("e1",)) == window + 1)
        await finished(second[0])
        assert (await waits.forwarded()).address == addresses[1]


async def test_a_request_ends_with_the_last_endpoint_that_it_may_go_to(
    opened: Open, fake: Fake, others: list[Fake]
) -> None:
    async with opened(fake.url, others[0].url, **one_by_one()) as (gateway, channel):
        await soon(gateway.all_up)
        only = [fake.url.removeprefix("http://")]
        inside = [await channel.asked(subset=only) for _ in range(gateway.controller.cluster.instances["e0"].window)]
        for call in inside:
            await call.forwarded()
        bound = await channel.asked(subset=only)
        await soon(lambda: gateway.controller.queued == 1)
        assert (await asyncio.to_thread(order, gateway, "DELETE", "/e0"))[0] == 202
        answer = await bound.immediate()
        assert (answer.status, answer.error["code"]) == (503, "model_unavailable")
        assert (await (await channel.asked()).forwarded()).address not in only
        for call in inside:
            await finished(call)


# ---- refusals and limits


async def test_without_a_ready_endpoint_there_is_a_503(opened: Open) -> None:
    async with opened(DEAD, ready=False) as (_, channel):
        answer = await (await channel.asked()).immediate()
        assert (answer.status, answer.error["code"]) == (503, "no_endpoint")
        assert await channel.status("liveness") == SERVING
        assert await channel.status("readiness") == NOT_SERVING


async def test_sheddable_work_gets_a_429(opened: Open) -> None:
    async with opened(recipe="llm-d-like", engine={"max_running": 1}) as (gateway, channel):
        window = gateway.controller.cluster.instances["e0"].window
        for _ in range(window):
            await (await channel.asked()).forwarded()
        await channel.asked(chat(service_tier="chat"))
        await soon(lambda: gateway.controller.queued == 1)
        answer = await (await channel.asked(chat(service_tier="batch"))).immediate()
        assert (answer.status, answer.headers["x-headway-dropped-reason"]) == (429, "saturated")
        assert 1 <= int(answer.headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [(b"{", 400, "invalid_json"), (chat(model="none"), 404, "model_not_found"), (b" " * 2**21, 413, "body_too_large")],
)
async def test_bad_requests_are_refused_in_openais_shape(opened: Open, body: Any, status: int, code: str) -> None:
    async with opened() as (_, channel):
        answer = await (await channel.asked(body)).immediate()
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/json"


async def test_keys_count_as_over_http(opened: Open) -> None:
    async with opened(keys=(Key("sk-alice-123456", "alice"),)) as (gateway, channel):
        assert (await (await channel.begun()).immediate()).status == 401
        call = await channel.asked(authorization="Bearer sk-alice-123456")
        await call.forwarded()
        assert [one.tenant for one in gateway.controller.requests.values()] == ["alice"]


async def test_the_queue_and_open_streams_have_limits(opened: Open) -> None:
    async with opened(max_streams=6, server={"max_queued": 1}, **one_by_one()) as (gateway, channel):
        window = gateway.controller.cluster.instances["e0"].window
        for _ in range(window):
            await (await channel.asked()).forwarded()
        await channel.asked()
        await soon(lambda: gateway.controller.queued == 1)
        full = await (await channel.asked()).immediate()
        assert (full.status, full.error["code"], "retry-after" in full.headers) == (429, "queue_full", True)
        for _ in range(5 - window):
            await channel.begun()
        await soon(lambda: len(gateway.server.server_state.tasks) == 6)
        many = await channel.call().immediate()  # it may be refused before it has sent anything
        assert (many.status, many.error["code"], many.headers["retry-after"]) == (429, "too_many_streams", "1")


async def test_a_proxy_that_does_not_stream_bodies_is_told_so(opened: Open) -> None:
    async with opened() as (_, channel):
        answer = await (await channel.begun(mode=2)).immediate()  # refused before a body is sent
        assert (answer.status, answer.error["code"]) == (500, "processing_mode")
        call = channel.call()
        await call.send(request_body={"body": b"x"})
        with pytest.raises(grpc.aio.AioRpcError, match="begins with request_headers"):
            await call.read()


async def test_a_body_has_one_time_limit_for_all_of_it(opened: Open) -> None:
    async with opened(server={"body_timeout_s": 1.0}) as (_, channel), asyncio.timeout(10):
        call = await channel.begun()

        async def drip() -> None:
            while True:
                await call.send(request_body={"body": b" "})
                await asyncio.sleep(0.3)

        async with tasks.running(drip):
            assert (await call.immediate()).status == 408


async def test_an_engine_that_takes_too_long_is_given_up(opened: Open) -> None:
    async with opened(engine={"request_timeout_s": 0.3}) as (gateway, channel):
        call = await channel.asked()
        await call.forwarded()
        answer = await call.immediate()
        assert (answer.status, answer.error["code"]) == (504, "engine_timeout")
        assert not gateway.controller.requests


@pytest.mark.parametrize("body", [b'{"error": {"message": "no", "type": "x"}}', b"<h1>bad</h1>"])
async def test_an_engines_error_is_passed_on_or_replaced(opened: Open, body: bytes) -> None:
    async with opened() as (gateway, channel):
        call = await channel.asked()
        await call.forwarded()
        await call.answer(body, status=400)
        answer = await call.immediate()
        assert (answer.status, "error" in json.loads(answer.body)) == (400 if body.startswith(b"{") else 502, True)
        await soon(lambda: not gateway.controller.requests)


async def test_a_dead_engine_costs_its_request_only(opened: Open, fake: Fake, mortal: Fake) -> None:
    """Envoy answers in the engine's place with 503 when it cannot connect."""
    async with opened(mortal.url) as (gateway, channel):
        call = await channel.asked()
        await call.forwarded()
        mortal.stop()
        await call.answer(b"upstream connect error", status=503, kind="text/plain")
        answer = await call.immediate()
        assert answer.status == 503
        await soon(lambda: not gateway.all_up())
        assert not gateway.controller.requests


async def test_a_drained_engine_finishes_what_was_forwarded(opened: Open, fake: Fake, others: list[Fake]) -> None:
    async with opened(fake.url, others[0].url) as (gateway, channel):
        await soon(gateway.all_up)
        call = await channel.asked(subset=[fake.url.removeprefix("http://")])
        await call.forwarded()
        assert (await asyncio.to_thread(order, gateway, "POST", "/e0/drain"))[0] == 202
        await soon(lambda: states(gateway)["e0"] == "draining")
        refused = await (await channel.asked(subset=[fake.url.removeprefix("http://")])).immediate()
        assert refused.error["code"] == "no_endpoint"
        await finished(call)
        await soon(lambda: states(gateway)["e0"] == "drained")


async def test_five_hundred_streams_at_once(opened: Open) -> None:
    async with opened(server={"max_queued": 1000}, engine={"max_running": 64}) as (gateway, channel):

        async def one() -> None:
            call = await channel.asked(chat(stream=True))
            await call.forwarded()
            await call.answer(*STREAM, USAGE + DONE, kind="text/event-stream")
            _, body = await call.answered()
            assert body.endswith(DONE)

        async with asyncio.timeout(120):
            await asyncio.gather(*(one() for _ in range(500)))
        await soon(lambda: gateway.metric('headway_tokens_total{kind="output"') == 500 * 7)
        assert not gateway.controller.requests


# ---- the end of the gateway


@pytest.mark.parametrize("drain", ["streams", 600])
async def test_requests_end_in_peace_and_none_begin_while_the_gateway_drains(opened: Open, drain: Any) -> None:
    async with opened(server={"drain_s": drain}) as (gateway, channel):
        call = await answering(channel)
        await asyncio.to_thread(stop, gateway)
        await soon(gateway.server._state.stopping.is_set)
        with pytest.raises(grpc.aio.AioRpcError):
            async with connected(gateway.config.picker.port or 0) as late:
                await late.status()
        await finished(call)
    assert gateway.newest() == ("done", None)


@pytest.mark.parametrize(("drain", "times"), [(0, 1), ("streams", 2)], ids=["no drain", "Ctrl-C twice"])
async def test_what_is_cut_short_says_why(opened: Open, drain: Any, times: int) -> None:
    async with opened(server={"drain_s": drain}) as (gateway, channel):
        sent, waits = await answering(channel), await channel.begun()
        gateway.server.last_connections_s = 0.0
        await asyncio.to_thread(stop, gateway, times)
        for call in (sent, waits):
            answer = await call.immediate()
            assert (answer.status, answer.error["code"]) == (503, "gateway_stopped")


# ---- health, TLS, settings


async def test_health_checks(opened: Open) -> None:
    async with opened() as (_, channel):
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert await channel.status(service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="unknown service"):
            await channel.status("other")


async def test_the_gateways_certificate_is_the_pickers(serve: Serve, tmp_path: Any) -> None:
    authority, port = Authority(tmp_path), free_port()
    pair, new = authority.issue("gateway"), authority.issue("new")
    with serve(server={"tls": Tls(*pair)}, picker=Picker(port)):
        for replaced in ("", *zip(new, pair, strict=True)):
            if replaced:
                shutil.copy(*replaced)  # after the first one, certificate and key do not match
            async with connected(port, authority.ca.read_bytes()) as channel:
                await (await channel.asked()).forwarded()
        assert ssl.get_server_certificate(("127.0.0.1", port)) == (tmp_path / "new.crt").read_text()
        async with connected(port) as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await plain.status()


async def test_a_port_that_is_taken_is_an_error(gateway: Gateway) -> None:
    ports = {"server": {"port": 9002}, "picker": {"port": 9002}}
    with pytest.raises(ConfigError, match=r"picker\.port and server\.port"):
        parse(ports)
    taken = replace(gateway.config, picker=Picker(gateway.config.server.port))
    with pytest.raises(ConfigError, match="The picker cannot listen"):
        async with picking(taken, cast(Any, None), cast(Any, None), set()):
            pass
