"""An agent: runs the engines of one machine, reports on them, and carries out the controller's commands.

Operators order changes of its engines at a gateway, which passes them on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from headway.cluster.wire.messages import (
    AgentEngines,
    Asked,
    EngineOrder,
    EngineState,
    Gone,
    Item,
    Message,
    OrderAnswer,
    Progressed,
    Standing,
    WireLink,
)
from headway.config import Config, read_engine, write_engine
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.limits import inside_of
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError
from headway.events import Cached, Event, InstanceDown, InstanceUp, Learned, Swapped, Warmed
from headway.gateway import tasks
from headway.gateway.control.agents import Agents
from headway.gateway.control.fleet import POLL_S
from headway.gateway.control.own_fleet import OwnFleet
from headway.gateway.control.wiring import Make, drops, engines_of
from headway.gateway.preflight import preflight
from headway.gateway.watch.metrics import Metrics
from headway.types import Instance, Progress, Rerank, Swap, Warm

EVERY_S = 1.0  # between two reports of all engines
_AGAIN_S, _ANSWER_S = 1.0, 3.0  # between two looks whether an engine is empty, and for its answer
log = logging.getLogger("headway.gateway")
Tell = Callable[[Event], None]


class ReportedWork:
    """What is inside an agent's engines, as they report it (`Work`); gateways have the requests, and take them back."""

    def needing(self, models: Collection[str], *, now: bool) -> int:
        return 0

    def inside(self, engine: str) -> int:
        return 0

    async def is_empty(self, engine: EngineView) -> bool:
        """Look twice: a gateway may just be sending a request."""
        if await self._is_busy(engine):
            return False
        await asyncio.sleep(_AGAIN_S)
        return not await self._is_busy(engine)

    async def _is_busy(self, engine: EngineView) -> bool:
        if not (engine.up.is_set() and engine.api.vllm):  # what is inside another server, only gateways know
            return False
        try:
            state, page = await engine.control({"op": "state", "jobs": False}, _ANSWER_S), ""
        except EngineError:  # it is stock vLLM, or does not answer
            state, page = {}, await engine.metrics(_ANSWER_S)
        counts = inside_of(state, page)
        return counts is None or counts.computing + counts.paused + counts.waiting > 0

    async def take_back(self, engine: EngineView, others: Iterable[EngineView]) -> None:
        return

    def cut(self, engine: EngineView) -> None:
        return

    def refuse_unavailable(self) -> None:
        return


class Agent:
    """The engines of this process, for gateways and a controller elsewhere.

    maker: returns what makes engines, given a listener for their events. only: ids of the engines to run, None = all.
    """

    def __init__(
        self,
        link: WireLink,
        config: Config,
        maker: Callable[[Tell], Make],
        metrics: Metrics,
        only: frozenset[str] | None = None,
    ) -> None:
        # Where some class drops requests, gateways want to know what is cached: they refuse by it at arrival.
        self._link, self._drops, self._configured = link, drops(config), config.named
        self._drain_s = config.server.drain_s
        make = maker(self._tell)
        self.agents = Agents(engines_of(config, make, only), self._tell, self._progressed, apart=True)
        self.fleet = OwnFleet(config, self.agents, make, ReportedWork(), _check, metrics)
        self.fleet.changed = self._send_states
        self._instances: dict[str, Instance] = {}
        self._epoch = 0
        self._orders = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engines, and change them as ordered, until the block ends."""
        async with self.agents.running(), self.fleet, tasks.running(self._report):
            try:
                yield
            finally:
                await tasks.cancel(*self._orders)

    def receive(self, message: Message) -> None:
        """Handle a message from a gateway, or from a controller unless its term is over."""
        if not message.epoch:
            for item in message.items:
                if isinstance(item, EngineOrder):
                    task = asyncio.create_task(self._obey(message.sender, item))
                    self._orders.add(task)
                    task.add_done_callback(self._orders.discard)
            return
        if message.epoch < self._epoch:
            log.debug("ignored a message from %s, which no longer leads", message.sender)
            return
        self._epoch = message.epoch
        for item in message.items:
            match item:
                case Rerank() | Swap() | Warm() if item.instance in self.agents.engines:
                    self.agents.execute(item)
                    if isinstance(item, Swap):
                        self._send_states()
                case Asked(instance, ids):
                    self.agents.inquire(instance, ids)
                case Standing(known) if self._link.name not in known:
                    self._send_states()

    async def _obey(self, gateway: str, order: EngineOrder) -> None:
        """Carry out an order, and answer that it has begun or is refused; that gateway has checked what waits."""
        answer = OrderAnswer(order.number)
        try:
            add, roll = map(read_engine, order.add), {id: read_engine(text) for id, text in order.roll.items()}
            await self.fleet.change([*add], roll, order.remove, now=order.now, force=True)
            for id in order.drain:
                await self.fleet.drain(id, force=True)
        except HeadwayError as error:
            answer = OrderAnswer(order.number, error.status, error.message, error.hint, error.code)
        except Exception as error:  # the gateway must not wait in vain
            log.exception("an order of %s failed", gateway)
            answer = OrderAnswer(order.number, 500, f"The agent {self._link.name} failed: {error!r}.", "See its log.")
        self._send_states()
        self._link.send(gateway, answer)

    def _tell(self, event: Event) -> None:
        """Report an event of an engine."""
        if isinstance(event, Learned) or (isinstance(event, Cached) and self._drops):
            self._to_both(event)
            return
        if not isinstance(event, Cached):
            self._note(event)
            self._send_states()
        self._link.send("controller", event)

    def _note(self, event: Event) -> None:
        """Keep track of the instances that are up."""
        match event:
            case InstanceDown(id):
                self._instances.pop(id, None)
            case InstanceUp(instance) | Swapped(instance) | Warmed(instance):
                self._instances[instance.id] = instance

    def _progressed(self, instance: str, progress: Mapping[str, Progress], asked: float) -> None:
        self._link.send("controller", Progressed(instance, progress, asked))

    async def _report(self) -> None:
        """Report the state of all engines, until cancelled."""
        connections = self._link.connections
        while True:
            if self._link.connections != connections:  # commands may have been lost: the controller starts over
                connections = self._link.connections
                self._link.send("controller", Gone())
            self._send_states()
            await asyncio.sleep(EVERY_S)

    def _send_states(self) -> None:
        states = (self._state(engine) for engine in self.agents.engines.values())
        self._to_both(*states, AgentEngines(frozenset(self.agents.engines)))

    def _to_both(self, *items: Item) -> None:
        """Send something to the controller and to all gateways."""
        self._link.send("controller", *items)
        self._link.send("gateways", *items)

    def _state(self, engine: VllmEngine) -> EngineState:
        errors = {name: engine.models.unavailable(name) for name in engine.models.names}
        return EngineState(
            engine.id,
            engine.url,
            engine.key,
            self._instances.get(engine.id),
            engine.models.current,
            engine.loading,
            {name: str(error) for name, error in errors.items() if error is not None},
            engine.prefix_caching,
            engine.restarts,
            None if engine.failure is None else str(engine.failure),
            engine.fatal,
            engine.leaving,
            engine.stopped,
            None if engine.config == self._configured.get(engine.id) else write_engine(engine.config),
        )

    async def drain(self) -> None:
        """Let all engines end what is inside them and stop, as far as that takes no longer than `server.drain_s`."""
        limit = self._drain_s
        with suppress(TimeoutError):
            async with asyncio.timeout(None if limit == "streams" else limit):
                for id in self.fleet.settings:
                    if not self.agents.engines[id].stopped:
                        await self.fleet.drain(id, force=True)
                while True:
                    if all(one.stopped for one in self.agents.engines.values()):
                        return
                    await asyncio.sleep(POLL_S)

    def end(self) -> None:
        """Report that these engines are gone."""
        self._to_both(Gone())


def _check(config: Config) -> None:
    """Raise ConfigError for engines that cannot be served; the gateway that orders checks those for overflow.

    They need another engine of their model, which another agent may have.
    """
    if config.fleet:
        preflight(replace(config, engines=config.fleet))
