"""Gateways, controllers and agents in threads of this process, on one exchange, with FAKE engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headway.cluster.roles.agent import Agent
from headway.cluster.roles.main import ControllerProcess
from headway.config import Config
from headway.gateway import tasks
from headway.gateway.control.lengths.service import open_lengths
from headway.gateway.control.wiring import engine_maker
from headway.gateway.watch.metrics import Metrics
from headway.policy.recipes.registry import find
from tests.gateway import gateway as base
from tests.gateway.gateway import Gateway
from tests.gateway.roles.exchange import Exchange


@dataclass
class Parts:
    """The processes of one Headway. Each `Future` in `ends` stops the coroutine that waits for it."""

    config: Config
    folder: Path
    exchange: Exchange = field(default_factory=Exchange)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    controllers: dict[str, ControllerProcess] = field(default_factory=dict)
    agents: dict[str, Agent] = field(default_factory=dict)
    running: dict[str, Future[None]] = field(default_factory=dict)

    def begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.running[name] = asyncio.run_coroutine_threadsafe(work(), self.loop)

    def controller(self, name: str) -> None:
        """Start a controller."""

        async def run() -> None:
            metrics = Metrics()
            link = self.exchange.link(name, controls=True)
            async with open_lengths(find(self.config.recipe), self.config.predictor, metrics) as lengths:
                one = self.controllers[name] = ControllerProcess(self.config, link, lengths, metrics)
                await one.run()

        self.begin(name, run)

    def agent(self, name: str, *engines: str) -> None:
        """Start an agent of some engines."""

        async def run() -> None:
            metrics, link = Metrics(), self.exchange.link(name)
            maker = lambda tell: engine_maker(self.config, self.folder, tell, metrics)  # noqa: E731
            agent = self.agents[name] = Agent(link, self.config, maker, metrics, frozenset(engines))

            async def listen() -> None:
                async for message in link.messages():
                    agent.receive(message)

            async with agent.running(), tasks.running(listen):
                await asyncio.Event().wait()

        self.begin(name, run)

    def kill(self, name: str) -> None:
        """End a controller or an agent without a word."""
        self.exchange.lose(name)
        self.running.pop(name).cancel()

    @contextmanager
    def gateway(self, name: str, *, ready: bool = True) -> Iterator[Gateway]:
        """Run a gateway until the block ends."""

        @asynccontextmanager
        async def link() -> Any:
            yield self.exchange.link(name)
            self.exchange.lose(name)

        with base.serving(self.config, ready=ready, link=link) as one:
            yield one


@contextmanager
def parts(config: Config, folder: Path) -> Iterator[Parts]:
    """Yield the parts of a Headway, none of them started; end them with the block."""
    config = replace(config, wire=replace(config.wire, lease_seconds=2.0))
    made = Parts(config, folder)
    thread = threading.Thread(target=made.loop.run_forever, name="parts")
    thread.start()
    try:
        yield made
    finally:
        for name in [*made.running]:
            made.kill(name)
        made.loop.call_soon_threadsafe(partial(_stop, made.loop))
        thread.join(20)
        assert not thread.is_alive()
        made.loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    ended = asyncio.gather(*left, return_exceptions=True)
    ended.add_done_callback(lambda _: loop.stop())
