"""The engines of this process come and go: in `headway serve`, and in an agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from headway.config import Config, Engine
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.memory import check_memory
from headway.errors import ConfigError
from headway.gateway.control.agents import Agents
from headway.gateway.control.fleet import POLL_S, Fleet, Work
from headway.gateway.control.setup import Make
from headway.gateway.control.targets import Paces
from headway.gateway.parsing.tokens import TokenCounter
from headway.gateway.watch.metrics import Metrics
from headway.types import Leaving

log = logging.getLogger("headway.gateway")


class OwnFleet(Fleet):
    """Changes the engines of this process. metrics, paces: forget those that are removed; the rest as in `Fleet`."""

    def __init__(
        self,
        config: Config,
        agents: Agents,
        make: Make,
        work: Work,
        check: Callable[[Config], None],
        metrics: Metrics,
        *,
        counters: dict[str, TokenCounter] | None = None,
        paces: Paces | None = None,
    ) -> None:
        super().__init__(config, agents.engines, work, check, counters)
        self._agents, self._make, self._metrics, self._paces = agents, make, metrics, paces or Paces()
        self._cut: set[str] = set()  # engines that leave at once

    async def _prepare(self, stay: Mapping[str, Engine], starting: Mapping[str, Engine]) -> None:
        await super()._prepare(stay, starting)
        if starting:
            await asyncio.to_thread(check_memory, starting)

    async def _start(self, id: str, settings: Engine, agent: str | None) -> None:
        await self._agents.start(self._make(id, settings))

    async def _leave(self, id: str, why: Leaving, *, now: bool) -> None:
        engine = self._agents.engines[id]
        if now:
            self._cut.add(id)
        if engine.leaving is None or engine.stopped:
            engine.leave(why)
            self._begin(self._end(engine))
        elif engine.leaving != "remove":
            engine.leaving = why

    async def _end(self, engine: VllmEngine) -> None:
        """Stop an engine that leaves when nothing is inside it; if it is to be replaced, `_replace` does."""
        await self._empty(engine)
        async with self._lock:  # it may stay after all
            if engine.leaving in ("drain", "remove"):
                await self._stop(engine)

    async def _stop(self, engine: VllmEngine) -> None:
        """Stop an engine, and forget one that is removed."""
        await self._agents.stop(engine.id)
        log.info("engine %s has stopped (%s)", engine.id, engine.leaving)
        if engine.leaving == "remove" and self._agents.engines.get(engine.id) is engine:
            del self._agents.engines[engine.id]
            self._cut.discard(engine.id)
            self._paces.remove(engine.id)
            self._metrics.forget_engine(engine.id)
            self._left()

    async def _empty(self, engine: VllmEngine) -> None:
        """Take back what an engine has not begun to answer, and wait until the rest has ended."""
        if engine.id not in self._cut:
            await self._work.take_back(engine, self.engines.values())
        while engine.leaving is not None and not await self._work.is_empty(engine):
            if engine.id in self._cut:
                break
            await asyncio.sleep(POLL_S)
        if engine.id in self._cut:
            self._work.cut(engine)
            engine.sever()

    async def _fitting(self, id: str, settings: Engine, before: Engine) -> Engine:
        """Return new settings of an engine that has stopped, or those before if there is not the memory for them."""
        try:
            if settings != before:
                await asyncio.to_thread(check_memory, {id: settings})
        except ConfigError as error:
            log.error("engine %s keeps its settings: %s", id, error)
            return before
        return settings

    async def _replace(self, id: str, settings: Engine) -> bool:
        old = self._agents.engines[id]
        async with self._lock:
            stays = old.leaving == "drain" and settings == old.config and old.stay()
        if stays:
            log.info("engine %s drains no more", id)
            self._update()
            return True
        old.leave("roll")
        self._update()
        await self._empty(old)
        async with self._lock:
            if old.leaving != "roll":  # it was drained or removed meanwhile
                await self._stop(old)
                return True
            await self._agents.stop(id)
            fitting = await self._fitting(id, settings, old.config)
            new = self._make(id, fitting)
            new.restarts = old.restarts + 1
            await self._agents.start(new)
            self._update()
        while True:
            if (state := new.state) != "starting":
                return state != "failed" and fitting is settings
            await asyncio.sleep(POLL_S)
