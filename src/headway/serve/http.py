"""uvicorn's HTTP parser with a limit on the request line and headers.

httptools buffers a header line of any length. The limit here is enforced while bytes come in, so that no
memory is spent on what will be refused.
"""

from __future__ import annotations

import json
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.errors import RequestError


def limited(max_head: int) -> type[HttpToolsProtocol]:
    """Return a protocol class that answers 431 when request line and headers exceed `max_head` bytes."""
    return type("LimitedHttp", (LimitedHttp,), {"max_head": max_head})


class LimitedHttp(HttpToolsProtocol):
    """Answers 431 when request line and headers exceed `max_head` bytes."""

    max_head: ClassVar[int]
    _head = 0  # bytes read since an unfinished head began
    _size = 0  # bytes of its complete lines
    _open = False  # a head has begun and is not complete
    _error: RequestError | None = None

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        if self._open and self._head > self.max_head:
            self._error = _too_large(self.max_head)
            self.send_400_response("")
            return
        began = self._open
        super().data_received(data)
        if began and self._open:  # the chunk in which it began may hold the end of a body before it
            self._head += len(data)

    def on_message_begin(self) -> None:
        self._open, self._head, self._size = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._open = False
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self.max_head:
            self._error = _too_large(self.max_head)
            raise ValueError("head too large")  # ends the parser, which calls send_400_response

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, in OpenAI's shape, and close the connection."""
        error = self._error or RequestError("This is not an HTTP request.", "Speak HTTP/1.1.")
        body = json.dumps(error.body()).encode()
        reason = b"431 Request Header Fields Too Large" if self._error else b"400 Bad Request"
        lines = (
            b"HTTP/1.1 " + reason,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()


def _too_large(max_head: int) -> RequestError:
    return RequestError(
        f"The request line and headers are larger than {max_head} bytes.",
        "Send less, or raise server.max_header_kib.",
        status=431,
        code="headers_too_large",
    )
