"""`Idempotency-Key`: a background request or batch that is sent again is the one that was accepted first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.config import Broker, Key, Sqlite
from tests.gateway.batches import ended, lines, text, upload
from tests.gateway.batches import look as batch_of
from tests.gateway.conftest import Serve
from tests.gateway.gateway import CHAT, DEAD, Fake, Gateway, configuration, serving, until
from tests.gateway.test_background import finished, look
from tests.gateway.test_request_ends import fakes

RESPONSES = "/v1/responses"


def send(
    gateway: Gateway, key: str = "one", path: str = CHAT, secret: str | None = None, **fields: Any
) -> httpx.Response:
    body = gateway.chat(background=True, **fields)
    if path == RESPONSES:
        body = {"model": "smollm2", "input": "Hi.", "background": True, **fields}
    headers = {"idempotency-key": key} | ({} if secret is None else {"authorization": f"Bearer {secret}"})
    return gateway.post(body, path, headers=headers)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_what_is_sent_again_is_the_same_response(gateway: Gateway, fake: Fake, path: str) -> None:
    asked = fake.last()["asked"]
    first = send(gateway, path, path)
    again = send(gateway, path, path)
    assert first.status_code == again.status_code
    assert set(again.json()) >= set(first.json()) - {"waiting_for"}
    id = first.json()["id"]
    assert again.json()["id"] == id
    assert again.json()["created_at"] == first.json()["created_at"]
    assert finished(gateway, id)["status"] == "completed"
    assert send(gateway, path, path).json()["status"] == "completed"
    assert fake.last()["asked"] == asked + 1


def test_a_key_is_of_one_request(gateway: Gateway) -> None:
    id = send(gateway).json()["id"]
    for other in (send(gateway, max_tokens=9), send(gateway, path=RESPONSES)):
        assert other.status_code == 422
        error = other.json()["error"]
        assert error["code"] == "idempotency_key_reused"
        assert "a key of its own" in error["message"]
    assert send(gateway, "two").json()["id"] != id
    finished(gateway, id)
    assert gateway.post(None, f"/v1/responses/{id}").status_code == 405
    assert httpx.delete(f"{gateway.url}/v1/responses/{id}").json()["deleted"]
    assert send(gateway, max_tokens=9).status_code == 202, "it is free again"


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_has_a_length(gateway: Gateway, key: str) -> None:
    refused = send(gateway, key)
    assert refused.status_code == 400
    assert "1 to 255" in refused.json()["error"]["message"]


def test_requests_that_wait_on_their_connection_ignore_it(gateway: Gateway) -> None:
    headers = {"idempotency-key": "foreground"}
    ids = {gateway.post(gateway.chat(), headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


def test_each_tenant_has_keys_of_its_own(serve: Serve) -> None:
    keys = Key("sk-alpha-123", "alpha"), Key("sk-beta-1234", "beta")
    with serve(keys=keys) as gateway:
        ids = [send(gateway, secret=key.key).json()["id"] for key in (*keys, *keys)]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]


def test_of_many_at_once_one_is_accepted(fake: Fake, tmp_path: Path) -> None:
    """At two gateways on one queue; the other one runs none of them again."""
    broker = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    asked = fake.last()["asked"]
    with (
        serving(configuration(tmp_path, fake.url, broker=broker)) as one,
        serving(configuration(tmp_path, fake.url, broker=broker)) as other,
        ThreadPoolExecutor(16) as clients,
    ):
        answers = list(clients.map(lambda i: send((one, other)[i % 2], **fakes(hold="idem")), range(32)))
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["id"] for answer in answers}) == 1
        until(lambda: fake.last()["open"] == 1)
        fake.release("idem")
        id = answers[0].json()["id"]
        assert finished(other, id)["status"] == "completed"
        assert look(one, id)["status"] == "completed"
    assert fake.last()["asked"] == asked + 1


def test_it_survives_a_restart(fake: Fake, tmp_path: Path) -> None:
    broker = Broker(sqlite=Sqlite(str(tmp_path / "queue.sqlite")))
    with serving(configuration(tmp_path, DEAD, broker=broker), ready=False) as gateway:
        id = send(gateway).json()["id"]
    with serving(configuration(tmp_path, fake.url, broker=broker)) as gateway:
        assert send(gateway).json()["id"] == id
        assert finished(gateway, id)["status"] == "completed"
        assert send(gateway, max_tokens=9).status_code == 422


def send_batch(gateway: Gateway, file: str, key: str = "batch", **fields: Any) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **fields}
    return gateway.post(body, "/v1/batches", headers={"idempotency-key": key})


def test_a_batch_that_is_sent_again_is_the_same(gateway: Gateway, fake: Fake) -> None:
    asked = fake.last()["asked"]
    file = upload(gateway, text(lines(3))).json()["id"]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: send_batch(gateway, file, metadata={"a": "b"}), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    (id,) = {answer.json()["id"] for answer in answers}
    assert ended(gateway, id)["request_counts"]["completed"] == 3
    assert send_batch(gateway, file, metadata={"a": "b"}).json() == batch_of(gateway, id)
    assert fake.last()["asked"] == asked + 3, "no line was run twice"
    other = send_batch(gateway, file, completion_window="1h", metadata={"a": "b"})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert send_batch(gateway, file, "k" * 256).status_code == 400
    two = send_batch(gateway, file, "two").json()["id"]
    assert two != id
    ended(gateway, two)
