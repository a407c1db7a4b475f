"""Streams whose engine is lost go on at another one, or at the same one, and their clients do not see it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway import clock
from headway.store.queue import SqliteBroker
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until
from tests.gateway.test_hung import PATIENCE, SOON, pid, stopped
from tests.gateway.test_request_ends import closed, events, fakes, hanging

COMPLETION = "/v1/completions"


def metric(gateway: Gateway, result: str) -> float:
    return gateway.metric(f'headway_streams_resumed_total{{model="smollm2",result="{result}"}}')


def words(answer: list[Any]) -> str:
    """Return the text of a stream's events."""
    choices = [choice for event in answer if event != "[DONE]" for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """A second fake engine that the test may stop."""
    (tmp_path / "other").mkdir()
    engine = Fake(tmp_path / "other").start()
    yield engine
    engine.stop()


@pytest.mark.parametrize("cuts", [[1], [15], [4, 5, 9]], ids=str)
@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETION])
def test_a_stream_goes_on_where_it_was_cut(serve: Serve, fake: Fake, path: str, cuts: list[int]) -> None:
    with serve() as gateway:
        ask = gateway.chat(stream=True, max_tokens=16, stream_options={"include_usage": True})
        if path == COMPLETION:
            ask |= {"prompt": "hello"}
            del ask["messages"]
        plain = events(gateway.post(ask | fakes(tokens=16), path))
        before = fake.last()["asked"]
        *moved, usage, done = events(gateway.post(ask | fakes(tokens=16, cuts=cuts), path))
        assert done == "[DONE]"
        assert words(moved) == words(plain[:-2]) == "fake " * 16
        assert usage["usage"] == plain[-2]["usage"]
        assert len({(event["id"], event["created"]) for event in [*moved, usage]}) == 1
        assert [event["choices"][0]["finish_reason"] for event in moved].count("length") == 1
        assert sum("role" in event["choices"][0].get("delta", {}) for event in moved) == (path != COMPLETION)
        assert not any(event["choices"][0].get("token_ids") for event in moved)
        assert fake.last()["asked"] == before + 1 + len(cuts)
        said = fake.last()["body"]["vllm_xargs"]["headway_said"]
        assert said == list(range(1000, 1000 + cuts[-1]))
        assert metric(gateway, "resumed") == len(cuts)
        assert until(lambda: closed(gateway)) == [("done", None)] * 2


def test_ids_that_a_client_asks_for_come_once(serve: Serve) -> None:
    with serve() as gateway:
        ask = gateway.chat(stream=True, max_tokens=16, return_token_ids=True, **fakes(tokens=8, cuts=[3]))
        choices = [event["choices"][0] for event in events(gateway.post(ask))[:-1]]
        assert [id for one in choices for id in one.get("token_ids") or ()] == list(range(1000, 1008))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_translated_streams_go_on(serve: Serve, path: str) -> None:
    with serve() as gateway:
        ask = {"model": "smollm2", "stream": True}
        ask |= {"input": "hello"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hello"}]}
        ask |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 16}
        answer = gateway.post(ask | fakes(tokens=12, cuts=[5]), path).text
        deltas = answer.split('"delta":')[1:]
        assert sum(delta.partition("}")[0].count("fake ") for delta in deltas) == 12
        assert "went away" not in answer
        assert metric(gateway, "resumed") == 1


def test_a_stream_of_an_engine_that_dies_goes_on_elsewhere(serve: Serve, mortal: Fake, other: Fake) -> None:
    slow = fakes(tokens=60, delay=0.05)
    with serve(mortal.url, other.url) as gateway, hanging(gateway, stream=True, max_tokens=60, **slow) as line:
        seen = b""
        while seen.count(b"fake ") < 3:
            seen += line.recv(65536)
        first, second = (mortal, other) if mortal.last()["open"] else (other, mortal)
        first.stop()
        line.settimeout(PATIENCE)
        while b"[DONE]" not in seen:
            seen += line.recv(65536)
        assert seen.count(b"fake ") == 60
        assert b"error" not in seen
        assert second.last()["asked"] == 1
        assert until(lambda: closed(gateway)) == [("done", None)]
        (in_queue,) = gateway.jobs()
        assert metric(gateway, "resumed") == 1
        assert gateway.metric('headway_requeue_seconds_count{reason="engine_gone"}') == 1
        assert in_queue.startswith("hw-")


async def end_lease(path: str, *, closes: bool) -> str:
    """Take the only open job as another gateway does once the lease has ended; then close it or give it back."""
    broker = SqliteBroker(path, "another", synchronous="normal")
    await broker.renew(clock.now() + 1e6)
    (job,) = await broker.take(clock.now() + 1e6, 10)
    await (broker.fail(job.id, "client_gone", clock.now()) if closes else broker.give_back(job.id))
    await broker.close()
    return job.id


@pytest.mark.parametrize("closes", [False, True])
def test_a_stream_goes_on_though_the_gateway_s_lease_has_ended(
    serve: Serve, mortal: Fake, other: Fake, closes: bool
) -> None:
    slow = fakes(tokens=100, delay=0.05)
    with serve(mortal.url, other.url) as gateway, hanging(gateway, stream=True, max_tokens=100, **slow) as line:
        seen = line.recv(65536)
        while b"fake " not in seen:
            seen += line.recv(65536)
        id = asyncio.run(end_lease(str(gateway.config.broker.sqlite.path), closes=closes))
        gone = gateway.inner.broker.gone
        held = {id: True} if closes else {}
        until(lambda: asyncio.run_coroutine_threadsafe(gone([id]), gateway.loop).result() == held)
        (mortal if mortal.last()["open"] else other).stop()
        line.settimeout(PATIENCE)
        while b"[DONE]" not in seen:
            seen += line.recv(65536)
        assert seen.count(b"fake ") == 100
        assert b"error" not in seen
        assert until(lambda: closed(gateway)) == [("failed", "client_gone") if closes else ("done", None)]


def test_a_stream_of_an_engine_that_hangs_goes_on_at_it_once_it_is_back(serve: Serve, mortal: Fake) -> None:
    slow = fakes(tokens=100, delay=0.05)
    with serve(mortal.url, engine=SOON) as gateway, hanging(gateway, stream=True, max_tokens=100, **slow) as line:
        seen = b""
        while b"fake " not in seen:
            seen += line.recv(65536)
        with stopped(pid(mortal)):
            until(lambda: gateway.controller.queued == 1, PATIENCE)
        line.settimeout(PATIENCE)
        while b"[DONE]" not in seen:
            seen += line.recv(65536)
        assert seen.count(b"fake ") == 100
        gap = 'headway_stream_gap_seconds_sum{class="default",model="smollm2"}'
        assert until(lambda: gateway.metric(gap)) > SOON["health_timeout_s"]
        until(lambda: mortal.last()["aborted"] == 1, PATIENCE)


def test_a_stream_goes_on_as_often_as_it_may(serve: Serve, fake: Fake) -> None:
    with serve(server={"max_resumes": 2}) as gateway:
        before = fake.last()["asked"]
        answer = events(gateway.post(gateway.chat(stream=True, **fakes(tokens=16, cuts=[2, 4, 6, 8]))))
        *_, error, done = answer
        assert (error["error"]["message"].split(".")[0], done) == ("The engine e0 went away", "[DONE]")
        assert words(answer[:-2]) == "fake " * 6
        assert fake.last()["asked"] == before + 3
        assert (metric(gateway, "resumed"), metric(gateway, "limit")) == (2, 1)
        state, reason = until(lambda: closed(gateway))[0]
        assert (state, str(reason).partition(":")[0]) == ("failed", "engine_gone")


@pytest.mark.parametrize("more", [{"n": 2}, {"fake_end": "other"}], ids=str)
def test_what_cannot_go_on_ends_with_an_error(serve: Serve, more: dict[str, Any]) -> None:
    with serve() as gateway:
        ask = fakes(tokens=16, cuts=[4])
        ask["vllm_xargs"] |= {name: value for name, value in more.items() if name != "n"}
        *_, error, done = events(gateway.post(gateway.chat(stream=True, n=more.get("n", 1), **ask)))
        assert done == "[DONE]"
        assert error["error"]["code"] == ("stream_diverged" if "fake_end" in more else None)
        assert metric(gateway, "diverged" if "fake_end" in more else "unable") == 1
        assert gateway.post(gateway.chat()).status_code == 200


def test_resumption_can_be_turned_off(serve: Serve, fake: Fake) -> None:
    with serve(server={"max_resumes": 0}) as gateway:
        *_, error, _ = events(gateway.post(gateway.chat(stream=True, **fakes(tokens=16, cuts=[4]))))
        assert "went away" in error["error"]["message"]
        assert "return_token_ids" not in fake.last()["body"]


def test_an_engine_without_headway_is_asked_for_nothing(serve: Serve, stock: Fake) -> None:
    with serve(stock.url) as gateway:
        *_, error, _ = events(gateway.post(gateway.chat(stream=True, **fakes(tokens=16, cuts=[4]))))
        assert "went away" in error["error"]["message"]
        assert "return_token_ids" not in stock.last()["body"]
        assert metric(gateway, "unable") == 1


def test_a_stream_does_not_go_on_at_an_engine_without_headway(serve: Serve, mortal: Fake, stock: Fake) -> None:
    slow = fakes(tokens=100, delay=0.05)
    with serve(mortal.url, stock.url) as gateway, ThreadPoolExecutor(6) as pool:
        until(gateway.all_up)
        asked = [pool.submit(gateway.post, gateway.chat(stream=True, max_tokens=100, **slow)) for _ in range(6)]
        until(lambda: sum(one.first_token is not None for one in gateway.inner.dispatcher.in_flight.values()) == 6)
        lost = mortal.last()["open"]
        assert lost
        mortal.stop()
        answers = [events(one.result()) for one in asked]
        errors = [answer[-2]["error"]["code"] for answer in answers if "error" in answer[-2]]
        assert errors == ["stream_diverged"] * lost
        assert sum(words(answer) == "fake " * 100 for answer in answers) == 6 - lost


def test_an_answer_that_its_engine_gives_up_goes_on(serve: Serve, fake: Fake) -> None:
    with serve() as gateway:
        before = fake.last()["asked"]
        answer = events(gateway.post(gateway.chat(stream=True, **fakes(tokens=16, end="abort"))))
        assert words(answer[:-2]) == "fake " * 4
        assert not any(event["choices"][0]["finish_reason"] for event in answer[:-2])
        assert "went away" in answer[-2]["error"]["message"]
        assert fake.last()["asked"] == before + 4


def test_a_client_may_leave_while_its_stream_waits(serve: Serve, mortal: Fake) -> None:
    slow = fakes(tokens=500, delay=0.05)
    with serve(mortal.url) as gateway:
        with hanging(gateway, stream=True, max_tokens=500, **slow) as line:
            seen = b""
            while b"fake " not in seen:
                seen += line.recv(65536)
            mortal.stop()
            until(lambda: gateway.controller.queued == 1, PATIENCE)
        state, reason = until(lambda: closed(gateway))[0]
        assert (state, str(reason).partition(":")[0]) == ("failed", "client_gone")
        assert not gateway.controller.requests


def test_streams_of_a_dead_engine_go_on_together(serve: Serve, mortal: Fake, fake: Fake) -> None:
    slow = fakes(tokens=80, delay=0.03)
    with serve(mortal.url, fake.url) as gateway, ThreadPoolExecutor(12) as pool:
        before = fake.last()["asked"]
        asked = [pool.submit(gateway.post, gateway.chat(stream=True, max_tokens=80, **slow)) for _ in range(12)]
        until(lambda: mortal.last()["open"] + fake.last()["open"] == 12)
        lost = mortal.last()["open"]
        assert lost
        mortal.stop()
        answers = [events(one.result()) for one in asked]
        assert [words(answer) for answer in answers] == ["fake " * 80] * 12
        assert [answer[-1] for answer in answers] == ["[DONE]"] * 12
        assert fake.last()["asked"] == before + 12
        assert set(until(lambda: closed(gateway))) == {("done", None)}
