"""An engine's response to one request: its head, the bytes that follow, its end."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

import aiohttp

from headway.engines.vllm.process.answers import Shape, begins_answer, client_error, read_answer
from headway.engines.vllm.process.connection import BROKEN, EngineGone, HttpResponse, MalformedAnswer, engine_error
from headway.gateway.budget import AnswerBudget, AnswerMemory
from headway.gateway.offload import offload

CHUNK = 2**14  # bytes of a response that are read at a time
_END, _LINE = b"\n\n", 8  # the end of an event, and bytes of a line that distinguish data from comments
ERROR_EVENT = b'data: {"error"'  # how vLLM's stream says that its engine core has died


@dataclass(slots=True)
class EngineResponse:
    """An engine's response that has begun. `close` ends it.

    status: of the HTTP response: 200, or that of an error.
    streams: it is a stream of events; otherwise it is in `head`, whole.
    head: the first chunk of a stream, otherwise the whole body: an answer, or an error in OpenAI's shape.
    output_tokens, prompt_tokens: of a whole answer, as the engine counts them; 0 when it does not.
    cached_tokens: of its prompt, None when the engine does not say.
    engine: id of the engine.
    memory: what is held of the answer.
    silence: the longest wait for more of a stream that has begun, in seconds, without the time in which its
        client did not read.
    shape: what it has as a whole, as in `read_answer`.
    """

    status: int
    streams: bool
    engine: str
    memory: AnswerMemory
    _response: HttpResponse = field(repr=False)
    _opened: AbstractAsyncContextManager[HttpResponse] = field(repr=False)
    head: bytes = b""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    shape: Shape = "choices"
    silence: float = 0.0
    _reading: bool = False
    _silent_since: float | None = None  # from when nothing but comments has come
    _line: bytes = b""  # the beginning of a line of the stream whose end has not come
    _end: asyncio.Future[None] | None = field(default=None, repr=False)  # of the connection

    @classmethod
    async def open(
        cls,
        engine: str,
        request: AbstractAsyncContextManager[HttpResponse],
        budget: AnswerBudget,
        *,
        stream: bool,
        shape: Shape = "choices",
    ) -> EngineResponse:
        """Post a request and return the response with its head.

        engine: its id. stream: the request asks for a stream.
        EngineGone when the engine breaks off, EngineTimeout when it takes too long, MalformedAnswer when it
        answers something else than was asked for.
        """
        http = await request.__aenter__()
        streams, memory = stream and http.status == 200, budget.of(engine)
        response = cls(http.status, streams, engine, memory, http, request, shape=shape)
        try:
            response._watch_end()
            await response._begin()
        except BaseException:
            await response.close()
            raise
        return response

    async def _begin(self) -> None:
        if self.status == 401:  # which its client would take for its own
            what = "it refuses the gateway's key with status 401; see api_key of its [[engines]]"
            raise MalformedAnswer(self.engine, what)
        if self.status != 200 and not 400 <= self.status <= 599:
            raise MalformedAnswer(self.engine, f"its status is {self.status}")
        if not self.streams:
            self.head = await self._read_all()
            await self._check()
        elif _is_stream(self._response):
            self.head = await self._first_event()
            self.silence = 0.0  # the wait for the first token does not count
        else:
            raise MalformedAnswer(self.engine, "it is not the stream that was asked for")

    async def _first_event(self) -> bytes:
        """Return all that comes with the first event of the answer; comments before it are left out."""
        head, looked_at = bytearray(), 0
        while more := await self.read():
            head += more
            end = head.rfind(_END, max(len(head) - len(more) - 1, 0)) + len(_END)
            if end >= len(_END):
                events = [event for event in bytes(head[looked_at:end]).split(_END)[:-1] if not _is_comment(event)]
                head[looked_at:end] = b"".join(event + _END for event in events)
                if await offload(end - looked_at, partial(_begins, events)):
                    return bytes(head)
                looked_at += sum(len(event) + len(_END) for event in events)
            self.memory.hold(len(head))
        return bytes(head)

    async def _check(self) -> None:
        """Raise MalformedAnswer unless the body is an answer, or an error that belongs to its status."""
        try:
            answer = await offload(len(self.head), lambda: read_answer(self.head, self.shape))
        except ValueError as error:
            raise MalformedAnswer(self.engine, f"{error}, with status {self.status}") from error
        if answer.failed != (self.status != 200):
            raise MalformedAnswer(self.engine, f"its status {self.status} does not fit its body")
        if answer.failed:
            self.head = await offload(len(self.head), lambda: client_error(self.head))
        self.output_tokens, self.prompt_tokens = answer.output_tokens or 0, answer.prompt_tokens
        self.cached_tokens = answer.cached_tokens

    async def read(self) -> bytes:
        """Return what has come, at most `CHUNK` bytes, empty at the end; errors as `open`."""
        self._reading, began = True, self._silent_since or time.monotonic()
        try:
            chunk = await self._response.content.read(CHUNK)
            self._silent_since = began if self.streams and not self._has_data(chunk) else None
            return chunk
        except BROKEN as error:
            raise engine_error(self.engine, error) from error
        except RuntimeError as error:  # aiohttp's, for a connection that has been closed
            raise EngineGone(self.engine, error) from error
        finally:
            self._reading, waited = False, time.monotonic() - began
            if waited > self.silence:
                self.silence = waited

    def _has_data(self, chunk: bytes) -> bool:
        """Return whether a part of a stream has data of an event, or a part of it."""
        lines = (self._line + chunk).split(b"\n")
        self._line = lines.pop()[:_LINE]
        return any(map(_is_data, lines)) or _is_data(self._line)

    @property
    def retry_after(self) -> str | None:
        """Seconds after which the engine wants to be asked again; None = it does not say."""
        seconds = self._response.headers.get("retry-after", "")
        return seconds if re.fullmatch("[0-9]{1,6}", seconds) else None

    @property
    def at_end(self) -> bool:
        """Return whether all of it has been read."""
        return self._response.content.at_eof()

    def _watch_end(self) -> None:
        """End `read` when the connection ends in bytes that are not HTTP; aiohttp would wait for ever."""
        if not isinstance(self._response, aiohttp.ClientResponse):
            return
        connection = self._response.connection  # None when all has come
        protocol = None if connection is None else connection.protocol
        self._end = None if protocol is None else protocol.closed
        if self._end is not None:
            self._end.remove_done_callback(_take_error)  # of an earlier response on this connection
            self._end.add_done_callback(_take_error)
            self._end.add_done_callback(self._closed)

    def _closed(self, closed: asyncio.Future[None]) -> None:
        assert isinstance(self._response, aiohttp.ClientResponse), "others are not watched"
        content = self._response.content
        if self._reading and content.exception() is None and not content.is_eof():
            content.set_exception(aiohttp.http_exceptions.HttpProcessingError(message="not HTTP"))

    async def _read_all(self) -> bytes:
        parts, size = list[bytes](), self._response.content_length or 0
        self.memory.hold(size)
        size = 0
        while part := await self.read():
            parts.append(part)
            size += len(part)
            self.memory.hold(size)
        return b"".join(parts)

    async def close(self) -> None:
        """Close the connection unless it was read to its end, which makes vLLM abort the request."""
        if self._end is not None:
            self._end.remove_done_callback(self._closed)
        try:
            await self._opened.__aexit__(None, None, None)
        finally:
            self.memory.close()


def _take_error(closed: asyncio.Future[None]) -> None:
    """Keep asyncio from logging that a connection broke, be it after the response: a reader gets the error itself."""
    if not closed.cancelled():
        closed.exception()


def _is_stream(response: HttpResponse) -> bool:
    """Return whether its type is that of events; aiohttp's own answer keeps a kilobyte."""
    kind, _, _ = response.headers.get("content-type", "").partition(";")
    return kind.strip().lower() == "text/event-stream"


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:") and not line[5:].isspace() and len(line) > 5


def _begins(events: Sequence[bytes]) -> bool:
    return any(map(begins_answer, events))


def _is_comment(event: bytes) -> bool:
    return all(line.startswith(b":") for line in event.split(b"\n") if line.strip())
