"""`headway gateway`, `controller` and `agent`: the processes, and their probes over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headway import clock
from headway.cluster.roles.agent import Agent
from headway.cluster.roles.leader import Leader
from headway.cluster.wire.connection import VARIABLE, RabbitAddress
from headway.cluster.wire.messages import Message, WireLink
from headway.cluster.wire.rabbitmq import RabbitLink
from headway.config import Config
from headway.config.keys import reveal
from headway.errors import ConfigError, HeadwayError
from headway.gateway import tasks
from headway.gateway.apis.access import Access
from headway.gateway.control.autoscale import commands
from headway.gateway.control.control import Control, Execute, Inquire
from headway.gateway.control.lengths.service import LengthService, open_lengths
from headway.gateway.control.wiring import controller_of, drops, engine_maker
from headway.gateway.errors import error_response
from headway.gateway.http.garbage import collect, spare_old_objects
from headway.gateway.http.listening import bind
from headway.gateway.main import serve
from headway.gateway.preflight import preflight
from headway.gateway.watch.logs import configure
from headway.gateway.watch.metrics import Metrics
from headway.policy.recipes.registry import find

State = Callable[[], tuple[bool, dict[str, Any]]]


def probes(state: State, metrics: Metrics, access: Access) -> Starlette:
    """Return the application.

    state: returns whether the process is ready, and details. access: decides which requests see these and metrics.
    """

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready, details = state()
        details = details if access.tells_status(request) else {}
        return JSONResponse({"ready": is_ready, **details}, 200 if is_ready else 503)

    async def page(request: Request) -> Response:
        access.check_status(request)
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadwayError), "registered for these alone"
        return error_response(error)

    routes = [Route("/health", health), Route("/ready", ready), Route("/metrics", page)]
    return Starlette(routes=routes, exception_handlers={HeadwayError: refused})


class ControllerProcess:
    """A controller that leads whenever the wire lets it; each term begins with a new, empty `Leader`.

    leader: that of the current or last term, None = it has not led yet. metrics: its own.
    """

    def __init__(self, config: Config, link: WireLink, lengths: LengthService, metrics: Metrics) -> None:
        self._config, self._link, self._lengths, self.metrics = config, link, lengths, metrics
        self.leader: Leader | None = None
        self._term, self._since = 0, 0.0  # the number of its term, and the instant of its begin
        metrics.wanted.counts = self._wanted

    def _wanted(self) -> Mapping[str, int]:
        """Return how many engines models need; nothing while it does not lead, or may not have heard of all agents."""
        knows = self._link.connected and clock.now() - self._since > self._config.wire.lease_seconds
        scaling = self.leader.control.controller.scaling if self.leader is not None and knows else None
        return {} if scaling is None else scaling.current

    def state(self) -> dict[str, int]:
        """Return the number of requests that it knows, 0 while it does not lead."""
        known = 0 if self.leader is None else len(self.leader.control.controller.requests)
        return {"requests": known if self._link.connected else 0}

    async def run(self) -> None:
        """Handle messages until the link is closed."""
        async with AsyncExitStack() as stack:
            async for message in self._link.messages():
                if self.leader is None or message.epoch != self._term:
                    await stack.aclose()
                    self._term, self._since, self.leader = message.epoch, clock.now(), self._new_leader()
                    log.info("this controller leads, in term %d", self._term)
                    await self.leader.control.prepare()
                    loops = [*self.leader.loops(), *commands(self._config.scale, self._wanted)]
                    await stack.enter_async_context(tasks.running(*loops, failed=self.metrics.loop_failed))
                self._receive(self.leader, message)

    def _receive(self, leader: Leader, message: Message) -> None:
        """Handle a message; if that fails, ask the sender for a full report."""
        try:
            leader.receive(message)
        except Exception:
            log.exception("handling a message from %s failed; asking it for a full report", message.sender)
            self.metrics.loop_failed("receive")
            leader.distrust(message.sender)

    def _new_leader(self) -> Leader:
        return Leader(self._link, self._control, self._config.wire.lease_seconds, self._config.named)

    def _control(self, execute: Execute, inquire: Inquire) -> Control:
        config = self._config
        controller = controller_of(config, find(config.recipe).planner(), self._lengths.lengths)
        swaps = any(engine.models for engine in config.engines)
        return Control(controller, execute, inquire, drops=drops(config), swaps=lambda: swaps)


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
