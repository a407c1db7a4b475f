"""`headway_stream_gap_seconds`: the longest silence between two tokens of each stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.gateway.gateway import CHAT, WEB, Gateway, until
from tests.gateway.test_request_ends import fakes, hanging

LABELS = '{class="default",model="smollm2"}'


@contextmanager
def noted(gateway: Gateway, count: int = 1) -> Iterator[list[float]]:
    """Wait at the block's end for so many streams to be noted; put the seconds of all of them in a list."""
    name = "headway_stream_gap_seconds"
    before, total = gateway.metric(f"{name}_count{LABELS}"), gateway.metric(f"{name}_sum{LABELS}")
    found: list[float] = []
    yield found
    until(lambda: gateway.metric(f"{name}_count{LABELS}") == before + count)
    found.append(gateway.metric(f"{name}_sum{LABELS}") - total)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_api_that_streams_tells_its_longest_silence(gateway: Gateway, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: gateway.chat(),
        "/v1/completions": {"model": "smollm2", "prompt": "Say", "max_tokens": 3},
        "/v1/responses": {"model": "smollm2", "input": "Say", "max_output_tokens": 3},
        "/v1/messages": gateway.chat(max_tokens=3),
    }
    with noted(gateway) as gap:
        body = bodies[path] | {"stream": True}
        slow = {} if path in ("/v1/responses", "/v1/messages") else fakes(delay=0.3, tokens=3)
        assert gateway.post(body | slow, path).status_code == 200
    assert gap[0] < 5
    if slow:
        assert gap[0] >= 0.28, "three tokens, 0.3 s between them: not their sum"
        assert gap[0] < 0.75


def test_the_wait_for_the_first_token_is_no_silence(gateway: Gateway, fake: Any) -> None:
    with noted(gateway) as gap, hanging(gateway, stream=True, **fakes(hold="first")) as line:
        until(lambda: fake.last()["open"])
        time.sleep(0.6)
        fake.release("first")
        while b"[DONE]" not in line.recv(2**16):
            pass
    assert gap[0] < 0.4


def test_an_answer_that_is_not_streamed_and_one_token_have_none(gateway: Gateway) -> None:
    with noted(gateway, 0):
        assert gateway.post(gateway.chat(**fakes(tokens=4, delay=0.05))).status_code == 200
        assert gateway.post(gateway.chat(stream=True, **fakes(tokens=1))).status_code == 200
    with noted(gateway):
        assert gateway.post(gateway.chat(stream=True)).status_code == 200


def test_a_client_that_leaves_during_a_silence_has_waited_for_it(gateway: Gateway) -> None:
    with noted(gateway) as gap, hanging(gateway, stream=True, **fakes(delay=2, tokens=5)) as line:
        assert line.recv(2**16)  # the head, with the first token
        time.sleep(0.5)
    assert 0.3 < gap[0] < 5


def test_an_engine_that_breaks_off_counts(gateway: Gateway) -> None:
    with noted(gateway) as gap:
        broken = WEB.post(gateway.url + CHAT, json=gateway.chat(stream=True, **fakes(end="cut", delay=0.3, tokens=4)))
        assert "error" in broken.text
    assert gap[0] >= 0.28
