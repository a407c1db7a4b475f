"""The engines' side: starts them, carries out the controller's commands on them, reports what they learn.

Only an engine knows how much of a prompt it has computed, and whether an answer that is not streamed has
begun. So the controller asks (`inquire`) before it refuses what is overdue inside one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from headway import clock
from headway.engines.vllm.process.client import VllmEngine
from headway.errors import EngineError
from headway.events import Cached, Event
from headway.gateway import tasks
from headway.types import Command, Progress, Rerank, Swap, Warm

Notify = Callable[[Event], None]
Progressed = Callable[[str, Mapping[str, Progress], float], None]
_LOOK = 0.5  # seconds between two looks at an engine's prefix cache
_WHOLE = 15.0  # seconds after which all that an engine has cached is reported again
_POLL = 1.0  # seconds between two looks at what engines have learned
log = logging.getLogger("headway.gateway")


class Agents:
    """The engines of this process, by id: they come (`start`) and go (`stop`) while it runs.

    notify: receives what they learn. progressed: receives their answers to `inquire`.
    follows: tells whether what they learn of their latency is reported; with several engines it always is.
    apart: there may be engines of other processes; what is cached matters only where there are several.
    beside: also run for each engine, as long as it does; to be set before they start.
    """

    def __init__(
        self,
        engines: dict[str, VllmEngine],
        notify: Notify,
        progressed: Progressed,
        *,
        follows: Callable[[], bool] = lambda: True,
        apart: bool = False,
    ) -> None:
        self.engines, self._notify, self._progressed = engines, notify, progressed
        self._follows, self._apart = follows, apart
        self.beside: tuple[Callable[[VllmEngine], Coroutine[Any, Any, None]], ...] = ()
        self._failed: Callable[[str], None] = lambda name: None
        self._running: dict[str, _Running] = {}

    @asynccontextmanager
    async def running(self, failed: Callable[[str], None] = lambda name: None) -> AsyncIterator[None]:
        """Start the engines, and stop all when the block ends. failed: as in `tasks.running`."""
        self._failed = failed
        try:
            for engine in tuple(self.engines.values()):
                await self.start(engine)
            async with tasks.running(self._follow_latency, failed=self._failed):
                yield
        finally:
            await asyncio.gather(*map(self.stop, tuple(self._running)))

    async def start(self, engine: VllmEngine) -> None:
        """Start an engine, in the place of one of the same id that has stopped."""
        await engine.start()
        self.engines[engine.id] = engine
        ranks, inquiry = RankUpdates(engine), _Inquiry(engine)
        loops: list[tasks.Loop] = [ranks.run, partial(self._ask, inquiry)]
        loops += [partial(self._follow_cache, engine)] if engine.api.vllm else []
        loops += (partial(one, engine) for one in self.beside)
        self._running[engine.id] = _Running(ranks, inquiry, tasks.Group(*loops, failed=self._failed), asyncio.Lock())

    async def stop(self, id: str) -> None:
        """Stop an engine, whatever is inside it; nothing happens if it does not run."""
        if (one := self._running.get(id)) is None:
            return
        async with one.stopping:  # a second call waits for its end, too
            if self._running.get(id) is one:
                await one.loops.end()
                await self.engines[id].stop()
                del self._running[id]

    def runs(self, id: str) -> bool:
        """Tell whether an engine was started and is not being stopped."""
        return (one := self._running.get(id)) is not None and not one.stopping.locked()

    def execute(self, command: Command) -> None:
        """Apply a command to its engine, unless that has stopped."""
        match command:
            case Rerank(instance) if instance in self._running and self.engines[instance].api.vllm:
                self._running[instance].ranks.put(command.ranks)
            case Swap(instance) if instance in self._running:
                self.engines[instance].begin_swap(command.model)
            case Warm(instance) if instance in self._running:
                self.engines[instance].begin_warm(command.model)

    def inquire(self, instance: str, ids: Sequence[str]) -> None:
        """Ask an engine soon how far it is with these requests."""
        if instance in self._running:
            self._running[instance].inquiry.put(ids)

    @property
    def _several(self) -> bool:
        return self._apart or len(self.engines) > 1

    async def _follow_latency(self) -> None:
        """Report what the engines have learned, every second until cancelled.

        An engine that does not answer, or without Headway's scheduler, reports nothing.
        """
        while True:
            follow = self._follows() or self._several
            up = [engine for engine in self.engines.values() if follow and engine.serves and engine.api.vllm]
            answers = await asyncio.gather(*(engine.learned() for engine in up), return_exceptions=True)
            for engine, learned in zip(up, answers, strict=True):
                if isinstance(learned, EngineError):
                    log.debug("engine %s does not say what it has learned: %s", engine.id, learned)
                elif isinstance(learned, BaseException):
                    log.error("engine %s could not be asked for what it has learned", engine.id, exc_info=learned)
                elif learned is not None and engine.serves and engine.loading is None:
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
            if not self._several:
                await asyncio.sleep(_LOOK)
                continue
            now, report = clock.now(), None
            if now >= whole_at:
                epoch, whole_at = "", now + _WHOLE
            try:
                report = await engine.cached(epoch, position)
            except EngineError as error:
                log.debug("engine %s does not say what it has cached: %s", engine.id, error)
            if report is not None and engine.serves and engine.loading is None:
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


class _Running(NamedTuple):
    """What belongs to an engine that runs."""

    ranks: RankUpdates
    inquiry: _Inquiry
    loops: tasks.Group
    stopping: asyncio.Lock


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
