"""The controller's side: events in, commands out, and timers.

The gateway's side (`dispatcher.py`) and the engines' (`agents.py`) report events to it and carry out its commands.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Thread

from headway import clock
from headway.events import Event, Started, Tick
from headway.gateway import tasks
from headway.policy.core.controller import Controller
from headway.policy.core.shares import Group
from headway.policy.scale.rates import STEP_S
from headway.types import Command, Progress

log = logging.getLogger("headway.gateway")
Execute = Callable[[Sequence[Command]], None]


class Planning:
    """The controller as the dispatcher uses it: events in, commands to `execute` now or later.

    Every event is followed by a plan, which answers at once. A planner that has decisions which take long (a solver,
    a search) hands them out (`Planner.deliberate`): they run in a thread, one at a time, while events and plans go
    on, and the planner takes note of the result when it is there. A computation that holds Python's interpreter lock
    all the time still slows the event loop; numpy, numba (`nogil`) and solvers release it.
    """

    def __init__(self, controller: Controller, execute: Execute) -> None:
        self._controller, self._execute = controller, execute
        self._changed = asyncio.Event()
        self._short = 0.0

    def note(self, *events: Event) -> None:
        """Report events to the controller, in order, and execute the commands that follow."""
        now = clock.now()
        noted = [self._controller.note(event, now) for event in events]
        if any(noted):
            self.plan()
        if self._controller.planner.thinks:
            self._changed.set()

    def plan(self) -> None:
        """Let the planner run, and execute the commands that follow."""
        self._execute(self._controller.decide(clock.now()))

    async def run(self) -> None:
        """Run what the planner hands out until cancelled.

        A failing computation is logged, and the planner is asked again at the next event. Cancelling does not
        wait for the computation under way.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._deliberate()
            except Exception:
                log.exception("the planner failed; it is asked again at the next event")

    async def _deliberate(self) -> None:
        work = self._controller.deliberate(clock.now())
        if work is not None:
            result = await _in_thread(work)
            self._execute(self._controller.conclude(result, clock.now()))
            self._changed.set()
        self._warn()

    def _warn(self) -> None:
        """Log when the planner begins and when it ceases to see that the capacity is short."""
        gauges = self._controller.planner.gauges
        short = gauges.get("short_requests", 0.0)
        if short and not self._short:
            seconds = gauges.get("short_seconds", 0.0)
            log.warning("capacity is short: about %d requests will be late, by up to %.1f s", short, seconds)
        elif self._short and not short:
            log.info("the capacity suffices again")
        self._short = short


async def _in_thread(work: Callable[[], object]) -> object:
    """Compute in a thread that is left to itself when this call is cancelled.

    The thread is a daemon: a planner that never returns does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    computed: asyncio.Future[object] = loop.create_future()

    def resolve(result: object, error: BaseException | None) -> None:
        if computed.done():  # cancelled
            return
        if error is None:
            computed.set_result(result)
        else:
            computed.set_exception(error)

    def compute() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(resolve, result, error)

    Thread(target=compute, name="headway-planner", daemon=True).start()
    return await computed


Inquire = Callable[[str, Sequence[str]], None]
_TICK = 1.0  # seconds between ticks for planners that wait for time to pass


class ControlView(ABC):
    """The controller as the gateway's side sees it.

    controller: what admits requests, and knows the queue and the fleet.
    """

    controller: Controller

    @abstractmethod
    def notify(self, event: Event) -> None:
        """Notify the controller of an event."""

    def problem(self) -> str | None:
        """Return why no request can be queued at the moment, None = it can."""
        return None

    @property
    def remote_counts(self) -> Mapping[Group, int]:
        """Requests that other gateways have accepted and that have not ended, by tenant and class."""
        return {}

    def queued(self, model: str) -> int:
        """Return the number of requests for a model that are not inside an engine."""
        cluster = self.controller.cluster
        backlog, rows = cluster.backlog, cluster.backlog.rows()
        return int(((backlog.model[rows] == cluster.code(model)) & ~backlog.sent[rows]).sum())

    def unavailability_reason(self, model: str) -> str | None:
        """Say why a request for a model cannot be in an engine now; None when there is an instance for it."""
        cluster = self.controller.cluster
        if any(instance.model == model for instance in cluster.instances.values()):
            return None
        loading = [name for name, (_, wanted) in cluster.loading.items() if wanted == model]
        if loading:
            return f"{model} is being loaded by {', '.join(loading)}"
        fleet = cluster.instances | {name: before for name, (before, _) in cluster.loading.items()}
        if not fleet:
            return "no instance is up"
        able = [name for name, one in fleet.items() if model == one.model or one.can_load(model)]
        if able:
            return f"{model} is not loaded; {', '.join(able)} can load it"
        return f"{model} is not loaded, and no instance can load it now"


class Control(ControlView):
    """The controller as a running process uses it.

    execute: carries out commands, in their order.
    inquire: asks an instance how far it is with requests, by id; `progressed` takes its answer.
    drops: some class drops requests, so the controller wants to know what the engines learn (as for planners
        that think, swap models or order application runs: they plan by it). swaps: tells whether some engine has
        models.
    """

    def __init__(
        self,
        controller: Controller,
        execute: Execute,
        inquire: Inquire,
        *,
        drops: bool = False,
        swaps: Callable[[], bool] = lambda: False,
    ) -> None:
        self.controller, self.execute, self._inquire = controller, execute, inquire
        self._planning = Planning(controller, execute)
        self._drops, self._swaps = drops, swaps
        self.have: Callable[[str], int] = self._up  # engines of a model that are up or starting
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = math.inf

    @property
    def follows_latency(self) -> bool:
        """Return whether the controller wants to know what the engines learn."""
        planner = self.controller.planner
        plans_by_it = planner.thinks or (planner.swaps and self._swaps()) or planner.knowledge is not None
        return self._drops or plans_by_it or self.controller.scaling is not None

    async def prepare(self) -> None:
        """Compile the planner; await this before the first event."""
        await asyncio.to_thread(self.controller.planner.prepare)

    def loops(self) -> list[tasks.Loop]:
        """Return what runs as long as events come."""
        scale = [self._scale] if self.controller.scaling is not None else []
        return [self._tick, self._planning.run, self._check_overdue, *scale]

    # ---- events

    def notify(self, event: Event) -> None:
        """Notify the controller; its commands are executed now, or when a slow planner has planned."""
        self.notify_all(event)

    def notify_all(self, *events: Event) -> None:
        """Notify the controller of events that became known together; it plans once after them."""
        self._planning.note(*events)
        self._arm()

    def correct(self, events: Iterable[Event], placed: Mapping[str, str]) -> None:
        """Take note of what happened while another controller led, then plan.

        placed: queued requests, by id, with the instances that they were sent to.
        """
        now = clock.now()
        known = list(events)
        for event in known:
            if not isinstance(event, Started):
                self.controller.note(event, now)
        for id, instance in placed.items():
            self.controller.place(id, instance, now)
        for event in known:
            if isinstance(event, Started):  # inside the engine that it was sent to
                self.controller.note(event, now)
        self._planning.plan()
        self._arm()

    def progressed(self, instance: str, progress: Mapping[str, Progress], asked: float) -> None:
        """Take an instance's answer to `inquire`. asked: an instant before that of the answer."""
        self.execute(self.controller.refuse(instance, progress, asked))
        self._arm()

    async def _tick(self) -> None:
        """Let planners run that wait for nothing but time."""
        while True:
            await asyncio.sleep(_TICK)
            if self.controller.queued:
                self.notify(Tick())

    def _up(self, model: str) -> int:
        cluster = self.controller.cluster
        fleet = [*cluster.instances.values(), *(before for before, _ in cluster.loading.values())]
        return sum(instance.model == model for instance in fleet)

    async def _scale(self) -> None:
        """Keep the numbers of engines wanted up to date; what takes long runs in a thread."""
        scaling, cluster = self.controller.scaling, self.controller.cluster
        assert scaling is not None
        while True:
            await asyncio.sleep(STEP_S)
            for model in scaling.scalers:
                have = self.have(model)
                needs = await asyncio.to_thread(scaling.ask(model, cluster, clock.now(), have))
                scaling.conclude(model, needs, have, clock.now())

    # ---- requests that may be late

    def _arm(self) -> None:
        """Wake at the controller's next check; to be called whenever that may have become an earlier one."""
        check = self.controller.next_check
        if check >= self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = check
        seconds = max(check - clock.now(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._due.set)

    async def _check_overdue(self) -> None:
        """Refuse what is overdue and queued, and ask the engines about what is inside them."""
        while True:
            await self._due.wait()
            self._due.clear()
            self._armed_for, self._timer = math.inf, None
            overdue = self.controller.overdue(clock.now())
            self.execute(overdue.rejects)
            for instance, ids in overdue.inside.items():
                self._inquire(instance, ids)
            self.execute(self.controller.decide(clock.now()))
            self._arm()
