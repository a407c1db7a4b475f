"""The Responses API in front of the fake engine, by OpenAI's client and by hand."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Key
from headway.gateway.apis.responses.events import ResponseEvents
from headway.gateway.apis.responses.translate import base_of, chat_of, response_of
from tests.gateway.conftest import Serve
from tests.gateway.gateway import OPERATOR, Fake, Gateway, until
from tests.gateway.test_request_ends import fakes
from tests.gateway.tool_calls import PARTS, arguments_of, in_turns

PATH = "/v1/responses"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "input": "Hi.", "max_output_tokens": 8, **fields}


# ---- by the client


def test_the_client_gets_a_response(gateway: Gateway) -> None:
    with gateway.client() as asks:
        response = asks.responses.create(**body(instructions="Be brief."), extra_headers={"x-slo-ttft-ms": "60000"})
    assert response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage is not None
    assert (response.usage.output_tokens, response.model) == (8, "smollm2")
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    assert response.instructions == "Be brief."
    assert response.id.startswith("hw-")


def test_the_client_streams(gateway: Gateway) -> None:
    with gateway.client() as asks:
        whole = asks.responses.create(**body())
        events = list(asks.responses.create(**body(), stream=True))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", f"response.{final.status}")
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert final.status == whole.status


def test_the_client_works_in_the_background(gateway: Gateway) -> None:
    with gateway.client() as asks:
        begun = asks.responses.create(**body(background=True))
        assert begun.status == "queued"
        done = until(
            lambda: (seen := asks.responses.retrieve(begun.id)).status not in ("queued", "in_progress") and seen
        )
        assert done.output_text
        assert done.usage.output_tokens == 8
        asks.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            asks.responses.retrieve(begun.id)


def test_the_client_cancels(gateway: Gateway, fake: Fake) -> None:
    with gateway.client() as asks:
        begun = asks.responses.create(**body(background=True, extra_body=fakes(hold="responses-cancel")))
        with pytest.raises(openai.ConflictError):
            asks.responses.delete(begun.id)
        assert asks.responses.cancel(begun.id).status == "cancelled"
        assert asks.responses.retrieve(begun.id).status == "cancelled"
        asks.responses.delete(begun.id)


def test_a_background_chat_has_an_output_too(gateway: Gateway) -> None:
    id = gateway.post(gateway.chat(background=True)).json()["id"]
    done = until(lambda: (seen := gateway.get(f"{PATH}/{id}").json())["status"] not in ("queued",) and seen)
    assert done["output"][0]["content"][0]["text"] == done["response"]["choices"][0]["message"]["content"]


def test_answers_of_before_there_were_keys_are_the_operator_s_to_fetch(serve: Serve) -> None:
    with serve() as gateway:
        id = gateway.post(gateway.chat(background=True)).json()["id"]
        until(lambda: gateway.get(f"{PATH}/{id}").json()["status"] == "completed")
        queue = gateway.config.broker
    with serve(keys=(Key("sk-alpha-key", "alpha"),), broker=queue, ready=False) as gateway:
        mine = {"authorization": "Bearer sk-alpha-key"}
        assert gateway.get(f"{PATH}/{id}", headers=mine).status_code == 404
        assert gateway.get(f"{PATH}/{id}", headers=OPERATOR).json()["status"] == "completed"


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": {"id": "p"}}, "templates"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "file_search"}]}, "file_search"),
        ({"tools": [{"type": "custom", "name": "f"}], "tool_choice": {"type": "hosted"}}, "tool_choice"),
        ({"input": [{"type": "item_reference"}]}, "item_ref"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"role": "robot", "content": "x"}]}, "role"),
        ({"input": [{"role": [], "content": "x"}]}, "role"),
        ({"text": {"format": {"type": "x"}}}, "format"),
        ({"instructions": [1]}, "instructions"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"n": 2, "stream": True}, "n cannot"),
        ({"n": 2}, "n cannot"),
    ],
)
def test_what_cannot_be_is_refused(gateway: Gateway, fields: dict[str, Any], words: str) -> None:
    answer = gateway.post(body(**fields), PATH)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_what_is_not_in_the_background_cannot_be_cancelled(gateway: Gateway) -> None:
    id = gateway.post(body(), PATH).json()["id"]
    assert gateway.get(f"{PATH}/{id}").json()["id"] == id
    assert gateway.post(None, f"{PATH}/{id}/cancel").status_code == 409


def test_the_engine_gets_the_chat(gateway: Gateway, fake: Fake) -> None:
    asked = body(
        instructions="Be brief.",
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "low"},
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"type": "function_call_output", "call_id": "c2", "output": "5"},
            {"type": "message", "role": "developer", "content": "Go on."},
        ],
    )
    assert gateway.post(asked, PATH).status_code == 200
    chat = fake.last()["body"]
    function = {"name": "f", "arguments": "{}"}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "system", "content": "Go on."},
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}}
    assert (chat["max_tokens"], chat["reasoning_effort"]) == (8, "low")


def test_tools_of_agents_are_functions_or_left_out(gateway: Gateway, fake: Fake) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    tools: list[dict[str, Any]] = [
        {"type": "custom", "name": "patch", "description": "Edit.", "format": grammar},
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "inner"}]},
        {"type": "web_search_preview_2025_03_11"},
    ]
    earlier = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": "Again."},
    ]
    asked = body(tools=tools, input=earlier, tool_choice={"type": "custom", "name": "patch"})
    answer = gateway.post(asked, PATH)
    assert answer.headers["x-headway-ignored-tools"] == "web_search,web_search_preview_2025_03_11"
    assert answer.json()["tools"] == tools
    chat = fake.last()["body"]
    tool, inner = chat["tools"]
    assert inner["function"]["name"] == "mcp__inner"
    assert (tool["function"]["name"], tool["function"]["description"]) == ("patch", "Edit.")
    assert "start: WORD" in tool["function"]["parameters"]["properties"]["input"]["description"]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "patch"}}
    call = {"name": "patch", "arguments": '{"input": "a \\"b\\""}'}
    assert chat["messages"][:2] == [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    alone = gateway.post(body(tools=tools[1::2]), PATH)
    assert alone.status_code == 200
    assert "tools" not in fake.last()["body"]
    assert gateway.post(body(), PATH).headers.get("x-headway-ignored-tools") is None


@pytest.mark.parametrize(
    ("arguments", "input"), [('{"input": "a\\nb"}', "a\nb"), ("a", "a"), ('{"x": 1}', '{"x": 1}'), ("[1]", "[1]")]
)
def test_a_custom_tool_is_called_with_a_text(arguments: str, input: str) -> None:
    base = base_of(body(tools=[{"type": "custom", "name": "f"}]), "hw-1", 10)
    told = chunks([], [], [[arguments[:2], arguments[2:]]], "tool_calls")
    events = ResponseEvents(base)
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in told) + b"data: [DONE]\n\n"
    seen = [json.loads(event.split(b"data: ", 1)[1]) for event in events.feed(data).split(b"\n\n") if event]
    item = seen[-1]["response"]["output"][0]
    assert (item["type"], item["name"], item["call_id"], item["input"]) == ("custom_tool_call", "f", "c0", input)
    kinds = [one["type"].removeprefix("response.") for one in seen]
    assert kinds[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert seen[3]["delta"] == seen[4]["input"] == input


def test_a_tool_of_a_namespace_is_called_by_both_names() -> None:
    tools = [{"type": "namespace", "name": "f0", "tools": [{"type": "function", "name": "say"}]}]
    earlier = {"type": "function_call", "namespace": "f0", "name": "say", "call_id": "c", "arguments": "{}"}
    asked = body(tools=tools, input=[earlier], tool_choice={"type": "function", "namespace": "f0", "name": "say"})
    chat = chat_of(asked)
    assert chat["tools"][0]["function"]["name"] == "f0__say"
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "f0__say"
    assert chat["tool_choice"]["function"]["name"] == "f0__say"
    call = {"id": "c", "function": {"name": "f0__say", "arguments": "{}"}}
    base = base_of(asked, "hw-1", 10)
    (item,) = response_of(base, {"choices": [{"message": {"tool_calls": [call]}}]})["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "f0", "say")
    delta = {"tool_calls": [{"index": 0, **call}]}
    out = ResponseEvents(base).feed(
        b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\ndata: [DONE]\n\n"
    )
    seen = [json.loads(event.split(b"data: ", 1)[1]) for event in out.split(b"\n\n") if event]
    assert seen[-1]["response"]["output"] == [item]


def test_log_probabilities_are_those_of_the_text(gateway: Gateway, fake: Fake) -> None:
    def of(token: str) -> dict[str, Any]:
        top = {"token": token, "logprob": -0.5, "bytes": [1]}
        return top | {"top_logprobs": [top]}

    base = base_of(body(top_logprobs=1), "hw-1", 10)
    message = {"content": "Paris.", "reasoning_content": "Hm."}
    logprobs = {"content": [of(token) for token in ("Hm", ".", "Par", "is", ".", "")]}
    answer = {"choices": [{"message": message, "finish_reason": "stop", "logprobs": logprobs}]}
    (part,) = response_of(base, answer)["output"][1]["content"]
    assert "".join(one["token"] for one in part["logprobs"]) == "Paris."
    assert part["logprobs"][0] == of("Par")
    told = [{"choices": [{"delta": {"content": word}, "logprobs": {"content": [of(word)]}}]} for word in ("Par", "is.")]
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in told) + b"data: [DONE]\n\n"
    out = ResponseEvents(base).feed(data).split(b"\n\n")
    seen = [json.loads(event.split(b"data: ", 1)[1]) for event in out if event]
    deltas = [one["logprobs"] for one in seen if one["type"] == "response.output_text.delta"]
    assert deltas == [[of("Par")], [of("is.")]]
    assert seen[-1]["response"]["output"][0]["content"][0]["logprobs"] == [of("Par"), of("is.")]
    gateway.post(body(top_logprobs=3, include=["message.output_text.logprobs"]), PATH)
    asked = fake.last()["body"]
    assert (asked["logprobs"], asked["top_logprobs"]) == (True, 3)


def test_the_first_system_messages_are_one() -> None:
    asked = body(instructions="A.", input=[{"role": "developer", "content": "B."}, {"role": "user", "content": "C."}])
    assert chat_of(asked)["messages"][0] == {"role": "system", "content": "A.\n\nB."}


# ---- the stream


def chunks(thoughts: list[str], texts: list[str], calls: list[list[str]], reason: str) -> list[dict[str, Any]]:
    """Return the chunks of a chat: what it thinks, says and calls."""
    deltas: list[dict[str, Any]] = [{"reasoning_content": text} for text in thoughts]
    deltas += [{"content": text} for text in texts]
    for number, parts in enumerate(calls):
        for i, part in enumerate(parts):
            head = {"id": f"c{number}"} if i == 0 else {}
            named = {"name": "f"} if i == 0 else {}
            deltas.append({"tool_calls": [{"index": number, **head, "function": {**named, "arguments": part}}]})
    found: list[dict[str, Any]] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    found.append({"choices": [{"delta": {}, "finish_reason": reason}]})
    found.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    return found


WORDS = st.lists(st.text(min_size=1, max_size=5), max_size=4)


@given(
    WORDS,
    WORDS,
    st.lists(st.lists(st.text(max_size=4), min_size=1, max_size=3), max_size=3),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.lists(st.integers(1, 90), max_size=60),
)
def test_a_stream_ends_in_the_response_that_would_have_come_whole(
    thoughts: list[str], texts: list[str], calls: list[list[str]], reason: str, cuts: list[int]
) -> None:
    base = base_of(body(), "hw-1", 10)
    told = chunks(thoughts, texts, calls, reason)
    data = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in told) + b"data: [DONE]\n\n"
    events, at, out = ResponseEvents(base), 0, b""
    for size in [*cuts, len(data)]:
        out += events.feed(data[at : at + size])
        at += size
    assert out == ResponseEvents(base).feed(data)
    seen = [json.loads(event.split(b"data: ", 1)[1]) for event in out.split(b"\n\n") if event]
    assert [one["sequence_number"] for one in seen] == list(range(len(seen)))
    message: dict[str, Any] = {"content": "".join(texts) or None, "reasoning_content": "".join(thoughts)}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "function": {"name": "f", "arguments": "".join(parts)}} for i, parts in enumerate(calls)
        ]
    answer = {
        "model": "smollm2",
        "choices": [{"message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }
    assert seen[-1]["response"] == response_of(base, answer)
    deltas = "".join(one["delta"] for one in seen if one["type"] == "response.output_text.delta")
    assert deltas == "".join(texts)
    added = [one["item"]["id"] for one in seen if one["type"] == "response.output_item.added"]
    assert added == [one["item"]["id"] for one in seen if one["type"] == "response.output_item.done"]
    assert len(set(added)) == len(added)


@given(PARTS)
def test_tool_calls_that_take_turns_are_an_item_each(parts: list[tuple[int, str]]) -> None:
    out = ResponseEvents(base_of(body(), "hw-1", 10)).feed(in_turns(parts))
    seen = [json.loads(event.split(b"data: ", 1)[1]) for event in out.split(b"\n\n") if event]
    whole = arguments_of(parts)
    done = [one["item"] for one in seen if one["type"] == "response.output_item.done"]
    assert {item["call_id"]: (item["name"], item["arguments"]) for item in done} == {
        f"c{number}": (f"f{number}", text) for number, text in whole.items()
    }
    assert len(done) == len(whole)
    assert [one["call_id"] for one in seen[-1]["response"]["output"]] == [f"c{number}" for number in whole]
    for place, number in enumerate(whole):
        mine = [one for one in seen if one.get("output_index") == place]
        deltas = [one for one in mine if one["type"] == "response.function_call_arguments.delta"]
        assert "".join(one["delta"] for one in deltas) == whole[number]
        assert (mine[0]["type"], mine[-1]["type"]) == ("response.output_item.added", "response.output_item.done")


def test_an_item_is_done_once_its_arguments_are_whole_and_another_begins() -> None:
    out = ResponseEvents(base_of(body(), "hw-1", 10)).feed(in_turns([(0, '{"a": 1}'), (1, "{")], end=False))
    assert out.count(b"event: response.output_item.done") == 1


def test_an_error_ends_the_stream() -> None:
    events = ResponseEvents(base_of(body(), "hw-1", 10))
    told = events.feed(b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n')
    last = json.loads(told.split(b"\n\n")[-2].split(b"data: ", 1)[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


def test_a_prompt_may_be_cut() -> None:
    assert chat_of(body(truncation="auto"))["truncate_prompt_tokens"] == -1
    assert "truncate_prompt_tokens" not in chat_of(body(truncation="disabled"))


def test_a_chat_of_a_text_is_one_message() -> None:
    assert chat_of(body())["messages"] == [{"role": "user", "content": "Hi."}]
