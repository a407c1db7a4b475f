"""The end of a gateway as its clients see it: answers in time, else an error that says why."""

from __future__ import annotations

import json
import logging
import signal
import socket

import pytest

from tests.gateway.conftest import Serve
from tests.gateway.gateway import DEAD, Fake, Gateway, until
from tests.gateway.test_connections import connected, rest
from tests.gateway.test_request_ends import fakes, hanging


def stop(gateway: Gateway, times: int = 1) -> None:
    """Do what Ctrl-C does."""
    for _ in range(times):
        gateway.server.handle_exit(signal.SIGINT, None)


def begun(line: socket.socket) -> bytes:
    """Read until the first event of a stream has come."""
    seen = b""
    while b"data: " not in seen:
        seen += line.recv(65536)
    return seen


@pytest.mark.parametrize(("drain", "times"), [(0, 1), (600, 2)], ids=["no drain", "Ctrl-C twice"])
def test_a_stream_that_is_cut_short_says_why(
    serve: Serve, drain: int, times: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(server={"drain_s": drain}) as gateway:
        with hanging(gateway, stream=True, max_tokens=1000, **fakes(delay=0.3, tokens=1000)) as line:
            seen = begun(line)
            stop(gateway, times)
            seen += rest(line)
        assert b"gateway_stopped" in seen
        assert b"data: [DONE]\n\n" in seen
        assert seen.endswith(b"\r\n0\r\n\r\n"), "the answer is whole as HTTP"
    assert gateway.newest() == ("failed", "gateway_stopped")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("inside", [True, False], ids=["in an engine", "queued"])
def test_what_has_no_answer_yet_gets_an_error(
    serve: Serve, fake: Fake, inside: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = fake.url if inside else DEAD
    with serve(engine, ready=False, server={"drain_s": 0}) as gateway:
        with hanging(gateway, **fakes(hold="never")) as line:
            until(lambda: fake.last()["open"] == 1 if inside else gateway.controller.queued == 1)
            stop(gateway)
            head, _, body = rest(line).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "gateway_stopped"
    assert gateway.newest() == ("failed", "gateway_stopped")
    assert "Traceback" not in capfd.readouterr().err


def test_an_upload_gets_an_error(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n"
    with serve(server={"drain_s": 0}) as gateway, connected(gateway, head + b"{") as line:
        until(lambda: gateway.inner.bodies.used == 1)
        stop(gateway)
        seen = rest(line)
    assert seen.startswith(b"HTTP/1.1 503 ")
    assert b"gateway_stopped" in seen
    assert "Traceback" not in capfd.readouterr().err


def test_answers_that_end_in_time_are_given(serve: Serve, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    with serve(server={"drain_s": 600}) as gateway, hanging(gateway, **fakes(hold="drain")) as line:
        until(lambda: fake.last()["open"] == 1)
        with caplog.at_level(logging.WARNING):
            stop(gateway)
            until(lambda: "have up to 600 s" in caplog.text)
        fake.release("drain")
        assert rest(line).startswith(b"HTTP/1.1 200 ")
    assert gateway.newest() == ("done", None)
