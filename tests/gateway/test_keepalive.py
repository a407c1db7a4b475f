"""Comments to streams that wait: they keep proxies from cutting them, and change nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headway.config import Tier
from headway.errors import RequestError
from headway.gateway.in_flight import InFlightRequest
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, WEB, Fake, Gateway, until
from tests.gateway.test_request_ends import fakes

STRICT = Tier(ttft_ms=600_000.0, drop=True)
SOON = {"keepalive_s": 0.02}
COMMENT = ": waiting"
PATHS = [CHAT, "/v1/messages", "/v1/responses"]


@contextmanager
def waiting(gateway: Gateway, path: str = CHAT, **fields: Any) -> Iterator[Iterator[str]]:
    """Ask for a stream, and yield its lines once it has had comments but no token."""
    body = {"model": "smollm2", "stream": True, "max_tokens": 8, **fields}
    body |= {"input": "Say it."} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Say it."}]}
    with WEB.stream("POST", gateway.url + path, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
        lines = (line for line in answer.iter_lines() if line)
        assert [next(lines) for _ in range(3)] == [COMMENT] * 3
        yield lines


def one(gateway: Gateway) -> InFlightRequest:
    (found,) = gateway.inner.dispatcher.in_flight.values()
    return found


def events(lines: Iterator[str]) -> list[Any]:
    """Return what comes after the comments."""
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_waits_gets_comments_and_then_its_answer(serve: Serve, fake: Fake, path: str) -> None:
    name = f"kept-{path.rpartition('/')[2]}"
    with serve(server=SOON) as gateway:
        with waiting(gateway, path, **fakes(hold=name)) as lines:
            assert one(gateway).first_token is None, "a comment is no token"
            fake.release(name)
            assert "".join(lines).count("fake ") >= 8
        until(lambda: gateway.metric("headway_ttft_seconds_count{") == 1)
        assert gateway.newest()[0] == "done"


def test_a_stream_that_is_silent_in_the_middle_gets_comments(serve: Serve) -> None:
    with serve(server={"keepalive_s": 0.1}) as gateway:
        answer = gateway.post(gateway.chat(stream=True, max_tokens=2, **fakes(delay=0.5, tokens=2)))
    lines = [line for line in answer.text.split("\n") if line]
    first = next(i for i, line in enumerate(lines) if "fake" in line)
    assert lines[first + 1 :].count(COMMENT) >= 2
    assert lines[-1] == "data: [DONE]"


def test_a_stream_without_an_engine_gets_comments(serve: Serve, mortal: Fake) -> None:
    """It is sent again to an engine that comes back, as if nothing had been said."""
    with serve(mortal.url, server=SOON) as gateway, waiting(gateway, **fakes(hold="death")) as lines:
        until(lambda: mortal.last()["open"] == 1)
        mortal.stop()
        until(lambda: gateway.controller.queued == 1)
        assert next(lines) == COMMENT
        mortal.start()
        mortal.release("death")
        assert events(lines)[-1] == "[DONE]"
        assert gateway.metric('headway_requeue_seconds_count{reason="engine_gone"}') == 1


@pytest.mark.parametrize("path", PATHS)
def test_what_is_refused_after_comments_is_an_event_of_its_api(serve: Serve, fake: Fake, path: str) -> None:
    late = RequestError("It is late.", "Ask for less.", status=429, kind="rate_limit_error", code="infeasible")

    async def refuse() -> None:
        one(gateway).refuse(late)

    with serve(server=SOON, classes={"strict": STRICT}) as gateway:
        with waiting(gateway, path, service_tier="strict", **fakes(hold="for ever")) as lines:
            gateway.do(refuse())
            told = events(lines)
        assert gateway.newest()[0] == "failed"
        until(lambda: fake.last()["open"] == 0)
    if path == CHAT:
        assert told == [late.body(), "[DONE]"]
    elif path == "/v1/messages":
        error = {"type": "rate_limit_error", "message": "It is late. Ask for less."}
        assert told == [{"type": "error", "error": error}]
    else:
        assert [event["type"] for event in told] == ["response.created", "response.in_progress", "response.failed"]
        assert told[-1]["response"]["status"] == "failed"
        assert told[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_what_an_engine_refuses_after_comments_is_an_event(serve: Serve, fake: Fake) -> None:
    with serve(server=SOON) as gateway:
        with waiting(gateway, **fakes(hold="no", end="400")) as lines:
            fake.release("no")
            refused, done = events(lines)
        assert (refused["error"]["code"], done) == (400, "[DONE]")
        assert str(gateway.newest()[1]).startswith("engine_refused")


def test_without_comments_a_refusal_keeps_its_status(serve: Serve, fake: Fake) -> None:
    with serve(server={"keepalive_s": 0}) as gateway:
        fake.release("at once")
        answer = gateway.post(gateway.chat(stream=True, **fakes(hold="at once", end="400")))
        assert answer.status_code == 400


def test_a_client_that_leaves_while_it_gets_comments(serve: Serve, fake: Fake) -> None:
    with serve(server=SOON) as gateway:
        aborted = fake.last()["aborted"]
        with waiting(gateway, **fakes(hold="left")):
            until(lambda: fake.last()["open"] == 1)
        until(lambda: fake.last()["aborted"] == aborted + 1)
        assert str(gateway.newest()[1]).startswith("client_gone")
