"""No field of the APIs is dropped without a word.

It has an effect on the engine or on Headway, is refused, or docs/clients.md says that it has none. The
fields are those of the clients' packages and of vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsNonStreaming as Messages
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Completions
from openai.types.embedding_create_params import EmbeddingCreateParams as Embeddings
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Responses
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest

from headway.errors import RequestError
from headway.gateway.apis.anthropic import translate as anthropic
from headway.gateway.apis.responses import translate as responses
from headway.gateway.parsing.requests import _HEADWAY_FIELDS, Kind
from tests.engine.test_request_fields import take

pytestmark = pytest.mark.filterwarnings("default")
DOCS = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SAYS = [{"role": "user", "content": "Hi."}]
TOOL = {"name": "f", "input_schema": {}, "parameters": {}}
Fields = dict[str, Any]
Translate = Callable[[Fields], Fields]
# By API: fields of the package, of vLLM and of its engine; the engine's kind, a translation, a smallest body.
APIS: dict[str, tuple[Any, Any, Any, Kind, Translate, Fields]] = {
    "chat": (Chat, ChatCompletionRequest, ChatCompletionRequest, "chat", dict, {"messages": SAYS}),
    "completions": (Completions, CompletionRequest, CompletionRequest, "completions", dict, {"prompt": "a"}),
    "embeddings": (
        Embeddings,
        EmbeddingCompletionRequest,
        EmbeddingCompletionRequest,
        "embeddings",
        dict,
        {"input": "a"},
    ),
    "responses": (
        Responses,
        ResponsesRequest,
        ChatCompletionRequest,
        "chat",
        responses.chat_of,
        {"input": "Hi.", "tools": [{"type": "function", **TOOL}]},
    ),
    "messages": (
        Messages,
        AnthropicMessagesRequest,
        ChatCompletionRequest,
        "chat",
        anthropic.chat_of,
        {"messages": SAYS, "max_tokens": 8, "tools": [TOOL]},
    ),
}
# Values that have an effect, where a text would be no value of the field.
SAMPLES: Fields = {
    "background": True,
    "best_of": 2,
    "dimensions": 3,
    "echo": True,
    "encoding_format": "base64",
    "max_completion_tokens": 3,
    "return_token_ids": True,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "max_tool_calls": 1,
    "n": 2,
    "messages": [{"role": "user", "content": "Ho."}],
    "metadata": {"user_id": "u"},
    "modalities": ["audio"],
    "output_config": {"effort": "low"},
    "priority": 3,
    "prompt": "b",
    "reasoning": {"effort": "low"},
    "stop_sequences": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "system": "Be brief.",
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "enabled"},
    "tool_choice": {"type": "function", "name": "f"},
    "tools": [],
    "truncate_prompt_tokens": 3,
    "truncation": "auto",
    "service_tier": "priority",
    "include": ["reasoning.encrypted_content"],
    "input": "b",
    "vllm_xargs": {"a": "b"},
}
BESIDE: dict[str, Fields] = {"stream_options": {"stream": True}}  # what a field has an effect with
OWN: dict[tuple[str, str], Any] = {  # where APIs differ
    ("messages", "tool_choice"): {"type": "any"},
    ("messages", "service_tier"): "batch",
    ("responses", "prompt"): {"id": "p"},
}


def documented() -> set[str]:
    """Return the fields that docs/clients.md lists as without effect."""
    found = re.search(r"These have no effect: (.*?)\n\n", DOCS, re.DOTALL)
    assert found is not None
    return set(re.findall(r"`([\w.]+)`", found[1]))


def made(api: str, body: Fields) -> Fields:
    """Return what an engine gets of a body, of the fields that it knows."""
    _, _, engine, kind, translate, least = APIS[api]
    upstream = json.loads(take(kind, translate({"model": "m"} | least | body), 4).upstream.joined({}))
    return {name: value for name, value in upstream.items() if name in engine.model_fields}


def fate(api: str, beside: Fields, name: str, value: Any) -> str:
    """Tell what becomes of a field beside others."""
    try:
        with_it = made(api, beside | {name: value})
    except RequestError as error:
        told = (error.param, error.code) == (name, "unsupported_parameter") and f"`{name}`" in DOCS
        return "refused" if told else str(error)
    return "has an effect" if with_it != made(api, beside) else "none"


def fields() -> Iterable[tuple[str, str]]:
    for api, (package, theirs, *_) in APIS.items():
        yield from ((api, name) for name in sorted({*get_type_hints(package), *theirs.model_fields} - {"model"}))


@pytest.mark.parametrize(("api", "name"), list(fields()))
def test_no_field_is_dropped_without_a_word(api: str, name: str) -> None:
    value, beside = OWN.get((api, name), SAMPLES.get(name, "x")), BESIDE.get(name, {})
    assert fate(api, beside, name, value) in ("refused", "has an effect") or name in {*_HEADWAY_FIELDS, *documented()}


def test_log_probabilities_of_a_response_are_asked_for() -> None:
    assert made("responses", {"include": ["message.output_text.logprobs"]})["logprobs"] is True
