"""The path of one request: admitted, stored, queued, opened on an engine, finished or failed.

Whatever happens, an accepted request ends exactly once, in the core and in the broker.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from headway import clock
from headway.config import Config, Key
from headway.engines.vllm.fatal_fields import check_fields
from headway.engines.vllm.process.answers import Shape
from headway.engines.vllm.process.connection import EngineGone, MalformedAnswer, Part
from headway.engines.vllm.process.view import EngineView
from headway.engines.vllm.request_metadata import as_header, write_metadata
from headway.errors import EngineError, HeadwayError, RequestError
from headway.events import Failed, Finished, Started
from headway.gateway.bill import Bill, accounts_of, priced, reserved_in, without_promises
from headway.gateway.budget import AnswerBudget, Held
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.control.lengths.service import LengthService
from headway.gateway.errors import refusal
from headway.gateway.http.turns import Turns
from headway.gateway.in_flight import (
    EngineKilled,
    EngineWithoutAddress,
    InFlightRequest,
    Outcome,
    RequestState,
    ReturnReason,
    TakenBack,
    Via,
)
from headway.gateway.offload import offload
from headway.gateway.parsing.engine_body import EngineBody
from headway.gateway.parsing.idempotency import check_same
from headway.gateway.parsing.media import PATHS as AUDIO
from headway.gateway.parsing.pooling import PATHS as POOLING
from headway.gateway.parsing.requests import PATHS, Kind, ParsedRequest
from headway.gateway.requests.closing import Closings, Then
from headway.gateway.requests.engine_response import ERROR_EVENT, EngineResponse
from headway.gateway.requests.overflow import Declined, answered, reserve, settle
from headway.gateway.transcript import Diverged, Transcript
from headway.gateway.watch.ends import Ended, Observer, Refused
from headway.gateway.watch.tracing import RequestTracing
from headway.gateway.watch.usage import Usage
from headway.policy.core.shares import Group
from headway.store.queue.port import AccountSpent, Broker, queue_unavailable
from headway.types import Reject

_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two questions to a broker that is out
_AT_A_TIME = 8  # streams that begin or end in one iteration of the event loop: about two milliseconds
_LONGEST_PROMPT = 2**18  # tokens of a prompt whose ids an engine may list in the first event of a stream
T = TypeVar("T")
log = logging.getLogger("headway.gateway")


class RequestPath:
    """Takes requests from acceptance to their end."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        broker: Broker,
        lengths: LengthService,
        usage: Usage,
        tracing: RequestTracing,
        observers: Observer,
    ) -> None:
        self.limits, self.prices, self._dispatcher, self.broker = config.server, config.prices, dispatcher, broker
        self._lengths, self._tracing, self.observers, self.usage = lengths, tracing, observers, usage
        self.closings = Closings(broker)
        self.large_chunk = asyncio.Lock()  # held by the stream that brings one
        self.turns = Turns(_AT_A_TIME)  # of streams that begin or end
        self._answers = AnswerBudget(self.limits.max_answer_mib * 2**20)
        self.answered: Then | None = None  # for requests whose answers belong to a conversation
        self._storing = Counter[Group]()  # places of admitted requests that the broker has not stored yet

    # ---- in

    def check_rate(self, key: Key, *, counted: bool = False) -> None:
        """Count a request of a tenant, unless it is `counted`; refuse it when its minute is used up (429)."""
        now = clock.now()
        try:
            self.usage.check(key, now, counted=counted)
        except RequestError:
            self.observers.refused(Refused("rate_limit", key.tenant))
            raise
        self.usage.count(key.tenant, now, requests=0 if counted else 1)

    def check_room(self, key: Key) -> None:
        """Refuse a request before its body is read (429), if its tenant may not have more of any class."""
        controller = self._dispatcher.control.controller
        reject = controller.full(key.tenant, None, clock.now(), self._pending_by_group(), key.max_queued)
        if reject is not None:
            self.observers.refused(Refused(reject.reason, key.tenant))
            raise refusal(reject)

    def check_queue(self) -> None:
        """Refuse what the broker would not keep. HeadwayError (503)."""
        if (problem := self.broker.problem()) is not None:
            raise queue_unavailable(problem)

    def check_capacity(self, parsed: ParsedRequest, most: int | None = None) -> None:
        """Refuse a request before it is stored (429): the queue has no room, or it would be late (`drop`).

        Only the latter is a promise that was not kept. ModelUnavailable (503) when its model is given up,
        HeadwayError (503) while the controller cannot be reached. most: places of its tenant that may wait.
        """
        if (problem := self._dispatcher.control.problem()) is not None:
            raise HeadwayError(problem, "Try again soon.", status=503, kind="server_error", code="queue_unreachable")
        unavailable = self._dispatcher.unavailable(parsed.request)
        if unavailable is not None:
            raise unavailable
        reject = self.admission(parsed, most)
        if reject is None:
            return
        self.observers.refused(Refused(reject.reason, parsed.request.tenant, parsed.request))
        raise refusal(reject)

    def admission(self, parsed: ParsedRequest, most: int | None = None) -> Reject | None:
        """Return why a request would be refused now, None = it would not be. Nothing is counted."""
        control = self._dispatcher.control
        return control.controller.admit(parsed.request, clock.now(), self._pending_by_group(), most, parsed.keys)

    def _pending_by_group(self) -> Mapping[Group, int]:
        """Return the places that the controller does not count: of what is being stored, or elsewhere."""
        elsewhere = self._dispatcher.control.remote_counts
        return self._storing + Counter(elsewhere) if elsewhere else self._storing

    async def admit(self, parsed: ParsedRequest, key: Key | None) -> ParsedRequest:
        """Return a request with its run's deadline and the job of its idempotency key, if it has room.

        Errors as `with_earlier` and, for one without such a job, `check_rate` and `check_capacity`. To be
        stored without a pause, as until then it counts for no limit.
        """
        if parsed.request.stage is not None:
            parsed = replace(parsed, request=self._dispatcher.promised(parsed.request))
        parsed = await self.with_earlier(parsed)
        if parsed.earlier is None:
            if key is not None:
                self.check_rate(key, counted=True)  # others' prompts were read meanwhile
            self.check_capacity(parsed, None if key is None else key.max_queued)
        return parsed

    async def with_earlier(self, parsed: ParsedRequest) -> ParsedRequest:
        """Return a request with the job accepted under its idempotency key; 422 if that is another's."""
        if parsed.digest is None:
            return parsed
        job = await self.broker.get(parsed.request.id)
        if job is not None:
            await offload(len(job.request), lambda: check_same(job, parsed.digest))
        return replace(parsed, earlier=job)

    async def accept(self, parsed: ParsedRequest, held: Held, via: Via | None = None) -> InFlightRequest:
        """Store a request durably and queue it. From here on it must end. via: as in `InFlightRequest`."""
        in_flight = await self.store(parsed, held, via)
        self._dispatcher.add(in_flight)
        return in_flight

    async def store(self, parsed: ParsedRequest, held: Held, via: Via | None = None) -> InFlightRequest:
        """Store a request durably; it keeps the memory that its body holds."""
        in_flight = InFlightRequest(
            parsed.request, parsed.kind, parsed.upstream, parsed.stream, parsed.background, keys=parsed.keys,
            conversation=None if parsed.kept is None else parsed.kept.conversation, via=via,
        )  # fmt: skip
        single = parsed.request.places == 1 and parsed.request.prompt_tokens <= _LONGEST_PROMPT
        if parsed.stream and single and self.limits.max_resumes and parsed.kind not in AUDIO and via is None:
            in_flight.transcript = Transcript(shows_ids=parsed.wants_ids)
        self._tracing.begin(in_flight, parsed.trace_parent)
        in_flight.waited = self._dispatcher.control.unavailability_reason(parsed.request.model)
        group, places = (parsed.request.tenant, parsed.request.tier), parsed.request.places
        self._storing[group] += places
        now, tokens = clock.now(), parsed.request.prompt_tokens
        self.usage.count(parsed.request.tenant, now, tokens=tokens)
        try:
            await self._lengths.read(in_flight.request, parsed.text)  # before it must end
            await self._put(in_flight, parsed)
        except BaseException:
            self.usage.count(parsed.request.tenant, now, tokens=-tokens)
            self.observers.ended(Ended(in_flight, clock.now(), "not_stored"))
            raise
        finally:
            self._storing -= Counter({group: places})
        if parsed.kept is not None:  # it is in the queue alone
            held.resize(held.size - len(parsed.kept.content))
        in_flight.held = held.keep()
        return in_flight

    async def _put(self, in_flight: InFlightRequest, parsed: ParsedRequest) -> None:
        """Store a request, and count what it may cost; RequestError (429) when a budget has no room for that.

        Beyond a soft budget it is stored without promises.
        """
        key, request, now = parsed.payer, in_flight.request, datetime.now(UTC)
        price = self.prices.get(request.adapter or "") or self.prices.get(request.model)
        accounts = {one.name: one for one in accounts_of(key, request, price, now)}
        reserved = reserved_in([*accounts.values()])
        in_flight.bill = Bill("" if key is None else key.label, price, reserved)
        while True:
            try:
                charges = [one.charge for one in accounts.values()]
                await self.broker.put(in_flight.to_job(parsed.digest, parsed.kept), charges)
                return
            except AccountSpent as spent:
                account = accounts[spent.account]
                if not account.limits[0].soft:
                    self.observers.refused(Refused("budget", request.tenant, request))
                    raise account.refusal(spent.counted, now) from spent
                in_flight.bill = replace(in_flight.bill, beyond=account.what)
                in_flight.request = without_promises(request)
                del account.limits[0]
            except asyncio.CancelledError:  # stored or not: calls of the broker take effect in their order
                reason, unused = "client_gone: disconnected while it was stored", in_flight.unused("failed", 0)
                await self.closings.fail(in_flight.id, reason, clock.now(), unused)
                raise

    # ---- through the engine

    async def open(self, in_flight: InFlightRequest) -> EngineResponse:
        """Wait for an engine and return its response, begun.

        An engine that dies before its response begins costs an attempt and the request queues again, up to
        server.max_attempts; then EngineKilled. One that begins to load another model costs none. HeadwayError
        when it is refused before its first token, EngineError when its engine answers too late or with nonsense.
        """
        while True:
            engine = await in_flight.engine_future
            try:
                if not engine.takes(in_flight.request.model):  # a swap began while this task was waking up
                    raise TakenBack
                response = await self._open_unless_refused(engine, in_flight)
            except TakenBack:
                self._dispatcher.requeue(in_flight, _reason_taken_back(engine, in_flight))
            except Declined as declined:
                log.warning("request %s: %s", in_flight.id, declined)
                await settle(self.broker, in_flight, 0.0)
                in_flight.raise_if_refused()
                self._dispatcher.requeue(in_flight, "declined", declined.aside_s)
            except EngineGone as error:
                lives = await self._note_gone(engine, in_flight, error)
                attempts = await self._count_attempt(in_flight)
                in_flight.raise_if_refused()
                if attempts >= self.limits.max_attempts:
                    if lives:
                        raise
                    raise EngineKilled(engine.id, attempts) from error
                self._dispatcher.requeue(in_flight, "engine_gone")
            else:
                if in_flight.first_token is None:
                    in_flight.first_token = clock.now()
                in_flight.prompt_tokens = response.prompt_tokens
                in_flight.cached_tokens = response.cached_tokens
                if in_flight.transcript is not None and not engine.api.vllm:
                    in_flight.transcript.unable = True  # its tokens are not known
                in_flight.enter(RequestState.ANSWERING)
                in_flight.note_begun()
                self._dispatcher.notify(Started(in_flight.id))
                return response

    async def _note_gone(self, engine: EngineView, in_flight: InFlightRequest, error: EngineGone) -> bool:
        """Take note that a request has lost its engine; return whether that can still work.

        `error` again for a request that a proxy has sent there, as it cannot be sent elsewhere. After
        EngineWithoutAddress, the request is restricted to the engines that the proxy now has an address for, with
        errors as `Via.restricted`.
        """
        if isinstance(error, EngineWithoutAddress) and in_flight.via is not None:
            log.warning("request %s: %s", in_flight.id, error.message)
            in_flight.request = in_flight.via.restricted(in_flight.request)
            return True
        log.warning("request %s: the engine %s went away: %r", in_flight.id, engine.id, error.why)
        lives = engine.up.is_set() and await engine.lives()
        if engine.up.is_set() and not lives:
            engine.lost()
        if in_flight.via is not None:
            raise error
        return lives

    async def lives(self, engine: str) -> bool:
        """Return whether an engine can still work."""
        one = self._dispatcher.engines.get(engine)  # None = it was removed
        return one is not None and await one.lives()

    async def resume(self, in_flight: InFlightRequest, error: EngineGone) -> None:
        """Queue a stream again that has lost its engine, to go on at another one, or there when it is back.

        `error` again when it has gone on as often as it may (server.max_resumes), or cannot.
        """
        transcript, engine = in_flight.transcript, self._dispatcher.engines.get(in_flight.sends[-1][1])
        if engine is not None:  # it was not removed
            await self._note_gone(engine, in_flight, error)
        if transcript is None or transcript.unable:
            self.observers.resumed(in_flight.request, "unable")
            raise error
        if in_flight.resumes >= self.limits.max_resumes:
            self.observers.resumed(in_flight.request, "limit")
            raise error
        in_flight.resumes += 1
        transcript.rewind()
        self._dispatcher.requeue(in_flight, "engine_gone")
        self.observers.resumed(in_flight.request, "resumed")

    async def _open_unless_refused(self, engine: EngineView, in_flight: InFlightRequest) -> EngineResponse:
        """Open the response; a refusal in the meantime closes the connection, so that the engine aborts.

        TakenBack when a swap does, an engine that leaves, or an overflow engine that is to have it.
        """
        in_flight.raise_if_refused()
        in_flight.opening = this = asyncio.current_task()
        assert this is not None, "on the event loop"
        try:
            response = await self._open_on(engine, in_flight)
        except asyncio.CancelledError:
            if in_flight.refusal is None and in_flight.state is not RequestState.QUEUED:
                raise
            if this.uncancel():  # its client has left as well
                raise
            in_flight.raise_if_refused()
            raise TakenBack from None
        finally:
            in_flight.opening = None
        if in_flight.refusal is not None:  # while the first token was on its way
            await response.close()
            raise in_flight.refusal
        return response

    async def _open_on(self, engine: EngineView, in_flight: InFlightRequest) -> EngineResponse:
        streams, shape = in_flight.streams, _shape(in_flight.kind)
        upstream = await self._upstream(engine, in_flight)
        if engine.config.overflow:
            await reserve(self.broker, engine, in_flight)
        open_at = engine.open if in_flight.via is None else partial(in_flight.via.open, engine)
        request = open_at(PATHS[in_flight.kind], *upstream)
        opening = EngineResponse.open(engine.id, request, self._answers, stream=streams, shape=shape)
        if engine.config.overflow:
            return await answered(engine.id, opening)
        try:
            response = await opening
        except MalformedAnswer as error:
            log.error("request %s: %s", in_flight.id, error)
            if not await engine.lives():
                raise EngineGone(engine.id, error) from error
            raise
        # A live engine's error is this request's fault, and the client gets it.
        broken = response.status >= 500 or ERROR_EVENT in response.head
        if broken and not await engine.lives():
            await response.close()
            raise EngineGone(engine.id, response.head[:300])
        return response

    async def _upstream(
        self, engine: EngineView, in_flight: InFlightRequest
    ) -> tuple[Sequence[Part], Mapping[str, str]]:
        """Return body, in parts, and headers for an engine."""
        forecast = self._lengths.lengths.forecast(in_flight.request)
        in_flight.forecast = forecast.mean * in_flight.request.places
        upstream = in_flight.upstream or await self._stored_body(in_flight.id)
        if engine.fatal:  # it may have said so after the request was accepted
            raw = await offload(len(upstream.content), upstream.fields)
            check_fields(raw, engine.fatal)
        said = () if in_flight.transcript is None else in_flight.transcript.ids
        if said and not engine.instance.continues:
            self.observers.resumed(in_flight.request, "unable")
            raise Diverged
        if engine.config.rewrites:
            whole, request = upstream, in_flight.request
            upstream = await offload(len(whole.content), lambda: whole.fitted(engine.config, request))
        if not engine.api.vllm:
            return [upstream.content], {}
        metadata = write_metadata(
            in_flight.request, forecast, in_flight.rank, engine.ahead, in_flight.soft,
            said=said, first=in_flight.first_token,
        )  # fmt: skip
        headers = {"x-request-id": in_flight.id} | self._tracing.headers(in_flight.id) | upstream.headers
        if in_flight.kind in POOLING:
            return [upstream.content], headers | as_header(metadata)
        return upstream.parts(metadata, ids=in_flight.transcript is not None and engine.instance.continues), headers

    async def _stored_body(self, id: str) -> EngineBody:
        job = await self._retry_broker(lambda: self.broker.get(id))
        if job is None or not job.body:
            raise EngineError(f"The body of {id} is not in the queue any more.", "Send the request again.")
        return await offload(len(job.body), lambda: EngineBody.of(json.loads(job.body)))

    async def _count_attempt(self, in_flight: InFlightRequest) -> int:
        """Return how many engines died over this request; for background work restarts do not reset it."""
        in_flight.attempts += 1
        if not in_flight.background:
            return in_flight.attempts
        return await self._retry_broker(lambda: self.broker.attempt(in_flight.id))

    async def _retry_broker(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the broker's answer, asking again while it is out, as that loses none of its jobs.

        Until cancelled, as it is when another gateway has taken the request over meanwhile.
        """
        pause = _PAUSE_S
        while True:
            try:
                return await ask()
            except HeadwayError as error:
                if error.status != 503:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    # ---- out

    async def price(self, in_flight: InFlightRequest, response: EngineResponse) -> float | None:
        """Return the cost of a whole answer, and put it into its usage; None = an error, or a model without a price."""
        used = in_flight.used("finished", response.output_tokens)
        cost = in_flight.bill.cost(used) if response.status == 200 else None
        if cost is not None:
            response.head = await offload(len(response.head), partial(priced, response.head, cost))
        return cost

    async def finish(self, in_flight: InFlightRequest, output_tokens: int, result: bytes | None = None) -> bool:
        """End a request as answered, first in the core, then in the broker. False when it had ended."""
        if not in_flight.enter(RequestState.ENDED):
            return False
        in_flight.drop_body()
        request, ended = in_flight.request, Ended(in_flight, clock.now(), "finished", output_tokens)
        self._lengths.answered(request, request.per_answer(output_tokens))
        cached, prompt = in_flight.cached_tokens, in_flight.prompt_tokens
        finished = Finished(request.id, output_tokens, cached_tokens=cached, prompt_tokens=prompt, met=ended.met)
        self._dispatcher.remove(in_flight, finished)
        self._lengths.ended(request.id)
        then = None if in_flight.conversation is None else self.answered
        unused = in_flight.unused("finished", output_tokens)
        done = await self.closings.done(request.id, result, ended.at, unused, then)
        self.observers.ended(ended if done else replace(ended, outcome="abandoned"))
        if (units := in_flight.spent("finished", output_tokens)) is not None:
            await settle(self.broker, in_flight, units)
        return done

    async def fail(
        self, in_flight: InFlightRequest, reason: str, outcome: Outcome = "failed", output_tokens: int = 0
    ) -> None:
        """Close a request as failed, with the reason that the broker keeps.

        output_tokens: that its client has got.
        """
        if in_flight.enter(RequestState.ENDED):
            now = self._close(in_flight, reason, outcome, output_tokens)
            await self.closings.fail(in_flight.id, reason, now, in_flight.unused(outcome, output_tokens))

    def abandon(self, in_flight: InFlightRequest, reason: str) -> None:
        """Close a request here without an end in the broker."""
        if in_flight.enter(RequestState.ENDED):
            self._close(in_flight, reason, "abandoned")

    def _close(self, in_flight: InFlightRequest, reason: str, outcome: Outcome, output_tokens: int = 0) -> float:
        """Let go of a request that has ended without an answer; return when."""
        now = clock.now()
        in_flight.drop_body()
        self.observers.ended(Ended(in_flight, now, outcome, output_tokens, reason))
        self._dispatcher.remove(in_flight, Failed(in_flight.id, reason, missed=outcome in ("failed", "refused")))
        self._lengths.ended(in_flight.id)
        return now

    async def close(self) -> None:
        """Fail what still has a connection, and store its end; background work stays open in the broker."""
        for in_flight in [one for one in self._dispatcher.in_flight.values() if not one.background]:
            await self.fail(in_flight, "gateway_stopped")
        await self.closings.retry()


def _shape(kind: Kind) -> Shape:
    """Return what an answer has that is not streamed."""
    return "data" if kind in POOLING else "text" if kind in AUDIO else "choices"


def _reason_taken_back(engine: EngineView, in_flight: InFlightRequest) -> ReturnReason:
    """Return why a request was taken back from an engine."""
    if engine.leaving is not None:
        return "engine_leaves"
    return "overflow" if engine.takes(in_flight.request.model) else "model_swap"
