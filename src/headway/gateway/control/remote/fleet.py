"""The engines as a gateway in another process sees them, by their agents' reports."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway import clock
from headway.cluster.wire.messages import AgentEngines, EngineOrder, EngineState, Gone, Message, OrderAnswer, WireLink
from headway.config import Config, Engine, read_engine, write_engine
from headway.engines.vllm.fatal_fields import known_fields
from headway.engines.vllm.process.api import APIS
from headway.engines.vllm.process.view import KnownModels, RemoteEngine
from headway.errors import EngineError, HeadwayError, RequestError
from headway.events import Cached, Event, InstanceDown, InstanceUp, Learned, Swapped, Warmed
from headway.gateway import tasks
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.control.fleet import POLL_S, Fleet, Work
from headway.gateway.control.remote.control import RemoteControl
from headway.gateway.parsing.tokens import TokenCounter
from headway.gateway.watch.metrics import Metrics
from headway.policy.apps.account import RunAccount
from headway.policy.core.controller import Controller
from headway.types import Leaving

UNKNOWN = "this configuration lacks it. Give all parts the same [[engines]], and restart them."
log = logging.getLogger("headway.gateway")


@dataclass(slots=True)
class _Report:
    """The latest state of an engine. at: instant. agent: that reported it."""

    at: float
    agent: str
    state: EngineState


class RemoteFleet:
    """Keeps the gateway's engines as their agents report them.

    lease_s: seconds of silence of its agent after which an engine is down.
    """

    def __init__(self, control: RemoteControl, engines: Mapping[str, Engine], lease_s: float) -> None:
        self.engines = {id: RemoteEngine(id, engine, self._lost) for id, engine in engines.items()}
        self._control, self._lease_s = control, lease_s
        self._configured = engines
        self._reports: dict[str, _Report] = {}
        self._agents: dict[str, float] = {}  # instants of their last reports
        self._owner: dict[str, str] = {}  # engine -> the agent that reported it last
        self._unknown: set[tuple[str, str]] = set()  # agents and engines of theirs that were logged
        self.dispatcher: Dispatcher | None = None
        self.orders: RemoteOrders | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep connections to the engines until the block ends."""
        for engine in self.engines.values():
            engine.connect()
        try:
            yield
        finally:
            await asyncio.gather(*(engine.disconnect() for engine in self.engines.values()))

    def receive(self, message: Message) -> None:
        """Take a message of an agent."""
        for item in message.items:
            match item:
                case EngineState(id) if id in self.engines:
                    self._update(message, item)
                case EngineState(id) if (settings := self._settings(item)) is not None and self.orders is not None:
                    self.orders.found(id, settings)
                case AgentEngines(ids):
                    self._remove_missing(message.sender, ids)
                case OrderAnswer() if self.orders is not None:
                    self.orders.answered(item)
                case EngineState(id) if (message.sender, id) not in self._unknown:
                    self._unknown.add((message.sender, id))
                    log.warning("%s has an engine %s, which gets no work: %s", message.sender, id, UNKNOWN)
                case Gone():
                    self._agents.pop(message.sender, None)
                    self._unknown = {(agent, id) for agent, id in self._unknown if agent != message.sender}
                    for id in [id for id, one in self._reports.items() if one.agent == message.sender]:
                        self._mark_silent(id)
                case Learned() | Cached():
                    self._control.fleet_changed(item)

    def agent_of(self, id: str) -> str | None:
        """Return the agent that reports an engine, None = none does at the moment."""
        return self._reports[id].agent if id in self._reports else None

    def was_reported(self, id: str) -> bool:
        """Tell whether an agent has an engine, or had it when it was last there."""
        return id in self._owner

    @property
    def agents(self) -> set[str]:
        """Return the agents that are not silent."""
        return {name for name, at in self._agents.items() if at >= clock.now() - self._lease_s}

    def add(self, id: str, settings: Engine) -> None:
        """Add an engine that an agent has, which reports it again within a second."""
        engine = self.engines[id] = RemoteEngine(id, settings, self._lost)
        engine.connect()

    def _settings(self, state: EngineState) -> Engine | None:
        """Return the settings of an engine, None = they are not known."""
        return self._configured.get(state.id) if state.settings is None else read_engine(state.settings)

    def _remove_missing(self, agent: str, ids: Collection[str]) -> None:
        """Remove the engines that this agent had and has no more; one of the configuration only if that was ordered."""
        self._agents[agent] = clock.now()
        for id in [id for id, owner in self._owner.items() if owner == agent and id not in ids]:
            if id in self._configured and self.engines[id].leaving != "remove":
                continue
            del self._owner[id]
            self._reports.pop(id, None)
            self._control.fleet_changed(InstanceDown(id))
            if self.orders is not None:
                self.orders.lost(self.engines.pop(id))

    def _update(self, message: Message, state: EngineState) -> None:
        engine, before = self.engines[state.id], self._reports.get(state.id)
        self._reports[state.id] = _Report(clock.now(), message.sender, state)
        self._owner[state.id] = message.sender
        settings = self._settings(state) if before is None or state.settings != before.state.settings else None
        if settings is not None and settings != engine.config:
            engine.config, engine.api = settings, APIS[settings.kind]
            engine.models = KnownModels(tuple(settings.served), settings.name)
        else:
            settings = None
        was, engine.leaving, engine.stopped = engine.leaving, state.leaving, state.stopped
        engine.ahead, engine.loading = -message.apart, state.loading
        engine.models.current, engine.models.given_up = state.current, state.given_up
        engine.prefix_caching, engine.restarts = state.prefix_caching, state.restarts
        engine.fatal = known_fields(state.fatal)
        engine.failure = None if state.failure is None else EngineError(state.failure, "See its agent's log.")
        engine.tries = 0 if state.failure is None else state.restarts + 1
        if engine.url != state.url.rstrip("/") or before is None:
            engine.moved(state.url, state.key)
        if state.instance is not None:
            engine.instance = state.instance
        self._update_admission(engine, state, None if before is None else before.state)
        if self.orders is not None and (settings is not None or was != state.leaving):
            self.orders.altered(settings)
            if was is None and state.leaving is not None:
                self.orders.leaves(engine)

    def _update_admission(self, engine: RemoteEngine, state: EngineState, before: EngineState | None) -> None:
        """Update admission with a state of an engine."""
        event = _event(state, before, up=engine.up.is_set())
        if state.instance is None:
            engine.up.clear()
        else:
            engine.up.set()
        if event is not None:
            self._control.fleet_changed(event)
            if self.dispatcher is not None:
                self.dispatcher.receive(event)

    def _lost(self, id: str) -> None:
        """Mark an engine that does not answer as down, until its agent says that it is up."""
        self._control.fleet_changed(InstanceDown(id))
        self._control.notify(InstanceDown(id))

    async def expire(self) -> None:
        """Mark engines whose agents are silent as down, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            before = clock.now() - self._lease_s
            for id, report in [(id, one) for id, one in self._reports.items() if one.at < before]:
                log.warning("%s is silent; %s is taken for down", report.agent, id)
                self._mark_silent(id)

    def _mark_silent(self, id: str) -> None:
        del self._reports[id]
        self.engines[id].up.clear()
        self._control.fleet_changed(InstanceDown(id))


def _event(state: EngineState, before: EngineState | None, *, up: bool) -> Event | None:
    """Return what has happened between two states of an engine, None = nothing that counts here."""
    now = state.instance
    if now is None:
        return InstanceDown(state.id) if up else None
    if not up or before is None:
        return InstanceUp(now)
    if before.loading is not None and state.loading is None:
        return Swapped(now) if state.current != before.current else InstanceUp(now)
    return Warmed(now) if now != before.instance else None


_ANSWER_S = 120.0  # for an agent to check an order


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


@dataclass(frozen=True, slots=True)
class RemoteGateway:
    """The gateway's side, with what it knows of controller and engines from the wire."""

    control: RemoteControl
    fleet: RemoteFleet
    dispatcher: Dispatcher
    metrics: Metrics
    link: WireLink

    @classmethod
    def of(cls, config: Config, controller: Controller, metrics: Metrics, link: WireLink) -> RemoteGateway:
        """Connect requests in flight with the wire. controller: plans nothing, and admits requests."""
        control = RemoteControl(controller, link)
        fleet = RemoteFleet(control, config.named, config.wire.lease_seconds)
        runs = RunAccount(config.apps.run_timeout_s)
        dispatcher = Dispatcher(control, fleet.engines, runs, metrics)
        control.execute, fleet.dispatcher = dispatcher.execute, dispatcher
        return cls(control, fleet, dispatcher, metrics, link)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen to the wire until the block ends."""
        loops: list[tasks.Loop] = [self._listen, self.control.live, self.fleet.expire, *self.dispatcher.loops()]
        async with self.fleet.running():
            try:
                async with tasks.running(*loops, failed=self.metrics.loop_failed):
                    yield
            finally:
                await self.dispatcher.warmups.close()
                self.link.send("controller", Gone())

    async def _listen(self) -> None:
        async for message in self.link.messages():
            if message.epoch:
                self.control.receive(message)
            else:
                self.fleet.receive(message)
