"""The body of a request as its engine gets it: the client's fields, and metadata for the scheduler inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.config import Engine
from headway.engines.vllm.request_metadata import client_xargs
from headway.errors import RequestError
from headway.types import Request

# As short as JSON can be: it is held until its engine has answered, counted as it came.
_LIMITS = ("max_tokens", "max_completion_tokens")
_SHORT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class EngineBody:
    """The body of a request for the engine, as bytes: objects would take many times their memory.

    content: a JSON object without `vllm_xargs`. xargs: the client's own `vllm_xargs`, a JSON object.
    """

    content: bytes
    xargs: bytes

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> EngineBody:
        """Return the bytes of a body with its `vllm_xargs`, those of Headway's names left out.

        RequestError for numbers beyond all floats (1e400), which JSON can write and the engine cannot read.
        """
        xargs = client_xargs(fields.get("vllm_xargs") or {})
        rest = {name: value for name, value in fields.items() if name != "vllm_xargs"}
        return cls(_json(rest), _json(xargs) if xargs else b"{}")

    @property
    def headers(self) -> dict[str, str]:
        """Headers that it needs beside those of JSON."""
        return {}

    def fields(self) -> dict[str, Any]:
        """Return its fields, to look for those that crash an engine."""
        fields: dict[str, Any] = json.loads(self.content)
        return fields

    def parts(self, metadata: Mapping[str, object], *, ids: bool = False) -> tuple[memoryview | bytes, ...]:
        """Return the whole body in parts, with metadata for the scheduler beside the client's `vllm_xargs`.

        ids: ask for the token ids of the answer; of two fields of a name vLLM reads the second.
        The content is not copied: it may be large, and is held as long as its engine has not answered.
        """
        extra = _merge(self.xargs, json.dumps(metadata).encode()) if metadata else self.xargs
        comma = b"" if self.content == b"{}" else b", "
        name = b'"return_token_ids": true, "vllm_xargs": ' if ids else b'"vllm_xargs": '
        return memoryview(self.content)[:-1], comma, name, extra, b"}"

    def fitted(self, engine: Engine, request: Request) -> EngineBody:
        """Return the body for an engine by URL: its name of the model, and without vLLM's fields if it is none.

        An overflow engine is told the limit of tokens that its price was reserved for.
        """
        fields = json.loads(self.content)
        if engine.remote_model is not None and fields["model"] == engine.name:  # else it names an adapter
            fields["model"] = engine.remote_model
        if engine.kind != "vllm":
            fields.pop("priority", None)
        if engine.overflow and all(fields.get(name) is None for name in _LIMITS):
            fields["max_tokens"] = request.max_tokens
        return EngineBody(_json(fields), self.xargs)

    def joined(self, metadata: Mapping[str, object]) -> bytes:
        """Return `parts` as one."""
        return b"".join(self.parts(metadata))


def _json(fields: Mapping[str, Any]) -> bytes:
    try:
        return _SHORT.encode(fields).encode()
    except ValueError as error:
        raise RequestError(
            "The body has a number that is too large.", "Send finite numbers.", code="invalid_json"
        ) from error


def _merge(first: bytes, second: bytes) -> bytes:
    """Return one JSON object with the members of two."""
    if b"{}" in (first, second):
        return second if first == b"{}" else first
    return first[:-1] + b", " + second[1:]
