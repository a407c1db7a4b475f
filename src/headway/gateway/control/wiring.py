"""Controller, engines and gateway in one process, connected by plain calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headway.config import Config
from headway.events import Event
from headway.gateway import tasks
from headway.gateway.control.agents import Agents
from headway.gateway.control.control import Control
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.control.setup import Listener, Make, drops, engines_of
from headway.gateway.watch.metrics import Metrics
from headway.policy.apps.account import RunAccount
from headway.policy.core.controller import Controller
from headway.types import Command


@dataclass(frozen=True, slots=True)
class LocalGateway:
    """A gateway with controller and engines in one process."""

    control: Control
    agents: Agents
    dispatcher: Dispatcher
    metrics: Metrics
    make: Make

    @classmethod
    def of(
        cls, config: Config, controller: Controller, metrics: Metrics, maker: Callable[[Listener], Make]
    ) -> LocalGateway:
        """Connect a controller with engines and requests in flight.

        maker: returns what makes engines, given the listener for what happens to them.
        """

        def execute(commands: Sequence[Command]) -> None:
            for command in commands:
                agents.execute(command)
                dispatcher.execute(command)

        def notify(event: Event) -> None:
            control.notify(event)
            dispatcher.receive(event)

        def inquire(instance: str, ids: Sequence[str]) -> None:
            agents.inquire(instance, ids)

        def swaps() -> bool:
            return any(engine.models.swaps for engine in engines.values())

        make = maker(notify)
        engines = engines_of(config, make)
        control = Control(controller, execute, inquire, drops=drops(config), swaps=swaps)
        agents = Agents(engines, notify, control.progressed, follows=lambda: control.follows_latency)
        dispatcher = Dispatcher(control, engines, RunAccount(config.apps.run_timeout_s), metrics)
        return cls(control, agents, dispatcher, metrics, make)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engines and the planner until the block ends; the engines stop last."""
        await self.control.prepare()
        loops = [*self.control.loops(), *self.dispatcher.loops()]
        async with self.agents.running(self.metrics.loop_failed):
            try:
                async with tasks.running(*loops, failed=self.metrics.loop_failed):
                    yield
            finally:
                await self.dispatcher.warmups.close()
