"""A request inside the gateway, from its acceptance to its end.

`InFlightRequest` is also what the broker's jobs are made of (`to_job`) and become again after a restart
(`from_job`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol
from urllib.parse import quote

from pydantic import TypeAdapter

from headway.engines.vllm.process.connection import EngineGone, EngineTimeout, HttpResponse, MalformedAnswer, Part
from headway.engines.vllm.process.models import ModelUnavailable
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError, RequestError
from headway.gateway.bill import Bill, Used, bill_of, with_bill
from headway.gateway.budget import ByteBudget, Held
from headway.gateway.offload import offload
from headway.gateway.parsing.engine_body import EngineBody
from headway.gateway.parsing.idempotency import with_digest
from headway.gateway.parsing.media import PATHS as AUDIO
from headway.gateway.parsing.requests import PATHS, Kept, Kind
from headway.gateway.transcript import Diverged, Transcript
from headway.store.queue.port import KEPT_MARK, Job
from headway.types import Overflowed, Request


class EngineKilled(EngineError):
    """Engines died over a request as often as it may be tried: it may be the cause, and is not run again."""

    def __init__(self, engine: str, attempts: int) -> None:
        super().__init__(
            f"The engine ({engine}) died each of the {attempts} times that this request ran.",
            "Do not send it again as it is; the log of the engine has the reason.",
            status=500,
            code="engine_killed",
            headers={"x-should-retry": "false"},  # without it, OpenAI's clients send it again
        )


class TakenBack(Exception):
    """The engine of a request is to load another model or leaves, or an overflow engine is to have the request."""


class EngineWithoutAddress(EngineGone):
    """The proxy has no address for the chosen engine; the request is planned again for the engines with an address."""

    def __init__(self, name: str) -> None:
        message, hint = f"The proxy has no address for the engine {name}.", "Try again soon."
        EngineError.__init__(self, message, hint, status=503, code="no_address")
        self.why = message


class Via(Protocol):
    """A proxy that sends one request to its engine, instead of the gateway's own connection (`gateway/picker`).

    It can be told one engine, once: the request cannot be taken back from it, and does not go on elsewhere.
    """

    def restricted(self, request: Request) -> Request:
        """Return the request with the engines that the proxy allows; HeadwayError (503) if none of them is ready."""
        ...

    def open(
        self, engine: EngineView, path: str, body: Sequence[Part], more: Mapping[str, str]
    ) -> AbstractAsyncContextManager[HttpResponse]:
        """Send the request, like `EngineConnection.open`.

        EngineWithoutAddress if the engine has no allowed address now.
        """
        ...


class RequestState(Enum):
    """How far a request is. One whose engine dies or loads another model is queued again."""

    STORING = "storing"  # accepted; its job is on its way into the broker
    QUEUED = "queued"  # the controller plans it
    SENT = "sent"  # an engine has it and has not begun to answer
    ANSWERING = "answering"
    ENDED = "ended"


# abandoned: another gateway has it, or has ended it. not_stored: the queue did not take it.
Outcome = Literal["finished", "failed", "refused", "cancelled", "abandoned", "not_stored"]
# overflow: it goes to an overflow engine. declined: that one did not answer it.
ReturnReason = Literal["engine_gone", "model_swap", "engine_leaves", "overflow", "declined"]
VIA = "headway.via"  # key in a request's scope: its `Via`, if the gateway does not send it itself
KEPT = 32 * 1024  # bytes of a stream's body that stay in memory until it ends
_REQUEST = TypeAdapter(Request)  # the broker stores a `Request` as JSON
# Error class -> reason in the broker, outcome in the metrics.
_REASONS: dict[type[HeadwayError], tuple[str, Outcome]] = {
    EngineGone: ("engine_gone", "failed"),
    EngineWithoutAddress: ("no_address", "failed"),
    EngineKilled: ("engine_killed", "failed"),
    RequestError: ("dropped", "refused"),
    ModelUnavailable: ("model_unavailable", "failed"),
    Diverged: ("engine_gone", "failed"),
    EngineTimeout: ("engine_timeout", "failed"),
    MalformedAnswer: ("invalid_answer", "failed"),
}


def reason_of(error: HeadwayError) -> tuple[str, Outcome]:
    """Return what the broker keeps of the error that ended a request, and its outcome in the metrics."""
    kind, outcome = _REASONS.get(type(error), ("internal", "failed"))
    return f"{kind}: {error.message}", outcome


def is_kept(job: Job) -> bool:
    """Tell whether something is kept of a job's request, without reading it."""
    return KEPT_MARK in job.request


def kept_in(job: Job) -> dict[str, Any] | None:
    """Return what is kept of a job's request so that others can go on from it, None = nothing."""
    kept: dict[str, Any] | None = json.loads(job.request)["kept"] if is_kept(job) else None
    return kept


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
    state: set by `enter` alone.
    engine_future: resolved with the engine by `Send`, failed with RequestError by `Reject`.
    opening: the task that waits for the engine's first byte, until that has come.
    returned: when (monotonic) and why it came back to the queue; None = it has not, or was sent again.
    waited: what it waited for in the queue, as in a header of its response; None = nothing.
    refusal: the error that its client gets instead of an answer, None = it is not refused.
    rank: the latest from `Send` or `Rerank`, `Jobs.urgency` in the engine. soft, found: of the latest `Send`.
    overflow: as in the latest `Send`, None once it came back. account: from which that is paid, None = from none.
    attempts: engines that died over it since it was accepted or recovered.
    prompt_tokens: as its engine counts them, 0 = not reported yet.
    cached_tokens: of its prompt, found in the engine's prefix cache; None = not reported.
    first_token: instant of the first token, None before it. silence: the longest
        between two tokens of its stream, seconds; None = nothing was streamed.
    queued: instant at which it was in line for an engine, once it was stored.
    sends: (instant, engine) of each time that it was sent to one.
    forecast: output tokens that were expected when it was sent last.
    keys: as in `Arrived`.
    transcript: what its client has of a stream that may go on at another engine, None = this one may not.
    resumes: how often it has gone on at another one.
    bill: who pays for it.
    conversation: that its input and answer are added to, None = to none.
    via: sends it to its engine, None = the gateway's own connection.
    """

    request: Request
    kind: Kind
    upstream: EngineBody | None
    streams: bool = False
    background: bool = False
    held: Held = field(default_factory=lambda: ByteBudget(0).hold())
    state: RequestState = RequestState.STORING
    engine_future: asyncio.Future[EngineView] = field(default_factory=_new_future)
    opening: asyncio.Task[object] | None = None
    returned: tuple[float, ReturnReason] | None = None
    waited: str | None = None
    refusal: HeadwayError | None = None
    rank: float = 0.0
    soft: float | None = None
    found: int = 0
    overflow: Overflowed | None = None
    account: str | None = None
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    first_token: float | None = None
    silence: float | None = None
    queued: float | None = None
    sends: tuple[tuple[float, str], ...] = ()
    forecast: float | None = None
    keys: bytes = b""
    transcript: Transcript | None = None
    resumes: int = 0
    bill: Bill = field(default_factory=Bill)
    conversation: str | None = None
    via: Via | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def ended(self) -> bool:
        return self.state is RequestState.ENDED

    @classmethod
    async def from_job(cls, job: Job) -> InFlightRequest:
        """Return the background request of a stored job; its SLO counts from its first arrival. ValueError."""
        kind: Kind = next(kind for kind, path in PATHS.items() if path == job.path)
        size = len(job.request)  # with what is kept of it, megabytes
        request, bill, kept = await offload(
            size, lambda: (_REQUEST.validate_json(job.request), bill_of(job), kept_in(job) or {})
        )
        return cls(request, kind, None, background=True, bill=bill, conversation=kept.get("conversation"))

    def to_job(self, digest: str | None = None, kept: Kept | None = None) -> Job:
        """Return the job that the broker stores. digest, kept: as in `ParsedRequest`."""
        assert self.upstream is not None, "it is stored once, before its body is dropped"
        # Speech is large, and only background requests run again from what is stored.
        request, body = self.request, b"" if self.kind in AUDIO else self.upstream.joined({})
        stored = with_bill(with_digest(_REQUEST.dump_json(request).decode(), digest), self.bill)
        if kept is not None:
            stored = f"{stored[:-1]},{KEPT_MARK}{kept.content}}}"
        return Job(request.id, request.tenant, PATHS[self.kind], body, stored, request.arrival, self.background)

    def spent(self, outcome: Outcome, output_tokens: int) -> float | None:
        """Return the units that it cost at an overflow engine, at most unless it finished; None = it was at none."""
        if self.overflow is None or outcome != "finished":
            return None if self.overflow is None else self.overflow.reserved
        return self.overflow.terms.units(self.prompt_tokens or self.request.prompt_tokens, output_tokens)

    def used(self, outcome: Outcome, output_tokens: int) -> Used:
        """Return the tokens that its tenant pays for.

        Without an end of its answer these are the tokens that its client has got. If there are none, nothing is paid,
        but its prompt if it was sent to an engine and its client has given it up. Speech whose tokens are not known
        costs all that it may.
        """
        if (
            outcome == "finished" and self.kind in AUDIO and not (output_tokens or self.streams)
        ):  # its engine reports no usage
            return Used(self.request.prompt_tokens, self.request.max_tokens * self.request.places)
        if outcome == "finished" or output_tokens or (outcome == "cancelled" and self.sends):
            prompt = self.prompt_tokens or self.request.prompt_tokens
            return Used(prompt, output_tokens, min(self.cached_tokens or 0, prompt))
        return Used(0, 0)

    def unused(self, outcome: Outcome, output_tokens: int) -> dict[str, float]:
        """Return by account what was reserved for it and is not paid."""
        return self.bill.unused(self.used(outcome, output_tokens)) if self.bill.reserved else {}

    def enter(self, state: RequestState) -> bool:
        """Enter a state; False when the request has ended already."""
        if self.ended:
            return False
        self.state = state
        return True

    def refuse(self, error: HeadwayError) -> None:
        """Answer with this error; an engine that works on the request aborts it."""
        self.refusal = error
        if not self.engine_future.done():
            self.engine_future.set_exception(error)
        else:
            self._interrupt()

    def take_back(self) -> None:
        """Close its connection to the engine, so that the engine aborts it, unless a byte has come."""
        if self.via is None and self._interrupt():
            self.enter(RequestState.QUEUED)

    def _interrupt(self) -> bool:
        """Cancel the wait for the engine's first byte, once; False when nothing waits."""
        opening, self.opening = self.opening, None
        return opening is not None and opening.cancel()

    def raise_if_refused(self) -> None:
        """Raise the refusal, if there is one."""
        if self.refusal is not None:
            raise self.refusal

    def await_engine_again(self, reason: ReturnReason) -> None:
        """Replace the engine future: the engine that it named has died, or serves another model."""
        self.engine_future = _new_future()
        self.returned, self.overflow, self.account = (time.monotonic(), reason), None, None
        self.enter(RequestState.QUEUED)

    def promise_headers(self) -> list[tuple[bytes, str]]:
        """Return the headers with the class of a request and the SLO that counts, in ms."""
        request, slo = self.request, self.request.slo
        targets = (b"ttft", slo.ttft), (b"tpot", slo.tpot), (b"e2e", slo.e2e), (b"itl", slo.itl)
        headers = [(b"x-headway-slo-%s-ms" % name, f"{value * 1000:g}") for name, value in targets if value is not None]
        if self.bill.beyond is not None:
            headers.append((b"x-headway-beyond-budget", self.bill.beyond))
        return [(b"x-headway-class", quote(request.tier)), *headers]

    def note_begun(self) -> None:
        """Let go of the body, as an engine has it, but keep a small one of a stream that may go on elsewhere.

        In the broker it may not be there any more: when this gateway's lease ends, another one fails the job.
        """
        small = self.upstream is not None and max(self.held.size, len(self.upstream.content)) <= KEPT
        if self.transcript is None or self.transcript.unable or not small:
            self.drop_body()

    def drop_body(self) -> None:
        """Let go of the body: it is on disk, or an engine has it."""
        self.upstream = None
        self.held.close()
