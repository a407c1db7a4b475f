"""uvicorn's HTTP parser with limits: of the request line and headers, and of the time that clients take.

httptools buffers a header line of any length. The limit here is enforced while bytes come in, so that no
memory is spent on what will be refused.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import sys
import termios
from functools import partial
from typing import Any, ClassVar, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headway.errors import HeadwayError, RequestError
from headway.gateway.errors import error_response, stopped
from headway.gateway.http.connections import CONNECTION, PROBES, ConnectionLimits, Connections, Limit, Watcher
from headway.gateway.http.empty_queues import Event, Flow, Pipeline
from headway.gateway.http.turns import Turns

_VERSIONS = ("1.0", "1.1")
_ROUTING = ("asgi", "state")  # of a request's scope, besides its headers


def protocol_class(connections: Connections) -> type[HttpToolsProtocol]:
    """Return a protocol class whose connections keep these limits."""
    attributes = {"clients": connections, "limits": connections.limits, "__slots__": ()}
    return type("LimitedHttp", (LimitedHttp,), attributes)


class LimitedHttp(HttpToolsProtocol):
    """Answers 431 to heads that are too large, 408 to requests that take too long, 503 when there is no room.

    clients: all connections, this one among them.
    """

    clients: ClassVar[Connections]
    limits: ClassVar[ConnectionLimits]
    # In slots: Python keeps up to 30 attributes of an object without a dictionary, and uvicorn has 29.
    __slots__ = (
        "_due",
        "_error",
        "_head",
        "_in_body",
        "_last",
        "_open",
        "_running",
        "_size",
        "_unsent",
        "_upgrades",
        "_watcher",
        "_write_due",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.pipeline = Pipeline()  # type: ignore[assignment]
        self._head = 0  # bytes read since an unfinished head began
        self._size = 0  # bytes of its complete lines
        self._open = False  # a head has begun and is not complete
        self._in_body = False  # a head is complete and its body is not
        self._upgrades = False  # a head is complete that asks for another protocol
        self._due = math.inf  # when the client has to be through with its head or body
        self._unsent = 0  # bytes that waited for a client at the last look, 0 = it was not waited for
        self._write_due = math.inf  # when the client has to have taken some of them
        self._error: RequestError | None = None
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._watcher: Watcher | None = None  # notified when the client leaves before that has ended
        self._last: bytes | None = None  # the answer to what cannot be parsed; nothing is read after it

    # ---- bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        if self.server != self.clients.address:
            self.clients.address = self.server
        self.server = self.clients.address  # one for all
        self._due = self.loop.time() + self.limits.head_s
        self.clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._error is not None or self._last is not None:
            return
        if self._open and self._head > self.limits.max_head:
            self._error = _too_large(self.limits.max_head)
            self.send_400_response("")
            return
        if self._due == math.inf and self._idle:  # an empty line before a request begins no head
            self._due = self.loop.time() + self.limits.head_s
        if self._open:  # a chunk in which a head begins is not counted: other requests may precede it
            self._head += len(data)
        self._parse(data)

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser; a request's wish for another protocol is ignored (RFC 9110, 7.8).

        The parser takes what follows the head of such a request for bytes of that protocol, and would read
        the body as another request.
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    data = memoryview(data)[upgrade.args[0] :]
                    self._begin_without_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("")

    def _begin_without_upgrade(self) -> None:
        """Parse the head that has come once more, without its wish for another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":  # asks for another protocol by itself
            raise httptools.HttpParserError("a tunnel")
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        options = [
            token.strip()
            for name, value in self.headers
            if name == b"connection"
            for token in value.split(b",")
            if token.strip().lower() != b"upgrade"
        ]
        lines = [b"%s %s HTTP/%s" % (method, self.url, version), *(b"%s: %s" % pair for pair in kept)]
        if options:
            lines.append(b"connection: " + b", ".join(options))
        self._upgrades, self.parser = False, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.clients.discard(self)
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True  # uvicorn notifies the latest request alone
            running.message_event.set()
        super().connection_lost(exc)
        if self._watcher is not None and running is not None and not running.response_complete:
            self._watcher.client_left()
        self._watcher = None

    def watch(self, watcher: Watcher) -> None:
        """Notify it when the client leaves before it has the answer to the request that is being answered.

        An ASGI application learns it from `receive`; to wait there takes a task for every stream. What
        routing alone reads is not kept for as long as the answer takes.
        """
        self._watcher, running = watcher, self._running
        if running is not None:
            scope = cast(dict[str, Any], running.scope)
            scope["headers"].clear()  # the parser has this list, too
            for name in _ROUTING:
                scope.pop(name, None)
        if running is not None and running.disconnected:
            watcher.client_left()
        else:
            self.flow.resume_reading()  # or its end would not be read

    def join_head(self) -> None:
        """Let the answer that begins now write its head with the beginning of its body."""
        assert self._running is not None, "a request is being answered"
        self._running.transport = cast(asyncio.Transport, HeadWithBody(self._running))

    def resume_writing(self) -> None:
        self._unsent = 0
        super().resume_writing()

    # ---- the parser's callbacks

    def on_message_begin(self) -> None:
        self._open, self._head, self._size = True, 0, 0
        if self._due == math.inf:
            self._due = self.loop.time() + self.limits.head_s
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._upgrades = self.parser.should_upgrade()
        if self._upgrades:
            return
        version, hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in _VERSIONS or hosts > 1 or (hosts == 0 and version == "1.1"):
            self._error = _malformed_head(version, hosts)
            raise ValueError("malformed head")  # ends the parser, which calls send_400_response
        self._open, self._in_body = False, True
        self._due = self.loop.time() + self.limits.body_s
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._in_body, self._due = False, math.inf
        if not self.cycle.response_complete:
            self.clients.busy(self)
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self.limits.max_head:
            self._error = _too_large(self.limits.max_head)
            raise ValueError("head too large")  # ends the parser, which calls send_400_response

    # ---- requests and their answers

    @property
    def _idle(self) -> bool:
        return self._running is None or self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running, self._watcher = cycle, None
        cycle.message_event = Event(is_set=cycle.message_event.is_set())
        cast(dict[str, object], cycle.scope)[CONNECTION] = self
        if cycle.scope["http_version"] == "1.0":
            cycle.transport = cast(asyncio.Transport, WithoutChunks(cycle))
        if not self.clients.admit(self):
            app = _probes_only(app)
        turns = self.clients.turns_of(self, cycle.scope["path"] in PROBES)
        super()._start_asgi_task(cycle, partial(_until_stopped, cycle, app, turns))

    def on_response_complete(self) -> None:
        self._watcher = None
        super().on_response_complete()
        if self._idle:
            self.clients.waits(self)
        if self._last is not None:
            self._close_when_answered()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed or does not come, in OpenAI's shape, and close the connection.

        Requests that came whole before it on the same connection get their answers first.
        """
        error = self._error or RequestError("This is not an HTTP request.", "Send HTTP/1.1.")
        body = json.dumps(error.body()).encode()
        lines = (b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close")
        self._last = STATUS_LINE[error.status] + b"\r\n".join(lines) + b"\r\n\r\n" + body
        running = self._running
        if running is not None and running is self.cycle and self._in_body:  # the rest of its body is missing
            if running.response_started:  # it has its answer
                self.transport.close()
            self._close_with_last()
            return
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        self._close_when_answered()

    def _close_when_answered(self) -> None:
        if not self.pipeline and self._idle:
            self._close_with_last()

    def _close_with_last(self) -> None:
        if self._last is not None and not self.transport.is_closing():
            self.transport.write(self._last)
            self.transport.close()

    # ---- limits of time and number

    def exceeded(self, now: float) -> Limit | None:
        """Return the limit that this connection exceeds at an instant of the event loop's clock.

        One that is closing and whose client has acknowledged everything also leaves uvicorn's connections, for which a
        gateway that stops waits: TLS keeps it until its client closes, too.
        """
        if self.transport.is_closing() and not _in_flight(self.transport):
            self.connections.discard(self)
        if self._unread(now):
            return "write"
        if now < self._due:
            return None
        if self.flow.read_paused:  # the client waits for the gateway
            self._due = now + self.limits.body_s
            return None
        return "body" if self._in_body else "head"

    def _unread(self, now: float) -> bool:
        """Return whether the client has read nothing for too long of a buffer that does not grow."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or not (self.flow.write_paused or self._idle or self.transport.is_closing()):
            self._unsent = 0
        elif not self._unsent or unsent < self._unsent:
            self._unsent, self._write_due = unsent, now + self.limits.write_s
        return self._unsent > 0 and now >= self._write_due

    def end(self, limit: Limit) -> None:
        """Tell the client which limit it exceeded, where that is possible, and close."""
        self._due = math.inf
        if limit in ("write", "room"):
            self.transport.abort()
        elif limit == "head" and not self._open:  # nothing of a request has come
            self.transport.close()
        else:
            self._error = _too_slow(limit, self.limits)
            self.send_400_response("")


class HeadWithBody:
    """Stands in for the transport of an answer until it has its head and the first bytes of its body.

    Both go out in one system call.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Keep the head, or write it with what comes after it."""
        if self._head is None:
            self._head = data
        else:
            self._cycle.transport = self._transport
            self._transport.writelines([self._head, data])

    def close(self) -> None:
        """Close the transport once all has gone out, a head without a body, too."""
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the transport closes, or has closed."""
        return self._transport.is_closing()


class WithoutChunks:
    """The transport of an answer to HTTP/1.0, which knows no chunks: a stream ends with its connection."""

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport, self._head = cycle, cycle.transport, True

    def write(self, data: bytes) -> None:
        """Write the head, or a part of the body, without what uvicorn has added for chunks."""
        if self._cycle.chunked_encoding and self._head:
            data = data.replace(b"transfer-encoding: chunked\r\n", b"")
        elif self._cycle.chunked_encoding and data:
            size, _, rest = data.partition(b"\r\n")
            data = rest[: int(size, 16)]
        self._head = False
        self._transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        """Write a head and the part of the body after it."""
        for part in parts:
            self.write(part)

    def close(self) -> None:
        """Close the connection once all has gone out."""
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the transport closes, or has closed."""
        return self._transport.is_closing()


def _in_flight(transport: asyncio.Transport) -> int:
    """Return the number of bytes in the kernel that the client has not acknowledged; 0 once the socket is closed."""
    sock = transport.get_extra_info("socket")
    try:
        unsent = b"" if sock is None else fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # it is closed, and `connection_lost` comes next
        return 0
    return int.from_bytes(unsent, sys.byteorder)


def _probes_only(app: ASGIApp) -> ASGIApp:
    """Return what answers questions about the gateway's health, and refuses all other requests."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
        else:
            await error_response(_no_room())(scope, receive, send)

    return answer


async def _until_stopped(
    cycle: RequestResponseCycle, app: ASGIApp, turns: Turns | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run the application in its turn; the end of the gateway, which alone cancels it, is not an error."""
    try:
        if turns is not None:
            await turns.take()
        await app(scope, receive, send)
    except asyncio.CancelledError:
        if not cycle.response_started:
            await error_response(stopped())(scope, receive, send)
        elif not cycle.response_complete:
            cycle.disconnected = True
            cycle.transport.close()
    finally:
        scope.pop(CONNECTION, None)  # or the two would wait for the garbage collector


def _too_large(max_head: int) -> RequestError:
    return RequestError(
        f"The request line and headers are larger than {max_head} bytes.",
        "Send less, or raise server.max_header_kib.",
        status=431,
        code="headers_too_large",
    )


def _malformed_head(version: str, hosts: int) -> RequestError:
    if version not in _VERSIONS:
        return RequestError(f"HTTP/{version} is not served here.", "Send HTTP/1.1.", code="unsupported_version")
    count = f"{hosts} Host headers" if hosts else "no Host header"
    return RequestError(f"The request has {count}.", "Send one.", code="invalid_host")


def _too_slow(limit: Limit, limits: ConnectionLimits) -> RequestError:
    what, seconds = ("headers", limits.head_s) if limit == "head" else ("body", limits.body_s)
    return RequestError(
        f"The request's {what} did not come within {seconds:g} s.",
        f"Send faster, or raise server.{limit}_timeout_s.",
        status=408,
        code=f"{limit}_timeout",
    )


def _no_room() -> HeadwayError:
    return RequestError(
        "All connections are in use (server.max_connections).",
        "Try again in 1 s.",
        status=503,
        kind="server_error",
        code="too_many_connections",
        headers={"retry-after": "1", "connection": "close"},
    )
