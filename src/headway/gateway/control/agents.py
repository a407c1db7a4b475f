"""The engines' side: starts them, carries out the controller's commands on them, reports what they learn.

Only an engine knows how much of a prompt it has computed, and whether an answer that is not streamed has
begun. So the controller asks (`inquire`) before it refuses what is overdue inside one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from headway import clock
from headway.engines.vllm.process.client import VllmEngine
from headway.errors import EngineError
from headway.events import Cached, Event
from headway.gateway.tasks import Loop
from headway.types import Command, Progress, Rerank, Swap, Warm

Notify = Callable[[Event], None]
Progressed = Callable[[str, Mapping[str, Progress], float], None]
_LOOK = 0.5  # seconds between two looks at an engine's prefix cache
_WHOLE = 15.0  # seconds after which all that an engine has cached is reported again
_POLL = 1.0  # seconds between two looks at what engines have learned
log = logging.getLogger("headway.gateway")


class Agents:
    """The engines of this process.

    notify: receives what they learn. progressed: receives their answers to `inquire`.
    """

    def __init__(self, engines: Mapping[str, VllmEngine], notify: Notify, progressed: Progressed) -> None:
        self.engines, self._notify, self._progressed = engines, notify, progressed
        self._ranks = {id: RankUpdates(engine) for id, engine in engines.items()}
        self._inquiries = {id: _Inquiry(engine) for id, engine in engines.items()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the engines, and stop them when the block ends."""
        try:
            for engine in self.engines.values():
                await engine.start()
            yield
        finally:
            await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    def loops(self, *, follow_latency: bool, apart: bool = False) -> list[Loop]:
        """Return what runs as long as the engines do.

        follow_latency: report every second what they learn. apart: there may be engines of other processes; what
        is cached matters only where there are several.
        """
        loops: list[Loop] = [ranks.run for ranks in self._ranks.values()]
        loops += (partial(self._ask, inquiry) for inquiry in self._inquiries.values())
        if len(self.engines) > 1 or apart:
            loops += (partial(self._follow_cache, engine) for engine in self.engines.values())
        return [*loops, self._follow_latency] if follow_latency else loops

    def execute(self, command: Command) -> None:
        """Apply a command to its engine."""
        match command:
            case Rerank():
                self._ranks[command.instance].put(command.ranks)
            case Swap():
                self.engines[command.instance].begin_swap(command.model)
            case Warm():
                self.engines[command.instance].begin_warm(command.model)

    def inquire(self, instance: str, ids: Sequence[str]) -> None:
        """Ask an engine soon how far it is with these requests."""
        self._inquiries[instance].put(ids)

    async def _follow_latency(self) -> None:
        """Report what the engines have learned, every second until cancelled.

        An engine that does not answer, or without Headway's scheduler, reports nothing.
        """
        while True:
            up = [engine for engine in self.engines.values() if engine.up.is_set()]
            answers = await asyncio.gather(*(engine.learned() for engine in up), return_exceptions=True)
            for engine, learned in zip(up, answers, strict=True):
                if isinstance(learned, EngineError):
                    log.debug("engine %s does not say what it has learned: %s", engine.id, learned)
                elif isinstance(learned, BaseException):
                    log.error("engine %s could not be asked for what it has learned", engine.id, exc_info=learned)
                elif learned is not None and engine.up.is_set() and engine.loading is None:
                    self._notify(learned)
            await asyncio.sleep(_POLL)

    async def _follow_cache(self, engine: VllmEngine) -> None:
        """Report what an engine's prefix cache takes in and gives up, twice a second until cancelled.

        Every quarter of a minute all of it, for a controller that a report has not reached, or that began anew. An
        engine that reports nothing, as it is stock vLLM, is asked that often.
        """
        epoch, position, whole_at = "", 0, 0.0
        while True:
            if not engine.up.is_set() or engine.loading is not None:
                epoch = ""
            await engine.up.wait()
            now, report = clock.now(), None
            if now >= whole_at:
                epoch, whole_at = "", now + _WHOLE
            try:
                report = await engine.cached(epoch, position)
            except EngineError as error:
                log.debug("engine %s does not say what it has cached: %s", engine.id, error)
            if report is not None and engine.up.is_set() and engine.loading is None:
                epoch, position = report.epoch, report.until
                if report.whole or report.until > report.since:
                    self._notify(Cached(engine.id, report))
            await asyncio.sleep(_WHOLE if report is None else _LOOK)

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
            self._progressed(inquiry.engine.id, progress, asked)


class _Inquiry:
    """The requests that one engine is to be asked about."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._ids: dict[str, None] = {}  # in order, each once
        self._changed = asyncio.Event()

    def put(self, ids: Sequence[str]) -> None:
        self._ids.update(dict.fromkeys(ids))
        self._changed.set()

    async def take(self) -> list[str]:
        """Wait for requests to ask about, and return all there are."""
        await self._changed.wait()
        self._changed.clear()
        ids, self._ids = list(self._ids), {}
        return ids


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
