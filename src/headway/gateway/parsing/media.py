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
import wave
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from headway.errors import RequestError
from headway.gateway.parsing.pooling import FIELDS

log = logging.getLogger("headway.gateway")
_HEAD = 2**18  # bytes of a file in which its size is looked for
# Height and width of images that have as many tokens as any: processors shrink larger ones.
_LARGE = ((8192, 8192), (16384, 4096), (4096, 16384))
_URLS = ("image_url", "audio_url", "video_url")  # of vLLM's parts, whatever their type
# Of a URL about whose host all parsers agree: no user, no backslash, no control character before the path.
_HOST = re.compile(r"(https?)://([a-z0-9.-]+)(?::(\d+))?(?:[/?#]|\Z)", re.IGNORECASE)
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
