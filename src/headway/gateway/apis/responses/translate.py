"""Requests and answers of OpenAI's Responses API as chat completions, and back. A pure translation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from headway.errors import RequestError
from headway.gateway.apis.chat_stream import cost_of, thought_of
from headway.gateway.parsing.fields import RESPONSES, list_in, object_in, refuse

# Built-in tools that agents offer beside their own: a model that is not told of them does without.
_IGNORED = ("web_search", "image_generation", "tool_search")
MORE_TOOLS = "additional_tools"  # an item of the input
_INPUT = "input"  # the one argument of a custom tool, as a function


def is_ignored(tool: Mapping[str, Any]) -> bool:
    """Tell whether a tool is left out; `web_search_preview_2025_03_11` is a web search, too."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_IGNORED)


def tools_of(raw: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a body, and those in items of its input; RequestError for what is none."""
    tools, items = list_in(raw.get("tools") or [], "tools"), raw.get("input")
    more = [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []
    added = (list_in(one.get("tools"), "tools") for one in more if one.get("type") == MORE_TOOLS)
    return [object_in(tool, "tools") for tool in chain(tools, *added)]


def ignored_in(tools: Any) -> str:
    """Return the types of the tools that are left out, as a header's value; empty = none is."""
    found = [tool["type"] for tool in tools if is_ignored(tool)] if isinstance(tools, list) else []
    return ",".join(dict.fromkeys(one for one in found if one.isascii() and one.isprintable()))[:256]


def calls_of(tools: Any) -> dict[str, dict[str, Any]]:
    """Return what the item of a call says of its tool, by the tool's name in a chat, where that is not a function's."""
    found = dict[str, dict[str, Any]]()
    for tool, inside in _flat(tools or ()):
        kind = "custom_tool_call" if tool.get("type") == "custom" else "function_call"
        if inside or kind == "custom_tool_call":
            found[_name(tool.get("name"), inside)] = {"type": kind, "name": tool.get("name"), **inside}
    return found


def name_of(item: Mapping[str, Any]) -> Any:
    """Return the name in a chat of the tool that an item calls."""
    inside = {"namespace": item["namespace"]} if item.get("namespace") else {}
    return _name(item.get("name"), inside)


def _name(name: Any, inside: Mapping[str, Any]) -> Any:
    return f"{inside['namespace']}__{name}" if inside else name


def _flat(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yield tools, those in a namespace each by itself, with the field that an item of its call has."""
    for tool in tools:
        if tool.get("type") == "namespace":
            inside = {"namespace": str(tool.get("name"))}
            yield from ((object_in(one, "tools"), inside) for one in list_in(tool.get("tools"), "tools"))
        else:
            yield tool, {}


def chat_tools(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `tools` and `tool_choice`; RequestError for tools that nothing here can run."""
    tools = [_tool(tool, inside) for tool, inside in _flat(tools_of(raw)) if not is_ignored(tool)]
    return {"tools": tools, "tool_choice": _choice(raw.get("tool_choice"))} if tools else {}


def arguments_of(input: Any) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({_INPUT: str(input or "")})


def input_of(arguments: str) -> str:
    """Return the input of a custom tool's call; what is not as it was asked for is passed on as it is."""
    try:
        value = json.loads(arguments)[_INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else arguments


def _tool(tool: Mapping[str, Any], inside: Mapping[str, Any]) -> dict[str, Any]:
    match tool.get("type"):
        case "function":
            names = ("name", "description", "parameters", "strict")
            function = {n: tool[n] for n in names if tool.get(n) is not None}
        case "custom":
            function = _custom(tool)
        case kind:
            raise RequestError(
                f"Tools of type {kind!r} are OpenAI's own.",
                "Send tools of type function or custom.",
                param="tools",
                code="unsupported_tool",
            )
    return {"type": "function", "function": function | {"name": _name(tool.get("name"), inside)}}


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function with one text as its argument; the grammar of that text is a description."""
    shape = object_in(tool.get("format") or {}, "tools")
    text: dict[str, Any] = {"type": "string"}
    if shape.get("type") == "grammar":
        text["description"] = f"A text of this {shape.get('syntax')} grammar:\n{shape.get('definition')}"
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    described = {"description": tool["description"]} if tool.get("description") is not None else {}
    return {"name": tool.get("name"), **described, "parameters": parameters}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        if choice.get("type") not in ("function", "custom"):
            raise RequestError(
                "tool_choice names no function.", "Use auto, none, required or a function.", param="tool_choice"
            )
        return {"type": "function", "function": {"name": name_of(choice)}}
    return choice or "auto"


_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "background",
    "user",
    "parallel_tool_calls",
    "service_tier",
    "metadata",
)
_TRANSLATED = {
    *_SAME,
    "input",
    "instructions",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "store",
    "include",
    "truncation",
    "prompt_cache_key",
    "safety_identifier",
    "stream_options",
    "top_logprobs",
    "client_metadata",
    *RESPONSES,
}
_LOGPROBS = "message.output_text.logprobs"  # in `include`
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# What a response repeats of its request, with the values of fields that the request leaves out.
_ECHO: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "top_logprobs": 0,
    "truncation": "disabled",
    "metadata": {},
    "user": None,
}


def chat_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a chat for that of a response; Headway's own fields and vLLM's are kept.

    RequestError for what the engine has no place for.
    """
    refuse(raw, RESPONSES)
    if raw.get("n") not in (None, 1):
        raise RequestError("A response has one answer, so n cannot be used here.", "Leave it out.", param="n")
    chat = {name: raw[name] for name in _SAME if raw.get(name) is not None}
    chat |= {name: value for name, value in raw.items() if name not in _TRANSLATED}
    chat["messages"] = _joined([*_instructions(raw.get("instructions")), *_items(raw.get("input"))])
    if raw.get("max_output_tokens") is not None:
        chat["max_tokens"] = raw["max_output_tokens"]
    chat |= chat_tools(raw) | _logprobs(raw)
    if (shape := _format(object_in(raw.get("text") or {}, "text").get("format"))) is not None:
        chat["response_format"] = shape
    effort = object_in(raw.get("reasoning") or {}, "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if raw.get("truncation") == "auto":
        chat["truncate_prompt_tokens"] = -1
    if raw.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def base_of(raw: Mapping[str, Any], id: str, created: int) -> dict[str, Any]:
    """Return a response that has not begun: what it says of its request."""
    echo = {name: raw[name] if raw.get(name) is not None else value for name, value in _ECHO.items()}
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": raw.get("model"),
        "output": [],
        "usage": None,
        "background": bool(raw.get("background")),
        "store": bool(raw.get("background")),
        "previous_response_id": None,
        "service_tier": raw.get("service_tier") or "auto",
        **echo,
        "tools": tools_of(raw),
    }


def response_of(base: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response of a chat's answer."""
    choice = answer["choices"][0]
    message, id = choice["message"], base["id"]
    output: list[dict[str, Any]] = []
    thought = thought_of(message)
    if thought:
        output.append(reasoning_item(id, thought))
    calls = message.get("tool_calls") or ()
    if (text := message.get("content") or "") or not calls:
        output.append(message_item(id, text, logprobs=_of_text(logprobs_of(choice), text)))
    known = calls_of(base["tools"])
    for number, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        output.append(call_item(f"{id}_{number}", call["id"], name, arguments, of=known.get(name)))
    end = end_of(choice.get("finish_reason"))
    return {
        **base,
        **end,
        "model": answer.get("model", base["model"]),
        "output": output,
        "usage": usage_of(answer.get("usage") or {}),
    }


def end_of(reason: Any) -> dict[str, Any]:
    """Return status and details of a response whose chat ended for this reason."""
    details = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(str(reason))
    return {
        "status": "incomplete" if details else "completed",
        "incomplete_details": {"reason": details} if details else None,
    }


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's usage as that of a response."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    input_tokens, output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": input_tokens + output_tokens,
        **cost_of(usage),
    }


def logprobs_of(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the log probabilities of a choice, or of a part of its stream, as a response has them."""
    return [
        _logprob(one) | {"top_logprobs": [_logprob(top) for top in one.get("top_logprobs") or ()]}
        for one in (choice.get("logprobs") or {}).get("content") or ()
    ]


def _logprob(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": one["token"], "logprob": one["logprob"], "bytes": one.get("bytes") or []}


def _of_text(logprobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return those of the tokens of a text: an engine's are of all that it wrote, thoughts included."""
    whole = "".join(one["token"] for one in logprobs)
    begin = whole.rfind(text)
    end = len(whole) if begin < 0 else begin + len(text)
    ends = accumulate(len(one["token"]) for one in logprobs)
    return [one for one, at in zip(logprobs, ends, strict=True) if begin < at <= end]


def message_item(
    id: str, text: str, status: str = "completed", *, logprobs: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the item of a text."""
    content = [text_part(text, logprobs)]
    return {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the part of an item that is a text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning_item(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """Return the item of what a model has thought."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{id}", "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(
    id: str, call_id: Any, name: Any, arguments: str, status: str = "completed", *, of: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the item of a tool call. of: as in `calls_of`; the input of a custom tool is one text."""
    item = {"type": "function_call", "status": status, "call_id": call_id, "name": name, **(of or {})}
    if item["type"] == "custom_tool_call":
        return {"id": f"ctc_{id}", **item, "input": input_of(arguments)}
    return {"id": f"fc_{id}", **item, "arguments": arguments}


# ---- requests


def _logprobs(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `top_logprobs` and its entry in `include`."""
    most = raw.get("top_logprobs")
    if _LOGPROBS not in list_in(raw.get("include") or [], "include") and most is None:
        return {}
    return {"logprobs": True, "top_logprobs": most or 0}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first system messages are one: many templates have a place for one alone."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    texts = [one["content"] for one in messages[:first]]
    if not all(isinstance(text, str) for text in texts):
        return messages
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[first:]]


def _instructions(text: Any) -> list[dict[str, Any]]:
    if text is None:
        return []
    if not isinstance(text, str):
        raise RequestError("instructions is not a text.", "Send a string.", param="instructions")
    return [{"role": "system", "content": text}]


def _items(input: Any) -> Iterator[dict[str, Any]]:
    """Yield the messages of `input`; tool calls that follow each other are one message."""
    if isinstance(input, str):
        yield {"role": "user", "content": input}
        return
    calls: list[dict[str, Any]] = []
    for number, item in enumerate(list_in(input or None, "input")):
        where = f"input.{number}"
        kind = object_in(item, where).get("type", "message")
        if kind in ("function_call", "custom_tool_call"):
            custom = kind == "custom_tool_call"
            arguments = arguments_of(item.get("input")) if custom else str(item.get("arguments") or "{}")
            function = {"name": name_of(item), "arguments": arguments}
            calls.append({"id": str(item.get("call_id")), "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": None, "tool_calls": calls}
            calls = []
        if kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output") or "", where)
            yield {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output}
        elif kind == "message":
            yield _message(item, where)
        elif kind not in ("reasoning", MORE_TOOLS):  # templates leave out earlier thoughts, too
            raise _unsupported_item(kind, where)
    if calls:
        yield {"role": "assistant", "content": None, "tool_calls": calls}


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where} has the role {role!r}.", f"Use one of {', '.join(_ROLES)}.", param="input")
    return {"role": _ROLES[role], "content": _content(item.get("content"), where)}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return a string, or parts of a chat's message as one where all are text."""
    if isinstance(content, str):
        return content
    parts = [_part(object_in(part, where), where) for part in list_in(content, where)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind == "input_audio":
        return {"type": kind, "input_audio": object_in(part.get("input_audio"), where)}
    if kind not in ("input_text", "output_text", "text", "refusal"):
        raise _unsupported_item(kind, where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where} has a part without text.", "Send it as a string.", param="input")
    return {"type": "text", "text": text}


def _unsupported_item(kind: Any, where: str) -> RequestError:
    return RequestError(
        f"{where} is of type {kind!r}.",
        "Send texts, images by image_url, input_audio, function_call and function_call_output.",
        param="input",
        code="unsupported_item",
    )


def _format(shape: Any) -> dict[str, Any] | None:
    """Return the `response_format` of a chat for `text.format`."""
    if shape is None:
        return None
    kind = object_in(shape, "text").get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        names = ("name", "schema", "strict", "description")
        return {"type": kind, "json_schema": {n: shape[n] for n in names if shape.get(n) is not None}}
    raise RequestError(f"text.format is {kind!r}.", "Use text, json_object or json_schema.", param="text.format")
