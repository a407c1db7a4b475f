"""Streams of chats whose tool calls take turns, as engines may write those that run at once."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

_WHOLE = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.dictionaries(st.text(max_size=2), st.none()))


@st.composite
def _parts(draw: st.DrawFn) -> list[tuple[int, str]]:
    """Draw the arguments of up to three calls, cut into parts that take turns: (number of the call, part)."""
    left = {}
    for number in range(draw(st.integers(1, 3))):
        text, parts = json.dumps(draw(_WHOLE)), list[str]()
        while text:
            size = draw(st.integers(0, 9)) if len(parts) < 9 else len(text)
            parts.append(text[:size])
            text = text[size:]
        left[number] = parts
    order = draw(st.permutations([number for number, parts in left.items() for _ in parts]))
    return [(number, left[number].pop(0)) for number in order]


PARTS = _parts()


def arguments_of(parts: list[tuple[int, str]]) -> dict[int, str]:
    """Return the arguments of each call, in the order in which the calls begin."""
    whole: dict[int, str] = {}
    for number, part in parts:
        whole[number] = whole.get(number, "") + part
    return whole


def in_turns(parts: list[tuple[int, str]], *, end: bool = True) -> bytes:
    """Return the stream of a chat with these parts. end: it ends, too."""
    begun, out = set[int](), b""
    for number, part in parts:
        call: dict[str, Any] = {"index": number, "function": {"arguments": part}}
        if number not in begun:
            call["id"], call["function"]["name"] = f"c{number}", f"f{number}"
            begun.add(number)
        chunk = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]}
        out += b"data: " + json.dumps(chunk).encode() + b"\n\n"
    return out + b"data: [DONE]\n\n" if end else out
