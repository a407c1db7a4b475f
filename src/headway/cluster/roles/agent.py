"""An agent: runs the engines of one machine, reports on them, and carries out the controller's commands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from headway.cluster.wire.messages import Asked, EngineState, Gone, Item, Progressed, Standing
from headway.cluster.wire.port import Message, WireLink
from headway.engines.vllm.process.client import VllmEngine
from headway.events import Cached, Event, InstanceDown, InstanceUp, Learned, Swapped, Warmed
from headway.gateway.control.agents import Agents
from headway.types import Instance, Progress, Rerank, Swap, Warm

EVERY_S = 1.0  # between two reports of all engines
log = logging.getLogger("headway.gateway")
Tell = Callable[[Event], None]


class Agent:
    """The engines of this process, for gateways and a controller elsewhere.

    make: creates the engines, given a listener for their events.
    drops: some class drops requests, so gateways want to know what is cached: they refuse by it at arrival.
    """

    def __init__(self, link: WireLink, make: Callable[[Tell], dict[str, VllmEngine]], *, drops: bool = False) -> None:
        self._link, self._drops = link, drops
        self.agents = Agents(make(self._tell), self._tell, self._progressed, apart=True)
        self._instances: dict[str, Instance] = {}
        self._epoch = 0

    def receive(self, message: Message) -> None:
        """Handle a message from a controller, unless its term is over."""
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

    async def report(self) -> None:
        """Report the state of all engines, until cancelled."""
        connections = self._link.connections
        while True:
            if self._link.connections != connections:  # commands may have been lost: the controller starts over
                connections = self._link.connections
                self._link.send("controller", Gone())
            self._send_states()
            await asyncio.sleep(EVERY_S)

    def _send_states(self) -> None:
        self._to_both(*(self._state(engine) for engine in self.agents.engines.values()))

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
            engine.continues,
            engine.restarts,
            None if engine.failure is None else str(engine.failure),
            engine.fatal,
        )

    def end(self) -> None:
        """Report that these engines are gone."""
        self._to_both(Gone())
