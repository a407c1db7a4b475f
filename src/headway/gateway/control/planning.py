"""Planning on the event loop, and long computations beside it.

Every event is followed by a plan, which answers at once. A planner that has decisions which take long (a
solver, a search) hands them out (`Planner.deliberate`): they run in a thread, one at a time, while events and
plans go on, and the planner takes note of the result when it is there. A computation that holds Python's
interpreter lock all the time still slows the event loop; numpy, numba (`nogil`) and solvers release it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from headway import clock
from headway.events import Event
from headway.policy.core.controller import Controller
from headway.types import Command

log = logging.getLogger("headway.gateway")
Execute = Callable[[Sequence[Command]], None]


class Planning:
    """The controller as the dispatcher uses it: events in, commands to `execute` now or later."""

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
