"""The official client, synchronous and not: what it sends arrives, what it gets it understands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headway.config import Broker
from headway.policy.recipes.registry import RECIPES
from tests.gateway.conftest import Serve
from tests.gateway.gateway import SAY, Fake, Gateway

ASK: dict[str, Any] = {"model": "smollm2", "messages": SAY, "max_tokens": 5}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    response = client.chat.completions.with_raw_response.create(**ASK)
    answer = response.parse()
    assert answer.choices[0].message.content == "fake " * 5
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert response.headers["x-request-id"].startswith("hw-")


def test_chat_streams(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "fake " * 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt="One", max_tokens=3)
    assert answer.choices[0].text == "fake " * 3
    chunks = list(client.completions.create(model="smollm2", prompt="One", max_tokens=3, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "fake " * 3


async def test_the_async_client(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        whole = await client.chat.completions.create(**ASK)
        assert whole.choices[0].message.content == "fake " * 5
        stream = await client.chat.completions.create(**ASK, stream=True, **USAGE)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        answers = await asyncio.gather(*(client.completions.create(model="smollm2", prompt=f"{i}") for i in range(30)))
        assert {answer.choices[0].text for answer in answers} == {"fake " * 8}


@pytest.mark.parametrize("wanted", [True, False])
def test_usage_only_when_asked_for(client: openai.OpenAI, fake: Fake, wanted: bool) -> None:
    """The engine is always asked for it: Headway counts tokens with it."""
    chunks = list(client.chat.completions.create(**ASK, stream=True, **(USAGE if wanted else {})))
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(with_usage) == wanted
    if wanted:
        assert chunks[-1].usage.completion_tokens == 5
        assert chunks[-1].choices == []
    assert fake.last()["body"]["stream_options"] == {"include_usage": True}


def test_usage_in_every_chunk_only_when_asked_for(client: openai.OpenAI, fake: Fake) -> None:
    every = {"continuous_usage_stats": True}
    list(client.chat.completions.create(**ASK, stream=True, stream_options=every))  # type: ignore[call-overload]
    assert fake.last()["body"]["stream_options"] == {"include_usage": True}
    list(client.chat.completions.create(**ASK, stream=True, stream_options=every | USAGE["stream_options"]))  # type: ignore[call-overload]
    assert fake.last()["body"]["stream_options"] == {"include_usage": True, **every}


def test_parameters_pass_through_unchanged(client: openai.OpenAI, fake: Fake) -> None:
    sent = {
        "stop": ["###", "zz"],
        "seed": 7,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 4,
        "temperature": 0.25,
        "top_p": 0.5,
        "presence_penalty": 0.1,
        "logit_bias": {"17": -5},
        "user": "somebody",
        "response_format": {"type": "json_object"},
        "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    }
    more = {"top_k": 5, "min_tokens": 2, "guided_choice": ["a", "b"], "vllm_xargs": {"mine": 3}}
    answer = client.chat.completions.create(**ASK, **sent, extra_body=more)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    got = fake.last()["body"]
    assert got.pop("vllm_xargs")["mine"] == 3
    assert got.pop("priority") == 0
    del more["vllm_xargs"]
    assert got == {**ASK, **sent, **more}


def test_completions_parameters_pass_through(client: openai.OpenAI, fake: Fake) -> None:
    sent = {"prompt": [[1, 2, 3], [4]], "max_tokens": 2, "n": 2, "logprobs": 2, "echo": True, "suffix": "!"}
    client.completions.create(model="smollm2", **sent)  # type: ignore[call-overload]
    got = fake.last()
    assert got["path"] == "/v1/completions"
    assert {name: got["body"][name] for name in sent} == sent


def test_what_is_ours_does_not_reach_the_engine(client: openai.OpenAI, fake: Fake) -> None:
    ours = {"ttft_slo_ms": 100, "tpot_slo_ms": 10, "ttlt_slo_ms": 1000, "background": False}
    client.chat.completions.create(**ASK, service_tier="auto", extra_body=ours)
    assert not {*ours, "service_tier"} & set(fake.last()["body"])


def test_odd_messages_are_the_engine_s_to_judge(gateway: Gateway, fake: Fake) -> None:
    """Tool calls, parts and roles that the template does not know are counted as well as can be."""
    parts = [{"type": "text", "text": "What is"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be kind.", "name": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    messages.append({"role": "user", "content": ["Is it", "4?"]})
    answer = gateway.post(gateway.chat(messages=messages))
    assert answer.status_code == 200, answer.text
    assert fake.last()["body"]["messages"] == messages


def test_whether_an_answer_streams_is_read_once(gateway: Gateway, fake: Fake) -> None:
    assert gateway.post(gateway.chat(stream="off", max_tokens=4.0)).json()["usage"]["completion_tokens"] == 4
    assert (fake.last()["body"]["stream"], fake.last()["body"]["max_tokens"]) == (False, 4.0)


def test_unicode_arrives_whole(gateway: Gateway, fake: Fake) -> None:
    text = "Grüße, 世界 👩‍👩‍👧 \u0000 \u2028"
    gateway.post(gateway.chat(messages=[{"role": "user", "content": text}]))
    assert fake.last()["body"]["messages"][0]["content"] == text


def test_the_answer_has_an_id_that_the_queue_knows(gateway: Gateway) -> None:
    answer = gateway.post(gateway.chat())
    assert gateway.newest()[0] == "done"
    assert list(gateway.jobs())[-1] == answer.headers["x-request-id"]


def test_what_open_webui_sends(gateway: Gateway) -> None:
    """The requests that `test_open_webui.py` sees, which is skipped where Open WebUI is not installed."""
    user = {"authorization": "Bearer none", "x-openwebui-user-name": "A%20User", "x-openwebui-chat-id": "1"}
    assert [one["id"] for one in gateway.get("/v1/models", headers=user).json()["data"]] == ["smollm2"]
    chat = gateway.post({"model": "smollm2", "messages": SAY, "stream": True, **USAGE}, headers=user)
    assert '"completion_tokens":8' in chat.text.replace(" ", "")
    assert chat.text.endswith("data: [DONE]\n\n")
    title = {"model": "smollm2", "messages": SAY, "stream": False, "max_completion_tokens": 1000}
    assert gateway.post(title, headers=user).json()["choices"][0]["message"]["content"] == "fake " * 8
    form = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"model": "smollm2", "language": "en"}, "headers": user}
    assert gateway.post(None, "/v1/audio/transcriptions", **form).json()["text"] == "fake " * 8
    for path in ("/v1/audio/speech", "/v1/images/generations"):
        assert gateway.post({"model": "smollm2", "input": "Hi."}, path, headers=user).status_code == 404


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "slack"])
def test_every_recipe_serves(serve: Serve, recipe: str) -> None:
    with serve(recipe=recipe, broker=Broker(kind="memory")) as gateway, gateway.client() as client:
        assert client.chat.completions.create(**ASK).choices[0].message.content == "fake " * 5
        assert len(list(client.chat.completions.create(**ASK, stream=True))) == 7
        assert len(list(client.chat.completions.create(**ASK, stream=True, service_tier="batch"))) == 7  # type: ignore[call-overload]
