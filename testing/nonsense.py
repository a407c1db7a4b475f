"""Invalid responses that a FAKE engine sends on request (`fake_end`); no client may get one as an answer."""

from __future__ import annotations

from itertools import chain, repeat

from starlette.types import Send

_JSON, _MIB = b"application/json", 2**20
_CHOICE = b'{"choices":[{"index":0,"logprobs":%s}]}'
# By name: status, content type, start of the body, the part that follows, and how often it is repeated.
NONSENSE: dict[str, tuple[int, bytes, bytes, bytes, int]] = {
    "page": (200, b"text/html", b"<h1>It works!</h1>", b"", 0),
    "NaN": (200, _JSON, _CHOICE % b"NaN", b"", 0),
    "1e999": (200, _JSON, _CHOICE % b"1e999", b"", 0),
    "list": (200, _JSON, b"[]", b"", 0),
    "redirect": (307, _JSON, b"{}", b"", 0),
    "accent": (200, "application/jsön".encode("latin-1"), _CHOICE % b"null", b"", 0),
    "million lists": (200, _JSON, b'{"choices":[],"x":[', b"[]," * 2**16, 12 * _MIB // (3 * 2**16)),
    "million choices": (200, _JSON, b'{"choices":[', b"{}," * 2**16, 12 * _MIB // (3 * 2**16)),
    "endless event": (200, b"text/event-stream", b"", b"data: " + b"x" * 2**16, 60 * _MIB // 2**16),
    "300 MB": (200, _JSON, b"", b" " * 2**16, 300_000_000 // 2**16),
}


async def send_nonsense(name: str, send: Send) -> None:
    """Send the response of this name; the server drops the rest when the client disconnects."""
    status, kind, head, part, times = NONSENSE[name]
    headers = [(b"content-type", kind), (b"location", b"/v1/models")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for piece in chain([head], repeat(part, times)):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
