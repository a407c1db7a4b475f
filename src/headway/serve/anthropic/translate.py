"""Requests and answers of Anthropic's Messages API as chat completions, and back.

A pure translation: what is checked here is what a chat has no place for; all else is checked as in a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headway.errors import HeadwayError, RequestError

# finish_reason of a chat -> stop_reason of a message
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_SAME = ("model", "max_tokens", "temperature", "top_k", "top_p", "stream")
_TAKEN = {
    *_SAME, "messages", "system", "stop_sequences", "tools", "tool_choice", "metadata", "service_tier",
    "thinking", "cache_control",
}  # fmt: skip
_UNKNOWN = ("container", "mcp_servers", "context_management")  # that Anthropic's own servers have
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a chat for that of a message; Headway's own fields and vLLM's are kept.

    RequestError for what the engine has no place for.
    """
    for name in _UNKNOWN:
        if raw.get(name):
            raise RequestError(f"{name} is not known here.", "Leave it out.", param=name)
    if not isinstance(raw.get("max_tokens"), int):
        raise RequestError(
            "max_tokens is missing.", "Give the most tokens of the answer.", param="max_tokens"
        )
    chat = {name: raw[name] for name in _SAME if name in raw}
    chat |= {name: value for name, value in raw.items() if name not in _TAKEN}
    chat["messages"] = [*_system(raw.get("system")), *_messages(raw.get("messages"))]
    if raw.get("stop_sequences"):
        chat["stop"] = raw["stop_sequences"]
    if raw.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list(raw["tools"], "tools")]
        chat |= _choice(raw.get("tool_choice"))
    if raw.get("service_tier") not in (None, "auto", "standard_only"):
        chat["service_tier"] = raw["service_tier"]
    if raw.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if (user := _object(raw.get("metadata") or {}, "metadata").get("user_id")) is not None:
        chat["user"] = str(user)
    thinking = _object(raw.get("thinking") or {}, "thinking").get("type")
    if thinking == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False} | (chat.get("chat_template_kwargs") or {})
    return chat


def message_of(answer: Mapping[str, Any], id: str) -> dict[str, Any]:
    """Return the message of a chat's answer. id: of the request."""
    choice = answer["choices"][0]
    usage, told = answer.get("usage") or {}, choice["message"]
    content: list[dict[str, Any]] = []
    thought = told.get("reasoning") or told.get("reasoning_content")
    if thought:
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if told.get("content"):
        content.append({"type": "text", "text": told["content"]})
    content += [_use(call) for call in told.get("tool_calls") or ()]
    reason, word = stop_of(choice)
    return {
        "id": id, "type": "message", "role": "assistant", "model": answer.get("model"), "content": content,
        "stop_reason": reason, "stop_sequence": word,
        "usage": {
            "input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0),
        },
    }  # fmt: skip


def stop_of(choice: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return why a choice ended, in Anthropic's words, and the stop sequence if that was it."""
    word = choice.get("stop_reason")
    if choice.get("finish_reason") == "stop" and isinstance(word, str):
        return "stop_sequence", word
    return STOPS.get(str(choice.get("finish_reason")), "end_turn"), None


def error_of(error: HeadwayError) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    return error_body(error.status, str(error))


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


# ---- requests


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None or system == []:
        return []
    return [{"role": "system", "content": _text(system, "system")}]


def _messages(messages: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, message in enumerate(_list(messages, "messages")):
        where = f"messages.{number}"
        role, content = _object(message, where).get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise RequestError(
                f"{where} has the role {role!r}.", "Use user and assistant; system is a field of its own.",
                param="messages",
            )  # fmt: skip
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "assistant":
            found.append(_assistant(_list(content, where), where))
        else:
            found += _user(_list(content, where), where)
    return found


def _user(blocks: list[Any], where: str) -> Iterable[dict[str, Any]]:
    """Yield the results of tools, each a message of its own, then what the user says."""
    texts: list[str] = []
    for block in blocks:
        kind = _object(block, where).get("type")
        if kind == "tool_result":
            told = _text(block.get("content") or "", where)
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": told}
        elif kind == "text":
            texts.append(_word(block, "text", where))
        else:
            raise _no_place(kind, where)
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    texts, calls = list[str](), list[dict[str, Any]]()
    for block in blocks:
        kind = _object(block, where).get("type")
        if kind == "text":
            texts.append(_word(block, "text", where))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # templates leave out earlier thoughts, too
            raise _no_place(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    return message | ({"tool_calls": calls} if calls else {})


def _no_place(kind: Any, where: str) -> RequestError:
    return RequestError(
        f"{where} has a block of type {kind!r}.", "Send text, tool_use and tool_result blocks.",
        param="messages", code="unsupported_block",
    )  # fmt: skip


def _text(content: Any, where: str) -> str:
    """Return the text of a string, or of text blocks."""
    if isinstance(content, str):
        return content
    blocks = [_object(block, where) for block in _list(content, where)]
    for block in blocks:
        if block.get("type") != "text":
            raise _no_place(block.get("type"), where)
    return "\n".join(_word(block, "text", where) for block in blocks)


def _tool(tool: Any) -> dict[str, Any]:
    kind = _object(tool, "tools").get("type", "custom")
    if kind != "custom":
        raise RequestError(
            f"Tools of type {kind!r} are Anthropic's own.",
            "Describe the tool by an input_schema.",
            param="tools",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Any) -> dict[str, Any]:
    """Return the fields of a chat for `tool_choice`."""
    if choice is None:
        return {}
    kind, fields = _object(choice, "tool_choice").get("type"), dict[str, Any]()
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError(f"tool_choice is {kind!r}.", "Use auto, any, tool or none.", param="tool_choice")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = json.loads(function.get("arguments") or "{}")
    except ValueError:  # the model has written no JSON; its client sees what it wrote
        given = {"arguments": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{where} is not a list.", "Send a list of objects.", param=where.split(".")[0])
    return value


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{where} is not an object.", "Send an object.", param=where.split(".")[0])
    return value


def _word(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where} has a block without {name}.", "Send it as a string.", param="messages")
    return value
