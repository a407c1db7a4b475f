"""`headway serve`: checks the configuration, opens the gateway and serves HTTP until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.cluster.wire.messages import WireLink
from headway.config import Config
from headway.engines.vllm.process.view import EngineView
from headway.errors import ConfigError, HeadwayError
from headway.gateway import tasks
from headway.gateway.apis.batches.execution import BatchRunner
from headway.gateway.apis.state import AppState
from headway.gateway.app import add_endpoints, new_app
from headway.gateway.gateway import Gateway, serving
from headway.gateway.http.connections import ConnectionLimits, Connections
from headway.gateway.http.garbage import collect, collect_all, spare_old_objects
from headway.gateway.http.listening import listening, steer_away
from headway.gateway.http.protocol import protocol_class
from headway.gateway.http.tls import Certificate, TlsServer
from headway.gateway.preflight import preflight
from headway.gateway.reload import Reload
from headway.gateway.requests.streaming import DeferredMiddleware
from headway.gateway.watch import json_log
from headway.gateway.watch.logs import AccessLog, configure
from headway.private import directory

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_BACKLOG = 65_535  # connections that wait to be accepted; the system's own limit is net.core.somaxconn
# Connections that are accepted in one iteration of the event loop. libuv accepts one per socket, so that a
# new one would wait for an iteration, with all that others have sent meanwhile, per connection before it.
_ACCEPTED = 4
_LOOK_S = 0.2  # between two looks at engines that start
_TRIES = 3  # starts of an engine, before `headway serve` gives up
_LAST_WORDS_S = 2.0  # for clients to learn that their requests end with the gateway
log = logging.getLogger("headway.gateway")
OpenLink = Callable[[], contextlib.AbstractAsyncContextManager[WireLink]]


def serve(
    config: Config,
    *,
    log_dir: Path | None = None,
    quiet: bool = False,
    file: Path | None = None,
    link: OpenLink | None = None,
) -> int:
    """Serve until a signal ends it; return the exit status.

    file: which SIGHUP reads again, unless a terminal may send that signal because it is closed.
    link: opens the way to a controller and agents elsewhere, None = all is in this process.
    """
    configure(config.log, quiet=quiet)
    preflight(config, starts_engines=link is None, serves=True)
    _make_log_dir(log_dir)
    _return_memory()
    spare_old_objects()
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        sock, address = listening(config.server)
        stack.enter_context(sock)
        config = replace(config, server=address)
        same = [stack.enter_context(sock.dup()) for _ in range(_ACCEPTED - 1)]
        server = GatewayServer(config, log_dir, None if sys.stderr.isatty() else file, link)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it is done
            server.run(sockets=[sock, *same])
    gc.unfreeze()  # or libraries would complain of leaks at the end
    return 1 if server.failed else 0


def _make_log_dir(log_dir: Path | None) -> None:
    """Make the directory of logs; ConfigError when that fails."""
    try:
        if log_dir is not None:
            directory(log_dir)
    except OSError as error:
        raise ConfigError(
            f"The logs' directory {log_dir} cannot be made: {error.strerror}.", "Give --logs another."
        ) from error


def _raise_file_limit() -> None:
    """Allow as many open files as the system grants: each client and each request in an engine is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _return_memory() -> None:
    """Let glibc return the memory of large bodies as soon as they are freed, and keep one heap, not several.

    Otherwise it raises the size from which it does so to that of the bodies, and they fragment its heap. A
    heap for each thread gains nothing where the interpreter lets one of them run at a time.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _tidy() -> None:
    """Let go of what the start leaves behind: 20 MB of a tokenizer's file, read and parsed.

    Imported modules stay: not scanning them for garbage saves a tenth of every request.
    """
    collect_all()
    gc.freeze()


class GatewayServer(uvicorn.Server):
    """uvicorn around an open gateway; it ends when no engine can be started.

    link: opens the way to a controller and agents elsewhere, None = all is in this process.
    failed: no engine could be started.
    last_connections_s: seconds in which connections that came before the end may still send their requests.
    """

    def __init__(
        self, config: Config, log_dir: Path | None = None, file: Path | None = None, link: OpenLink | None = None
    ) -> None:
        self._app, self._file = new_app(), file
        app = cross_origin(DeferredMiddleware(self._app), config.server.cors_origins)
        self._served: ASGIApp = AccessLog(app) if config.log.access else app
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections = Connections(ConnectionLimits.of(config.server, files))
        self._protocol = protocol_class(self._connections)
        super().__init__(
            uvicorn.Config(
                self._served,
                loop="uvloop",
                log_level="warning",
                log_config=None,
                access_log=False,
                lifespan="off",
                http=self._protocol,
                server_header=False,
                ws="none",
                timeout_keep_alive=config.server.idle_timeout_s,
                proxy_headers=False,
                timeout_graceful_shutdown=None if config.server.drain_s == "streams" else config.server.drain_s,
            )
        )
        self._certificate = None if config.server.tls.cert is None else Certificate(config.server.tls)
        self._settings, self._log_dir, self._link = config, log_dir, link
        self.failed = False
        self.last_connections_s = 0.5
        self._state: AppState | None = None  # until the gateway is open
        self._opening: asyncio.Task[None] | None = None  # while the gateway is being opened

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the gateway and serve until a signal; HeadwayError when it cannot be opened."""
        with self.capture_signals():  # around the gateway, so that a signal does not interrupt its closing
            async with contextlib.AsyncExitStack() as stack:
                if (gateway := await self._opened(stack)) is not None:
                    await self._serve_gateway(gateway, sockets)

    async def _opened(self, stack: contextlib.AsyncExitStack) -> Gateway | None:
        """Open the gateway until the stack ends; None = a signal has cancelled that."""
        task = self._opening = asyncio.current_task()
        assert task is not None
        try:
            link = None if self._link is None else await stack.enter_async_context(self._link())
            return await stack.enter_async_context(serving(self._settings, log_dir=self._log_dir, link=link))
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
            task.uncancel()  # or SIGINT, which is raised again, would not become a KeyboardInterrupt
            return None
        finally:
            self._opening = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. Opening the gateway may download from a model hub for minutes; a signal cancels it."""
        task = None if self.should_exit else self._opening  # a second signal does not cut the closing short
        super().handle_exit(sig, frame)
        if task is not None:
            task.get_loop().call_soon_threadsafe(lambda: self._opening and self._opening.cancel())

    async def _serve_gateway(self, gateway: Gateway, sockets: list[socket.socket] | None) -> None:
        state = AppState(gateway)
        await state.begin()
        add_endpoints(self._app, state)
        self._state = state
        if self._file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, Reload(self._file, state))
        self._connections.ended = gateway.metrics.connection_ended
        _tidy()
        collect_garbage = partial(collect, lambda: len(gateway.dispatcher.control.controller.requests))
        loops: list[tasks.Loop] = [partial(self._announce, state), self._connections.watch, collect_garbage]
        loops += state.loops
        if gateway.batches is not None:
            loops.append(BatchRunner(state, gateway.batches).run)
        if self._certificate is not None:
            loops.append(self._certificate.follow)
        async with tasks.running(*loops), self._picking(state):
            await self._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as in uvicorn, but with limits of TLS handshakes."""
        loop, protocol = asyncio.get_running_loop(), partial(self._protocol, self.config, self.server_state, {})
        servers: list[Any] = [
            await loop.create_server(protocol, sock=one, backlog=_BACKLOG)
            if self._certificate is None
            else TlsServer(one, _BACKLOG, self._certificate, self._connections, protocol)
            for one in sockets or ()
        ]
        self.servers, self.started = servers, True

    def _picking(self, state: AppState) -> contextlib.AbstractAsyncContextManager[None]:
        """Return what serves proxies, if it is configured; ConfigError if its packages are missing."""
        if self._settings.picker.port is None:
            return contextlib.nullcontext()
        try:
            from headway.gateway.picker.server import picking
        except ImportError as error:
            raise ConfigError(f"picker.port needs gRPC: {error}.", "pip install 'headway[picker]'") from error
        return picking(self._settings, self._served, state, self.server_state.tasks)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests in progress end, at most `drain_s`; send an error to clients whose requests are cut short.

        Other gateways go on with batches and background requests at once.
        """
        if self._settings.server.reuse_port and sockets:
            steer_away(sockets[0])
        else:
            for server in self.servers:
                server.close()
        await asyncio.sleep(self.last_connections_s)
        if self._state is not None:
            await self._hand_over(self._state)
        state, drain = self.server_state, self._settings.server.drain_s
        if state.tasks:
            limit = "all the time that they take" if drain == "streams" else f"up to {drain} s"
            log.warning("stopping; requests in progress (%d) have %s (Ctrl-C ends them now)", len(state.tasks), limit)
        for server in self.servers:
            if isinstance(server, TlsServer):  # one that ends its handshake during the drain would not be closed
                await server.wait_closed()
        await super().shutdown(sockets)
        for task in [task for task in state.tasks if not task.cancelling()]:  # after a second Ctrl-C
            task.cancel()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_LAST_WORDS_S)
        self._connections.cut(but=state.connections)

    async def _hand_over(self, state: AppState) -> None:
        state.stopping.set()
        if state.gateway.batches is not None:
            state.gateway.batches.changed.set()  # so that its runner ends now
        if state.gateway.broker.on_disk:
            await state.gateway.background.hand_over()

    async def _announce(self, state: AppState) -> None:
        """Say when the gateway is ready; stop everything when an engine of this process cannot start at all."""
        console = Console(stderr=True, soft_wrap=True, quiet=json_log.is_on())
        address = self._settings.server.url
        _say(
            console,
            f"[bold]Headway[/], recipe [cyan]{escape(self._settings.recipe)}[/]: starting engines "
            f"(a vLLM takes 15 to 60 s); requests to {escape(address)} wait for them",
        )
        gateway, said = state.gateway, False
        left = [one for one in gateway.dispatcher.engines.values() if not one.config.overflow]  # of the start
        if self._link is None and any(engine.url is None for engine in self._settings.engines):
            logs = self._log_dir or self._settings.logs_dir
            _say(console, f"[dim]their logs: {escape(str(logs))}[/]", highlight=False)
        with console.status("starting engines ..."):
            while left or not said:
                left = self._still_starting(console, left)
                if self.failed or (said and self._link is not None):  # what agents start may come later, or never
                    return
                # A model that may have 0 engines is ready without one, but not while this process starts its first.
                up = {name for one in gateway.dispatcher.engines.values() if one.serves for name in one.models.names}
                own = {one.config.name for one in left if self._link is None and one.config.url is None}
                if state.ready and own <= up and not said:
                    said = True
                    self._report_targets(console, state)
                    models = escape(", ".join(sorted(gateway.counters)))
                    _say(console, f"[green]ready[/]: {models} at {escape(address)}/v1  (Ctrl-C stops everything)")
                await asyncio.sleep(_LOOK_S)

    def _still_starting(self, console: Console, engines: Sequence[EngineView]) -> list[EngineView]:
        """Describe the engines that have come up; return the others, unless one of this process cannot start."""
        for engine in engines:
            if engine.up.is_set() and engine.about:
                line = f"{engine.id}: {engine.models.current}, {engine.about}"
                _say(console, f"[dim]{escape(line)}[/]", highlight=False)
        waiting = [one for one in engines if not one.up.is_set() and one.leaving is None]
        given_up = (one.failure for one in waiting if one.given_up or one.tries >= _TRIES)
        if self._link is None and (failure := next(filter(None, given_up), None)) is not None:
            self._give_up(console, failure)
        return waiting

    def _report_targets(self, console: Console, state: AppState) -> None:
        """Say what measured classes promise and which others promise more than engines can do; warn of prices."""
        classes, paces = self._settings.classes, state.gateway.paces
        for line in paces.descriptions(classes):
            _say(console, escape(line), highlight=False)
        for line in (*paces.warnings(classes), *state.price_warnings()):
            log.warning("%s", line)

    def _give_up(self, console: Console, failure: HeadwayError) -> None:
        _say(console, f"[red]cannot start[/]: {escape(str(failure))}", logging.ERROR, highlight=False)
        self.failed = self.should_exit = True


class _CrossOrigin(CORSMiddleware):
    """Starlette's, for requests whose headers are forgotten before their answer begins."""

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        kept = Headers({name: request_headers[name] for name in ("origin", "cookie") if name in request_headers})
        await super().simple_response(scope, receive, send, request_headers=kept)


def cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the app as scripts of these origins may use it; keys travel in headers, so no cookies are allowed."""
    if not origins:
        return app
    return _CrossOrigin(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"], max_age=600
    )


def _say(console: Console, markup: str, level: int = logging.INFO, *, highlight: bool = True) -> None:
    """Print a line for people, or log it where all lines are JSON."""
    if json_log.is_on():
        log.log(level, "%s", Text.from_markup(markup).plain)
    else:
        console.print(markup, highlight=highlight)
