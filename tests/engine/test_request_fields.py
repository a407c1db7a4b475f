"""A request that vLLM takes is taken by the gateway, too: bodies made up over the fields that it reads."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError

from headway.config import Config
from headway.gateway.parsing.pooling import PATHS as POOLING
from headway.gateway.parsing.requests import Kind, ParsedRequest, interpret, validate

LONGEST = 64  # context of the model, in tokens
MODEL = SimpleNamespace(max_model_len=LONGEST, encoder_config=None, pooler_config=None)
THEIRS: dict[Kind, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletionRequest),
    "completions": TypeAdapter(CompletionRequest),
    "embeddings": TypeAdapter(EmbeddingRequest),
    "score": TypeAdapter(ScoreRequest),
    "rerank": TypeAdapter(RerankRequest),
}
TEXT = st.text(max_size=4)
COUNTS = st.sampled_from([None, -1, 0, 0.0, 1, 2.0, 4.0, 1.5, "8", "many", True, 16, LONGEST, LONGEST + 1, 10**20])
PARTS = st.one_of(
    TEXT,
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.just({"type": "image_url", "image_url": {"url": "data:,"}}),
    st.integers(),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "robot"])},
        optional={"content": st.none() | TEXT | st.lists(PARTS, max_size=3)},
    ),
    min_size=1,
    max_size=3,
)
IDS = st.lists(st.sampled_from([0, 7, 9.0]), min_size=1, max_size=3)
PROMPTS = TEXT | st.lists(TEXT, min_size=1, max_size=3) | IDS | st.lists(IDS, min_size=1, max_size=2)
CUT = {
    "truncate_prompt_tokens": COUNTS,
    "model": st.just("m"),
    "service_tier": st.sampled_from([None, "auto", "default", "flex", "scale", "priority"]),
}
GENERATING = CUT | {
    "max_tokens": COUNTS,
    "n": st.sampled_from([None, 0, 1, 1.0, 2.0, 1.5, "2", True]),
    "stream": st.sampled_from([None, True, False, "yes", "off", "maybe", 0, 1, 2]),
    "priority": st.sampled_from([0, -3, 4.0, "5", 1.5]),
    "echo": st.booleans(),
}
CHATS = st.fixed_dictionaries({"messages": MESSAGES}, optional=GENERATING | {"max_completion_tokens": COUNTS})
SCORED = (
    st.lists(TEXT, min_size=1, max_size=3)
    | TEXT
    | st.fixed_dictionaries(
        {"content": st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT), max_size=2)}
    )
)
LIMITS = CUT | {"max_tokens_per_query": COUNTS, "max_tokens_per_doc": COUNTS}
BODIES: dict[Kind, st.SearchStrategy[dict[str, Any]]] = {
    "chat": CHATS,
    "completions": st.fixed_dictionaries({"prompt": PROMPTS}, optional=GENERATING),
    "embeddings": st.one_of(
        st.fixed_dictionaries({"input": PROMPTS}, optional=CUT),
        st.fixed_dictionaries({"messages": MESSAGES}, optional=CUT),
        st.fixed_dictionaries({"input": st.lists(MESSAGES, min_size=1, max_size=2)}, optional=CUT),
    ),
    "score": st.fixed_dictionaries({"queries": SCORED, "documents": SCORED}, optional=LIMITS),
    "rerank": st.fixed_dictionaries({"query": TEXT, "documents": SCORED}, optional=LIMITS),
}


def take(kind: Kind, body: dict[str, Any], tokens: int) -> ParsedRequest:
    """Return a body as the gateway reads it. tokens: of its prompt."""
    body = {"model": "m", **body}
    return interpret(
        kind,
        body,
        validate(kind, body, LONGEST),
        {},
        Config(),
        model="m",
        adapter=None,
        tenant="default",
        arrival=0.0,
        lengths=[tokens],
        max_model_len=LONGEST,
        max_running=16,
    )


def vllm_takes(kind: Kind, body: dict[str, Any], tokens: int) -> bool:
    """Tell whether vLLM takes a body, as its server checks it."""
    try:
        asked = THEIRS[kind].validate_python(copy.deepcopy(body))
        for message in asked.messages if kind == "chat" else ():
            list(message.get("content") or ())  # parts are checked when they are read
        kept = len(asked.build_tok_params(MODEL)._validate_tokens(None, [7] * tokens))
        if kind in POOLING:
            return True
        limit = asked.max_tokens
        if kind == "chat" and asked.max_completion_tokens is not None:
            limit = asked.max_completion_tokens
        cut = asked.truncate_prompt_tokens
        limit = get_max_tokens(LONGEST, limit, kept, {}, truncate_prompt_tokens=cut)
        asked.to_sampling_params(limit, {})
    except (ValueError, VLLMValidationError):
        return False
    if kind == "chat" and asked.max_tokens is not None and asked.max_tokens < 1:
        return False  # Headway refuses it also where max_completion_tokens overrides it
    return kept < LONGEST  # or its engine refuses it


@pytest.mark.parametrize("kind", BODIES)
def test_what_vllm_takes_is_taken(kind: Kind) -> None:
    taken = 0

    @given(BODIES[kind], st.integers(1, 2 * LONGEST))
    def check(body: dict[str, Any], tokens: int) -> None:
        nonlocal taken
        if vllm_takes(kind, body, tokens):
            take(kind, body, tokens)
            taken += 1

    check()
    assert taken > 5, "most made-up bodies are wrong, but not all"


CHAT = {"messages": [{"role": "user", "content": "Hi."}]}


@pytest.mark.parametrize(
    ("kind", "body", "tokens", "kept", "most"),
    [
        ("completions", {"prompt": "a", "truncate_prompt_tokens": 5, "max_tokens": None}, 40, 5, 16),
        ("completions", {"prompt": "a"}, 60, 60, 4),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": -1}, 100, 63, 1),
        ("chat", CHAT | {"truncate_prompt_tokens": 60, "max_tokens": 8}, 100, 60, 4),
        ("chat", CHAT | {"max_tokens": 60}, 40, 40, 24),
        ("chat", {"messages": [{"role": "user", "content": ["hi", "there"]}]}, 4, 4, 60),
        ("chat", CHAT | {"max_tokens": 4.0, "n": 1.0, "service_tier": "scale"}, 4, 4, 4),
        ("completions", {"prompt": "a", "echo": True, "max_tokens": 0}, 4, 4, 1),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": -1}, 100, 64, 1),
        ("embeddings", {"input": ["a"] * 2000}, 4, 4, 1),
        ("embeddings", {"input": [[{"role": "user", "content": "a"}]]}, 4, 4, 1),
        ("score", {"queries": "a", "documents": "b", "truncate_prompt_tokens": 9}, 100, 9, 1),
        ("rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, 100, 64, 1),
    ],
)
def test_what_is_counted(kind: Kind, body: dict[str, Any], tokens: int, kept: int, most: int) -> None:
    """The queue plans with the tokens that the engine will compute."""
    parsed = take(kind, body, tokens).request
    assert (parsed.prompt_tokens, parsed.max_tokens) == (kept, most)
