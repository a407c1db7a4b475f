"""Anthropic's Messages API in front of the fake engine, by its own client and by hand."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import RequestError
from headway.gateway.apis.anthropic.endpoints import MessageEvents
from headway.gateway.apis.anthropic.translate import chat_of, message_of
from tests.gateway.conftest import Serve
from tests.gateway.gateway import OPERATOR, Fake, Gateway
from tests.gateway.test_request_ends import fakes
from tests.gateway.tool_calls import PARTS, arguments_of, in_turns

PATH = "/v1/messages"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi."}], **fields}


def client(gateway: Gateway, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, **({"api_key": "none", "max_retries": 0} | options))


# ---- by the client


def test_the_client_gets_a_message(gateway: Gateway) -> None:
    with client(gateway) as asks:
        message = asks.messages.create(**body(system="Be brief."), extra_headers={"x-slo-ttft-ms": "60000"})
    assert (message.type, message.role, message.model) == ("message", "assistant", "smollm2")
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert message.usage.output_tokens == 8
    assert message.usage.input_tokens > 0
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.id.startswith("hw-")


def test_the_client_streams(gateway: Gateway) -> None:
    with client(gateway) as asks:
        whole = asks.messages.create(**body())
        with asks.messages.stream(**body()) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == 8
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.stop_reason == whole.stop_reason


def test_the_client_counts_tokens(gateway: Gateway) -> None:
    with client(gateway) as asks:
        counted = asks.messages.count_tokens(model="smollm2", messages=[{"role": "user", "content": "Hi."}])
        message = asks.messages.create(**body())
    assert counted.input_tokens > 10
    assert message.usage.input_tokens > 0


def test_errors_are_in_anthropic_s_shape(gateway: Gateway) -> None:
    with client(gateway) as asks:
        with pytest.raises(anthropic.NotFoundError) as missing:
            asks.messages.create(**body(model="nothing"))
        with pytest.raises(anthropic.BadRequestError, match="document"):
            asks.messages.create(
                **body(
                    messages=[
                        {
                            "role": "user",
                            "content": [
                                {"type": "document", "source": {"type": "url", "url": "https://example.com/cat.pdf"}}
                            ],
                        }
                    ]
                )
            )
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": "Hi."}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"system": 3}, "system"),
        ({"n": 2}, "n is"),
        ({"background": True}, "background"),
        ({"thinking": {"type": "some"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "Anthropic's own"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": ["x"]}, "chat_template_kwargs"),
        ({"tool_choice": {"type": []}, "tools": [{"name": "f", "input_schema": {}}]}, "tool_choice"),
        ({"tool_choice": {"type": "some"}, "tools": [{"name": "f", "input_schema": {}}]}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_refused(gateway: Gateway, fields: dict[str, Any], words: str) -> None:
    answer = gateway.post(body(**fields), PATH)
    told = answer.json()
    assert (answer.status_code, told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert words in told["error"]["message"]


def test_a_class_and_a_deadline_hold(gateway: Gateway) -> None:
    answer = gateway.post(body(service_tier="chat"), PATH, headers={"x-slo-e2e-ms": "60000"})
    assert answer.headers["x-headway-class"] == "chat"
    assert answer.headers["x-headway-slo-e2e-ms"] == "60000"
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == answer.json()["id"]
    plain = gateway.post(body(service_tier="standard_only"), PATH)
    assert plain.headers["x-headway-class"] == "default"


def test_an_engine_that_fails_tells_so_in_anthropic_s_shape(gateway: Gateway) -> None:
    answer = gateway.post(body(**fakes(end="400")), PATH)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    stream = gateway.post(body(stream=True, **fakes(end="error")), PATH)
    events = [line[7:] for line in stream.text.split("\n") if line.startswith("event: ")]
    assert (stream.status_code, events[0], events[-1]) == (200, "message_start", "error")


def test_its_key_is_taken_as_anthropic_s_clients_send_it(serve: Serve, fake: Fake) -> None:
    from headway.config import Key

    with serve(keys=(Key("sk-alpha-key", "alpha"),), ready=False) as gateway:
        assert gateway.post(body(), PATH).status_code == 401
        assert gateway.post(body(), PATH).json()["error"]["type"] == "authentication_error"
        good, bad = {"x-api-key": "sk-alpha-key"}, {"authorization": "Bearer sk-other-key"}
        assert gateway.post(body(), PATH, headers=good).status_code == 200
        assert gateway.post(gateway.chat(), headers=good).status_code == 200
        assert gateway.post(body(), PATH, headers=good | bad).status_code == 401
        assert gateway.post(body(), PATH, headers=OPERATOR).status_code == 401


def test_the_engine_gets_the_chat(gateway: Gateway, fake: Fake) -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    asked = body(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Hi."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        tools=[tool],
        tool_choice={"type": "none"},
        stop_sequences=["zz"],
        metadata={"user_id": "u"},
        top_k=3,
    )
    assert gateway.post(asked, PATH).status_code == 200
    chat = fake.last()["body"]
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "f", "parameters": {"type": "object"}, "description": "d"}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert (chat["tool_choice"], chat["stop"], chat["user"], chat["top_k"]) == ("none", ["zz"], "u", 3)


# ---- the translation


def test_a_tool_call_is_a_block() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {
        "model": "m",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}],
    }
    message = message_of(answer, "hw-1")
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {"input_tokens": 3, "output_tokens": 4}


def test_a_tool_that_the_client_named_is_used_too() -> None:
    """vLLM ends such an answer with "stop"."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "stop"}
    assert message_of({"choices": [choice]}, "hw-1")["stop_reason"] == "tool_use"
    assert message_of({"choices": [choice | {"finish_reason": "length"}]}, "hw-1")["stop_reason"] == "max_tokens"
    delta = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    events = [{"choices": [{"delta": delta}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    assert b'"stop_reason": "tool_use"' in MessageEvents("hw-1", "m", 7).feed(data + b"data: [DONE]\n\n")


def test_what_agents_send_beside_their_messages() -> None:
    chat = chat_of(
        body(
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: 1a2b"},
                {"type": "text", "text": "Be brief."},
            ],
            messages=[
                {"role": "user", "content": "Hi."},
                {"role": "system", "content": "It is late."},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}],
                },
            ],
            context_management={"edits": []},
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
    )
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief.\nIt is late."},
        {"role": "user", "content": "Hi."},
        {"role": "tool", "tool_call_id": "t", "content": "Error: no"},
    ]
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (chat["reasoning_effort"], chat["chat_template_kwargs"]) == ("low", {"enable_thinking": True})
    assert not {"context_management", "output_config", "thinking"} & set(chat)


def test_a_stop_sequence_is_named() -> None:
    choice = {"message": {"content": "a"}, "finish_reason": "stop", "stop_reason": "zz"}
    message = message_of({"choices": [choice]}, "hw-1")
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "zz")


def test_the_earlier_name_of_a_schema_is_known_too() -> None:
    chat = chat_of(body(output_format={"type": "json_schema", "schema": {"type": "object"}}))
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "output_format" not in chat
    with pytest.raises(RequestError, match="json_schema"):
        chat_of(body(output_format={"type": "xml"}))


def test_thinking_may_be_turned_off() -> None:
    chat = chat_of(body(thinking={"type": "disabled"}))
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(RequestError):
        chat_of(body(thinking=3))


DELTAS = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=6).map(lambda text: {"content": text}),
        st.text(min_size=1, max_size=6).map(lambda text: {"reasoning_content": text}),
        st.tuples(st.integers(0, 2), st.text(max_size=6)).map(
            lambda pair: {
                "tool_calls": [{"index": pair[0], "id": f"c{pair[0]}", "function": {"name": "f", "arguments": pair[1]}}]
            }
        ),
    ),
    max_size=12,
)


@given(DELTAS, st.lists(st.integers(1, 40), max_size=60))
def test_a_stream_is_the_same_however_it_is_cut(deltas: list[dict[str, Any]], cuts: list[int]) -> None:
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    whole, events, at = MessageEvents("hw-1", "m", 7).feed(data), MessageEvents("hw-1", "m", 7), 0
    parts = []
    for size in [*cuts, len(data)]:
        parts.append(events.feed(data[at : at + size]))
        at += size
    assert b"".join(parts) == whole
    told = [json.loads(event.split(b"data: ", 1)[1]) for event in whole.split(b"\n\n") if event]
    assert [one["type"] for one in told][:1] == ["message_start"]
    assert [one["type"] for one in told][-2:] == ["message_delta", "message_stop"]
    text = "".join(one["delta"].get("text", "") for one in told if one["type"] == "content_block_delta")
    assert text == "".join(delta.get("content", "") for delta in deltas)
    begun = [one["index"] for one in told if one["type"] == "content_block_start"]
    assert begun == [one["index"] for one in told if one["type"] == "content_block_stop"] == list(range(len(begun)))
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"
    assert told[-2]["usage"] == {"input_tokens": 3, "output_tokens": 5}


@given(PARTS)
def test_tool_calls_that_take_turns_are_a_block_each(parts: list[tuple[int, str]]) -> None:
    whole, found = arguments_of(parts), dict[int, tuple[str, str, str]]()
    out = MessageEvents("hw-1", "m", 7).feed(in_turns(parts))
    for event in out.split(b"\n\n")[:-1]:
        told = json.loads(event.split(b"data: ", 1)[1])
        if told["type"] == "content_block_start":
            assert told["index"] == len(found)
            block = told["content_block"]
            found[told["index"]] = block["id"], block["name"], ""
        elif told["type"] == "content_block_delta":
            assert told["index"] == len(found) - 1, "blocks do not interleave"
            id, name, text = found[told["index"]]
            found[told["index"]] = id, name, text + told["delta"]["partial_json"]
    assert list(found.values()) == [(f"c{number}", f"f{number}", text) for number, text in whole.items()]


def test_a_block_ends_once_its_arguments_are_whole_and_another_begins() -> None:
    out = MessageEvents("hw-1", "m", 7).feed(in_turns([(0, '{"a": 1}'), (1, '{"b"')], end=False))
    assert out.count(b"event: content_block_stop") == 1
    assert b'"b' in out


def test_an_error_ends_the_stream() -> None:
    events = MessageEvents("hw-1", "m", 7)
    told = events.feed(b'data: {"error": {"message": "gone", "type": "server_error"}}\n\ndata: [DONE]\n\n')
    assert told.startswith(b"event: error\n")
    assert told.count(b"event: ") == 1


# ---- tokens


def test_tokens_and_back(gateway: Gateway) -> None:
    told = gateway.post({"prompt": "Hello there", "return_token_strs": True}, "/tokenize").json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] > 100
    back = gateway.post({"tokens": told["tokens"]}, "/detokenize").json()
    assert back == {"prompt": "Hello there"}
    chat = gateway.post({"model": "smollm2", "messages": [{"role": "user", "content": "Hi."}]}, "/tokenize").json()
    assert chat["count"] > 3


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("/tokenize", {"prompt": ["a", "b"]}, 400),
        ("/tokenize", {}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
        ("/detokenize", {"tokens": [True]}, 400),
        ("/tokenize", {"model": "nothing", "prompt": "a"}, 404),
    ],
)
def test_what_no_tokenizer_can_do(gateway: Gateway, path: str, asked: dict[str, Any], status: int) -> None:
    answer = gateway.post(asked, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
