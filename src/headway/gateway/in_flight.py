"""A request inside the gateway, from its acceptance to its end, and the response of an engine.

`InFlightRequest` is also what the broker's jobs are made of (`to_job`) and become again after a restart
(`from_job`).
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

import aiohttp
from pydantic import TypeAdapter

from headway.engines.vllm.process.answers import read_answer, told_error
from headway.engines.vllm.process.connection import (
    BROKEN,
    EngineGone,
    EngineTimeout,
    MalformedAnswer,
    OpenRequest,
    engine_error,
)
from headway.engines.vllm.process.models import ModelUnavailable
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError, RequestError
from headway.gateway.budget import AnswerBudget, AnswerMemory, ByteBudget, Held
from headway.gateway.offload import offload
from headway.gateway.parsing.engine_body import EngineBody
from headway.gateway.parsing.idempotency import with_digest
from headway.gateway.parsing.requests import PATHS, Kind, ParsedRequest
from headway.store.queue.port import Job
from headway.types import Request


class EngineKilled(EngineError):
    """Engines died over a request as often as it may be tried: it may be the reason and is not run again."""

    def __init__(self, engine: str, attempts: int) -> None:
        super().__init__(
            f"The engine ({engine}) died each of the {attempts} times that this request ran.",
            "Do not send it again as it is; the log of the engine has the reason.",
            status=500, code="engine_killed",
            headers={"x-should-retry": "false"},  # without it, OpenAI's clients send it again
        )  # fmt: skip


class TakenBack(Exception):
    """The engine of a request begins to load another model."""


# abandoned: another gateway has it, or has ended it. not_stored: the queue did not take it.
Outcome = Literal["finished", "failed", "refused", "cancelled", "abandoned", "not_stored"]
ReturnReason = Literal["engine_gone", "model_swap"]
CHUNK = 2**14  # bytes of a response that are read at a time
ERROR_EVENT = b'data: {"error"'  # how vLLM's stream says that its engine core has died
_REQUEST = TypeAdapter(Request)  # the broker stores a `Request` as JSON
# Error class -> reason in the broker, outcome in the metrics.
_REASONS: dict[type[HeadwayError], tuple[str, Outcome]] = {
    EngineGone: ("engine_gone", "failed"), EngineKilled: ("engine_killed", "failed"),
    RequestError: ("dropped", "refused"),
    ModelUnavailable: ("model_unavailable", "failed"), EngineTimeout: ("engine_timeout", "failed"),
    MalformedAnswer: ("invalid_answer", "failed"),
}  # fmt: skip


def reason_of(error: HeadwayError) -> tuple[str, Outcome]:
    """Return what the broker keeps of the error that ended a request, and its outcome in the metrics."""
    kind, outcome = _REASONS.get(type(error), ("internal", "failed"))
    return f"{kind}: {error.message}", outcome


def _new_future() -> asyncio.Future[EngineView]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class InFlightRequest:
    """One accepted request.

    request: the core's view.
    kind: the endpoint that it came to.
    upstream: the body for the engine, without metadata; None = it is read from the broker when it is needed.
    streams: the client reads the answer as it comes.
    held: the memory of its body, within the limit of all.
    background: its client polls for the response instead of holding a connection.
    engine_future: resolved with the engine by `Send`, failed with RequestError by `Reject`.
    opening: the task that waits for the engine's first byte, of a request that may be refused or taken back
        meanwhile.
    taken_back: its engine loads another model, so it is queued again.
    returned: when (monotonic) and why it came back to the queue; None = it has not, or was sent again.
    waited: what it waited for in the queue, as in a header of its response; None = nothing.
    refusal: the error that its client gets instead of an answer, None = it is not refused.
    rank: the latest from `Send` or `Rerank`, `Jobs.urgency` in the engine. soft: of the latest `Send`.
    attempts: engines that died over it since it was accepted or recovered.
    first_token: instant of the first token, None before it.
    queued: instant at which it was in line for an engine, once it was stored.
    sends: (instant, engine) of each time that it was sent to one.
    forecast: output tokens that were expected when it was sent last.
    closed: it has its end.
    digest: as in `ParsedRequest`; stored with its job.
    """

    request: Request
    kind: Kind
    upstream: EngineBody | None
    streams: bool = False
    background: bool = False
    held: Held = field(default_factory=lambda: ByteBudget(0).hold())
    engine_future: asyncio.Future[EngineView] = field(default_factory=_new_future)
    opening: asyncio.Task[EngineResponse] | None = None
    taken_back: bool = False
    returned: tuple[float, ReturnReason] | None = None
    waited: str | None = None
    refusal: HeadwayError | None = None
    rank: float = 0.0
    soft: float | None = None
    attempts: int = 0
    first_token: float | None = None
    queued: float | None = None
    sends: tuple[tuple[float, str], ...] = ()
    forecast: float | None = None
    closed: bool = False
    digest: str | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @classmethod
    def of(cls, parsed: ParsedRequest) -> InFlightRequest:
        """Return a parsed request as one in flight."""
        return cls(
            parsed.request, parsed.kind, parsed.upstream, parsed.stream, parsed.background,
            digest=parsed.digest,
        )  # fmt: skip

    @classmethod
    def from_job(cls, job: Job) -> InFlightRequest:
        """Return the background request of a stored job; its SLO counts from its first arrival."""
        kind: Kind = next(kind for kind, path in PATHS.items() if path == job.path)
        return cls(_REQUEST.validate_json(job.request), kind, None, background=True)

    def to_job(self) -> Job:
        """Return the job that the broker stores."""
        assert self.upstream is not None, "it is stored once, before its body is dropped"
        request, body = self.request, self.upstream.joined({})
        stored = with_digest(_REQUEST.dump_json(request).decode(), self.digest)
        return Job(
            request.id, request.tenant, PATHS[self.kind], body, stored, request.arrival, self.background
        )

    def refuse(self, error: HeadwayError) -> None:
        """Answer with this error; an engine that works on the request aborts it."""
        self.refusal = error
        if not self.engine_future.done():
            self.engine_future.set_exception(error)
        elif self.opening is not None:
            self.opening.cancel()

    def inside(self, engine: EngineView) -> bool:
        """Tell whether it was sent to this engine last."""
        future = self.engine_future
        if not future.done() or future.cancelled() or future.exception() is not None:
            return False
        return future.result() is engine

    def take_back(self) -> None:
        """Close its connection to the engine, so that the engine aborts it, unless a byte has come."""
        if self.opening is not None and self.opening.cancel():
            self.taken_back = True

    def raise_if_refused(self) -> None:
        """Raise the refusal, if there is one."""
        if self.refusal is not None:
            raise self.refusal

    def await_engine_again(self, reason: ReturnReason) -> None:
        """Replace the engine future: the engine that it named has died, or serves another model."""
        self.engine_future, self.taken_back = _new_future(), False
        self.returned = time.monotonic(), reason

    def promise(self) -> list[tuple[bytes, str]]:
        """Return the headers that tell a client the class of its request, and the SLO that counts, in ms."""
        request, slo = self.request, self.request.slo
        targets = (b"ttft", slo.ttft), (b"tpot", slo.tpot), (b"e2e", slo.e2e)
        told = [
            (b"x-headway-slo-%s-ms" % name, f"{value * 1000:g}")
            for name, value in targets
            if value is not None
        ]
        return [(b"x-headway-class", quote(request.tier)), *told]

    def drop_body(self) -> None:
        """Let go of the body: it is on disk, or an engine has it."""
        self.upstream = None
        self.held.close()


@dataclass(slots=True)
class EngineResponse:
    """An engine's response that has begun. `close` ends it.

    status: of the HTTP response: 200, or that of an error.
    streams: it is a stream of events; otherwise it is in `head`, whole.
    head: the first chunk of a stream, otherwise the whole body: an answer, or an error in OpenAI's shape.
    output_tokens: of a whole answer, as the engine counts them; 0 when it does not.
    engine: id of the engine.
    memory: what is held of the answer.
    silence: the longest wait for more of a stream that has begun, in seconds, without the time in which its
        client did not read.
    pooled: it is of a pooling model: data or results, and no choices.
    """

    status: int
    streams: bool
    engine: str
    memory: AnswerMemory
    _response: aiohttp.ClientResponse = field(repr=False)
    _opened: OpenRequest = field(repr=False)
    head: bytes = b""
    output_tokens: int = 0
    pooled: bool = False
    silence: float = 0.0
    _reading: bool = False
    _silent_since: float | None = None  # from when nothing but comments has come
    _end: asyncio.Future[None] | None = field(default=None, repr=False)  # of the connection

    @classmethod
    async def open(
        cls, engine: str, request: OpenRequest, budget: AnswerBudget, *, stream: bool, pooled: bool = False
    ) -> EngineResponse:
        """Post a request and return the response with its head.

        engine: its id. stream: the request asks for a stream.
        EngineGone when the engine breaks off, EngineTimeout when it takes too long, MalformedAnswer when it
        answers something else than was asked for.
        """
        http = await request.__aenter__()
        streams, memory = stream and http.status == 200, budget.of(engine)
        response = cls(http.status, streams, engine, memory, http, request, pooled=pooled)
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
            self.silence = 0.0  # the wait for the first token is none
        else:
            raise MalformedAnswer(self.engine, "it is not the stream that was asked for")

    async def _first_event(self) -> bytes:
        """Return what comes with the first event; comments before it are not tokens and are left out."""
        head = await self.read()
        while head and not _has_event(head):
            self.memory.hold(len(head))
            more = await self.read()
            head = head.rpartition(b"\n")[2] + more if more else b""
        return head

    async def _check(self) -> None:
        """Raise MalformedAnswer unless the body is an answer, or an error that belongs to its status."""
        try:
            answer = await offload(len(self.head), lambda: read_answer(self.head, pooled=self.pooled))
        except ValueError as error:
            raise MalformedAnswer(self.engine, f"{error}, with status {self.status}") from error
        if answer.failed != (self.status != 200):
            raise MalformedAnswer(self.engine, f"its status {self.status} does not fit its body")
        if answer.failed:
            self.head = await offload(len(self.head), lambda: told_error(self.head))
        self.output_tokens = answer.output_tokens or 0

    async def read(self) -> bytes:
        """Return what has come, at most `CHUNK` bytes, empty at the end; errors as `open`."""
        self._reading, began = True, self._silent_since or time.monotonic()
        try:
            chunk = await self._response.content.read(CHUNK)
            self._silent_since = began if self.streams and not _has_event(chunk) else None
            return chunk
        except BROKEN as error:
            raise engine_error(self.engine, error) from error
        except RuntimeError as error:  # aiohttp's, for a connection that has been closed
            raise EngineGone(self.engine, error) from error
        finally:
            self._reading, waited = False, time.monotonic() - began
            if waited > self.silence:
                self.silence = waited

    @property
    def retry_after(self) -> str | None:
        """Seconds after which the engine wants to be asked again; None = it does not say."""
        told = self._response.headers.get("retry-after", "")
        return told if re.fullmatch("[0-9]{1,6}", told) else None

    @property
    def at_end(self) -> bool:
        """Tell whether all of it has been read."""
        return self._response.content.at_eof()

    def _watch_end(self) -> None:
        """End `read` when the connection ends in bytes that are not HTTP; aiohttp would wait for ever."""
        connection = self._response.connection  # None when all has come
        protocol = None if connection is None else connection.protocol
        self._end = None if protocol is None else protocol.closed
        if self._end is not None:
            self._end.add_done_callback(self._closed)

    def _closed(self, closed: asyncio.Future[None]) -> None:
        if not closed.cancelled():
            closed.exception()  # the reader gets it; nothing else asks for it
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


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    """Tell whether its type is that of events; aiohttp's own answer keeps a kilobyte."""
    kind, _, _ = response.headers.get("content-type", "").partition(";")
    return kind.strip().lower() == "text/event-stream"


def _has_event(data: bytes) -> bool:
    """Tell whether this has more of a stream of events than comments."""
    return data.startswith(b"data:") or any(
        line.strip() and not line.startswith(b":") for line in data.split(b"\n")
    )
