"""uvicorn's HTTP parser with a limit on the request line and headers.

httptools buffers a header line of any length. The limit here is enforced while bytes come in, so that no
memory is spent on what will be refused.
"""

from __future__ import annotations

import json
from typing import ClassVar

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

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
    _running: RequestResponseCycle | None = None  # the request that is being answered
    _last: bytes | None = None  # the answer to what cannot be parsed; nothing is read after it

    def data_received(self, data: bytes) -> None:
        if self._error is not None or self._last is not None:
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
        """Answer what cannot be parsed, in OpenAI's shape, and close the connection.

        Requests that came whole before it on the same connection get their answers first.
        """
        error = self._error or RequestError("This is not an HTTP request.", "Speak HTTP/1.1.")
        body = json.dumps(error.body()).encode()
        reason = b"431 Request Header Fields Too Large" if self._error else b"400 Bad Request"
        lines = (
            b"HTTP/1.1 " + reason,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self._last = b"\r\n".join(lines) + b"\r\n\r\n" + body
        running = self._running
        if running is not None and running is self.cycle and running.more_body:
            self._close_with_last()  # its own body cannot be parsed
            return
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        self._close_when_answered()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True  # uvicorn tells the latest request alone
            running.message_event.set()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._last is not None:
            self._close_when_answered()

    def _close_when_answered(self) -> None:
        if not self.pipeline and (self._running is None or self._running.response_complete):
            self._close_with_last()

    def _close_with_last(self) -> None:
        if self._last is not None and not self.transport.is_closing():
            self.transport.write(self._last)
            self.transport.close()


def _too_large(max_head: int) -> RequestError:
    return RequestError(
        f"The request line and headers are larger than {max_head} bytes.",
        "Send less, or raise server.max_header_kib.",
        status=431,
        code="headers_too_large",
    )
