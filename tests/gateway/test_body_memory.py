"""What bodies take in memory: their bytes within one limit, uploads included; background ones are on disk."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Broker
from headway.gateway.budget import ByteBudget
from headway.gateway.parsing.engine_body import EngineBody
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, DEAD, Fake, Gateway, until
from tests.gateway.test_background import begin, finished
from tests.gateway.test_refusals import error
from tests.gateway.test_request_ends import fakes, hanging

HALF = "x" * 500_000  # characters of metadata: a body of about half a MiB
NAMES = st.text().filter(lambda name: name != "vllm_xargs")
VALUES = st.dictionaries(NAMES, st.none() | st.integers() | st.text() | st.lists(st.booleans()))


def used(gateway: Gateway) -> int:
    return gateway.inner.bodies.used


@given(VALUES, VALUES, st.dictionaries(st.just("headway_id") | st.just("headway_rank"), st.text()))
def test_a_body_keeps_its_fields(fields: dict[str, Any], xargs: dict[str, Any], ours: dict[str, Any]) -> None:
    whole = {**fields, "vllm_xargs": xargs}
    assert json.loads(EngineBody.of(whole).joined(ours)) == {**whole, "vllm_xargs": {**xargs, **ours}}


@given(st.dictionaries(NAMES, st.text() | st.lists(st.integers())))
def test_a_body_for_the_engine_is_no_longer_than_the_client_can_make_it(fields: dict[str, Any]) -> None:
    shortest = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    assert len(EngineBody.of(fields).content) <= len(shortest)


def test_a_body_that_gets_longer_counts_as_it_is_kept(serve: Serve) -> None:
    """JSON can write a number in fewer characters than Python does."""
    metadata = [1e15] * 50_000
    with serve(DEAD, ready=False) as gateway:
        body = json.dumps(gateway.chat(metadata=metadata)).replace("1000000000000000.0", "1e15").encode()
        with hanging(gateway, content=body):
            until(lambda: gateway.controller.queued == 1)
            assert used(gateway) > 3 * len(body)


def test_a_budget_is_given_back_once() -> None:
    budget = ByteBudget(10)
    with budget.hold() as first:
        first.add(6)
        kept = first.keep()
    with budget.hold() as second:
        second.add(4)
    assert budget.used == 6
    kept.close()
    kept.close()
    assert budget.used == 0


def test_waiting_bodies_are_limited_in_bytes(serve: Serve) -> None:
    with serve(DEAD, ready=False, server={"max_queued_mib": 1}) as gateway:
        with hanging(gateway, metadata=HALF):
            until(lambda: gateway.controller.queued == 1)
            assert 500_000 < used(gateway) < 502_000, "its bytes and no more"
            with hanging(gateway, metadata=HALF):
                until(lambda: gateway.controller.queued == 2)
                answer = gateway.post(gateway.chat(metadata=HALF))
                assert error(answer, 429)["code"] == "queue_full"
                assert answer.headers["retry-after"] == "1"
            until(lambda: gateway.controller.queued == 1)
            error(gateway.post(gateway.chat(model="nothing", metadata=HALF)), 404)
        until(lambda: used(gateway) == 0)


@contextmanager
def uploading(gateway: Gateway, size: int, sent: bytes) -> Iterator[socket.socket]:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.config.server.port)) as line:
        line.sendall(head.encode() + sent)
        yield line


def test_uploads_count(serve: Serve) -> None:
    with serve(server={"max_queued_mib": 1}) as gateway:
        with uploading(gateway, 2**20, b" " * 900_000):
            until(lambda: used(gateway) == 900_000)
            assert error(gateway.post(gateway.chat(metadata=HALF)), 429)["code"] == "queue_full"
            assert gateway.post(gateway.chat()).status_code == 200
        until(lambda: used(gateway) == 0)


def test_a_body_is_let_go_when_its_answer_begins(serve: Serve, fake: Fake) -> None:
    with serve() as gateway, hanging(gateway, stream=True, metadata=HALF, **fakes(tokens=900, delay=0.1)):
        until(lambda: fake.last()["open"] == 1)
        until(lambda: used(gateway) == 0)
        assert gateway.controller.requests


def test_what_a_response_keeps_counts_until_it_is_stored(serve: Serve, fake: Fake) -> None:
    """Beside the body that waits; the engine gets neither's reasoning."""

    def asked(text: str, **more: Any) -> dict[str, Any]:
        thought = {"type": "reasoning", "summary": [], "encrypted_content": text}
        return {"model": "smollm2", "input": [thought, {"role": "user", "content": "Hi."}], **more}

    with serve(server={"max_queued_mib": 1}) as gateway, ThreadPoolExecutor(1) as client:
        answer = client.submit(gateway.post, asked(HALF, **fakes(hold="kept")), "/v1/responses")
        until(lambda: fake.last()["open"] == 1)
        assert 500_000 < used(gateway) < 502_000
        fake.release("kept")
        assert answer.result(20.0).status_code == 200
        assert error(gateway.post(asked(HALF + HALF[:40_000]), "/v1/responses"), 429)["code"] == "queue_full"


def test_background_bodies_wait_on_disk(serve: Serve, mortal: Fake) -> None:
    mortal.stop()
    with serve(mortal.url, ready=False, server={"max_queued_mib": 1}) as gateway:
        ids = [begin(gateway, metadata=HALF, **fakes(tokens=3)) for _ in range(4)]
        assert used(gateway) == 0
        assert all(one.upstream is None for one in gateway.inner.dispatcher.in_flight.values())
        mortal.start()
        assert {finished(gateway, id)["status"] for id in ids} == {"completed"}
        assert mortal.last()["body"]["metadata"] == HALF
        assert mortal.last()["body"]["vllm_xargs"]["fake_tokens"] == 3


def test_a_broker_in_memory_has_no_disk(serve: Serve) -> None:
    with serve(DEAD, ready=False, broker=Broker(kind="memory")) as gateway:
        begin(gateway, metadata=HALF)
        assert used(gateway) > 500_000


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 19])
def test_a_length_beyond_all_numbers_is_refused(gateway: Gateway, length: str) -> None:
    with socket.create_connection(("127.0.0.1", gateway.config.server.port)) as line:
        line.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode())
        assert line.recv(100).split()[1] in (b"400", b"413")
