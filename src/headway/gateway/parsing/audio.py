"""Forms with speech, for models that write it down: `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, Literal

from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from headway.config import Engine
from headway.engines.vllm.request_metadata import client_xargs
from headway.errors import RequestError
from headway.gateway.parsing.engine_body import EngineBody
from headway.types import Request

AudioKind = Literal["transcriptions", "translations"]
PATHS: dict[AudioKind, str] = {"transcriptions": "/v1/audio/transcriptions", "translations": "/v1/audio/translations"}
_MOST_FIELDS = 64
_READ = ("service_tier", "stream", "seed", "max_completion_tokens")  # fields that the gateway looks at, too
_FORMATS = ("json", "verbose_json")
_OWN = ("model", "service_tier", "vllm_xargs", "stream_include_usage")  # that are not passed on as they came


@dataclass(frozen=True, slots=True)
class AudioForm:
    """A form. fields: names and values of its texts; file: its content, with its name."""

    fields: Sequence[tuple[str, str]]
    file: bytes
    name: str

    @classmethod
    def read(cls, data: bytes, content_type: str) -> AudioForm:
        """Parse a body; RequestError for what is no form with one file."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not (boundary := options.get(b"boundary")):
            raise _not_a_form(f"its content type is {content_type[:64]!r}")
        fields, files = list[tuple[str, str]](), list[tuple[str, bytes]]()

        def on_field(field: Any) -> None:
            if len(fields) >= _MOST_FIELDS:
                raise _not_a_form(f"it has more than {_MOST_FIELDS} fields")
            fields.append((_text(field.field_name), _text(field.value)))

        def on_file(file: Any) -> None:
            if file.field_name != b"file" or files:
                raise _not_a_form("it has another file beside `file`")
            files.append((_text(file.file_name), _content(file.file_object)))

        parser = FormParser(
            kind.decode(), on_field, on_file, boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": len(data) + 1}
        )
        try:
            parser.write(data)
            parser.finalize()
        except FormParserError as error:
            raise _not_a_form(str(error)[:200]) from error
        if not files:
            raise _not_a_form("it has no file")
        ((name, file),) = files
        return cls(fields, file, name)

    def chat_fields(self) -> dict[str, Any]:
        """Return its fields as those of a completion, by which the request is planned; RequestError for bad ones."""
        sent = dict(self.fields)
        if sent.get("response_format", "json") not in _FORMATS:
            raise RequestError(
                f"The response_format is {sent['response_format'][:40]!r}.",
                f"Use one of {', '.join(_FORMATS)}.",
                param="response_format",
                code="unsupported_value",
            )
        body: dict[str, Any] = {"model": sent.get("model"), "prompt": sent.get("prompt") or " ", "stream": False}
        body |= {name: sent[name] for name in _READ if name in sent}
        if "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        return body

    def for_engine(self, model: str) -> FormBody:
        """Return the form that the engine gets, with its own name of the model."""
        sent = dict(self.fields)
        rest = [(name, value) for name, value in self.fields if name not in _OWN]
        if sent.get("stream", "").lower() in ("true", "1"):
            rest.append(("stream_include_usage", "true"))  # tokens are counted by it
        boundary = secrets.token_hex(16).encode()
        texts = b"".join(_part(boundary, name, value.encode()) for name, value in [("model", model), *rest])
        file = _head(boundary, f'file"; filename="{_quoted(self.name)}') + self.file
        return FormBody(texts + file, json.dumps(client_xargs(_xargs(sent.get("vllm_xargs")))).encode())


@dataclass(frozen=True, slots=True)
class FormBody(EngineBody):
    """A form for the engine, as bytes without its last field, `vllm_xargs`, and its end. `model` is its first field."""

    @property
    def _boundary(self) -> bytes:
        return self.content[2 : self.content.index(b"\r\n")]

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": f"multipart/form-data; boundary={self._boundary.decode()}"}

    def fields(self) -> dict[str, Any]:
        return {}

    def parts(self, metadata: Mapping[str, object], *, ids: bool = False) -> tuple[memoryview | bytes, ...]:
        boundary, xargs = self._boundary, json.dumps(json.loads(self.xargs) | dict(metadata)).encode()
        end = b"\r\n" + _head(boundary, "vllm_xargs") + xargs + b"\r\n--" + boundary + b"--\r\n"
        return memoryview(self.content), end

    def fitted(self, engine: Engine, request: Request) -> EngineBody:
        if engine.remote_model is None or request.adapter is not None:
            return self
        start = self.content.index(b"\r\n\r\n") + 4
        end = self.content.index(b"\r\n", start)
        return replace(self, content=self.content[:start] + engine.remote_model.encode() + self.content[end:])


def _head(boundary: bytes, name: str) -> bytes:
    return b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (boundary, name.encode())


def _part(boundary: bytes, name: str, value: bytes) -> bytes:
    return _head(boundary, _quoted(name)) + value + b"\r\n"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _text(value: bytes | None) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError as error:
        raise _not_a_form("a field is not UTF-8") from error


def _content(file: Any) -> bytes:
    content: bytes = file.getvalue() if isinstance(file, BytesIO) else b""
    return content


def _xargs(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RequestError("vllm_xargs is not a JSON object.", "Send one, or leave it out.", param="vllm_xargs")
    return value


def _not_a_form(why: str) -> RequestError:
    return RequestError(
        f"The body is not a form with speech: {why}.",
        "Send multipart/form-data with the fields file and model.",
        code="invalid_form",
    )
