"""Bodies made to cost much: refused at the first fault, and by their size before they are tokenized."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.errors import RequestError
from headway.gateway.apis import state as app_state
from headway.gateway.apis import tokens as token_endpoints
from headway.gateway.parsing import parser
from headway.gateway.parsing import requests as request_parsing
from headway.gateway.parsing.requests import ChatBody, CompletionBody, read_json, validate
from headway.gateway.parsing.tokens import TokenCounter
from tests.gateway.gateway import CHAT, SAY, Gateway
from tests.gateway.test_refusals import COMPLETIONS, error

MODEL = {"model": "smollm2"}


@pytest.fixture(scope="module")
def counter() -> TokenCounter:
    return asyncio.run(TokenCounter.load("smollm2"))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatBody, {"messages": [0] * 500}),
        (ChatBody, {"messages": [{}] * 500}),
        (ChatBody, {"messages": SAY, "tools": [0] * 500}),
        (ChatBody, {"messages": [{"role": "user", "content": [0] * 500}]}),
        (CompletionBody, {"prompt": [{}] * 500}),
        (CompletionBody, {"prompt": [["a"] * 9] * 500}),
    ],
)
def test_checks_end_at_the_first_wrong_element(
    model: type[ChatBody] | type[CompletionBody], fields: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(MODEL | fields)
    assert caught.value.error_count() <= 4, "one for each type that the field may have"


@pytest.mark.parametrize(
    ("path", "fields", "most"),
    [
        (CHAT, {"messages": [0] * 300_000}, 2048),
        (CHAT, {"messages": SAY * 3000}, 2048),
        (COMPLETIONS, {"prompt": [7] * 9000}, 2048),
        (CHAT, {"messages": SAY, "tools": [{}] * 3000}, 2048),
        (CHAT, {"messages": SAY, "stop": ["a"] * 1025}, 1024),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["a"] * 1025}, 1024),
    ],
)
def test_lists_are_bounded(gateway: Gateway, path: str, fields: dict[str, Any], most: int) -> None:
    said = error(gateway.post(MODEL | fields, path), 400)
    assert said["code"] == "too_many_values"
    assert f"at most {most}." in said["message"]


@pytest.mark.parametrize("element", ["{}", "[]", "[0]", '{"": []}'])
def test_a_body_of_nothing_but_objects_is_refused_before_it_is_read(gateway: Gateway, element: str) -> None:
    raw = f'{{"model": "smollm2", "prompt": [{",".join([element] * 100_000)}]}}'
    said = error(gateway.post(None, COMPLETIONS, content=raw.encode()), 400)
    assert said["code"] == "too_many_values"


def nested(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(nested, value.values()))
    return 1 + sum(map(nested, value)) if isinstance(value, list) else 0


VALUES = st.recursive(
    st.text(st.sampled_from('a"\\[{}]é\n')) | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('"\\{[')), inner),
)


@given(VALUES, st.booleans())
def test_brackets_in_strings_are_text(value: Any, ascii: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_parsing, "_MOST_NESTED", 0)
        assert request_parsing._nested(json.dumps(value, ensure_ascii=ascii).encode()) == nested(value)


def test_code_full_of_brackets_is_a_prompt() -> None:
    prompt = 'x = [{"\\"": []}]' * 20_000
    assert read_json(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}


@given(
    st.text() | st.text(st.sampled_from(" \n\tae0€=-\x16<|im_start|>")) | st.text(st.sampled_from(" =-"), min_size=99)
)
def test_bytes_never_promise_more_tokens_than_there_are(counter: TokenCounter, text: str) -> None:
    measure = counter._bytes
    assert measure is not None
    assert measure.least_tokens(text) <= len(counter._encode(text, False))
    assert measure.least_tokens("a" * 1000) > 10


@pytest.mark.parametrize(
    "text", ["a" * 500_000, "€" * 100_000, "word " * 50_000, *(white * 500_000 for white in " \n\t\u3000")]
)
def test_what_cannot_fit_is_not_tokenized(counter: TokenCounter, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(counter, "_encode", lambda *_: pytest.fail("tokenized"))
    message = {"role": "user", "content": text}
    bodies = [
        validate("chat", MODEL | {"messages": [message]}, 2048),
        validate("completions", MODEL | {"prompt": text}, 2048),
        validate("completions", MODEL | {"prompt": ["short", text]}, 2048),
    ]
    for body in bodies:
        with pytest.raises(RequestError, match=r"at least \d+ tokens") as caught:
            counter.read(body, 2048)
        assert caught.value.code == "context_length_exceeded"


def test_many_short_prompts_are_not_one_long_one(counter: TokenCounter) -> None:
    body = validate("completions", MODEL | {"prompt": ["a" * 200] * 1000}, 2048)
    assert max(counter.read(body, 2048).lengths) < 200


async def test_tokenizing_lets_others_run(counter: TokenCounter) -> None:
    """A thread that counts goes on while 300 kB are tokenized in another one."""
    body = validate("completions", MODEL | {"prompt": "word " * 60_000}, 2048)
    turns = 0
    reading = asyncio.ensure_future(asyncio.to_thread(counter.read, body, 10**6))
    while not reading.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert (await reading).tokens == 60_001
    assert turns > 3, "the interpreter was held"


def say(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


SAID = {"messages": SAY}
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 20_000}}
STARTED = {"unit": "u", "state": "started"}


@pytest.fixture
def threads(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Return what returns the threads in which bodies have been read since it was called last."""
    names: list[str] = []

    def note(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def noted(*arguments: Any, **more: Any) -> Any:
            names.append(threading.current_thread().name.rpartition("_")[0] or "event loop")
            return work(*arguments, **more)

        monkeypatch.setattr(owner, name, noted)

    counter = gateway.inner.counters["smollm2"]
    note(app_state, "read_json")
    for name in ("validate", "interpret"):
        note(parser, name)
    for name in ("_encode", "text", "words"):
        note(counter, name)
    note(counter._tokenizer, "apply_chat_template")
    note(token_endpoints, "JSONResponse")

    def seen() -> set[str]:
        found = set(names)
        names.clear()
        return found

    return seen


@pytest.mark.parametrize(
    ("path", "large", "small"),
    [
        (CHAT, SAID | {"metadata": "x" * 20_000}, SAID),
        *((CHAT, {"messages": say(white * 20_000)}, {"messages": say(white)}) for white in " \u3000"),
        (CHAT, {"messages": say("hi", name="x" * 20_000)}, {"messages": say("hi", name="x")}),
        (CHAT, {"messages": say("") * 300}, {"messages": say("") * 3}),
        (CHAT, SAID | {"tools": [TOOL], "tool_choice": "none"}, SAID | {"tools": []}),
        (COMPLETIONS, {"prompt": " " * 20_000}, {"prompt": " "}),
        ("/tokenize", {"messages": say("\n" * 20_000)}, {"messages": say(" ")}),
        ("/tokenize", {"prompt": " " * 200_000, "return_token_strs": True}, {"prompt": " "}),
        ("/detokenize", {"tokens": [7] * 20_000}, {"tokens": [7]}),
        ("/v1/messages/count_tokens", {"messages": say(" " * 20_000)}, {"messages": say(" ")}),
        ("/v1/runs/r1/units", STARTED | {"app": " " * 20_000}, STARTED),
    ],
)
def test_large_bodies_are_read_beside_the_event_loop(
    gateway: Gateway, threads: Callable[[], set[str]], path: str, large: Any, small: Any
) -> None:
    assert gateway.post(MODEL | large, path).status_code < 500
    assert threads() == {"large-body"}
    assert gateway.post(MODEL | small, path).status_code < 500
    assert threads() == {"event loop"}
