"""Who carries out what the core decides? The asyncio host of the controller.

Every accepted request becomes a `InFlightRequest`. The controller's `Send` tells the ticket its engine; the ticket's
owner (a connection, or a background task) then talks to that engine itself, so tokens never pass through
here, only counts do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import TypeAdapter

from headway.broker import open_broker
from headway.broker.port import Broker, Job
from headway.config import Config, state_dir
from headway.core.cluster import Cluster
from headway.core.controller import Controller
from headway.engines.vllm.process.client import EngineGone, VllmEngine
from headway.engines.vllm.request_metadata import write_metadata
from headway.errors import EngineError, RequestError
from headway.recipes.registry import find
from headway.serve.lengths.service import LengthService
from headway.serve.metrics import Metrics
from headway.serve.request_parsing import PATHS, Kind, ParsedRequest
from headway.types import (
    Arrived,
    Command,
    Event,
    Failed,
    Finished,
    Reject,
    Request,
    Returned,
    Send,
    Started,
    Swap,
    Tick,
    Warm,
)

_CORE = TypeAdapter(Request)  # to and from the broker's text
_BROKEN = b'data: {"error"'  # how vLLM says within a stream that its engine died
log = logging.getLogger("headway.serve")


@dataclass(slots=True)
class InFlightRequest:
    """One accepted request on its way: what to send, where (once decided), and what was seen of it."""

    request: Request
    kind: Kind
    upstream: dict[str, Any]
    place: asyncio.Future[VllmEngine]
    facts: dict[str, str | float]
    background: bool = False
    attempts: int = 0
    first: float | None = None
    closed: bool = False

    def body(self) -> bytes:
        """Return the body for the engine: the client's, with our facts for the scheduler."""
        extra = {**(self.upstream.get("vllm_xargs") or {}), **self.facts}
        return json.dumps({**self.upstream, "vllm_xargs": extra}).encode()


@dataclass(slots=True)
class EngineResponse:
    """An engine's response whose beginning is here. Leaving `stack` closes it."""

    status: int
    content_type: str
    head: bytes
    response: aiohttp.ClientResponse
    engine: str
    stack: AsyncExitStack = field(repr=False)

    @property
    def streams(self) -> bool:
        return "event-stream" in self.content_type

    async def read(self) -> bytes:
        """Return what came next, empty at the end; EngineGone when the engine breaks off."""
        try:
            return await self.response.content.readany()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineGone(self.engine, error) from error

    async def whole(self) -> bytes:
        """Return the complete body."""
        parts = [self.head]
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def close(self) -> None:
        await self.stack.aclose()


class Dispatcher:
    """Owns the controller, the broker and the engines of one Headway process."""

    def __init__(self, config: Config, *, log_dir: Path | None = None) -> None:
        self.config = config
        self.recipe = find(config.recipe)
        self.metrics = Metrics()
        self.foresight = LengthService(self.recipe, config.predictor, self.metrics, config.history)
        planner = self.recipe.planner()
        self.controller = Controller(
            planner, self.foresight.lengths, config.server.max_queued, Cluster(pull=planner.pull)
        )
        log_dir = log_dir or state_dir()
        self.engines = {
            f"e{i}": VllmEngine(f"e{i}", engine, config.recipe, log_dir, self.tell)
            for i, engine in enumerate(config.engines)
        }
        self._storing = 0
        self._tickets: dict[str, InFlightRequest] = {}
        self._background: dict[str, asyncio.Task[None]] = {}
        self.broker: Broker
        self._chores: list[asyncio.Task[None]] = []

    # ---- life

    async def start(self) -> None:
        """Open the broker, settle what an earlier process owed, start the engines."""
        settings = self.config.broker
        await self.foresight.start()
        self.broker = open_broker(settings.kind, str(settings.file), settings.synchronous)
        await self._recover()
        for engine in self.engines.values():
            await engine.start()
        self._chores = [asyncio.create_task(chore) for chore in (self._forget(), self._pulse())]

    async def stop(self) -> None:
        """Stop engines first, so that nothing answers any more, then close the broker.

        Background jobs stay open in the broker: the next start runs them.
        """
        tasks = [*self._background.values(), *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
        for ticket in [ticket for ticket in self._tickets.values() if not ticket.background]:
            await self.fail(ticket, "gateway_stopped")
        await self.foresight.stop()
        await self.broker.close()

    async def _recover(self) -> None:
        """Close as failed what nobody waits for any more; run background work again."""
        served = {engine.config.name for engine in self.engines.values()}
        async for job in self.broker.open():
            if not job.background:
                reason = "client_gone: the gateway ended before the answer"
                await self.broker.fail(job.id, reason, time.time())
                continue
            ticket = _ticket_of(job)
            if ticket.request.model in served:
                self._run_background(ticket)
            else:
                reason = f"engine_gone: {ticket.request.model} is not served any more"
                await self.broker.fail(job.id, reason, time.time())

    async def _forget(self) -> None:
        while True:
            await self.broker.forget(time.time() - self.config.broker.keep_hours * 3600)
            await asyncio.sleep(600)

    # ---- the core's host

    def tell(self, event: Event) -> None:
        """Give the controller an event and carry out what it answers."""
        self._obey(self.controller.on(event, time.time()))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send(id, instance):
                    ticket = self._tickets[id]
                    if not ticket.place.done():
                        ticket.place.set_result(self.engines[instance])
                case Reject():
                    self._shed(command)
                case Swap() | Warm():  # our engines announce no `loadable`, so no planner may ask for it
                    raise EngineError(
                        f"{command.instance} cannot load {command.model} while it serves.",
                        "Give each model an engine of its own, or use a recipe that does not swap.",
                    )

    def _shed(self, refusal: Reject) -> None:
        """Refuse a request that was accepted and is still queued: who waits for its place gets the error."""
        place = self._tickets[refusal.id].place
        self.metrics.dropped(refusal.reason)
        if not place.done():
            place.set_exception(_refused("All engines of this model are saturated.", refusal))

    async def _pulse(self) -> None:
        """Let planners that wait for nothing but time run again."""
        while True:
            await asyncio.sleep(1)
            if self.controller.queued:
                self.tell(Tick())

    # ---- the way of one request

    def check_capacity(self, request: Request) -> None:
        """Refuse a request the queue has no room for, before it is stored: 429 with Retry-After."""
        refusal = self.controller.admit(request, time.time(), self._storing)
        if refusal is None:
            return
        self.metrics.dropped(refusal.reason)
        raise _refused(f"The queue is full ({self.config.server.max_queued} requests wait).", refusal)

    async def accept(self, asked: ParsedRequest) -> InFlightRequest:
        """Store a request durably, then queue it. From here on it is owed an end."""
        ticket = _ticket(asked.request, asked.kind, asked.upstream, asked.background)
        self._storing += 1
        try:
            await self.foresight.read(ticket.request, ticket.upstream)  # while nothing is owed
            await self._store(ticket)
        finally:
            self._storing -= 1
        if asked.background:
            self._run_background(ticket)
        else:
            self._enter(ticket)
        return ticket

    async def _store(self, ticket: InFlightRequest) -> None:
        put = asyncio.ensure_future(self.broker.put(_job_of(ticket)))
        try:
            await asyncio.shield(put)
        except asyncio.CancelledError:
            await asyncio.wait([put])
            if put.exception() is None:
                await self.broker.fail(
                    ticket.request.id, "client_gone: left while it was stored", time.time()
                )
            raise

    def _enter(self, ticket: InFlightRequest) -> None:
        request = ticket.request
        ticket.facts = write_metadata(request, self.controller.lengths.forecast(request))
        self._tickets[request.id] = ticket
        self.tell(Arrived(request))

    async def begin(self, ticket: InFlightRequest) -> EngineResponse:
        """Wait for the ticket's turn and return the answer's beginning.

        An engine that dies before the beginning costs an attempt and the request queues again, up to
        server.max_attempts; then EngineGone.
        """
        while True:
            engine = await ticket.place
            try:
                return await self._open(engine, ticket)
            except EngineGone:
                if not await engine.lives():
                    engine.lost()
                ticket.attempts += 1
                if await self._attempts(ticket) >= self.config.server.max_attempts:
                    raise
                ticket.place = asyncio.get_running_loop().create_future()
                self.tell(Returned(ticket.request.id))

    async def _attempts(self, ticket: InFlightRequest) -> int:
        """Return how often engines died over this request; background work counts on over restarts."""
        return await self.broker.attempt(ticket.request.id) if ticket.background else ticket.attempts

    async def _open(self, engine: VllmEngine, ticket: InFlightRequest) -> EngineResponse:
        stack = AsyncExitStack()
        try:
            response = await stack.enter_async_context(engine.open(PATHS[ticket.kind], ticket.body()))
            kind = response.headers.get("content-type", "application/json")
            answer = EngineResponse(response.status, kind, b"", response, engine.id, stack)
            answer.head = await (answer.read() if answer.streams else answer.whole())
            broken = response.status >= 500 or answer.head.startswith(_BROKEN)
            if broken and not await engine.lives():  # else it is this request's fault: the client is told
                raise EngineGone(engine.id, answer.head[:300])
        except BaseException:
            await stack.aclose()
            raise
        self._started(ticket)
        return answer

    def _started(self, ticket: InFlightRequest) -> None:
        ticket.first = time.time()
        self.tell(Started(ticket.request.id))

    async def finish(self, ticket: InFlightRequest, output_tokens: int, result: bytes | None = None) -> bool:
        """Close a ticket as answered: at once for the core, then durably. False when it was closed before."""
        if ticket.closed:
            return False
        ticket.closed = True
        now, request = time.time(), ticket.request
        self.foresight.ending(request, output_tokens)
        self._leave(ticket, Finished(request.id, output_tokens))
        done = await self.broker.done(request.id, result, now)
        if done:
            first = ticket.first if ticket.upstream.get("stream") and ticket.first is not None else now
            self.metrics.finished(request, first - request.arrival, now - request.arrival, output_tokens)
        return done

    async def fail(self, ticket: InFlightRequest, reason: str, outcome: str = "failed") -> None:
        """Close a ticket as failed, with the reason that the broker keeps."""
        if ticket.closed:
            return
        ticket.closed = True
        self._leave(ticket, Failed(ticket.request.id, reason))
        self.metrics.failed(ticket.request, outcome)
        await self.broker.fail(ticket.request.id, reason, time.time())

    def _leave(self, ticket: InFlightRequest, event: Event) -> None:
        self._tickets.pop(ticket.request.id, None)
        self.tell(event)
        self.foresight.ended(ticket.request.id)

    # ---- background work

    def _run_background(self, ticket: InFlightRequest) -> None:
        task = asyncio.create_task(self._background_job(ticket))
        self._background[ticket.request.id] = task
        task.add_done_callback(lambda _: self._background.pop(ticket.request.id, None))

    async def _background_job(self, ticket: InFlightRequest) -> None:
        self._enter(ticket)
        try:
            answer = await self.begin(ticket)
            await answer.close()
            if answer.status == 200:
                await self.finish(ticket, tokens_made(answer.head), answer.head)
            else:
                await self.fail(ticket, f"engine_refused: {answer.head.decode(errors='replace')[:2000]}")
        except EngineGone as error:
            await self.fail(ticket, f"engine_gone: {error.message}")
        except RequestError as error:
            await self.fail(ticket, f"dropped: {error.message}", "refused")
        except Exception as error:  # whatever it was, the request gets its end and frees its place
            log.exception("request %s failed", ticket.request.id)
            await self.fail(ticket, f"internal: {error!r}")

    async def cancel(self, id: str) -> bool:
        """Give up a background job that is not finished; tell whether there was one."""
        task, ticket = self._background.get(id), self._tickets.get(id)
        if task is None or ticket is None:
            return False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if ticket.closed:  # it ended this very moment
            return False
        await self.fail(ticket, "cancelled", "cancelled")
        return True


def _refused(what: str, refusal: Reject) -> RequestError:
    """Return the 429 that says why, and when it pays to ask again."""
    seconds = f"{refusal.retry_after or 1:.0f}"
    return RequestError(
        what, f"Try again in {seconds} s.", code=refusal.reason, status=429, kind="rate_limit_error",
        headers={"retry-after": seconds, "x-headway-dropped-reason": refusal.reason},
    )  # fmt: skip


def tokens_made(body: bytes) -> int:
    """Return the output tokens that a complete response reports, 0 when it has no usage."""
    try:
        return int(json.loads(body)["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0


def _ticket(request: Request, kind: Kind, upstream: dict[str, Any], background: bool) -> InFlightRequest:
    place: asyncio.Future[VllmEngine] = asyncio.get_running_loop().create_future()
    return InFlightRequest(request, kind, upstream, place, {}, background)


def _job_of(ticket: InFlightRequest) -> Job:
    request = ticket.request
    body, core = json.dumps(ticket.upstream).encode(), _CORE.dump_json(request).decode()
    return Job(request.id, request.tenant, PATHS[ticket.kind], body, core, request.arrival, ticket.background)


def _ticket_of(job: Job) -> InFlightRequest:
    """Return the ticket of a stored job, its promises counted from its first arrival."""
    kind: Kind = "chat" if job.path == PATHS["chat"] else "completions"
    return _ticket(_CORE.validate_json(job.request), kind, json.loads(job.body), True)
