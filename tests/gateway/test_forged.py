"""What clients may not do to others or to the gateway: forge facts, break into answers, fill the log."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest

from headway.engines.vllm.request_metadata import client_xargs
from tests.gateway.gateway import CHAT, Fake, Gateway, until
from tests.gateway.test_refusals import error, speak
from tests.gateway.test_request_ends import fakes


def post(body: bytes, length: int | None = None, path: str = CHAT) -> bytes:
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), size) + body


def test_facts_cannot_be_forged(gateway: Gateway, fake: Fake) -> None:
    forged = {"headway_urgency": -1e300, "headway_made_up": 1, "Headway_id": "hw-1", "own": 2}
    assert gateway.post(gateway.chat(vllm_xargs=forged)).status_code == 200
    seen = fake.last()["body"]["vllm_xargs"]
    assert seen["own"] == 2
    assert seen["headway_id"].startswith("hw-")
    assert seen["headway_urgency"] != -1e300
    assert {"headway_made_up", "Headway_id"}.isdisjoint(seen)
    assert client_xargs({"headwaY_x": 1, "x": 2}) == {"x": 2}


@pytest.mark.parametrize("number", ["1e400", "-1e999", "[[1e400]]", '{"deep": 1e309}'])
def test_numbers_beyond_all_floats_are_refused(gateway: Gateway, number: str) -> None:
    for name in ("temperature", "vllm_xargs"):
        value = number if name == "temperature" else f'{{"x": {number}}}'
        raw = json.dumps(gateway.chat())[:-1] + f', "{name}": {value}}}'
        assert "too large" in error(gateway.post(None, content=raw.encode()), 400)["message"]


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", b"GET /x HTTP/9.9\r\n\r\n", b"GET /" + b"y" * 40_000])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_bad_head_waits_for_the_answers_before_it(gateway: Gateway, fake: Fake, bad: bytes, streamed: bool) -> None:
    name = f"bad-{streamed}-{len(bad)}"
    body = json.dumps(gateway.chat(stream=streamed, **fakes(hold=name))).encode()
    with socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=10) as line:
        line.sendall(post(body) + bad)
        until(lambda: fake.last()["open"] == 1)
        fake.release(name)
        seen = b""
        while part := line.recv(65536):
            seen += part
    first, _, last = seen.rpartition(b"HTTP/1.1 4")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in first
    assert last.startswith((b"00", b"31"))


def test_a_bad_body_behind_another_request_is_let_go(gateway: Gateway, fake: Fake) -> None:
    body = json.dumps(gateway.chat(**fakes(hold="behind"))).encode()
    chunked = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n" % CHAT.encode()
    with socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=10) as line:
        line.sendall(post(body) + chunked)
        until(lambda: fake.last()["open"] == 1)
        fake.release("behind")
        seen = b""
        while part := line.recv(65536):
            seen += part
    assert seen.count(b"HTTP/1.1 ") == 2
    assert seen.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " in seen
    assert speak(gateway, [chunked]).startswith(b"HTTP/1.1 400 ")


def test_an_aborted_upload_is_one_line(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    path = "/v1/completions"  # clients of the tests before leave the other one, which may be noticed late

    def lines() -> list[logging.LogRecord]:
        return [one for one in caplog.records if CHAT not in one.getMessage()]

    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", gateway.config.server.port)) as line:
            line.sendall(post(b'{"model":', 1000, path))
        until(lines)
    only = lines()
    assert len(only) == 1
    assert "before its body was complete" in only[0].getMessage()
    assert only[0].exc_info is None


def test_a_client_that_has_sent_more_is_noticed_when_it_leaves(gateway: Gateway, fake: Fake) -> None:
    body = json.dumps(gateway.chat(**fakes(hold="never"))).encode()
    with socket.create_connection(("127.0.0.1", gateway.config.server.port), timeout=10) as line:
        line.sendall(post(body) + post(body))
        until(lambda: fake.last()["open"] == 1)
    until(lambda: fake.last()["open"] == 0)
    assert gateway.newest() == ("failed", "client_gone: disconnected")


def test_a_stored_body_forges_nothing_either(gateway: Gateway, fake: Fake) -> None:
    fields: dict[str, Any] = {"vllm_xargs": {"headway_urgency": -1e300}, "background": True}
    id = gateway.post(gateway.chat(**fields)).json()["id"]
    until(lambda: gateway.get(f"/v1/responses/{id}").json()["status"] == "completed")
    assert fake.last()["body"]["vllm_xargs"].get("headway_urgency") != -1e300
