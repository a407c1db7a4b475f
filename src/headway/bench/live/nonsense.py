"""What a FAKE engine sends when it is asked for nonsense (`fake_end`): no client may get it as an answer."""

from __future__ import annotations

from starlette.types import Send

_JSON, _MIB = b"application/json", 2**20
_CHOICE = b'{"choices":[{"index":0,"logprobs":%s}]}'
# By name: status, content type, a part of the body and how often it comes.
NONSENSE: dict[str, tuple[int, bytes, bytes, int]] = {
    "page": (200, b"text/html", b"<h1>It works!</h1>", 1),
    "NaN": (200, _JSON, _CHOICE % b"NaN", 1),
    "1e999": (200, _JSON, _CHOICE % b"1e999", 1),
    "list": (200, _JSON, b"[]", 1),
    "redirect": (307, _JSON, b"{}", 1),
    "accent": (200, "application/jsön".encode("latin-1"), _CHOICE % b"null", 1),
    "endless event": (200, b"text/event-stream", b"data: " + b"x" * 2**16, 60 * _MIB // 2**16),
    "300 MB": (200, _JSON, b" " * 2**16, 300_000_000 // 2**16),
}


async def send_nonsense(name: str, send: Send) -> None:
    """Send the response of this name; what its reader has no patience for is dropped by the server."""
    status, kind, part, times = NONSENSE[name]
    headers = [(b"content-type", kind), (b"location", b"/v1/models")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for _ in range(times):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
