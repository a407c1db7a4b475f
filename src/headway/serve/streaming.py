"""Streaming: the bytes of an engine's response go to the client as they come.

`ResponseStream` is an ASGI response that waits for an engine, opens its response and passes the bytes on. It
parses them only as far as needed to know when the response is complete and how many tokens it had. A client
that disconnects ends the request in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from headway.engines.vllm.process.connection import EngineGone
from headway.engines.vllm.process.models import ModelUnavailable
from headway.errors import EngineError, HeadwayError, RequestError
from headway.serve import tasks
from headway.serve.request_path import RequestPath
from headway.serve.requests import ERROR_EVENT, EngineResponse, InFlightRequest, count_output_tokens

log = logging.getLogger("headway.serve")
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_USAGE = b'"choices":[]'  # in vLLM's last event, which carries only the usage
# Error class -> reason in the broker, outcome in the metrics.
_REASONS: dict[type[HeadwayError], tuple[str, str]] = {
    EngineGone: ("engine_gone", "failed"), RequestError: ("dropped", "refused"),
    ModelUnavailable: ("model_unavailable", "failed"),
}  # fmt: skip


class ResponseStream(Response):
    """The response to one accepted request."""

    def __init__(self, path: RequestPath, in_flight: InFlightRequest, *, wants_usage: bool) -> None:
        super().__init__()
        self._path, self._in_flight, self._wants_usage = path, in_flight, wants_usage
        self._started = self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the response is complete or the client has disconnected, whichever is first.

        The end of the gateway cancels it: then the client is told.
        """
        work = asyncio.create_task(self._serve(scope, receive, send))
        disconnected = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self._in_flight.closed:  # the client has the whole response already
                await work
            else:
                await tasks.cancel(work)
                await self._path.fail(self._in_flight, "client_gone: disconnected", "cancelled")
        except asyncio.CancelledError:
            await tasks.cancel(work)
            await self._path.fail(self._in_flight, "gateway_stopped")
            await self._send_error(stopped(), scope, receive, send)
        finally:
            await tasks.cancel(disconnected)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._path.open(self._in_flight)
            try:
                await self._pass_on(response, send)
            finally:
                await response.close()
        except HeadwayError as error:
            kind, outcome = _REASONS.get(type(error), ("internal", "failed"))
            await self._path.fail(self._in_flight, f"{kind}: {error.message}", outcome)
            await self._send_error(error, scope, receive, send)
        except Exception as error:  # whatever it was, the request ends and the client gets an error
            log.exception("request %s failed", self._in_flight.id)
            await self._path.fail(self._in_flight, f"internal: {error!r}")
            wrapped = EngineError(
                f"Headway failed: {error!r}.", "This is a bug; its trace is in the log.", status=500
            )
            await self._send_error(wrapped, scope, receive, send)

    async def _send_error(self, error: HeadwayError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error: with its status when nothing was sent yet, else as the stream's last event."""
        if not self._started:
            await error_response(error)(scope, receive, send)
        elif not self._complete:
            event = b"data: " + json.dumps(error.body()).encode() + _END + _DONE
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            log.error("request %s was answered, but not closed: %s", self._in_flight.id, error)

    async def _pass_on(self, response: EngineResponse, send: Send) -> None:
        headers = [
            (b"content-type", response.content_type.encode()),
            (b"x-request-id", self._in_flight.id.encode()),
        ]
        headers += [(name, value.encode()) for name, value in self._in_flight.promise()]
        if self._in_flight.waited is not None:
            headers.append((b"x-headway-waited-for", self._in_flight.waited.encode()))
        if not response.streams:
            headers.append((b"content-length", b"%d" % len(response.head)))
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        self._started = True
        await (self._stream(response, send) if response.streams else self._whole(response, send))

    async def _whole(self, response: EngineResponse, send: Send) -> None:
        await self._end(response.head, send)
        if response.status == 200:
            await self._path.finish(self._in_flight, count_output_tokens(response.head))
        else:
            reason = response.head.decode(errors="replace")[:500]
            await self._path.fail(self._in_flight, f"engine_refused: {reason}", "refused")

    async def _stream(self, response: EngineResponse, send: Send) -> None:
        reader, chunk = EventReader(self._wants_usage), response.head
        while chunk:
            data = reader.feed(chunk)
            if reader.complete:
                await self._end(data + reader.rest, send)
                await self._path.finish(self._in_flight, reader.tokens)
                await _drain(response)
                return
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            chunk = await response.read()
        if not reader.broken:
            raise EngineGone(response.engine, "its stream ended early")
        await self._end(b"" if reader.closed else _DONE, send)
        await self._path.fail(self._in_flight, "engine_failed: it said so in the stream")

    async def _end(self, last: bytes, send: Send) -> None:
        """Send the end of the response, before the broker stores it, so that no client waits for the disk.

        A crash in between leaves an answered request open; the next start fails it as `client_gone`.
        """
        await send({"type": "http.response.body", "body": last, "more_body": False})
        self._complete = True


class EventReader:
    """Cuts a byte stream at event ends, counts tokens, drops a usage event that was not asked for."""

    def __init__(self, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self.rest = b""
        self._counted: int | None = None  # the engine's own count, None before its usage event
        self._events = 0
        self.closed = False  # [DONE] has come
        self.broken = False  # an error event has come

    @property
    def tokens(self) -> int:
        return self._events if self._counted is None else self._counted

    @property
    def complete(self) -> bool:
        return self.closed and not self.broken

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to pass on; an unfinished event is kept until its end comes."""
        data = self.rest + chunk if self.rest else chunk
        end = data.rfind(_END) + 2
        if end < 2:
            self.rest = data
            return b""
        whole, self.rest = data[:end], data[end:]
        self._events += whole.count(_END)
        if _USAGE in whole or ERROR_EVENT in whole or b"[DONE]" in whole:
            whole = b"".join(self._look(event + _END) for event in whole.split(_END)[:-1])
        return whole

    def _look(self, event: bytes) -> bytes:
        if event.startswith(b"data: [DONE]"):
            self.closed = True
        elif event.startswith(ERROR_EVENT):
            self.broken = True
        elif _USAGE in event:
            with suppress(ValueError, KeyError, TypeError):
                self._counted = int(json.loads(event[6:])["usage"]["completion_tokens"])
                return event if self._wants_usage else b""
        return event


def error_response(error: HeadwayError) -> JSONResponse:
    """Return an error in OpenAI's shape."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


def stopped() -> EngineError:
    """Return what clients are told whose requests the end of the gateway cuts short."""
    hint = "Send the request again in a moment."
    return EngineError("The gateway is being stopped.", hint, status=503, code="gateway_stopped")


async def _drain(response: EngineResponse) -> None:
    """Read to the very end, so that the connection to the engine can be used again."""
    with suppress(EngineGone):
        while await response.read():
            pass


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
