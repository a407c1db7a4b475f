"""Planning beside the event loop, so that the gateway's latency does not depend on the planner.

A planner that answers at once runs inside each event. One that takes time (`Planner.thinks`: a solver, a
search) runs in a thread on a copy of the cluster, one plan at a time. Events that come meanwhile are noted at
once and lead to one more plan; the controller carries out what of a finished plan still holds
(`Controller.apply`) and drops the rest. A planner that holds Python's interpreter lock all the time still
slows the event loop; numpy, numba (`nogil`) and solvers release it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Protocol

from headway.core.cluster import Cluster
from headway.core.controller import Controller
from headway.events import Event
from headway.ports import Planner
from headway.types import Command, Plan, Rerank

log = logging.getLogger("headway.serve")
Execute = Callable[[Sequence[Command]], None]


class Planning(Protocol):
    """The controller as the dispatcher uses it: events in, commands to `execute` now or later."""

    def note(self, event: Event) -> None:
        """Tell the controller an event."""

    async def run(self) -> None:
        """Plan until cancelled."""


def planning_for(controller: Controller, execute: Execute) -> Planning:
    """Return the way of planning that fits the controller's planner."""
    thinks = controller.planner.thinks
    return ThreadedPlanning(controller, execute) if thinks else ImmediatePlanning(controller, execute)


class ImmediatePlanning:
    """Plans inside each event, on the event loop."""

    def __init__(self, controller: Controller, execute: Execute) -> None:
        self._controller, self._execute = controller, execute

    def note(self, event: Event) -> None:
        """Tell the controller an event and execute the commands that follow."""
        self._execute(self._controller.on(event, time.time()))

    async def run(self) -> None:
        """Return at once: every event plans for itself."""


class ThreadedPlanning:
    """Plans in a thread, one plan at a time, when something has happened that may change the plan."""

    def __init__(self, controller: Controller, execute: Execute) -> None:
        self._controller, self._execute = controller, execute
        self._changed = asyncio.Event()

    def note(self, event: Event) -> None:
        """Tell the controller an event; a plan follows when it may change what is to be done."""
        if self._controller.note(event, time.time()):
            self._changed.set()

    async def run(self) -> None:
        """Plan at every change; a failing planner is logged, and asked again at the next event.

        Cancelling does not wait for the plan under way, which reads a copy of the cluster; it is dropped.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._plan()
            except Exception:
                log.exception("the planner failed; it is asked again at the next event")

    async def _plan(self) -> None:
        controller = self._controller
        if not (controller.queued and controller.cluster.instances):
            return
        snapshot = controller.snapshot()
        plan = await _in_thread(controller.planner, snapshot)
        commands = controller.apply(replace(plan, based_on=snapshot.version), time.time())
        if not plan.final and not all(isinstance(command, Rerank) for command in commands):
            self._changed.set()  # the cluster is another one now, as in `Controller.decide`
        self._execute(commands)  # at once: what was applied must not be left half executed


async def _in_thread(planner: Planner, cluster: Cluster) -> Plan:
    """Plan in a thread that is left to itself when this call is cancelled.

    The thread is a daemon: a planner that never returns does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    planned: asyncio.Future[Plan] = loop.create_future()

    def resolve(plan: Plan | None, error: BaseException | None) -> None:
        if planned.done():  # cancelled
            return
        if plan is not None:
            planned.set_result(plan)
        elif error is not None:
            planned.set_exception(error)

    def work() -> None:
        plan, error = None, None
        try:
            plan = planner.plan(cluster, time.time())
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(resolve, plan, error)

    Thread(target=work, name="headway-planner", daemon=True).start()
    return await planned
