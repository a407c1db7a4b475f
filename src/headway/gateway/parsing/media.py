"""Tokens of images and audio in a prompt, before an engine has read them.

Images are counted by the model's own processor in transformers, as vLLM's backend for transformers does. Of one whose
size is not known here (it is behind a URL), and of audio, there is an upper bound.

Engines fetch what is behind a URL, from inside the operator's network: `refuse_urls`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import wave
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from headway.gateway.parsing.pooling import FIELDS
from headway.types import Request

log = logging.getLogger("headway.gateway")
_HEAD = 2**18  # bytes of a file in which its size is looked for
# Height and width of images that have as many tokens as any: processors shrink larger ones.
_LARGE = ((8192, 8192), (16384, 4096), (4096, 16384))
_URLS = ("image_url", "audio_url", "video_url")  # of vLLM's parts, whatever their type
# Of a URL about whose host all parsers agree: no user, no backslash, no control character before the path.
_HOST = re.compile(r"(https?)://([a-z0-9.-]+)(?::(\d+))?(?:[/?#]|\Z)", re.IGNORECASE | re.ASCII)
_AUDIO_RATE = 50  # tokens per second at most: positions of Whisper's encoder, which audio models pool further


@dataclass(frozen=True, slots=True)
class MediaCounter:
    """Counts the images of one model's prompts. most: tokens of an image at most."""

    _processor: Any
    most: int

    @classmethod
    def of(cls, path: str) -> MediaCounter | None:
        """Return that of a model directory or hub id; None where it reads no images, or they cannot be counted."""
        try:
            from transformers.utils import cached_file

            with open(str(cached_file(path, "config.json"))) as file:
                if "vision_config" not in json.load(file):
                    return None
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(path)
            return cls(processor, max(_tokens(processor, size) for size in _LARGE))
        except Exception as error:  # a model's processor may raise anything
            log.warning("images for %s are not counted before its engine has: %s", path, str(error)[:300])
            return None

    def image(self, url: str) -> int | None:
        """Return the tokens of an image, None where its size is not known here, or none of the processor's."""
        size = _size(url)
        try:
            return None if size is None else _tokens(self._processor, size)
        except Exception as error:  # as for 1 x 300 pixels; the engine's own error reaches the client
            log.debug("an image of %s pixels is not counted: %s", size, error)
            return None


def media_tokens(counter: MediaCounter | None, contents: Iterable[Any]) -> tuple[int, int]:
    """Return the tokens of all images and audio in the contents of messages: known ones, and a bound of the others.

    What nothing is known of counts as 0, until the engine tells.
    """
    known = unknown = 0
    for part in _parts(contents):
        if part.get("type") == "image_url" and counter is not None:
            tokens = counter.image(_url(part.get("image_url")))
            known, unknown = (known, unknown + counter.most) if tokens is None else (known + tokens, unknown)
        elif part.get("type") == "input_audio":
            unknown += _audio(part.get("input_audio"))
    return known, unknown


def refuse_urls(raw: Mapping[str, Any], domains: Collection[str]) -> None:
    """Raise RequestError for a body with a URL of an image, audio or video that an engine may not fetch.

    domains: hosts from which it may, as in `server.media_domains`; data: URLs are not fetched.
    """
    hosts = {domain.lower() for domain in domains}
    rest: list[Any] = [raw.get(name) for name in FIELDS]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            for url in filter(None, (_url(one.get(name) or "") for name in _URLS)):
                if not (url.startswith("data:") or _is_of(hosts, url)):
                    raise RequestError(
                        f"The image, audio or video at {url[:100]!r} is not fetched.",
                        "Send it in a data: URL, or have the operator add its host (and port, unless it is 80 or 443) "
                        "to server.media_domains.",
                        code="media_url_refused",
                    )
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        rest += [value for value in inner if isinstance(value, dict | list)]


def _is_of(hosts: Collection[str], url: str) -> bool:
    """Tell whether a URL's host is one of these, its port also unless it is the scheme's."""
    if (found := _HOST.match(url)) is None:
        return False
    scheme, host, given = found.groups()
    default = "443" if scheme.lower() == "https" else "80"
    port = given or default
    return f"{host.lower()}:{port}" in hosts or (port == default and host.lower() in hosts)


def _parts(contents: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
    return (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))


def _tokens(processor: Any, size: tuple[int, int]) -> int:
    return int(processor._get_num_multimodal_tokens(image_sizes=[size])["num_image_tokens"][0])


def _url(value: Any) -> str:
    return str(value.get("url") or "") if isinstance(value, dict) else str(value)


def _decoded(text: str, most: int) -> bytes:
    """Return the beginning of a base64 text, b"" for one that is none."""
    try:
        return b64decode(text[: most // 3 * 4])
    except ValueError:
        return b""


def _size(url: str) -> tuple[int, int] | None:
    """Return height and width of an image in a data URL."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return None
    from PIL import Image

    try:
        with Image.open(BytesIO(_decoded(data, _HEAD))) as image:  # reads the head alone
            width, height = image.size
            return height, width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _audio(value: Any) -> int:
    """Return a bound of the tokens of a WAV file, by its head; 0 for other formats."""
    data = _decoded(str(value.get("data", "")), _HEAD) if isinstance(value, dict) else b""
    try:
        with wave.open(BytesIO(data)) as file:
            seconds: float = file.getnframes() / file.getframerate()
            return math.ceil(seconds * _AUDIO_RATE)
    except (wave.Error, EOFError, ZeroDivisionError):
        return 0


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
        """Parse a body; RequestError if it is not a form with one file."""
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
