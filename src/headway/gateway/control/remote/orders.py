"""What operators order at a gateway of engines that agents have; the agents carry it out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from headway.cluster.wire.messages import EngineOrder, OrderAnswer
from headway.cluster.wire.port import WireLink
from headway.config import Config, Engine, write_engine
from headway.engines.vllm.process.view import RemoteEngine
from headway.errors import HeadwayError, RequestError
from headway.gateway.control.fleet import POLL_S, Fleet, Work
from headway.gateway.control.remote.fleet import RemoteFleet
from headway.gateway.parsing.tokens import TokenCounter
from headway.gateway.watch.metrics import Metrics
from headway.types import Leaving

_ANSWER_S = 120.0  # for an agent to check an order
log = logging.getLogger("headway.gateway")


class RemoteOrders(Fleet):
    """Has agents change their engines. metrics: forget those that are removed; the rest as in `Fleet`."""

    def __init__(
        self,
        config: Config,
        fleet: RemoteFleet,
        link: WireLink,
        work: Work,
        check: Callable[..., None],
        metrics: Metrics,
        counters: dict[str, TokenCounter],
    ) -> None:
        super().__init__(config, fleet.engines, work, partial(check, starts_engines=False), counters)
        self._fleet, self._link, self._metrics = fleet, link, metrics
        self._order_numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[OrderAnswer]] = {}
        self._found: set[str] = set()  # engines whose tokenizers are being loaded
        self._cut: set[str] = set()  # engines that leave at once
        fleet.orders = self

    # ---- what agents report

    def has_begun(self, id: str) -> bool:
        return self._fleet.was_reported(id)

    def found(self, id: str, settings: Engine) -> None:
        """Take note of an engine that an agent has, and that is not known here."""
        if id not in self._found:
            self._found.add(id)
            self._begin(self._add(id, settings))

    async def _add(self, id: str, settings: Engine) -> None:
        try:
            await self.count_tokens([settings])
            self._fleet.add(id, settings)
            self._update()
        finally:
            self._found.discard(id)

    def leaves(self, engine: RemoteEngine) -> None:
        """Take note of an engine that takes no new work."""
        self._begin(self._work.take_back(engine, [*self.engines.values()]))

    def altered(self, settings: Engine | None) -> None:
        """Take note of an engine that leaves or stays, or has other settings."""
        self._begin(self._alter(settings))

    async def _alter(self, settings: Engine | None) -> None:
        if settings is not None:
            await self.count_tokens([settings])
        self._update()

    def lost(self, engine: RemoteEngine) -> None:
        """Take note of an engine that was removed."""
        self._metrics.forget_engine(engine.id)
        if engine.api.vllm or engine.id in self._cut:
            self._work.cut(engine)
            engine.sever()
        self._begin(self._disconnect(engine))
        self._left()

    async def _disconnect(self, engine: RemoteEngine) -> None:
        """Close the connections to an engine; what a server that is not a vLLM has ends first: no agent can see it."""
        try:
            if not engine.api.vllm:
                await engine.idle.wait()
        finally:
            await engine.disconnect()

    def answered(self, answer: OrderAnswer) -> None:
        """Take an agent's answer to an order."""
        if (future := self._answers.get(answer.number)) is not None and not future.done():
            future.set_result(answer)

    # ---- orders

    async def _start(self, id: str, settings: Engine, agent: str | None) -> None:
        await self._order(self._chosen(agent), add=(write_engine(replace(settings, id=id)),))
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not await self._is_found(id):
                    continue
        except TimeoutError:
            problem, fix = f"The engine {id} has started, but is not known here.", "Look into the gateway's log."
            raise RequestError(problem, fix, status=504, code="agent_timeout") from None

    async def _is_found(self, id: str) -> bool:
        """Return whether the report of an engine has come, and its tokenizers are loaded; give it time for that."""
        await asyncio.sleep(POLL_S)
        return id in self.engines

    async def _leave(self, id: str, why: Leaving, *, now: bool) -> None:
        if why == "drain":
            await self._order(self._agent_of(id), drain=(id,))
        else:
            if now:
                self._cut.add(id)
            await self._order(self._agent_of(id), remove=(id,), now=now)

    async def _replace(self, id: str, settings: Engine) -> bool:
        now, number = self.engines[id], self._orders[id]
        before, old, drained = now.restarts, replace(now.config, id=id), now.leaving == "drain"
        try:
            await self._order(self._agent_of(id), roll={id: write_engine(settings)})
        except HeadwayError as error:
            log.error("engine %s is not replaced: %s", id, error)
            return False
        if drained:  # it starts, or takes work again as it is
            return True
        while (engine := self.engines.get(id)) is not None and self._orders[id] == number:
            if engine.leaving in ("drain", "remove"):  # by an order at another gateway
                break
            if engine.restarts < before or self._fleet.agent_of(id) is None:
                log.error("engine %s: its agent has ended", id)
                return False
            if engine.restarts > before and engine.state in ("up", "failed"):
                kept = replace(engine.config, id=id) == old != replace(settings, id=id)
                return engine.state == "up" and not kept  # there was not the memory for its new settings
            await asyncio.sleep(POLL_S)
        return True

    async def _order(self, agent: str, **order: Any) -> None:
        """Send an order; return when it has begun. RequestError if the agent refuses it or does not answer."""
        number = next(self._order_numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._link.send(agent, EngineOrder(number, **order))
        try:
            answer = await asyncio.wait_for(future, _ANSWER_S)
        except TimeoutError:
            problem = f"The agent {agent} has not answered within {_ANSWER_S:g} s."
            raise RequestError(problem, "Look into its log.", status=504, code="agent_timeout") from None
        finally:
            del self._answers[number]
        if answer.status:
            raise RequestError(answer.message, answer.hint, status=answer.status, code=answer.code)

    def _agent_of(self, id: str) -> str:
        if (agent := self._fleet.agent_of(id)) is None:
            problem = f"No agent reports the engine {id} at the moment."
            raise RequestError(problem, "Start its agent.", status=409, code="agent_missing")
        return agent

    def _chosen(self, agent: str | None) -> str:
        agents = sorted(self._fleet.agents)
        if agent in agents or (agent is None and len(agents) == 1):
            return agent or agents[0]
        known = f"Name one with ?agent=: {', '.join(agents)}." if agents else "Start one."
        problem = "There are several agents." if agent is None and agents else f"There is no agent {agent or ''!r}."
        raise RequestError(problem, known, code="agent_unknown", param="agent")
