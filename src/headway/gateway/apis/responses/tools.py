"""Tools of the Responses API as those of chats, and the calls that a model makes to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from headway.errors import RequestError
from headway.gateway.parsing.fields import list_in, object_in

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
