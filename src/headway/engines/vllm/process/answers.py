"""Engines' answers are not trusted: they are read as strict JSON in the shape of OpenAI's API.

Answers are checked without making objects of what they hold: 16 MiB of empty lists would take 400 MB, and
the interpreter for a second.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder

from headway.engines.vllm.parsers import no_tool_parser
from headway.errors import RequestError, shortened

Shape = Literal["choices", "data", "text"]
_PIECE = 2**16  # bytes that are looked at in one go; another thread may have its turn in between
# Most JSON objects in an answer: this base, and one per so many bytes. Log probabilities have one in 30.
_OBJECTS, _BYTES_PER_OBJECT = 2**16, 24
# What a number beyond a double must have, if it is one: an exponent of three digits, or very many digits.
_LARGE = re.compile(rb"[0-9](?:[eE]\+?[0-9]{3}|[0-9.]{63})")
_LARGE_WIDTH = 64  # bytes of its longest match
_LITERAL = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|-?[0-9][0-9.eE+-]*+')  # of valid JSON: text, or number
_LONGEST_NUMBER = 1000  # bytes
_LONGEST_ERROR = 2000  # bytes that a client gets as they are
# What an engine's error says -> the error that clients get instead: vLLM names its own options, no mend.
REPLACED_ERRORS = {
    b"is not a multimodal model": RequestError(
        "This model reads only text.",
        "Leave out images, audio and video, or name a model that takes them.",
        param="messages",
        code="unsupported_content",
    ),
    b"--tool-call-parser": no_tool_parser(),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer, or of one event of a stream, that the gateway reads.

    output_tokens: as the engine counts them, None = it does not say.
    prompt_tokens: likewise, 0 = it does not say.
    cached_tokens: of the prompt, found in its prefix cache, None = it does not say.
    failed: it is an error in OpenAI's shape.
    usage_only: it is a stream's event that has only the usage.
    """

    output_tokens: int | None = None
    failed: bool = False
    usage_only: bool = False
    prompt_tokens: int = 0
    cached_tokens: int | None = None


_PLAIN = Answer()  # nearly all events of streams


class _Object(Struct, gc=False):
    """A JSON object whose content is ignored."""


_Count = Annotated[int, Meta(ge=0, le=2**31)] | None


class _Details(Struct, gc=False):
    cached_tokens: _Count = None


class _Usage(Struct, gc=False):
    completion_tokens: _Count = None
    prompt_tokens: _Count = None
    prompt_tokens_details: _Details | None = None


class _Shape(Struct, gc=False):
    choices: list[_Object] | None = None
    data: list[_Object] | None = None
    results: list[_Object] | None = None
    usage: _Usage | None = None
    text: str | None = None
    error: _Object | None = None


class _Choice(Struct, gc=False):
    delta: dict[str, Raw] | None = None
    text: Raw = Raw(b"")
    finish_reason: Raw = Raw(b"")


class _Begin(Struct, gc=False):
    choices: list[_Choice] | None = None
    error: Raw | None = None


_BEGIN, _NOTHING = Decoder(_Begin), frozenset((b"", b"null", b'""', b"[]", b"{}"))
_SHAPE, _NO_USAGE = Decoder(_Shape), _Usage()


def read_answer(data: bytes, shape: Shape = "choices") -> Answer:
    """Read an answer or an event; ValueError says what is wrong with it.

    shape: what it must have: choices, data or results of a pooling model, or the text of speech.
    """
    if data.count(b"{") > _OBJECTS + len(data) // _BYTES_PER_OBJECT:
        raise ValueError("it has too many objects")
    try:
        found = _SHAPE.decode(data)
    except DecodeError as error:
        raise ValueError(f"it is not as in OpenAI's API: {error}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    _check_text(data)
    _check_numbers(data)
    if found.error is not None:
        return Answer(failed=True)
    usage = found.usage or _NO_USAGE
    if shape == "data":
        if found.data is None and found.results is None:
            raise ValueError("it has no list of data or results")
        return Answer(1, prompt_tokens=usage.prompt_tokens or 0)
    if shape == "text":
        if found.text is None:
            raise ValueError("it has no text")
        return Answer(usage.completion_tokens, prompt_tokens=usage.prompt_tokens or 0)
    if found.choices is None:
        raise ValueError("it has no list of choices")
    if found.usage is None:
        return _PLAIN
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    return Answer(
        usage.completion_tokens,
        usage_only=not found.choices,
        prompt_tokens=usage.prompt_tokens or 0,
        cached_tokens=cached,
    )


def event_data(event: bytes) -> bytes:
    """Return the data of a server-sent event, empty when it has none; ValueError for a malformed one."""
    if event.startswith(b"data: ") and event.find(b"\n", 6) == len(event) - 2:
        return event[6:-2]
    parts = list[bytes]()
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            parts.append(value.removeprefix(b" "))
        elif name not in (b"", b"event", b"id", b"retry"):
            raise ValueError("one of its lines does not belong to an event")
    return b"\n".join(parts)


def begins_answer(event: bytes) -> bool:
    """Return whether an event of a stream has content, an end, an error or a fault; a role or usage does not count."""
    try:
        data = event_data(event)
        if not data.strip():
            return False
        read_answer(data)
        begin = _BEGIN.decode(data)
    except (ValueError, DecodeError):  # [DONE], too
        return True
    return begin.error is not None or any(map(_has_content, begin.choices or ()))


def _has_content(choice: _Choice) -> bool:
    parts = [*(choice.delta or {}).items(), ("text", choice.text), ("finish_reason", choice.finish_reason)]
    return any(name != "role" and bytes(part) not in _NOTHING for name, part in parts)


def client_error(data: bytes) -> bytes:
    """Return the error that a client gets for an engine's, which `read_answer` has read.

    Long texts are cut.
    """
    for phrase, error in REPLACED_ERRORS.items():
        if phrase in data:
            return json.dumps(error.body()).encode()
    if len(data) <= _LONGEST_ERROR:
        return data
    body = json.loads(data)
    body["error"] = {
        name: shortened(value) if isinstance(value, str) else value for name, value in body["error"].items()
    }
    return json.dumps(body).encode()


def _check_text(data: bytes) -> None:
    """Raise ValueError unless it is UTF-8; the decoder looks only at what it keeps."""
    if data.isascii():
        return
    utf8, view = codecs.getincrementaldecoder("utf-8")(), memoryview(data)
    try:
        for start in range(0, len(data), _PIECE):
            utf8.decode(view[start : start + _PIECE], start + _PIECE >= len(data))
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None


def _check_numbers(data: bytes) -> None:
    """Raise ValueError when a number in valid JSON is beyond a double."""
    for start in range(0, len(data), _PIECE):
        if _LARGE.search(data, start, start + _PIECE + _LARGE_WIDTH):
            break
    else:
        return
    for literal in _LITERAL.finditer(data):
        start, end = literal.span()
        if data[start] != ord('"') and (end - start > _LONGEST_NUMBER or math.isinf(float(literal.group()))):
            raise ValueError(f"{data[start : start + 20].decode()} is beyond the range of numbers")


def read_strictly(data: bytes) -> Any:
    """Parse JSON; ValueError for what only some parsers accept (NaN) or no computer can hold (1e999)."""
    try:
        return _WHOLE.decode(data.decode())
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
        raise ValueError(f"{text[:20]} is beyond the range of numbers")
    return value


_WHOLE = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
