"""A real engine in float32: streams that lose it anywhere are, token for token, those that do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from headway.config import Broker, Config, Engine, Server, Tier
from tests.conftest import CORE, MARK
from tests.e2e.server import ANSWER_S, START_S
from tests.gateway.gateway import WEB, Gateway, serving, until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Write a short story about a lighthouse keeper and a whale."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
        },
    },
}
_EVENTS = 12  # of all streams together, between two losses
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}}}
SCHEMA |= {"required": ["name", "age"], "additionalProperties": False}
CALL = r'\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{2,9}", "days": [123]\}\}'
# What is asked, beside the model and 32 greedy tokens.
ASKS: dict[str, dict[str, Any]] = {
    "chat": {},
    "completion": {"prompt": "1 2 3 4 5 6 7"},
    "stop strings": {"stop": ["lighthouse", "\n\n"], "max_tokens": 60},
    "characters of several tokens": {"messages": [{"role": "user", "content": "Repeat: \U0001f40b\U0001f433 世界 é"}]},
    "seed": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "log probabilities of a completion": {"prompt": "The sea is", "logprobs": 2, "echo": True},
    "ids": {"return_token_ids": True},
    "usage with each token": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "a named tool": {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "a required tool": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60},
    "a tool that the model calls": {
        "tools": [WEATHER],
        "max_tokens": 60,
        "structured_outputs": {"regex": f"Let me see\\. <tool_call>\\n{CALL}\\n</tool_call>"},
    },
    "JSON": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 60,
    },
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in this process, whose connections a test can break."""
    engine = Engine(
        cores=CORE, max_running=16, dtype="float32", eager=True, start_timeout_s=START_S, tool_parser="hermes"
    )
    config = Config(
        server=Server(max_resumes=100, max_attempts=100),
        engines=(engine,),
        classes={"default": Tier()},
        broker=Broker(kind="memory"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK)
        with serving(config, ready=False, logs=tmp_path_factory.mktemp("logs")) as running:
            until(lambda: running.get("/ready").status_code == 200, START_S)
            yield running


def ask(gateway: Gateway, fields: dict[str, Any], come: Event) -> dict[str, Any]:
    """Stream an answer and return what the client has of it. come: set after each event."""
    path = COMPLETION if "prompt" in fields else CHAT
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": 32, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | fields
    body |= {} if "prompt" in fields else {"messages": fields.get("messages", QUESTION)}
    out: dict[str, Any] = {"roles": 0, "ends": [], "usage": None, "calls": {}, "text": "", "ids": [], "logprobs": []}
    out |= {"frames": set(), "done": 0}
    with WEB.stream("POST", gateway.url + path, json=body, timeout=ANSWER_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                out["done"] += 1
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                add(out, event)
                come.set()
    assert len(out.pop("frames")) == 1
    return out


def ask_all(gateway: Gateway, breaks: int) -> dict[str, dict[str, Any]]:
    """Stream all answers at once; lose the engine so often, each time after a few more tokens of theirs."""
    engine, come = gateway.inner.dispatcher.engines["e0"], Event()
    with ThreadPoolExecutor(len(ASKS)) as pool:
        asked = {name: pool.submit(ask, gateway, fields, come) for name, fields in ASKS.items()}
        for _ in range(breaks):
            for _ in range(_EVENTS):
                come.clear()
                assert come.wait(ANSWER_S)
            gateway.loop.call_soon_threadsafe(engine.sever)
        return {name: one.result() for name, one in asked.items()}


def engine_losses(gateway: Gateway) -> int:
    return int(gateway.metric('headway_streams_resumed_total{model="smollm2",result="resumed"}'))


def add(out: dict[str, Any], event: dict[str, Any]) -> None:
    """Add an event to what the client has."""
    out["frames"].add((event["id"], event["created"], event["model"]))
    out["usage"] = event.get("usage") or out["usage"]
    for choice in event["choices"]:
        delta = choice.get("delta", {})
        out["roles"] += "role" in delta
        out["text"] += delta.get("content") or choice.get("text") or ""
        out["ends"] += [(choice["finish_reason"], choice.get("stop_reason"))] if choice["finish_reason"] else []
        out["ids"] += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        numbers = [entry["logprob"] for entry in logprobs.get("content") or ()] + (logprobs.get("token_logprobs") or [])
        tokens = [entry["token"] for entry in logprobs.get("content") or ()] + (logprobs.get("tokens") or [])
        out["logprobs"] += [
            (token, None if number is None else round(number, 3)) for token, number in zip(tokens, numbers, strict=True)
        ]
        for one in delta.get("tool_calls") or ():
            call = out["calls"].setdefault(one["index"], {"ids": 0, "name": "", "arguments": ""})
            call["ids"] += "id" in one
            call["name"] += one["function"].get("name") or ""
            call["arguments"] += one["function"].get("arguments") or ""


def test_broken_streams_are_the_unbroken_ones(gateway: Gateway) -> None:
    whole = ask_all(gateway, 0)
    assert all((one["done"], len(one["ends"])) == (1, 1) for one in whole.values())
    assert [len(one["calls"]) for name, one in whole.items() if "tool" in name] == [1, 1, 1]
    assert engine_losses(gateway) == 0
    broken = ask_all(gateway, 6)
    for name, one in broken.items():
        assert one == whole[name], name
    assert engine_losses(gateway) >= 2 * len(ASKS)
    assert not gateway.controller.requests
