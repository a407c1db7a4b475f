"""Requests and answers of Anthropic's Messages API as chat completions, and back.

A pure translation: only what a chat has no field for is checked here; all else is checked as in a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headway.errors import RequestError
from headway.gateway.apis.chat_stream import cost_of, thought_of
from headway.gateway.parsing.fields import MESSAGES, list_in, object_in, refuse

# finish_reason of a chat -> stop_reason of a message
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_SAME = ("model", "max_tokens", "temperature", "top_k", "top_p", "stream")
_TRANSLATED = {
    *_SAME,
    "messages",
    "system",
    "stop_sequences",
    "tools",
    "tool_choice",
    "metadata",
    "service_tier",
    "thinking",
    "cache_control",
    "context_management",
    "output_config",
    "output_format",
    "betas",
}
_ALLOWED = {"n": (None, 1), "background": (None, False)}  # fields of chats that a message has no place for
_BILLING = "x-anthropic-billing-header"  # a block with a hash of the request, which no cached prefix survives
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a chat for that of a message; Headway's own fields and vLLM's are kept.

    RequestError for what the engine has no place for.
    """
    refuse(raw, MESSAGES)
    for name, allowed in _ALLOWED.items():
        if raw.get(name) not in allowed:
            raise RequestError(f"{name} is not supported.", "Leave it out.", param=name)
    if raw.get("max_tokens") is None:
        raise RequestError("max_tokens is missing.", "Send the maximum number of answer tokens.", param="max_tokens")
    chat = {name: raw[name] for name in _SAME if name in raw}
    chat |= {name: value for name, value in raw.items() if name not in _TRANSLATED}
    messages = list(_messages(raw.get("messages")))
    chat["messages"] = [*_system(raw.get("system"), messages), *messages]
    if raw.get("stop_sequences"):
        chat["stop"] = raw["stop_sequences"]
    if raw.get("tools"):
        chat["tools"] = [_tool(tool) for tool in list_in(raw["tools"], "tools")]
        chat |= _choice(raw.get("tool_choice"))
    if raw.get("service_tier") not in (None, "auto", "standard_only"):
        chat["service_tier"] = raw["service_tier"]
    if raw.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if (user := object_in(raw.get("metadata") or {}, "metadata").get("user_id")) is not None:
        chat["user"] = str(user)
    config = object_in(raw.get("output_config") or {}, "output_config")
    if raw.get("output_format"):  # its name before there was output_config
        config = {"format": raw["output_format"], **config}
    return chat | _thinking(raw, chat) | _output(config)


def message_of(answer: Mapping[str, Any], id: str) -> dict[str, Any]:
    """Return the message of a chat's answer. id: of the request."""
    choice = answer["choices"][0]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    thought = thought_of(message)
    if thought:
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    content += [_tool_use(call) for call in message.get("tool_calls") or ()]
    reason, word = stop_of(choice, any(block["type"] == "tool_use" for block in content))
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": answer.get("model"),
        "content": content,
        "stop_reason": reason,
        "stop_sequence": word,
        "usage": usage_of(answer.get("usage") or {}),
    }


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage as that of a message."""
    tokens = {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}
    return tokens | cost_of(usage)


def stop_of(choice: Mapping[str, Any], calls: bool) -> tuple[str, str | None]:
    """Return why a choice ended, in Anthropic's words, and the stop sequence if that was it.

    calls: it calls a tool. vLLM says "stop" of a tool that the client has named, too.
    """
    word = choice.get("stop_reason")
    if calls and choice.get("finish_reason") in ("stop", "tool_calls"):
        return "tool_use", None
    if choice.get("finish_reason") == "stop" and isinstance(word, str):
        return "stop_sequence", word
    return STOPS.get(str(choice.get("finish_reason")), "end_turn"), None


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


# ---- requests


def _system(system: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the system prompt, with the texts of the system messages, which are taken out of `messages`.

    Many templates have a place for one system message alone, the first.
    """
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    texts = [_text(system, "system")] if system else []
    texts += [message["content"] for message in messages if message["role"] == "system"]
    messages[:] = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text", "")).startswith(_BILLING)


def _thinking(raw: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `thinking`."""
    kind = object_in(raw.get("thinking") or {}, "thinking").get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise RequestError(f"thinking is {kind!r}.", "Use enabled, adaptive or disabled.", param="thinking")
    if kind is None:
        return {}
    kwargs = object_in(chat.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    return {"chat_template_kwargs": {"enable_thinking": kind != "disabled", **kwargs}}


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `output_config`: an effort, and a JSON schema of the answer."""
    fields: dict[str, Any] = {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    shape = object_in(config.get("format") or {}, "output_config")
    if shape:
        if shape.get("type") != "json_schema":
            raise RequestError(
                f"output_config.format is {shape.get('type')!r}.", "Use json_schema.", param="output_config"
            )
        schema = {"name": "answer", "schema": shape.get("schema") or {}}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _messages(messages: Any) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    for number, message in enumerate(list_in(messages, "messages")):
        where = f"messages.{number}"
        role, content = object_in(message, where).get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where} has the role {role!r}.", "Use user, assistant and system.", param="messages")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
        elif role == "system":
            chat.append({"role": role, "content": _text(content, where)})
        elif role == "assistant":
            chat.append(_assistant(list_in(content, where), where))
        else:
            chat += _user(list_in(content, where), where)
    return chat


def _user(blocks: list[Any], where: str) -> Iterable[dict[str, Any]]:
    """Yield the results of tools, each a message of its own, then what the user says."""
    said: list[str | dict[str, Any]] = []
    for block in blocks:
        if object_in(block, where).get("type") == "tool_result":
            content = block.get("content") or ""
            results = [{"type": "text", "text": content}] if isinstance(content, str) else list_in(content, where)
            told = [_part(one, where) for one in results]
            if block.get("is_error"):
                told = [f"Error: {told[0]}", *told[1:]] if told and isinstance(told[0], str) else ["Error:", *told]
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": _joined(told)}
        else:
            said.append(_part(block, where))
    if said:
        yield {"role": "user", "content": _joined(said)}


def _part(block: Any, where: str) -> str | dict[str, Any]:
    """Return a block of text as a string, an image as a part of a chat's message."""
    kind = object_in(block, where).get("type")
    if kind == "text":
        return _string(block, "text", where)
    source = block.get("source") if kind == "image" else None
    match source:
        case {"type": "base64", "media_type": str(media), "data": str(data)}:
            url = f"data:{media};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case _:
            raise _unsupported_block(kind, where)
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(parts: list[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message: one text unless there are images."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    texts, calls = list[str](), list[dict[str, Any]]()
    for block in blocks:
        kind = object_in(block, where).get("type")
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # templates leave out earlier thoughts, too
            raise _unsupported_block(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    return message | ({"tool_calls": calls} if calls else {})


def _unsupported_block(kind: Any, where: str) -> RequestError:
    return RequestError(
        f"{where} has a block of type {kind!r}.",
        "Send text, image (base64 or url), tool_use and tool_result blocks.",
        param="messages",
        code="unsupported_block",
    )


def _text(content: Any, where: str) -> str:
    """Return the text of a string, or of text blocks."""
    if isinstance(content, str):
        return content
    blocks = [object_in(block, where) for block in list_in(content, where)]
    for block in blocks:
        if block.get("type") != "text":
            raise _unsupported_block(block.get("type"), where)
    return "\n".join(_string(block, "text", where) for block in blocks)


def _tool(tool: Any) -> dict[str, Any]:
    kind = object_in(tool, "tools").get("type", "custom")
    if kind != "custom":
        raise RequestError(
            f"Tools of type {kind!r} are Anthropic's own.", "Describe the tool by an input_schema.", param="tools"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> dict[str, Any]:
    """Return the fields of a chat for `tool_choice`."""
    if choice is None:
        return {}
    kind, fields = object_in(choice, "tool_choice").get("type"), dict[str, Any]()
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError(f"tool_choice is {kind!r}.", "Use auto, any, tool or none.", param="tool_choice")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:  # the model has written no JSON; its client sees what it wrote
        arguments = {"arguments": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where} has a block without {name}.", "Send it as a string.", param="messages")
    return value
