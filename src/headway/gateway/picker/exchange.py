"""One stream of Envoy's external processing: a client's request, and the response of its engine.

Envoy sends the request and waits. The picker's reply is the request that Envoy sends to the engine, and the engine's
response passes through the picker, too. So an exchange is a client's connection for the gateway's ASGI app, and the
connection to the engine (`Via`) for `RequestPath`. Between the two, from keys and limits to the queue, requests take
the same path as over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

import grpc.aio
from starlette.types import ASGIApp, Message, Scope

from headway.config import Server
from headway.engines.vllm.process.connection import HttpResponse, Part, engine_error
from headway.engines.vllm.process.models import ModelUnavailable
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError, RequestError
from headway.gateway.errors import error_response, stopped
from headway.gateway.http.connections import CONNECTION, Watcher
from headway.gateway.in_flight import VIA, NotNamed
from headway.gateway.picker.messages import (
    FULL_DUPLEX,
    ProcessingResponse,
    changed_headers,
    headers_of,
    mutation,
    streamed,
)
from headway.types import Request

DESTINATION, NAMESPACE = "x-gateway-destination-endpoint", "envoy.lb"
SUBSET, SUBSET_NAMESPACE = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
# The client's headers that reach the engine. Others could control it: vLLM reads X-data-parallel-rank and X-Session-ID.
_PASSED = frozenset({"content-type", "accept", "host", "x-request-id", "traceparent", "tracestate"})
_PASSED_PREFIXES = (":", "x-forwarded-", "x-envoy-")  # the last are Envoy's own, which no picker may change
_REMOVED = frozenset({"authorization", "content-length", "x-api-key"})  # even if the picker does not see them
_PART = 62_000  # bytes of a body in one message; some proxies accept at most 64 KiB
_REST_S = 1.0  # to wait for the end of a response after its last event


@dataclass(frozen=True, slots=True)
class Pool:
    """The engines that a proxy may use.

    engines: of the gateway, by id. addresses: IP address and port of each that has one, by id.
    restricts: tells whether the current planner keeps to `Request.engines`.
    """

    engines: Mapping[str, EngineView]
    addresses: Mapping[str, str]
    restricts: Callable[[], bool]

    def restricted(self, request: Request, subset: frozenset[str] | None) -> Request:
        """Return a request as `Via.restricted` does. subset: addresses that the proxy allows, None = all.

        A separate controller's planner is not in this process. It does not restrict once any engine swaps models, so
        this is checked here.
        """
        model = [one for one in self.engines.values() if request.model in one.models.names]
        own = [one for one in model if not one.config.overflow]
        allowed = [one for one in own if self._allowed(one, subset)]
        if not any(one.serves for one in allowed):
            problem = f"No endpoint is ready for the model {request.model}."
            raise ModelUnavailable(problem, "Try again soon; /ready says what the engines do.", code="no_endpoint")
        if len(allowed) == len(model):
            return replace(request, engines=())
        restricts = self.restricts() and not any(one.models.swaps for one in self.engines.values())
        if not restricts and any(one.serves or one.id in self.addresses for one in own if one not in allowed):
            problem = "Only a part of the model's engines can serve this proxy, and this recipe cannot keep to it."
            raise ModelUnavailable(
                problem, "Use recipe headway, and engines with one model.", code="subset_unsupported"
            )
        return replace(request, engines=tuple(one.id for one in allowed))

    def _allowed(self, engine: EngineView, subset: frozenset[str] | None) -> bool:
        address = self.addresses.get(engine.id)
        if subset is None:
            return address is not None or not engine.serves  # it may have one by the time it serves
        return address in subset


class _Response:
    """The engine's response, as the proxy passes it on: both `HttpResponse` and its `Content`."""

    content_length = None

    def __init__(self, exchange: Exchange, message: Any, deadline: float | None) -> None:
        self.headers = {name: value.decode("latin-1") for name, value in headers_of(message)}
        self.status = int(self.headers.pop(":status", "0"))
        self._exchange, self._deadline = exchange, deadline
        self._ended, self._rest = bool(message.end_of_stream), b""
        self.trailers = False  # they have arrived

    @property
    def content(self) -> _Response:
        return self

    def at_eof(self) -> bool:
        return self._ended and not self._rest

    async def read(self, n: int = -1) -> bytes:
        """Return the next bytes, at most `n`, empty at the end; TimeoutError when the request takes too long."""
        while not self._rest and not self._ended:
            async with asyncio.timeout_at(self._deadline):
                kind, message = await self._exchange.next()
            self.trailers = kind == "response_trailers"
            self._ended = self.trailers or message.end_of_stream
            self._rest = b"" if self.trailers else message.body
        part, self._rest = (self._rest, b"") if n < 0 else (self._rest[:n], self._rest[n:])
        return part


class Exchange:
    """A stream of Envoy's messages; `serve` handles it. It is the request's `Via`, and its connection for the app.

    context: of the gRPC call.
    """

    def __init__(self, context: Any, pool: Pool, limits: Server) -> None:
        self._context, self._pool, self._limits = context, pool, limits
        self._read: asyncio.Task[Any] | None = None  # one at a time; it goes on after a timeout
        self._task: asyncio.Task[None] | None = None  # of the app
        self._watcher: Watcher | None = None
        self._over = False  # the answer has been sent, or the client has left
        self._subset: frozenset[str] | None = None
        self._client_headers: frozenset[str] = frozenset()  # their names
        self._body_until = 0.0  # event loop's time by which the whole body must have arrived
        self._request_ended = self._request_given = self._request_trailers = False  # given = passed to the app
        self._response: _Response | None = None
        self._start: Message = {}
        self._immediate = bytearray()
        self._begun = False  # the head of the response has been sent

    # ---- for the call

    async def serve(self, app: ASGIApp, tasks: set[asyncio.Task[None]]) -> None:
        """Serve the request with the gateway's app; if the client leaves, the request ends.

        tasks: those in progress; the app's is added while it runs. The gateway cancels them when it stops.
        """
        try:
            async with asyncio.timeout(self._limits.head_timeout_s):
                first = await self._context.read()
        except TimeoutError:
            first = None
        if first is None or first is grpc.aio.EOF or first.WhichOneof("request") != "request_headers":
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, "A stream begins with request_headers.")
        modes = first.protocol_config
        both = (modes.request_body_mode, modes.response_body_mode)
        if first.HasField("protocol_config") and both != (FULL_DUPLEX, FULL_DUPLEX):
            problem = "Envoy's filter ext_proc does not stream bodies both ways."
            hint = "Set request_body_mode and response_body_mode to FULL_DUPLEX_STREAMED (docs/picker.md)."
            await self.refuse(EngineError(problem, hint, status=500, code="processing_mode"))
            return
        scope = self._scope(first.request_headers)
        if not scope["path"].startswith("/v1/"):
            await self.refuse(RequestError("Proxies are served /v1 only.", "Use Headway's port.", status=404))
            return
        self._subset = _subset_of(first.metadata_context)
        self._client_headers = frozenset(name for name, _ in headers_of(first.request_headers))
        self._body_until = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        self._request_ended = first.request_headers.end_of_stream
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))
        await self._finish(self._task, tasks)

    async def _finish(self, task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
        """Wait for the app's task; if this task is cancelled because the client or its proxy has left, end it, too."""
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if (this := asyncio.current_task()) is not None and this.cancelling():
                self._leave()
                await asyncio.gather(task, return_exceptions=True)
                raise
            if not (self._over or self._begun):  # the gateway has cancelled the app's task
                await self.refuse(stopped())
        finally:
            if self._read is not None:
                self._read.cancel()

    async def _lose(self) -> None:
        """End the work, and let the calling task see its cancellation before an error of the connection."""
        self._leave()
        await asyncio.sleep(0)

    def _leave(self) -> None:
        """End the work on the request because its client has left, unless it is already answered."""
        if self._over or self._task is None:
            return
        self._over = True
        if self._watcher is not None:
            self._watcher.client_left()
        else:
            self._task.cancel()

    async def refuse(self, error: HeadwayError) -> None:
        """End the exchange with an error in OpenAI's shape."""
        answer = error_response(error)
        self._start = {"status": answer.status_code, "headers": answer.raw_headers}
        self._immediate += answer.body
        await self._answer_now()

    async def next(self) -> tuple[str, Any]:
        """Return the kind of the next message, and the message; ConnectionResetError at the end."""
        if self._read is None:
            self._read = asyncio.create_task(self._context.read())
        try:
            message = await asyncio.shield(self._read)
        except asyncio.CancelledError:
            if not self._read.cancelled() or (self._task is not None and self._task.cancelling()):
                raise
            message = grpc.aio.EOF  # the call was cancelled, not this task
        except grpc.aio.BaseError:  # the call has ended
            message = grpc.aio.EOF
        self._read = None
        if message is grpc.aio.EOF:
            await self._lose()
            raise ConnectionResetError("Envoy has ended the call")
        kind = message.WhichOneof("request")
        return kind, getattr(message, kind)

    async def _write(self, **fields: Any) -> None:
        """Write a message; if Envoy does not accept it within `write_timeout_s`, the client counts as gone."""
        try:
            async with asyncio.timeout(self._limits.write_timeout_s):
                await self._context.write(ProcessingResponse(**fields))
        except grpc.aio.BaseError:  # the call has ended; the next read notices it
            return
        except TimeoutError:
            await self._lose()

    # ---- for the app: a client's connection

    def watch(self, watcher: Watcher) -> None:
        """Notify this watcher when the client leaves."""
        self._watcher = watcher

    def join_head(self) -> None:
        """Do nothing: Envoy itself sends the head with the next part of the body."""

    def _scope(self, message: Any) -> Scope:
        headers = headers_of(message)
        pseudo = {name: value for name, value in headers if name.startswith(":")}
        path, _, query = pseudo.get(":path", b"/").partition(b"?")
        plain = [(name.encode("latin-1"), value) for name, value in headers if not name.startswith(":")]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": pseudo.get(":method", b"").decode("latin-1"),
            "scheme": pseudo.get(":scheme", b"http").decode("latin-1"),
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(b"host", pseudo.get(":authority", b"")), *(one for one in plain if one[0] != b"host")],
            "client": None,
            "server": None,
            CONNECTION: self,
            VIA: self,
        }

    async def _receive(self) -> Message:
        body = b""
        if self._request_given:
            await asyncio.Event().wait()  # until the exchange ends
        if not self._request_ended:
            try:
                async with asyncio.timeout_at(self._body_until):
                    kind, message = await self.next()
            except ConnectionResetError:
                return {"type": "http.disconnect"}
            except TimeoutError:
                raise RequestError("The body did not come in time.", "Send it at once.", status=408) from None
            self._request_trailers = kind == "request_trailers"
            if kind == "request_body":
                body = message.body
            self._request_ended = self._request_trailers or message.end_of_stream
        self._request_given = self._request_ended
        return {"type": "http.request", "body": body, "more_body": not self._request_ended}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._response is None or self._start["status"] >= 400:
            self._immediate += body
            if len(self._immediate) > self._limits.max_answer_mib * 2**20:
                await self._give_up()
            elif not more:
                await self._answer_now()
            return
        if not self._begun:
            self._begun = True
            await self._write(response_headers=changed_headers(mutation(self._headers, ("content-length",))))
        for part, _ in _parts(body):
            await self._write(response_body=streamed(part))
        if not more:
            await self._end(self._response)

    @property
    def _headers(self) -> dict[str, str | bytes]:
        pairs = ((name.decode("latin-1"), value) for name, value in self._start["headers"])
        return {name: value for name, value in pairs if name != "content-length"}

    async def _end(self, response: _Response) -> None:
        """End the response after the engine's has ended, because Envoy would close a connection that can be reused."""
        with suppress(TimeoutError, ConnectionResetError):
            async with asyncio.timeout(_REST_S):
                while await response.read():
                    pass
        self._over = True
        await self._write(response_body=streamed(b"", end=not response.trailers))
        if response.trailers:
            await self._write(response_trailers={})

    async def _give_up(self) -> None:
        """Refuse an answer of the gateway that is too long; Envoy takes such answers as a whole."""
        self._immediate.clear()
        problem = "The answer is longer than server.max_answer_mib."
        await self.refuse(EngineError(problem, "Use Headway's port.", code="answer_too_long"))
        if self._task is not None:
            self._task.cancel()

    async def _answer_now(self) -> None:
        """Send an immediate response, without an engine."""
        self._over = True
        status, headers = {"code": self._start["status"]}, mutation(self._headers)
        await self._write(immediate_response={"status": status, "headers": headers, "body": bytes(self._immediate)})

    # ---- for `RequestPath`: the connection to the engine

    def restricted(self, request: Request) -> Request:
        """Return the request as `Via.restricted` does."""
        return self._pool.restricted(request, self._subset)

    @asynccontextmanager
    async def open(
        self, engine: EngineView, path: str, body: Sequence[Part], more: Mapping[str, str]
    ) -> AsyncIterator[HttpResponse]:
        """Have the proxy send the request to an engine, and wait for the response, like `EngineConnection.open`."""
        seconds = engine.config.request_timeout_s
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        engine.count(1)
        try:
            await self._forward(engine, path, body, more)
            del body  # the engine has it (`InFlightRequest.note_begun`)
            try:
                async with asyncio.timeout_at(deadline):
                    _, message = await self.next()
            except (TimeoutError, ConnectionResetError) as error:
                raise engine_error(engine.id, error) from error
            self._response = _Response(self, message, deadline)
            yield self._response
        finally:
            engine.count(-1)

    async def _forward(self, engine: EngineView, path: str, body: Sequence[Part], more: Mapping[str, str]) -> None:
        address = self._pool.addresses.get(engine.id)  # address and planner may have changed since it was planned
        if address is None or not (self._subset is None or address in self._subset):
            raise NotNamed(engine.id)
        headers: dict[str, str | bytes] = {
            ":path": urlsplit(engine.url).path + path,
            "content-type": "application/json",
            "accept-encoding": "identity",
            DESTINATION: address,
            **more,
        }
        if engine.key is not None:
            headers["authorization"] = f"Bearer {engine.key}"
        others = {one for one in self._client_headers if one not in _PASSED and not one.startswith(_PASSED_PREFIXES)}
        remove = sorted((others | _REMOVED) - {name.lower() for name in headers})
        changes = changed_headers(mutation(headers, remove))
        await self._write(request_headers=changes, dynamic_metadata={NAMESPACE: {DESTINATION: address}})
        for part, last in _parts(b"".join(body)):
            await self._write(request_body=streamed(part, end=last and not self._request_trailers))
        if self._request_trailers:
            await self._write(request_trailers={})


def _parts(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a body, each with whether it is the last."""
    return ((body[at : at + _PART], at + _PART >= len(body)) for at in range(0, len(body), _PART))


def _subset_of(metadata: Any) -> frozenset[str] | None:
    """Return the addresses that a proxy allows (a list or comma-separated text), None = it names none."""
    if SUBSET_NAMESPACE not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[SUBSET_NAMESPACE].fields
    if SUBSET not in fields:
        return None
    value = fields[SUBSET]
    told = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return frozenset(filter(None, map(str.strip, told)))
