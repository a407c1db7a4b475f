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
from headway.gateway.control.targets import Paces
from headway.gateway.control.wiring import Make
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
        if engine.leaving in ("drain", "remove"):  # it may stay after all
            await self._agents.stop(engine.id)
            async with self._lock:
                self._stopped(engine)

    def _stopped(self, engine: VllmEngine) -> None:
        """Forget an engine that has stopped, if it is removed."""
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

    def _stay(self, id: str, settings: Engine) -> bool:
        engine = self._agents.engines[id]
        same = engine.leaving == "drain" and settings == engine.config
        return same and self._agents.runs(id) and engine.stay()

    async def _replace(self, id: str, settings: Engine) -> bool:
        old, order = self._agents.engines[id], self._orders[id]
        old.leave("roll")
        self._update()
        await self._empty(old)
        if old.leaving is None:  # it was drained meanwhile, and takes work again
            return True
        await self._agents.stop(id)
        async with self._lock:
            if self._orders[id] != order:  # it was drained, removed or is to be replaced by another one
                self._stopped(old)
                return True
            fitting = await self._fitting(id, settings, old.config)
            new = self._make(id, fitting)
            new.restarts = old.restarts + 1
            await self._agents.start(new)
            self._update()
        while True:
            if (state := new.state) != "starting":
                return state != "failed" and fitting is settings
            await asyncio.sleep(POLL_S)
