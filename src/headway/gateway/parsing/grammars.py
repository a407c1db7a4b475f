"""Limits of structured output, checked before a request is queued.

The engine compiles a grammar on the cores that all its requests share, and some of its libraries write
repetitions out: eleven characters, "a{1,100000}", may take minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headway.config import Grammars
from headway.errors import RequestError

_FIELDS = ("response_format", "structured_outputs")  # and vLLM's earlier names, which begin with guided_
_REGEX = frozenset(("pattern", "regex", "whitespace_pattern", "guided_regex", "guided_whitespace_pattern"))
_GRAMMAR = frozenset(("grammar", "guided_grammar"))
_AS_TEXT = frozenset(("json", "guided_json", "structural_tag"))  # may have their JSON as a text
_BOUNDS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
# An escaped character, a class, a counted repetition, or any other character.
# An unclosed class extends to the end of the text, and nothing is given back: the time stays linear.
_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|\{(\d++)(?:,(\d*+))?\}|.", re.DOTALL)
# Of a grammar, in which "[" may be text.
_REPEATS = re.compile(r"\{(\d++)(?:,(\d*+))?\}")
_ENDLESS = 10**9  # more than any limit
_HINT = "Send a smaller grammar, or raise grammars.{} in the server's configuration."


def check_grammars(raw: Mapping[str, Any], limits: Grammars) -> None:
    """Refuse a request whose structured output is larger than the configuration allows."""
    fields = {name: value for name, value in raw.items() if name in _FIELDS or name.startswith("guided_")}
    if raw.get("tool_choice") not in (None, "auto", "none"):  # the arguments are held to the tools' schemas
        fields["tools"] = raw.get("tools")
    regex, repeats = 0, 0.0
    for name, value in fields.items():
        for key, one, depth in _nodes(name, value, limits.max_kib * 1024):
            if depth > limits.max_depth:
                raise _too_large(name, f"more than {limits.max_depth} objects within each other", "max_depth")
            if key in _REGEX and isinstance(one, str):
                regex += expanded_length(one)
            elif key in _GRAMMAR and isinstance(one, str):
                repeats += sum(max(_count(most), _count(least)) for least, most in _REPEATS.findall(one))
            elif key in _BOUNDS and isinstance(one, int | float):
                repeats += max(0, min(one, limits.max_repeats + 1))  # NaN counts as nothing
        if len(json.dumps(value)) > limits.max_kib * 1024:
            raise _too_large(name, f"more than {limits.max_kib} KiB", "max_kib")
        if regex > limits.max_regex:
            what = f"regular expressions of more than {limits.max_regex} characters, repetitions written out"
            raise _too_large(name, what, "max_regex")
        if repeats > limits.max_repeats:
            what = f"bounds, such as maxLength or {{9}} of a grammar, of more than {limits.max_repeats} in sum"
            raise _too_large(name, what, "max_repeats")


def _too_large(name: str, what: str, limit: str) -> RequestError:
    return RequestError(f"{name} has {what}.", _HINT.format(limit), param=name, code="grammar_too_large")


def _nodes(name: str, value: Any, longest: int) -> Iterator[tuple[str, Any, int]]:
    """Yield all values within a field, each with its name and how many objects and arrays it is in.

    longest: characters of a text that is parsed as JSON; what is longer is refused anyway.
    """
    waiting = [(name, value, 0)]
    while waiting:
        key, one, depth = waiting.pop()
        if key in _AS_TEXT and isinstance(one, str) and len(one) <= longest:
            one = _parse(one)
        yield key, one, depth
        if isinstance(one, dict):
            waiting += [(inner, child, depth + 1) for inner, child in one.items()]
            if key == "patternProperties":
                waiting += [("pattern", pattern, depth + 1) for pattern in one]
        elif isinstance(one, list):
            waiting += [("", child, depth + 1) for child in one]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the engine says what is wrong with it


def expanded_length(regex: str) -> int:
    """Return the characters of a regular expression, a class as one, with its repetitions written out.

    Dialects differ, so this is no parser: what it does not understand counts as characters.
    """
    sizes, last = [0], 0  # of the groups that are open, and of what a repetition would repeat
    for part in _PARTS.finditer(regex):
        text, least, most = part[0], part[1], part[2]
        if text == "(":
            sizes.append(1)
        elif text == ")" and len(sizes) > 1:
            last = min(sizes.pop() + 1, _ENDLESS)
            sizes[-1] += last
        elif least is not None:
            times = max(_count(least), _count(most), 1)
            sizes[-1] += last * (times - 1)
            last = min(last * times, _ENDLESS)
        elif text not in "*+?":  # loops, which are written once
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _count(digits: str | None) -> int:
    return int(digits or 0) if len(digits or "") < 10 else _ENDLESS
