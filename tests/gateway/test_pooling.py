"""Requests for pooling models are queued as all others are; what a model cannot do is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.types import Message, Receive, Scope, Send

from headway.config import Config, parse
from headway.engines.vllm.plugin.metadata_header import MetadataHeader, carry_metadata
from headway.engines.vllm.process.answers import read_answer
from headway.engines.vllm.request_metadata import HEADER, as_header, from_header, read_metadata, write_metadata
from headway.errors import ConfigError, RequestError
from headway.gateway.parsing.pooling import ENDPOINTS, as_completion
from headway.types import Forecast, Request, Slo
from tests.gateway.batches import begin, content, ended
from tests.gateway.gateway import Fake, Gateway, configuration, serving

POOLING = {"runner": "pooling", "max_model_len": 64}


@pytest.fixture(scope="module")
def pooling(fake: Fake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of an engine that it takes for one with a pooling model."""
    folder: Path = tmp_path_factory.mktemp("pooling")
    with serving(configuration(folder, fake.url, engine=POOLING)) as running:
        yield running


def body_of(path: str) -> dict[str, Any]:
    match ENDPOINTS[path]:
        case "score":
            return {"text_1": "a cat", "text_2": ["a dog", "a tree"]}
        case "rerank":
            return {"query": "a cat", "documents": ["a dog", "a tree"]}
        case _:
            return {"input": ["a cat", "a dog"]}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_each_endpoint_answers_for_all_texts(pooling: Gateway, fake: Fake, path: str) -> None:
    answer = pooling.post({"model": "smollm2", **body_of(path)}, path, headers={"x-slo-e2e-ms": "9000"})
    assert answer.status_code == 200, answer.text
    assert len(answer.json().get("data") or answer.json()["results"]) == 2
    assert answer.headers["x-headway-slo-e2e-ms"] == "9000"
    assert pooling.newest() == ("done", None)
    seen = fake.last()
    assert seen["body"].items() >= body_of(path).items()
    assert "vllm_xargs" not in seen["body"]
    assert from_header(seen["headers"][HEADER])["headway_e2e"] == 9.0


def test_openai_s_client_gets_embeddings(pooling: Gateway) -> None:
    made = pooling.client().embeddings.create(model="smollm2", input=["one", "two"], encoding_format="float")
    assert [one.index for one in made.data] == [0, 1]
    assert made.data[0].embedding[0] == 0.5


def test_a_prompt_may_fill_the_whole_context_but_no_more(pooling: Gateway) -> None:
    assert pooling.post({"input": list(range(64))}, "/v1/embeddings").status_code == 200
    refused = pooling.post({"input": [[1, 2], list(range(65))]}, "/v1/embeddings")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "service_tier": "none such"}, "service_tier"),
    ],
)
def test_bad_bodies_are_refused_by_the_field(pooling: Gateway, asked: dict[str, Any], param: str) -> None:
    refused = pooling.post({"model": "smollm2", **asked}, "/v1/embeddings")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_a_list_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(RequestError, match="1001 elements"):
        as_completion("embeddings", {"input": ["a"] * 1001}, 1000)


def test_messages_and_parts_count_by_their_text() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "there"}]}]
    assert as_completion("embeddings", {"messages": chat}, 9)["prompt"] == ["Hi\nthere"]
    parts = {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
    asked = {"query": "q", "documents": parts}
    assert as_completion("rerank", asked, 9)["prompt"] == ["q", "a"]


def test_a_field_without_a_value_is_not_there() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert as_completion("embeddings", {"input": None, "messages": chat}, 9)["prompt"] == ["Hi"]
    assert as_completion("score", {"queries": None, "text_1": "a", "text_2": "b"}, 9)["prompt"] == ["a", "b"]


def test_a_model_is_refused_what_it_cannot_do(gateway: Gateway, pooling: Gateway) -> None:
    for path in ENDPOINTS:
        refused = gateway.post(body_of(path), path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")
    assert gateway.post({"model": "nothing", "input": "a"}, "/v1/embeddings").status_code == 404
    refused = pooling.post(pooling.chat())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")


def test_answers_are_told_apart() -> None:
    assert read_answer(b'{"data": [{}]}', "data").output_tokens == 1
    assert read_answer(b'{"error": {}}', "data").failed
    for body, shape in ((b'{"choices": []}', "data"), (b'{"data": []}', "choices")):
        with pytest.raises(ValueError, match="no list"):
            read_answer(body, shape)  # type: ignore[arg-type]


def test_a_batch_of_embeddings(pooling: Gateway) -> None:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "smollm2", "input": f"text {i}"},
        }
        for i in range(3)
    ]
    done = ended(pooling, begin(pooling, lines, endpoint="/v1/embeddings"))
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    answers = content(pooling, done["output_file_id"])
    assert all(one["response"]["body"]["data"] for one in answers)


# ---- inside vLLM


def test_the_metadata_reaches_the_pooling_parameters() -> None:
    request = Request("hw-1", "m", 5, 1, 100.0, slo=Slo(e2e=2.0))
    header = as_header(write_metadata(request, Forecast(np.ones(1))))[HEADER]
    seen = list[Any]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        params = SimpleNamespace(extra_kwargs={"theirs": 1})
        client.encode(prompt="a", pooling_params=params)
        seen.append(params.extra_kwargs)

    async def ask(headers: list[tuple[bytes, bytes]]) -> None:
        async def nothing(*_: Any) -> Message:
            return {"type": "http.request"}

        await MetadataHeader(app)({"type": "http", "headers": headers}, nothing, nothing)

    client = SimpleNamespace(encode=lambda **_: None)
    carry_metadata(client)
    asyncio.run(ask([(HEADER.encode(), header.encode())]))
    asyncio.run(ask([]))
    assert seen[1] == {"theirs": 1}
    vllm = SimpleNamespace(
        request_id="embd-hw-1-0",
        arrival_time=5.0,
        sampling_params=None,
        pooling_params=SimpleNamespace(extra_kwargs=seen[0]),
    )
    read = read_metadata(vllm)
    assert (read.id, read.arrival, read.e2e, read.tokens_left) == ("hw-1", 100.0, 2.0, 1.0)


@pytest.mark.parametrize("header", ["", "[]", "{", json.dumps({"other": 1}), "7"])
def test_a_header_of_another_shape_is_no_metadata(header: str) -> None:
    assert from_header(header) == {}


def test_a_pooling_engine_has_one_model() -> None:
    engine = {"model": "a", "runner": "pooling"}
    assert isinstance(parse({"engines": [engine]}), Config)
    for more in ({"models": ["b"]}, {"adapters": {"c": "/c"}}):
        with pytest.raises(ConfigError, match="runner"):
            parse({"engines": [engine | more]})
