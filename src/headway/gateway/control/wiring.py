"""Controller, engines and gateway in one process, connected by plain calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config import Config, Engine
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.pace import MeasuredPace
from headway.events import Event
from headway.gateway import tasks
from headway.gateway.control.agents import Agents
from headway.gateway.control.control import Control
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.watch.metrics import Metrics
from headway.policy.apps.account import RunAccount
from headway.policy.apps.prewarming import PrewarmOptions
from headway.policy.core.controller import Controller
from headway.policy.core.shares import QueueShares
from headway.policy.scale.scaler import Scaling
from headway.ports import Lengths, Planner
from headway.types import Command

Listener = Callable[[Event], None]
Make = Callable[[str, Engine], VllmEngine]


def controller_of(config: Config, planner: Planner, lengths: Lengths) -> Controller:
    """Return the controller; several tenants take turns, and none may fill the queue."""
    server, shares = config.server, None
    if config.several_tenants:
        planner.take_turns()
        shares = QueueShares(server.tenant_share, server.class_share)
    elif config.closed:
        shares = QueueShares()  # for keys.max_queued
    be_ready(planner, config)
    scaling = Scaling(config.scale) if config.scale else None
    return Controller(planner, lengths, server.max_queued, shares, scaling)


def be_ready(planner: Planner, config: Config) -> None:
    """Set how readily a planner warms ahead for each class."""
    if planner.prewarming is not None:
        readiness = {name: tier.prewarm for name, tier in config.classes.items()}
        planner.prewarming.options = PrewarmOptions(readiness)


def engine_maker(
    config: Config,
    log_dir: Path | None,
    listener: Listener,
    metrics: Metrics,
    on_pace: Callable[[str, MeasuredPace], None] | None = None,
) -> Make:
    """Return what makes an engine of this process, by its id. on_pace: receives its measured pace, None = none is."""

    def make(id: str, engine: Engine) -> VllmEngine:
        logs, host = log_dir or config.logs_dir, config.wire.host
        return VllmEngine(id, engine, config.recipe, logs, listener, metrics.swapped, host=host, on_pace=on_pace)

    return make


def engines_of(config: Config, make: Make, only: frozenset[str] | None = None) -> dict[str, VllmEngine]:
    """Return the engines of a configuration by id. only: ids of those that are wanted, None = all."""
    return {id: make(id, engine) for id, engine in config.named.items() if only is None or id in only}


def drops(config: Config) -> bool:
    """Return whether some class refuses what cannot be on time."""
    return any(tier.drop for tier in config.classes.values())


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
