"""The dispatcher: tells the controller events and carries out its commands.

`Send` resolves a request's `engine_future`; the request's own task (`request_path.py`) then talks to that
engine itself, so tokens never pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from headway import clock
from headway.apps.account import EndedRun, RunAccount
from headway.apps.run import within
from headway.core.controller import Controller
from headway.core.drops import prepare
from headway.engines.vllm.process.client import VllmEngine
from headway.errors import EngineError
from headway.events import Arrived, Event, InstanceUp, Returned, RunEnded, Started, Tick
from headway.serve import tasks
from headway.serve.metrics import Metrics
from headway.serve.overdue import OverdueWatch
from headway.serve.planning import Planning
from headway.serve.prewarm import Warmups
from headway.serve.refusals import refusal
from headway.serve.requests import InFlightRequest, ReturnReason
from headway.serve.swaps import ModelSwaps
from headway.stages import Prewarm
from headway.types import Command, Reject, Request, Rerank, Send, Swap, Warm

Listener = Callable[[Event], None]
_TICK = 1.0  # seconds between ticks for planners that wait for time to pass
log = logging.getLogger("headway.serve")


class Dispatcher:
    """Connects the controller to the engines and to the requests in flight.

    engines: makes the engines, given the listener for their `InstanceUp` and `InstanceDown`.
    runs: the account of application runs, which says when one has ended.
    drops: some class drops requests, so the controller is told what the engines learn (as for planners that
        think, swap models or order application runs: they plan by it).
    """

    def __init__(
        self, controller: Controller, metrics: Metrics,
        engines: Callable[[Listener], dict[str, VllmEngine]], runs: RunAccount, *, drops: bool = False,
    ) -> None:  # fmt: skip
        self.controller = controller
        self.engines: Mapping[str, VllmEngine] = engines(self.dispatch)
        self.in_flight: dict[str, InFlightRequest] = {}
        self.runs = runs
        self.swaps = ModelSwaps(controller, self.engines, self.in_flight)
        self.warmups = Warmups(self.dispatch, metrics.prewarm)
        self._metrics = metrics
        self._planning = Planning(controller, self.execute)
        self._overdue = OverdueWatch(controller, self.engines, self.execute)
        swapping = controller.planner.swaps and any(one.models.swaps for one in self.engines.values())
        plans_by_it = controller.planner.thinks or swapping or controller.planner.knowledge is not None
        self._follows_latency = drops or plans_by_it
        self._ranks = {id: RankUpdates(engine) for id, engine in self.engines.items()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engines and the planner until the block ends."""
        await asyncio.to_thread(self.controller.planner.prepare)
        if self._follows_latency:
            await asyncio.to_thread(prepare)
        try:
            for engine in self.engines.values():
                await engine.start()
            loops: list[tasks.Loop] = [self._tick, self._planning.run, *self._overdue.loops()]
            loops += (ranks.run for ranks in self._ranks.values())
            if self._follows_latency:
                loops.append(partial(self._overdue.follow_latency, self.dispatch))
            async with tasks.running(*loops, failed=self._metrics.loop_failed):
                yield
        finally:
            await self.warmups.close()
            await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    # ---- events

    def dispatch(self, event: Event) -> None:
        """Tell the controller an event; its commands are executed now, or when a slow planner has planned."""
        ended = self.runs.note(event, clock.now())
        if not isinstance(event, RunEnded):  # the account says when a run ends
            self._planning.note(event)
        self._end_runs(ended)
        if isinstance(event, Started) and event.id in self.in_flight:
            self.warmups.used(self.in_flight[event.id].request)
        if isinstance(event, InstanceUp):  # a swap may have failed once too often
            self.swaps.refuse_unavailable()
        self._overdue.arm()

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

    def add(self, in_flight: InFlightRequest) -> None:
        """Queue a request that was stored."""
        self.in_flight[in_flight.id] = in_flight
        in_flight.queued = clock.now()
        self.dispatch(Arrived(in_flight.request))
        unavailable = self.swaps.unavailable(in_flight.request.model)
        if unavailable is not None:  # given up while the request was stored, or before it was recovered
            in_flight.refuse(unavailable)

    def requeue(self, in_flight: InFlightRequest, reason: ReturnReason) -> None:
        """Queue a request again whose engine died, or began to load another model, before it answered."""
        in_flight.await_engine_again(reason)
        self.dispatch(Returned(in_flight.id))

    def remove(self, in_flight: InFlightRequest, event: Event) -> None:
        """Let go of a request; event: Finished or Failed."""
        self.in_flight.pop(in_flight.id, None)
        self.dispatch(event)

    def _end_runs(self, ended: Sequence[EndedRun]) -> None:
        """Count runs that have ended, and tell the planner."""
        for run in ended:
            self._metrics.runs.ended(run)
            self._planning.note(RunEnded(*run.key))

    async def _tick(self) -> None:
        """Let silent runs end, and planners run that wait for nothing but time."""
        while True:
            await asyncio.sleep(_TICK)
            self._end_runs(self.runs.expire(clock.now()))
            if self.controller.queued:
                self.dispatch(Tick())

    # ---- commands

    def execute(self, commands: Sequence[Command]) -> None:
        """Carry out commands in their order."""
        for command in commands:
            match command:
                case Send():
                    self._send(command)
                case Rerank():
                    self._rerank(command)
                case Reject():
                    self._reject(command)
                case Swap():
                    self.swaps.swap(command)
                case Warm():
                    self.swaps.warm(command)
                case Prewarm():
                    self.warmups.put(command)

    def _send(self, send: Send) -> None:
        in_flight = self.in_flight[send.id]
        in_flight.rank = send.rank
        in_flight.sends += ((clock.now(), send.instance),)
        if not in_flight.engine_future.done():
            in_flight.engine_future.set_result(self.engines[send.instance])
        if in_flight.returned is not None:
            since, reason = in_flight.returned
            self._metrics.requeued(reason, time.monotonic() - since)
            in_flight.returned = None

    def _rerank(self, rerank: Rerank) -> None:
        for id, rank in rerank.ranks.items():
            if id in self.in_flight:
                self.in_flight[id].rank = rank  # the request may not be on its way yet
        self._ranks[rerank.instance].put(rerank.ranks)

    def _reject(self, reject: Reject) -> None:
        """Refuse a request that was accepted and has no token yet."""
        self._metrics.dropped(reject.reason)
        if reject.id in self.in_flight:
            self.in_flight[reject.id].refuse(refusal(reject))


class RankUpdates:
    """Brings changed ranks to one engine, one message at a time; a newer rank replaces one not yet sent."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._ranks: dict[str, float] = {}
        self._changed = asyncio.Event()

    def put(self, ranks: Mapping[str, float]) -> None:
        """Send these ranks soon."""
        self._ranks.update(ranks)
        self._changed.set()

    async def run(self) -> None:
        """Send ranks until cancelled; those that cannot be sent are logged and dropped."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            ranks, self._ranks = self._ranks, {}
            try:
                await self._engine.rerank(ranks)
            except EngineError as error:
                log.error("engine %s keeps its old ranks: %s", self._engine.id, error)
