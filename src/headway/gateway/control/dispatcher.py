"""The gateway's side: its requests in flight, whose events go to the controller.

`Send` resolves a request's `engine_future`; the request's own task (`requests/path.py`) then talks to that
engine itself, so tokens never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from headway import clock
from headway.engines.vllm.process.models import ModelUnavailable
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError
from headway.events import Arrived, Event, InstanceUp, Returned, RunEnded, Started
from headway.gateway import tasks
from headway.gateway.control.control import ControlView
from headway.gateway.control.prewarm import Warmups
from headway.gateway.errors import refusal
from headway.gateway.in_flight import InFlightRequest, RequestState, ReturnReason
from headway.gateway.watch.metrics import Metrics
from headway.policy.apps.account import EndedRun, RunAccount
from headway.policy.apps.run import Key, place_of, within
from headway.prefix import run_number
from headway.stages import Prewarm
from headway.types import Command, Recall, Reject, Request, Rerank, Send, Swap

log = logging.getLogger("headway.gateway")


class RunEnds:
    """Remembers which engines had requests of each live run, and reports its end to them.

    The engines then evict first the KV that only these runs have used. The end of a run that was silent for too long is
    not reported, as it may go on: its KV keeps its place in the engines' order.
    """

    def __init__(self, engines: Mapping[str, EngineView]) -> None:
        self._engines = engines
        self._of: dict[Key, set[str]] = {}
        self._untold: dict[str, list[int]] = {}  # by engine
        self._changed = asyncio.Event()

    def sent(self, request: Request, engine: str) -> None:
        """Take note of a request that goes to an engine; its run is live until `ended`."""
        if request.stage is not None:
            self._of.setdefault(place_of(request)[0], set()).add(engine)

    def ended(self, run: EndedRun) -> None:
        """Report a run soon whose client said that it ends."""
        for engine in self._of.pop(run.key, ()):
            if run.told:
                self._untold.setdefault(engine, []).append(run_number(run.key))
                self._changed.set()

    async def run(self) -> None:
        """Report ends until cancelled, in one message to each engine at a time."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            untold, self._untold = self._untold, {}
            await asyncio.gather(*(self._tell(name, runs) for name, runs in untold.items()))

    async def _tell(self, name: str, runs: Sequence[int]) -> None:
        """Report runs to an engine; if it does not answer, its KV keeps the order of last use."""
        engine = self._engines.get(name)
        if engine is None or not engine.up.is_set() or not engine.prefix_caching:
            return
        try:
            await engine.end_runs(runs)
        except EngineError as error:
            log.debug("engine %s keeps the KV of runs that have ended: %s", name, error)


_EXPIRE = 1.0  # seconds between two looks for runs that are silent


class Dispatcher:
    """Connects the controller to the requests in flight, and these to the engines.

    runs: the account of application runs, which says when one has ended.
    """

    def __init__(
        self, control: ControlView, engines: Mapping[str, EngineView], runs: RunAccount, metrics: Metrics
    ) -> None:
        self.control, self.engines, self.runs = control, engines, runs
        self.in_flight: dict[str, InFlightRequest] = {}
        self.warmups, self._run_ends = Warmups(self.notify, metrics.prewarm), RunEnds(engines)
        self._metrics = metrics

    # ---- events

    def notify(self, event: Event) -> None:
        """Notify the controller of an event."""
        ended = self.runs.note(event, clock.now())
        if not isinstance(event, RunEnded):  # the account says when a run ends
            self.control.notify(event)
        self._end_runs(ended)
        if isinstance(event, Started) and event.id in self.in_flight:
            self.warmups.used(self.in_flight[event.id].request)

    def receive(self, event: Event) -> None:
        """Take note of an event that an engine has reported."""
        if isinstance(event, InstanceUp):  # a swap may have failed once too often
            self.refuse_unavailable()

    def add(self, in_flight: InFlightRequest) -> None:
        """Queue a request that was stored."""
        self.in_flight[in_flight.id] = in_flight
        in_flight.queued = clock.now()
        in_flight.enter(RequestState.QUEUED)
        self.notify(Arrived(in_flight.request, in_flight.keys))
        self._refuse_unavailable(in_flight)

    def _refuse_unavailable(self, in_flight: InFlightRequest) -> None:
        """Refuse a request whose model was given up while it was stored, recovered or answered."""
        if (unavailable := self.unavailable(in_flight.request)) is not None:
            in_flight.refuse(unavailable)

    def requeue(self, in_flight: InFlightRequest, reason: ReturnReason, aside_s: float = 0.0) -> None:
        """Queue a request again that came back from its engine before it had its answer. aside_s: as in `Returned`."""
        in_flight.await_engine_again(reason)
        tokens = len(in_flight.transcript.ids) if in_flight.transcript else 0
        engines = None if in_flight.via is None else in_flight.request.engines
        self.notify(Returned(in_flight.id, tokens, aside_s, engines))
        self._refuse_unavailable(in_flight)

    def remove(self, in_flight: InFlightRequest, event: Event) -> None:
        """Let go of a request; event: Finished or Failed."""
        self.in_flight.pop(in_flight.id, None)
        self.notify(event)

    # ---- application runs

    def promised(self, request: Request) -> Request:
        """Return a request with the SLO that the deadline of its run means for it."""
        stage = request.stage
        if stage is None:
            return request
        run = self.runs.live((request.tenant, stage.app, stage.run))
        target, began = stage.target, request.arrival
        if run is not None:
            target, began = run.target if target is None else target, run.began
        return replace(request, slo=within(request.slo, target, began, request.arrival))

    def _end_runs(self, ended: Sequence[EndedRun]) -> None:
        """Count runs that have ended, and notify the controller."""
        for run in ended:
            self._metrics.runs.ended(run)
            self._run_ends.ended(run)
            self.control.notify(RunEnded(*run.key))

    def loops(self) -> list[tasks.Loop]:
        """Return what runs as long as requests come."""
        return [self._expire_runs, self._run_ends.run]

    async def _expire_runs(self) -> None:
        """Let silent runs end until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRE)
            self._end_runs(self.runs.expire(clock.now()))

    # ---- commands

    def execute(self, command: Command) -> None:
        """Apply a command to the requests in flight."""
        match command:
            case Send():
                self._send(command)
            case Rerank():
                for id, rank in command.ranks.items():
                    if id in self.in_flight:
                        self.in_flight[id].rank = rank  # the request may not be on its way yet
            case Recall(id, instance):
                one = self.in_flight.get(id)
                if one is not None and one.state is RequestState.SENT and one.sends[-1][1] == instance:
                    one.take_back()
            case Reject():
                self._reject(command)
            case Swap():
                self.take_back(self.unanswered(command.instance))
            case Prewarm():
                self.warmups.put(command)

    def _send(self, send: Send) -> None:
        in_flight = self.in_flight[send.id]
        in_flight.rank, in_flight.soft, in_flight.found = send.rank, send.soft, send.found
        in_flight.overflow = send.overflow
        in_flight.sends += ((clock.now(), send.instance),)
        in_flight.enter(RequestState.SENT)
        self._metrics.placed(in_flight.request, send)
        self._run_ends.sent(in_flight.request, send.instance)
        if not in_flight.engine_future.done():
            in_flight.engine_future.set_result(self.engines[send.instance])
        if in_flight.returned is not None:
            since, reason = in_flight.returned
            self._metrics.requeued(reason, time.monotonic() - since)
            in_flight.returned = None

    def _reject(self, reject: Reject) -> None:
        """Refuse a request that was accepted and has no token yet."""
        if (refused := self.in_flight.get(reject.id)) is not None:
            self._metrics.dropped(reject.reason, refused.request.tenant)
            refused.refuse(refusal(reject))

    def unanswered(self, engine: str) -> list[InFlightRequest]:
        """Return what was sent to an engine and has no byte of an answer; one not streamed comes as a whole."""
        sent = (one for one in self.in_flight.values() if one.state is RequestState.SENT)
        return [one for one in sent if one.sends[-1][1] == engine]

    def take_back(self, requests: Iterable[InFlightRequest]) -> None:
        """Take requests back from an engine that has not begun to answer them; they are queued again at once."""
        for request in requests:
            request.take_back()

    # ---- models that are given up

    def unavailable(self, request: Request) -> ModelUnavailable | None:
        """Return the error of a request whose engines have left or given up its model; None = one may still load it."""
        model = request.model
        stay = (one for one in self.engines.values() if one.leaving != "remove" and not one.config.overflow)
        having = [one for one in stay if model in one.models.names and request.may(one.id)]
        if not having and request.engines:
            problem = f"None of the engines that this request may go to is left: {', '.join(request.engines)}."
            return ModelUnavailable(problem, "Send it again.", code="model_unavailable")
        if not having:
            problem, hint = f"No engine has the model {model} any more.", "Use another model, or add an engine for it."
            return ModelUnavailable(problem, hint, code="model_unavailable")
        errors = [engine.models.unavailable(model) for engine in having]
        if None in errors:
            return None
        names = ", ".join(engine.id for engine in having)
        return ModelUnavailable(
            f"The model {model} could not be loaded by {names}: {errors[-1]}",
            "Repair its directory and restart Headway; until then use another model.",
            code="model_unavailable",
        )

    def refuse_unavailable(self) -> None:
        """End the queued requests whose models are given up, or whose engines have left."""
        for one in self.in_flight.values():
            if one.state is RequestState.QUEUED and (error := self.unavailable(one.request)) is not None:
                one.refuse(error)

    def state(self, id: str) -> str | None:
        """Say why a request is not in an engine; None when it is in one, or waits for its turn alone."""
        if (one := self.in_flight.get(id)) is None or one.state is not RequestState.QUEUED:
            return None
        return self.control.unavailability_reason(one.request.model)
