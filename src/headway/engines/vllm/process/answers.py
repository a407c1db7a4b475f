"""What engines answer is not trusted: it is read as strict JSON in the shape of OpenAI's API."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

_MOST_TOKENS = 2**31
_LONG = 2**16  # bytes
# What is read of a long answer. All else is checked and dropped: it must not take many times its bytes
# in memory.
_READ = frozenset(("choices", "error", "usage", "completion_tokens"))
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the gateway reads of an answer, or of one event of a stream.

    output_tokens: as the engine counts them, None = it does not say.
    failed: it is an error in OpenAI's shape.
    usage_only: it is a stream's event that has only the usage.
    """

    output_tokens: int | None = None
    failed: bool = False
    usage_only: bool = False


def read_answer(data: bytes) -> Answer:
    """Read an answer or an event; ValueError says what is wrong with it."""
    value = _decoded(_WHOLE if len(data) < _LONG else _SPARSE, data)
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    if value.get("error") is not None:
        if not isinstance(value["error"], dict):
            raise ValueError("its error is not an object")
        return Answer(failed=True)
    choices, usage = value.get("choices"), value.get("usage")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("it has no list of choices")
    if not isinstance(usage, dict | None):
        raise ValueError("its usage is not an object")
    count = None if usage is None else usage.get("completion_tokens")
    if count is not None and not (type(count) is int and 0 <= count <= _MOST_TOKENS):
        raise ValueError("its completion_tokens are not a number of tokens")
    return Answer(count, usage_only=usage is not None and not choices)


def read_strictly(data: bytes) -> Any:
    """Parse JSON; ValueError for what only some parsers accept (NaN) or no computer can hold (1e999)."""
    return _decoded(_WHOLE, data)


def _decoded(decoder: json.JSONDecoder, data: bytes) -> Any:
    try:
        return decoder.decode(data.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg}, at character {error.pos})") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is beyond all numbers")
    return value


def _keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name in _READ} or _NOTHING


_WHOLE = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
_SPARSE = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_keep)
