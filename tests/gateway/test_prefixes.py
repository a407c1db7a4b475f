"""Prefixes in the gateway: what prompts of a unit share, computed and pinned in engines before it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.connection import EngineGone
from headway.gateway.control.prefixes import PrefixBook
from headway.gateway.parsing.requests import ChatBody, CompletionBody
from headway.gateway.parsing.tokens import TokenCounter, load_tokenizer
from headway.stages import Prewarm, Resource, Stage
from headway.types import Request
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until

BLOCK = 16
FOR_EVER = 1e12
SYSTEM = "You are a careful assistant. " + " ".join(f"Rule {i}: be brief." for i in range(30))


# ---- what prompts share


def asked(run: str, *, tenant: str = "t", app: str = "app", unit: str = "act", model: str = "m") -> Request:
    return Request(run + unit, model, 1, 1, 0.0, tenant=tenant, stage=Stage(app, run, unit))


def common(book: PrefixBook, tenant: str = "t", name: str = "app/act") -> list[int]:
    return [int(token) for token in book.common(tenant, name)]


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=2, max_size=4))
def test_the_longest_beginning_of_all_prompts(prompts: list[list[int]]) -> None:
    book = PrefixBook()
    for run, prompt in enumerate(prompts):
        book.learn(asked(str(run)), prompt)
    beginning = takewhile(lambda tokens: len({*tokens}) == 1, zip(*prompts, strict=False))
    assert common(book) == [tokens[0] for tokens in beginning]


def test_it_is_learned_from_the_latest_prompts_of_several_runs() -> None:
    book = PrefixBook()
    book.learn(asked("a"), [1, 2, 3])
    book.learn(asked("a"), [1, 2, 3, 4, 5])
    assert common(book) == [], "one run, however often it asks, does not show what runs share"
    book.learn(asked("b"), [1, 2, 3, 4])
    assert common(book) == [1, 2, 3, 4]
    for run in "cdef":
        book.learn(asked(run), [7, 8, 9])
    assert common(book) == [7, 8, 9], "the system prompt has changed"


def test_tenants_units_and_models_are_kept_apart() -> None:
    book = PrefixBook()
    for tenant, unit, token in (("t", "act", 1), ("u", "act", 2), ("t", "plan", 3)):
        for run in "ab":
            book.learn(asked(run, tenant=tenant, unit=unit), [token, token])
    assert [common(book), common(book, "u"), common(book, "t", "app/plan")] == [[1, 1], [2, 2], [3, 3]]
    book.learn(asked("c", model="other"), [1, 1])
    assert (book.model("t", "app/act"), common(book)) == ("other", [])
    assert (book.model("v", "app/act"), common(book, "v")) == (None, [])


def test_memory_is_bounded() -> None:
    book = PrefixBook()
    for unit in range(300):
        for run in range(9):
            book.learn(asked(str(run), unit=str(unit)), range(10_000))
    assert book.model("t", "app/0") is None
    sizes = [prompt.nbytes for one in book._units.values() for prompt in one.prompts.values()]
    assert len(sizes) == 256 * 4
    assert sum(sizes) == 256 * 4 * 8192 * 4


# ---- which tokens the engine will see


@pytest.fixture(scope="module")
def counter() -> TokenCounter:
    return asyncio.run(TokenCounter.load("smollm2"))


def read(counter: TokenCounter, body: ChatBody | CompletionBody) -> tuple[int, list[int] | None]:
    prompt = counter.read(body, 2048)
    return prompt.tokens, None if prompt.ids is None else list(prompt.ids)


def test_a_prompt_s_tokens_are_those_of_the_model_s_template(counter: TokenCounter) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
    ]
    tokens, ids = read(counter, ChatBody.model_validate({"model": "m", "messages": messages}))
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    assert ids == read(counter, CompletionBody(model="m", prompt=text))[1]
    assert tokens == len(ids)
    assert read(counter, CompletionBody(model="m", prompt=[5, 6, 7])) == (3, [5, 6, 7])
    tokens, ids = read(counter, CompletionBody(model="m", prompt="one two"))
    assert ids == counter._tokenizer.encode("one two")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"chat_template_kwargs": {"thinking": True}},
    ],
)
def test_tokens_that_only_the_engine_knows_are_not_guessed(counter: TokenCounter, fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}]} | fields
    tokens, ids = read(counter, ChatBody.model_validate(body))
    assert tokens > 0
    assert ids is None
    assert read(counter, CompletionBody(model="m", prompt=[[1, 2], [3]])) == (3, None)


def test_keys_of_a_prompt_depend_on_its_adapter_and_its_salt(counter: TokenCounter) -> None:
    def keys(adapter: str | None, **fields: Any) -> bytes:
        prompt = {"role": "user", "content": "Hello! " * 40}
        body = ChatBody.model_validate({"model": "m", "messages": [prompt]} | fields)
        return counter.read(body, 10_000).keys(adapter)

    found = [keys(None), keys("a"), keys(None, cache_salt="mine"), keys("a", cache_salt="mine")]
    assert len({*found}) == 4
    assert all(found)
    assert keys(None, chat_template_kwargs={"thinking": True}) == b""


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"documents": [{"text": "one"}, {"text": "two"}]}, "onetwoHello!>"),
        ({"chat_template_kwargs": {"more": "and this"}}, "and thisHello!>"),
        ({"chat_template_kwargs": {"tokenize": True, "more": "and", "documents": [{"text": "one"}]}}, "oneandHello!>"),
        ({"chat_template_kwargs": {"chat_template": "{{ more }}"}}, "Hello!>"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"more": "and"}}, "andHello!> quiet"),
        ({"add_generation_prompt": False}, "Hello!"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "Hello!"),
        ({"chat_template_kwargs": ["no object"], "documents": None}, "Hello!>"),
    ],
)
def test_what_a_template_makes_of_other_fields_counts(fields: dict[str, Any], text: str) -> None:
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = (
        "{% for one in documents or [] %}{{ one.text }}{% endfor %}{{ more }}{{ messages[0].content }}"
        "{% if add_generation_prompt %}>{% endif %}{% if enable_thinking is false %} quiet{% endif %}"
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}]} | fields
    prompt = TokenCounter(tokenizer).read(ChatBody.model_validate(body), 2048)
    assert prompt.tokens == len(tokenizer.encode(text, add_special_tokens=False))


# ---- in a gateway


class Pins:
    """The pins of engines, in the place of their control channel."""

    def __init__(self) -> None:
        self.caching, self.gone = True, False
        self.cached: set[str] = set()
        self.held: dict[str, int] = {}
        self.said: list[tuple[str, str]] = []

    async def control(self, engine: VllmEngine, message: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"block_size": BLOCK, "blocks_total": 1000, "latency": None, "counters": {}}
        state |= {"prefix_caching": self.caching, "jobs": []}
        if message["op"] in ("pin", "unpin"):
            if self.gone:
                raise EngineGone(engine.id, "for a test")
            self.said.append((message["op"], message["chain"]))
        if message["op"] == "pin":
            found = len(message["tokens"]) if message["chain"] in self.cached else 0
            self.held[message["chain"]] = state["pinned"] = found
            self.cached.add(message["chain"])  # by what is computed next
        elif message["op"] == "unpin":
            self.held.pop(message["chain"], None)
        return state


@pytest.fixture
def pins(engines: Callable[..., None]) -> Pins:
    pins = Pins()

    async def control(engine: VllmEngine, message: dict[str, Any], seconds: float = 10) -> dict[str, Any]:
        return await pins.control(engine, message)

    engines("control", control)
    return pins


@pytest.fixture
def hermes(serve: Serve, pins: Pins) -> Iterator[Gateway]:
    with serve(recipe="hermes") as gateway:
        yield gateway


CHAIN = "prewarm default/agent/act"


def ask(gateway: Gateway, run: str, text: str = "Hi.", system: str = SYSTEM) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{run} says: {text}"}]
    headers = {"x-headway-app": "agent", "x-headway-run": run, "x-headway-unit": "act"}
    answer = gateway.post({"model": "smollm2", "messages": messages, "max_tokens": 8}, headers=headers)
    assert answer.status_code == 200


def warm(gateway: Gateway, until: float = FOR_EVER) -> None:
    async def execute() -> None:
        command = Prewarm("default", Resource("prefix", "agent/act"), until)
        gateway.inner.dispatcher.control.execute([command])

    gateway.do(execute())


def warmed(gateway: Gateway, outcome: str) -> float:
    family = "headway_prewarm_end_total" if outcome in ("used", "wasted") else "headway_prewarm_total"
    return gateway.metric(f'{family}{{kind="prefix",outcome="{outcome}"}}')


def test_a_unit_s_prefix_is_computed_pinned_and_let_go_of(hermes: Gateway, fake: Fake, pins: Pins) -> None:
    for run in ("r1", "r2"):
        ask(hermes, run)
    warm(hermes)
    until(lambda: warmed(hermes, "warmed"))
    assert pins.said == [("pin", CHAIN), ("pin", CHAIN)]
    sent = fake.last()["body"]
    tokenizer = hermes.inner.counters["smollm2"]._tokenizer
    shared = tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nr")
    assert sent["prompt"] == shared[: len(shared) // BLOCK * BLOCK]
    assert pins.held == {CHAIN: len(sent["prompt"])}
    assert (sent["max_tokens"], sent["priority"]) == (1, 2**31 - 1)
    assert sent["vllm_xargs"]["headway_urgency"] == np.finfo(float).max, "after all others"
    ask(hermes, "r3")
    until(lambda: not pins.held)
    assert (warmed(hermes, "used"), pins.said[-1]) == (1, ("unpin", CHAIN))


def test_what_is_cached_is_pinned_and_not_computed(hermes: Gateway, fake: Fake, pins: Pins) -> None:
    for run in ("r1", "r2"):
        ask(hermes, run)
    pins.cached.add(CHAIN)
    before = fake.last()["asked"]
    warm(hermes)
    until(lambda: warmed(hermes, "kept"))
    assert pins.held[CHAIN] > 0
    assert fake.last()["asked"] == before


def test_a_prefix_that_nothing_needs_is_given_back_in_time(hermes: Gateway, pins: Pins) -> None:
    for run in ("r1", "r2"):
        ask(hermes, run)
    warm(hermes, until=0.0)
    until(lambda: pins.said and pins.said[-1] == ("unpin", CHAIN))
    assert (warmed(hermes, "wasted"), warmed(hermes, "used")) == (1, 0)


def test_the_gateway_gives_all_pins_back_when_it_stops(serve: Serve, pins: Pins) -> None:
    with serve(recipe="hermes") as gateway:
        for run in ("r1", "r2"):
            ask(gateway, run)
        warm(gateway)
        until(lambda: warmed(gateway, "warmed"))
        assert pins.held
    assert pins.held == {}


def test_nothing_is_done_without_a_cache_or_a_prefix(serve: Serve, fake: Fake, pins: Pins) -> None:
    with serve(recipe="hermes") as gateway:
        warm(gateway)
        until(lambda: warmed(gateway, "skipped") == 1)
        for run in ("r1", "r2"):
            ask(gateway, run, system="Short.")
        warm(gateway)
        until(lambda: warmed(gateway, "skipped") == 2)
    pins.caching = False
    with serve(recipe="hermes") as gateway:
        for run in ("r1", "r2"):
            ask(gateway, run)
        warm(gateway)
        until(lambda: warmed(gateway, "skipped") == 1)
    assert pins.said == []


def test_an_engine_that_fails_is_counted(hermes: Gateway, pins: Pins, caplog: pytest.LogCaptureFixture) -> None:
    for run in ("r1", "r2"):
        ask(hermes, run)
    pins.gone = True
    warm(hermes)
    until(lambda: warmed(hermes, "failed"))
    assert "prefix 'agent/act' is not warm" in caplog.text
    pins.gone = False
    ask(hermes, "r3")


def test_a_recipe_without_warm_ups_learns_no_prefixes(serve: Serve) -> None:
    with serve(recipe="vllm") as gateway:
        ask(gateway, "r1")
        assert gateway.inner.prefixes is None
