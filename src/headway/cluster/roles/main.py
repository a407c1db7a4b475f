"""`headway gateway`, `controller` and `agent`: the commands that run Headway's parts as processes."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from headway.cluster.roles.agent import Agent
from headway.cluster.roles.controllers import ControllerProcess
from headway.cluster.roles.probes import probes
from headway.cluster.wire.connection import VARIABLE, RabbitAddress
from headway.cluster.wire.rabbitmq import RabbitLink
from headway.config import Config
from headway.config.keys import reveal
from headway.errors import ConfigError
from headway.gateway import tasks
from headway.gateway.apis.access import Access
from headway.gateway.control.lengths.service import open_lengths
from headway.gateway.control.setup import engine_maker
from headway.gateway.http.garbage import collect, spare_old_objects
from headway.gateway.http.listening import bind
from headway.gateway.main import serve
from headway.gateway.preflight import preflight
from headway.gateway.watch.logs import configure
from headway.gateway.watch.metrics import Metrics
from headway.policy.recipes.registry import find

log = logging.getLogger("headway.gateway")


def address_of(config: Config) -> RabbitAddress:
    """Return RabbitMQ's address. ConfigError when neither the configuration nor the environment has it."""
    url = os.environ.get(VARIABLE) if config.wire.url is None else reveal(config.wire.url, "wire.url")
    if not url:
        raise ConfigError(
            "Gateways, controllers and agents talk over RabbitMQ, but its URL is not set.",
            f'Set wire.url = "env:{VARIABLE}" and the variable, or run `headway serve`, which needs none.',
            param="wire.url",
        )
    return RabbitAddress(url, config.wire.name)


def new_name(role: str) -> str:
    """Return a unique name for this process."""
    return f"{role}-{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(3)}"


def gateway(config: Config, *, log_dir: Path | None = None, file: Path | None = None) -> int:
    """Serve HTTP for a controller and agents elsewhere until a signal; return the exit status."""
    link = partial(RabbitLink.opened, address_of(config), new_name("gateway"), "gateway")
    return serve(config, log_dir=log_dir, file=file, link=link)


def controller(config: Config, *, port: int | None = None) -> int:
    """Lead, or stand by to lead, until a signal; return the exit status. port: for probes, None = none."""
    configure(config.log, quiet=False)
    spare_old_objects()
    address, name = address_of(config), new_name("controller")

    async def work() -> None:
        metrics = Metrics()
        async with (
            RabbitLink.opened(address, name, "controller") as link,
            open_lengths(find(config.recipe), config.predictor, metrics) as lengths,
        ):
            process = ControllerProcess(config, link, lengths, metrics)
            state = lambda: (True, {"leads": link.connected, "term": link.term, **process.state()})  # noqa: E731
            full = partial(collect, lambda: process.state()["requests"])
            async with _probed(port, config, state, metrics), tasks.running(process.run, full):
                log.info("%s waits to lead", name)
                await _stop_signal()

    asyncio.run(work())
    return 0


def agent(
    config: Config, name: str | None, engines: Sequence[str], *, log_dir: Path | None = None, port: int | None = None
) -> int:
    """Run engines until a signal, then drain them until a second one at most; return the exit status.

    name: of this agent, the same after a restart; None = from the host name. engines: ids of the engines to run,
    empty = all of the configuration. port: for probes, None = none.
    """
    configure(config.log, quiet=False)
    preflight(config)
    address, only = address_of(config), _chosen(config, engines)

    async def work() -> None:
        metrics = Metrics()
        async with RabbitLink.opened(address, name or f"agent-{socket.gethostname()[:60]}", "agent") as link:
            one = Agent(link, config, lambda tell: engine_maker(config, log_dir, tell, metrics), metrics, only)

            async def listen() -> None:
                async for message in link.messages():
                    one.receive(message)

            state = partial(_state_of, one, link)
            async with _probed(port, config, state, metrics), one.running(), tasks.running(listen):
                try:
                    await _stop_signal()
                    draining = [asyncio.create_task(work) for work in (one.drain(), _stop_signal())]
                    await asyncio.wait(draining, return_when=asyncio.FIRST_COMPLETED)
                    await tasks.cancel(*draining)
                finally:
                    one.end()

    asyncio.run(work())
    return 0


def _chosen(config: Config, engines: Sequence[str]) -> frozenset[str]:
    """Return the ids of the engines to run, all when none is named. ConfigError for an unknown one."""
    known = list(config.named)
    if unknown := [id for id in engines if id not in known]:
        raise ConfigError(
            f"The configuration has no engine {unknown[0]!r}.", f"Choose from {', '.join(known)}.", param="engines"
        )
    return frozenset(engines or known)


def _state_of(one: Agent, link: RabbitLink) -> tuple[bool, dict[str, Any]]:
    """Return whether an agent is ready, and what /health shows of it."""
    up = {id: engine.up.is_set() for id, engine in one.agents.engines.items() if engine.leaving is None}
    return all(up.values()) and link.connected, {"engines": up, "wire": link.connected}


@asynccontextmanager
async def _probed(
    port: int | None, config: Config, state: Callable[[], tuple[bool, dict[str, Any]]], metrics: Metrics
) -> AsyncIterator[None]:
    """Answer /health, /ready and /metrics while the block runs."""
    if port is None:
        yield
        return
    app = probes(state, metrics, Access(config))
    with bind(config.server.host, port) as sock:
        server = _Probes(uvicorn.Config(app, log_level="warning", log_config=None, lifespan="off", access_log=False))
        task = asyncio.create_task(server.serve([sock]))
        try:
            yield
        finally:
            server.should_exit = True
            await task


class _Probes(uvicorn.Server):
    """An HTTP server that leaves signals to the process it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _stop_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.set)
    await received.wait()
