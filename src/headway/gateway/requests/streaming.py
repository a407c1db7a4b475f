"""Streaming: the bytes of an engine's response go to the client as they come.

`ResponseStream` is an ASGI response that waits for an engine, opens its response and passes the bytes on. It
parses them only as far as needed to know when the response is complete and how many tokens it had. A client
that disconnects ends the request in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.engines.vllm.process.answers import event_data, read_answer
from headway.engines.vllm.process.connection import EngineGone, MalformedAnswer
from headway.errors import EngineError, HeadwayError
from headway.gateway.bill import priced
from headway.gateway.errors import error_response, stopped
from headway.gateway.http.connections import CONNECTION, TENANT
from headway.gateway.in_flight import InFlightRequest, Outcome, reason_of
from headway.gateway.offload import INLINE, offload
from headway.gateway.requests.engine_response import CHUNK, EngineResponse
from headway.gateway.requests.path import RequestPath
from headway.gateway.transcript import Diverged, Transcript

log = logging.getLogger("headway.gateway")
_Close = Callable[[], Awaitable[object]]
_DEFERRED, HEAD = "headway.deferred", "headway.head"  # in the scope of a request
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"
# Proxies pass events on as they come; nginx would collect them.
_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_LONGEST_EVENT = 4 * 2**20  # bytes; the first one may hold the log probabilities of a whole prompt
_DRAINED, _DRAIN_S = 2**16, 1.0  # bytes and seconds of what may follow [DONE]


class DeferredResponse(Response):
    """A response that `DeferredMiddleware` serves once routing is over, without its memory and its calls per chunk."""

    def __init__(self) -> None:
        """Leave out what Starlette prepares: status and headers are not known yet."""
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leave it to `DeferredMiddleware`."""
        scope[_DEFERRED] = self

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the response is complete or the client has disconnected."""


class DeferredMiddleware:
    """ASGI middleware around all others: serves a `DeferredResponse` after they have returned.

    A HEAD is served as the GET that it asks about; uvicorn leaves out the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        routed = {**scope}  # with what routing adds, which is not kept
        if scope.get("method") == "HEAD":
            routed |= {"method": "GET", HEAD: True}
        await self._app(routed, receive, send)
        if TENANT in routed:
            scope[TENANT] = routed[TENANT]
        deferred: DeferredResponse | None = routed.get(_DEFERRED)
        del routed
        if deferred is not None:
            await deferred.serve(scope, receive, send)


class ResponseStream(DeferredResponse):
    """The response to one accepted request. keeps: `finish` is called with the answer, to keep it."""

    def __init__(
        self, path: RequestPath, in_flight: InFlightRequest, *, wants_usage: bool, keeps: bool = False
    ) -> None:
        super().__init__()
        self.keeps = keeps
        self._path, self._in_flight = path, in_flight
        self._reader = EventReader(wants_usage, in_flight.transcript, partial(_cost, in_flight))
        self._token_at = math.inf  # instant (the loop's) of the latest token, inf = none has come
        self._started = self._complete = False
        self._output_tokens: int | None = None  # of an answer that is not streamed
        self._client_gone = False  # the client has disconnected before the end
        self._sent = math.inf  # instant (the loop's) of the latest bytes for the client, inf = no more will come
        self._task: asyncio.Task[object] | None = None

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the response is complete or the client has disconnected, whichever is first.

        When the gateway stops it is cancelled: then the client gets an error.
        """
        self._task = this = asyncio.current_task()
        assert this is not None, "it is served by a task"
        if (connection := scope.get(CONNECTION)) is not None:
            connection.watch(self)
        try:
            await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            if self._client_gone and this.uncancel() == 0:
                await self._fail("client_gone: disconnected", "cancelled")
            else:
                await self._fail("gateway_stopped")
                await self._send_error(stopped(), scope, receive, send)

    async def finish(self, answer: bytes) -> None:
        """End the request as answered, before the end of its response is sent, and keep the answer."""
        tokens = self._reader.tokens if self._output_tokens is None else self._output_tokens
        await self._path.finish(self._in_flight, tokens, answer)

    async def _fail(self, reason: str, outcome: Outcome = "failed") -> None:
        await self._path.fail(self._in_flight, reason, outcome, self._reader.tokens)

    def client_left(self) -> None:
        """End the work on a request whose client has disconnected, unless it has the whole response."""
        if self._task is not None and not (self._complete or self._in_flight.ended):
            self._client_gone = self._task.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._keepalive(scope, send):
                while not await self._serve_from_engine(scope, send):
                    pass
        except HeadwayError as error:
            await self._fail(*reason_of(error))
            await self._send_error(error, scope, receive, send)
        except Exception as error:  # whatever it was, the request ends and the client gets an error
            log.exception("request %s failed", self._in_flight.id)
            await self._fail(f"internal: {error!r}")
            wrapped = EngineError(f"Headway failed: {error!r}.", "This is a bug; its trace is in the log.", status=500)
            await self._send_error(wrapped, scope, receive, send)
        finally:
            silence = self._in_flight.silence
            if silence is not None and (self._reader.tokens > 1 or not self._reader.complete):
                self._path.observers.streamed(self._in_flight.request, silence)

    async def _serve_from_engine(self, scope: Scope, send: Send) -> bool:
        """Serve until the response is complete; return False when its engine is lost and it is queued again."""
        response = await self._path.open(self._in_flight)
        try:
            try:
                if response.streams:
                    await self._stream(response, scope, send)
                else:
                    await self._whole(response, scope, send)
            finally:
                await response.close()
        except EngineGone as error:
            if self._complete:
                raise
            await self._resume(error, send)
            return self._complete
        except Diverged:
            self._path.observers.resumed(self._in_flight.request, "diverged")
            raise
        return True

    async def _resume(self, error: EngineGone, send: Send) -> None:
        """Queue the stream again, or end it here if its engine was lost after the answer's last token."""
        transcript, reader = self._in_flight.transcript, self._reader
        if transcript is not None and transcript.complete:
            last = reader.end(transcript)
            await self._end(last, send, partial(self._path.finish, self._in_flight, reader.tokens))
            return
        await self._path.resume(self._in_flight, error)
        reader.restart()

    @contextmanager
    def _keepalive(self, scope: Scope, send: Send) -> Iterator[None]:
        """Send comments while a stream is silent in the block; until the first one is due this costs a timer."""
        every, loop, begun = (self._path.limits.keepalive_s, asyncio.get_running_loop(), list[asyncio.Task[None]]())
        if (
            not (every and self._in_flight.streams) or self._in_flight.via is not None
        ):  # a proxy passes on answers alone
            yield
            return
        self._sent = loop.time()
        timer = loop.call_later(every, lambda: begun.append(loop.create_task(self._send_comments(every, scope, send))))
        try:
            yield
        finally:
            timer.cancel()
            for comments in begun:
                comments.cancel()

    async def _send_comments(self, every: float, scope: Scope, send: Send) -> None:
        now = asyncio.get_running_loop().time
        while self._sent < math.inf:
            if (left := self._sent + every - now()) > 0:
                await asyncio.sleep(left)
                continue
            if not self._started:
                await self._start(None, scope, send)
            self._sent = now()
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    async def _send_error(self, error: HeadwayError, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error: with its status when nothing was sent yet, else as the stream's last event."""
        if not self._started:
            await error_response(error)(scope, receive, send)
        elif not self._complete:
            await send({"type": "http.response.body", "body": _last(error.body()), "more_body": False})
        else:
            log.error("request %s was answered, but not closed: %s", self._in_flight.id, error)

    async def _start(
        self, response: EngineResponse | None, scope: Scope, send: Send, cost: float | None = None
    ) -> None:
        """Send the head, with the body that comes next; only status and Retry-After are the engine's.

        response: None = a stream's that has not begun. cost: of a whole answer, if its model has a price.
        """
        streams = response is None or response.streams
        kind = b"text/event-stream; charset=utf-8" if streams else b"application/json"
        headers = [(b"content-type", kind), (b"x-request-id", self._in_flight.id.encode())]
        headers += _UNBUFFERED if streams else []
        headers += [(name, value.encode()) for name, value in self._in_flight.promise_headers()]
        if self._in_flight.waited is not None:
            headers.append((b"x-headway-waited-for", self._in_flight.waited.encode()))
        if response is not None and response.retry_after is not None:
            headers.append((b"retry-after", response.retry_after.encode()))
        if response is not None and not streams:
            headers.append((b"content-length", b"%d" % len(response.head)))
        if cost is not None:
            headers.append((b"x-headway-cost", repr(cost).encode()))
        if response is not None and (connection := scope.get(CONNECTION)) is not None:
            connection.join_head()
        status = 200 if response is None else response.status
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self._started = True

    async def _whole(self, response: EngineResponse, scope: Scope, send: Send) -> None:
        close: _Close = partial(self._path.finish, self._in_flight, response.output_tokens)
        if response.status != 200:
            reason = response.head.decode(errors="replace")[:500]
            close, self.keeps = partial(self._fail, f"engine_refused: {reason}", "refused"), False
        if self._started:  # with comments, so this is an engine's error
            await self._end(_last(json.loads(response.head)), send, close)
            return
        self._output_tokens = response.output_tokens
        cost = await self._path.price(self._in_flight, response)
        await self._settle(close)
        await self._start(response, scope, send, cost)
        await self._end(response.head, send, close)

    async def _stream(self, response: EngineResponse, scope: Scope, send: Send) -> None:
        """Pass events on; the response begins with the first one that is whole and valid."""
        reader = self._reader
        self._note_silence(asyncio.get_running_loop().time() - self._token_at)  # negative before the first token
        try:
            await self._pass_on(reader, response, scope, send)
        finally:
            self._note_silence(response.silence)
        if reader.complete:
            await _drain(response)

    def _note_silence(self, seconds: float) -> None:
        self._in_flight.silence = max(self._in_flight.silence or 0.0, seconds)

    async def _pass_on(self, reader: EventReader, response: EngineResponse, scope: Scope, send: Send) -> None:
        """Send what comes until the stream is complete, and close the request."""
        chunk, now = response.head, asyncio.get_running_loop().time
        await self._path.turns.take()
        while chunk:
            data = await self._feed(reader, chunk)
            _take_counts(self._in_flight, reader)
            if data and not self._started:
                await self._start(response, scope, send)
            if reader.complete:
                await self._path.turns.take()
                self._note_silence(response.silence)
                await self._end(data, send, partial(self._path.finish, self._in_flight, reader.tokens))
                return
            if data:
                self._sent = self._token_at = now()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if reader.fault is not None:
                raise MalformedAnswer(response.engine, f"in an event, {reader.fault}")
            if reader.given_up:
                raise EngineGone(response.engine, "it has given the answer up")
            response.memory.hold(reader.buffered, _LONGEST_EVENT)
            chunk = b"" if reader.closed else await response.read()
        if not reader.broken:
            raise EngineGone(response.engine, "its stream ended early")
        if reader.failure and not await self._path.lives(response.engine):
            raise EngineGone(response.engine, reader.failure[:300])
        last = reader.failure + (b"" if reader.closed and not reader.failure else _DONE)
        await self._end(last, send, partial(self._fail, "engine_failed: it said so in the stream"))

    async def _feed(self, reader: EventReader, chunk: bytes) -> bytes:
        """Return what of a chunk may be passed on.

        Of streams that bring much, one at a time has its turn, so that all others' requests come in between.
        """
        if len(chunk) < CHUNK and reader.buffered <= INLINE:
            return reader.feed(chunk)
        async with self._path.large_chunk:
            await asyncio.sleep(0)
            return await offload(reader.buffered, partial(reader.feed, chunk))

    async def _end(self, last: bytes, send: Send, close: _Close) -> None:
        """Send the end of the response, before the broker stores it, so that no client waits for the disk.

        A crash in between leaves an answered request open; the next start fails it as `client_gone`. close: closes the
        request; called before the end is sent if the request is charged to budgets.
        """
        self._sent = math.inf
        await self._settle(close)
        await send({"type": "http.response.body", "body": last, "more_body": False})
        self._complete = True
        await close()  # does nothing if it is closed already

    async def _settle(self, close: _Close) -> None:
        """Close a request that is charged to budgets, so that the unused part is free before its client's next request.

        Not for a kept answer: its `finish` does so. The store's timeout limits the wait; then the end is stored later.
        """
        if self._in_flight.bill.reserved and not self.keeps:
            await close()


class EventReader:
    """Cuts a byte stream at event ends, counts tokens, drops a usage event that was not asked for.

    transcript: of the stream, if it may go on at another engine. An engine's error is then kept back, in `failure`.
    cost: returns the cost for the usage event, from the counts so far, or None for a model without a price.
    """

    __slots__ = (
        "_cost",
        "_events",
        "_reported_tokens",
        "_transcript",
        "_unfinished",
        "_usage_tokens",
        "broken",
        "cached_tokens",
        "closed",
        "failure",
        "fault",
        "prompt_tokens",
        "wants_usage",
    )

    def __init__(
        self,
        wants_usage: bool,
        transcript: Transcript | None = None,
        cost: Callable[[EventReader], float | None] = lambda reader: None,
    ) -> None:
        self.wants_usage, self._transcript, self._cost = wants_usage, transcript, cost
        self._unfinished = bytearray()
        self._usage_tokens: int | None = None  # the engine's own count, None before its usage event
        self._events = self._reported_tokens = 0  # events, and the engine's count beside one of them
        self.prompt_tokens = 0  # as the engine counts them
        self.cached_tokens: int | None = None  # likewise, of the prompt
        self.closed = False  # [DONE] has come
        self.broken = False  # an error event has come
        self.failure = b""
        self.fault: str | None = None  # what is wrong with the event that has come last

    @property
    def tokens(self) -> int:
        if self._usage_tokens is not None:
            return self._usage_tokens
        transcript = self._transcript
        if transcript is not None and not transcript.unable:  # an event may have several tokens, or none
            return max(len(transcript.ids), self._reported_tokens)
        return max(self._events, self._reported_tokens)

    @property
    def complete(self) -> bool:
        return self.closed and not (self.broken or self.given_up)

    @property
    def buffered(self) -> int:
        """Return the bytes of the event that is not finished."""
        return len(self._unfinished)

    @property
    def given_up(self) -> bool:
        """Return whether the engine has given the answer up."""
        return self._transcript is not None and self._transcript.given_up

    def restart(self) -> None:
        """Read on from another engine, which says again what has come."""
        self._unfinished.clear()
        self.closed = self.broken = False
        self.failure = b""

    def end(self, transcript: Transcript) -> bytes:
        """Return the rest of a stream whose answer is complete and whose engine was lost."""
        self.restart()
        return self.feed(transcript.ending(usage=self._usage_tokens is None))

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to pass on; an unfinished event is kept until its end comes.

        What follows [DONE] is dropped, and what follows an event that is not one of OpenAI's API (`fault`).
        """
        buffer = self._unfinished
        searched = max(len(buffer) - 1, 0)  # an end may begin with the last byte that was kept
        buffer += chunk
        end = buffer.rfind(_END, searched) + 2
        if end < 2:
            return b""
        whole = bytes(buffer[:end])
        del buffer[:end]
        passed = list[bytes]()
        for event in whole.split(_END)[:-1]:
            if self.closed:
                break
            try:
                passed.append(self._look(event + _END))
            except ValueError as error:
                self.fault = str(error)
                break
        return b"".join(passed)

    def _look(self, event: bytes) -> bytes:
        data = event_data(event)
        if not data:
            return event
        transcript = self._transcript
        if data == b"[DONE]":
            if transcript is not None and not (self.broken or self.given_up):
                transcript.check_end()
            self.closed = True
            return b"" if self.failure or self.given_up else event
        answer = read_answer(data)
        self.broken = self.broken or answer.failed
        if answer.failed and transcript is not None:
            self.failure = event
            return b""
        self.prompt_tokens = max(self.prompt_tokens, answer.prompt_tokens)
        if answer.cached_tokens is not None:
            self.cached_tokens = answer.cached_tokens
        if answer.usage_only and answer.output_tokens is not None:
            self._usage_tokens = answer.output_tokens
            if not self.wants_usage:
                return b""
            return self._priced(event if transcript is None else transcript.shown(event))
        self._events += not answer.failed
        self._reported_tokens = max(self._reported_tokens, answer.output_tokens or 0)
        return event if transcript is None else transcript.passed(event, data)

    def _priced(self, event: bytes) -> bytes:
        """Return the usage event with the cost of the request, if its model has a price."""
        if (cost := self._cost(self)) is None or not (data := event_data(event)):
            return event
        return b"data: " + priced(data, cost) + _END


def _take_counts(in_flight: InFlightRequest, reader: EventReader) -> None:
    """Note the engine's counts of a prompt, as far as they have come."""
    in_flight.prompt_tokens, in_flight.cached_tokens = reader.prompt_tokens, reader.cached_tokens


def _cost(in_flight: InFlightRequest, reader: EventReader) -> float | None:
    """Return the cost of a stream that ends with what has been read, as it will be billed."""
    _take_counts(in_flight, reader)
    return in_flight.bill.cost(in_flight.used("finished", reader.tokens))


def _last(error: dict[str, Any]) -> bytes:
    """Return the end of a stream that fails, for an error in OpenAI's shape."""
    return b"data: " + json.dumps(error).encode() + _END + _DONE


async def _drain(response: EngineResponse) -> None:
    """Read to the very end, so that the connection to the engine can be used again, if that is near."""
    if response.at_end:
        return
    left = _DRAINED
    with suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while left > 0 and (chunk := await response.read()):
                left -= len(chunk)
