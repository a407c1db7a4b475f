"""Responses that go on from kept ones and from conversations, in front of the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.config import Broker, Key, Sqlite
from headway.gateway.in_flight import InFlightRequest, is_kept, kept_in
from headway.gateway.parsing.engine_body import EngineBody
from headway.gateway.parsing.requests import Kept
from headway.types import Request, Slo
from tests.gateway.conftest import Serve
from tests.gateway.gateway import WEB, Fake, Gateway, until
from tests.gateway.test_responses import PATH, body

CONVERSATIONS = "/v1/conversations"
FAKE = "fake " * 8
ALPHA = {"authorization": "Bearer sk-alpha-key"}
BETA = {"authorization": "Bearer sk-beta-key"}


@pytest.fixture(scope="module")
def asks(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


def texts(fake: Fake) -> list[tuple[str, str]]:
    """Return what the engine was asked last: (role, text) of each message."""
    return [(one["role"], one["content"]) for one in fake.last()["body"]["messages"]]


@pytest.mark.parametrize("way", ["whole", "stream", "background"])
def test_a_response_goes_on_from_another(gateway: Gateway, asks: openai.OpenAI, fake: Fake, way: str) -> None:
    first = _answered(asks, way, instructions="Be brief.", input="One.")
    second = _answered(asks, way, previous_response_id=first, input=[{"role": "user", "content": "Two."}])
    third = _answered(asks, way, previous_response_id=second, input="Three.")
    said = [("user", "One."), ("assistant", FAKE), ("user", "Two."), ("assistant", FAKE), ("user", "Three.")]
    assert texts(fake) == said
    told = asks.responses.retrieve(third)
    assert (told.previous_response_id, told.output_text, told.store) == (second, FAKE, True)
    items = asks.responses.input_items.list(second, order="asc").data
    assert [one.content for one in items[::2]] == ["One.", "Two."]  # type: ignore[union-attr]
    asks.responses.delete(second)
    with pytest.raises(openai.NotFoundError):
        asks.responses.create(**body(previous_response_id=second))
    assert asks.responses.retrieve(third).id == third


def _answered(asks: openai.OpenAI, way: str, **fields: Any) -> str:
    if way == "stream":
        return str(list(asks.responses.create(**body(**fields), stream=True))[-1].response.id)
    made = asks.responses.create(**body(**fields, background=way == "background"))
    until(lambda: asks.responses.retrieve(made.id).status not in ("queued", "in_progress"))
    return str(made.id)


def test_a_custom_tool_is_known_in_the_background(gateway: Gateway) -> None:
    tools = [{"type": "custom", "name": "f"}]
    id = gateway.post(body(background=True, tools=tools), PATH).json()["id"]
    done = until(lambda: (seen := gateway.get(f"{PATH}/{id}").json())["status"] == "completed" and seen)
    assert (done["tools"], done["model"]) == (tools, "smollm2")


def test_what_the_client_does_not_want_kept_is_not(gateway: Gateway) -> None:
    made = gateway.post(body(store=False), PATH).json()
    assert made["store"] is False
    assert gateway.get(f"{PATH}/{made['id']}").status_code == 404
    assert gateway.post(body(previous_response_id=made["id"]), PATH).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"previous_response_id": "hw-1"}, 404, "hw-1"),
        ({"conversation": "conv_1"}, 404, "conv_1"),
        ({"conversation": {"id": "conv_1"}, "previous_response_id": "hw-1"}, 400, "one past"),
        ({"previous_response_id": 3}, 400, "id"),
        ({"conversation": {}}, 400, "id"),
    ],
)
def test_a_past_that_is_not_there(gateway: Gateway, fields: dict[str, Any], status: int, words: str) -> None:
    answer = gateway.post(body(**fields), PATH)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_a_conversation_gets_what_is_said(asks: openai.OpenAI, fake: Fake) -> None:
    begun = asks.conversations.create(
        items=[{"type": "message", "role": "user", "content": "Zero."}], metadata={"topic": "a"}
    )
    assert (begun.object, begun.metadata) == ("conversation", {"topic": "a"})
    for way, text in (("whole", "One."), ("stream", "Two."), ("background", "Three.")):
        _answered(asks, way, conversation=begun.id, input=text)
        until(lambda text=text: text in str(asks.conversations.items.list(begun.id, order="asc").data[-2].content))
    said = [("user", "Zero."), ("user", "One."), ("assistant", FAKE), ("user", "Two."), ("assistant", FAKE)]
    assert texts(fake) == [*said, ("user", "Three.")]
    assert asks.conversations.update(begun.id, metadata={"topic": "b"}).metadata == {"topic": "b"}
    asks.conversations.items.create(begun.id, items=[{"type": "message", "role": "user", "content": "Last."}])
    newest = asks.conversations.items.list(begun.id).data
    assert len(newest) == 8
    assert asks.conversations.retrieve(begun.id).metadata == {"topic": "b"}
    assert asks.conversations.delete(begun.id).deleted
    with pytest.raises(openai.NotFoundError):
        asks.responses.create(**body(conversation=begun.id))


def test_items_come_in_pages(gateway: Gateway, asks: openai.OpenAI) -> None:
    words = [f"n{number}" for number in range(25)]
    begun = asks.conversations.create(items=[{"role": "user", "content": word} for word in words[:20]])
    asks.conversations.items.create(begun.id, items=[{"role": "user", "content": word} for word in words[20:]])
    made = asks.responses.create(**body(input=[{"role": "user", "content": word} for word in words]))
    for path in (f"{CONVERSATIONS}/{begun.id}/items", f"{PATH}/{made.id}/input_items"):
        first = gateway.get(path).json()
        assert [one["content"] for one in first["data"]] == words[:4:-1]
        assert (first["has_more"], first["last_id"]) == (True, first["data"][-1]["id"])
        rest = gateway.get(f"{path}?after={first['last_id']}").json()
        assert ([one["content"] for one in rest["data"]], rest["has_more"]) == (words[4::-1], False)
        for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
            refused = gateway.get(f"{path}?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    for order, expected in (("asc", words), ("desc", words[::-1])):
        pages = asks.responses.input_items.list(made.id, limit=10, order=order)  # type: ignore[arg-type]
        assert [one.content for one in pages] == expected  # type: ignore[union-attr]
        assert [one.content for one in asks.conversations.items.list(begun.id, limit=10, order=order)] == expected  # type: ignore[arg-type, union-attr]


def test_answers_of_the_same_time_are_all_added(gateway: Gateway) -> None:
    id = gateway.post({}, CONVERSATIONS).json()["id"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: gateway.post(body(conversation=id, input=f"n{i}"), PATH), range(8)))
    items = gateway.get(f"{CONVERSATIONS}/{id}/items").json()["data"]
    assert {one["content"] for one in items if one["role"] == "user"} == {f"n{i}" for i in range(8)}
    assert len(items) == 16


async def test_a_recovered_response_knows_its_conversation() -> None:
    request = Request("hw-1", "m", 1, 1, 0.0, Slo(), task='"kept":1')
    begun = InFlightRequest(request, "chat", EngineBody(b"{}", b"{}"), background=True)
    assert not is_kept(begun.to_job())
    assert kept_in(begun.to_job()) is None
    kept = Kept('{"input": [], "own": 0, "conversation": "conv_1"}', "conv_1")
    job = begun.to_job("digest", kept)
    assert is_kept(job)
    recovered = await InFlightRequest.from_job(job)
    assert (recovered.conversation, recovered.request) == ("conv_1", request)


def test_a_tenant_has_its_own(serve: Serve) -> None:
    keys = (Key("sk-alpha-key", "alpha"), Key("sk-beta-key", "beta"))
    with serve(keys=keys, server={"max_body_kib": 1}) as gateway:
        id = gateway.post(body(), PATH, headers=ALPHA).json()["id"]
        talk = gateway.post({}, CONVERSATIONS, headers=ALPHA).json()["id"]
        for headers, status in ((ALPHA, 200), (BETA, 404)):
            assert gateway.get(f"{PATH}/{id}", headers=headers).status_code == status
            assert gateway.get(f"{PATH}/{id}/input_items", headers=headers).status_code == status
            assert gateway.get(f"{CONVERSATIONS}/{talk}", headers=headers).status_code == status
            assert gateway.get(f"{CONVERSATIONS}/{talk}/items", headers=headers).status_code == status
        for past in ({"previous_response_id": id}, {"conversation": talk}):
            assert gateway.post(body(**past), PATH, headers=BETA).status_code == 404
        for path in (f"{PATH}/{id}", f"{CONVERSATIONS}/{talk}"):
            assert WEB.delete(gateway.url + path, headers=BETA).status_code == 404
        last = id
        for _ in range(8):  # until it is too long
            answer = gateway.post(body(previous_response_id=last), PATH, headers=ALPHA)
            if answer.status_code != 200:
                break
            last = answer.json()["id"]
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "conversation_too_long"


@pytest.mark.parametrize("broker", [None, Broker(kind="memory")])
def test_nothing_is_kept_where_it_is_off(serve: Serve, broker: Broker | None, tmp_path: Path) -> None:
    queue = broker or Broker(keep_responses=False, sqlite=Sqlite(str(tmp_path / "q.sqlite")))
    with serve(broker=queue) as gateway:
        made = gateway.post(body(), PATH).json()
        assert made["store"] is False
        assert gateway.get(f"{PATH}/{made['id']}").status_code == 404
        refused = gateway.post(body(previous_response_id=made["id"]), PATH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert gateway.post({}, CONVERSATIONS).status_code == 403


def test_a_fault_in_a_conversation_leaves_the_end_of_the_request_whole(serve: Serve) -> None:
    async def fault(*_: Any) -> None:
        raise RuntimeError("a fault")

    with serve() as gateway:
        conversation = gateway.post({}, CONVERSATIONS).json()["id"]
        gateway.inner.path.answered.__self__.change = fault
        gateway.post(body(input="One.", conversation=conversation), PATH)
        until(lambda: gateway.metric("headway_requests_total{") == 1)
