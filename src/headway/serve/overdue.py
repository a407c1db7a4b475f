"""Looks after requests of classes that drop: wakes the controller when one may be late, and asks its engine.

Only an engine knows how much of a prompt it has computed, and whether an answer that is not streamed has
begun. So requests that are overdue inside an engine are refused when that engine has said how far they are.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial

from headway import clock
from headway.core.controller import Controller
from headway.engines.vllm.process.client import VllmEngine
from headway.errors import EngineError
from headway.events import Event
from headway.serve.planning import Execute
from headway.serve.tasks import Loop

_POLL = 1.0  # seconds between two looks at what engines have learned
log = logging.getLogger("headway.serve")


class OverdueWatch:
    """Calls `Controller.overdue` and `refuse` at their time."""

    def __init__(self, controller: Controller, engines: Mapping[str, VllmEngine], execute: Execute) -> None:
        self._controller, self._engines, self._execute = controller, engines, execute
        self._inquiries = {id: _Inquiry(engine) for id, engine in engines.items()}
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = math.inf

    def arm(self) -> None:
        """Wake at the controller's next check; to be called whenever that may have become an earlier one."""
        check = self._controller.next_check
        if check >= self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = check
        seconds = max(check - clock.now(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._due.set)

    def loops(self) -> list[Loop]:
        """Return what runs as long as the gateway serves."""
        return [self._run, *(partial(self._ask, inquiry) for inquiry in self._inquiries.values())]

    async def follow_latency(self, tell: Callable[[Event], None]) -> None:
        """Tell what the engines have learned, every second until cancelled.

        An engine that does not answer, or without Headway's scheduler, tells nothing.
        """
        while True:
            up = [engine for engine in self._engines.values() if engine.up.is_set()]
            told = await asyncio.gather(*(engine.learned() for engine in up), return_exceptions=True)
            for engine, learned in zip(up, told, strict=True):
                if isinstance(learned, EngineError):
                    log.debug("engine %s does not say what it has learned: %s", engine.id, learned)
                elif isinstance(learned, BaseException):
                    log.error("engine %s was not asked", engine.id, exc_info=learned)
                elif learned is not None and engine.up.is_set() and engine.loading is None:
                    tell(learned)
            await asyncio.sleep(_POLL)

    async def _run(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._armed_for, self._timer = math.inf, None
            overdue = self._controller.overdue(clock.now())
            self._execute(overdue.rejects)
            for id, requests in overdue.inside.items():
                self._inquiries[id].put(requests)
            self._execute(self._controller.decide(clock.now()))
            self.arm()

    async def _ask(self, inquiry: _Inquiry) -> None:
        """Ask one engine, one message at a time; what it does not answer comes up again in a second."""
        while True:
            ids = await inquiry.take()
            asked = clock.now()
            try:
                progress = await inquiry.engine.progress(ids)
            except EngineError as error:
                log.debug("engine %s does not say how far it is: %s", inquiry.engine.id, error)
                continue
            self._execute(self._controller.refuse(inquiry.engine.id, progress, asked))
            self.arm()


class _Inquiry:
    """The requests that one engine is to be asked about."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._ids: dict[str, None] = {}  # in order, each once
        self._changed = asyncio.Event()

    def put(self, ids: list[str]) -> None:
        self._ids.update(dict.fromkeys(ids))
        self._changed.set()

    async def take(self) -> list[str]:
        """Wait for requests to ask about, and return all there are."""
        await self._changed.wait()
        self._changed.clear()
        ids, self._ids = list(self._ids), {}
        return ids
