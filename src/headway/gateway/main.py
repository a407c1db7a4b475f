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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headway.addresses import is_host, is_url, netloc
from headway.cluster.wire.port import WireLink
from headway.config import Config, Engine, Postgres, check_contradictions
from headway.config.keys import reveal, revealed
from headway.engines.vllm.process.cards import cards, check_cards
from headway.engines.vllm.process.launch import check_installed, spec
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.engines.vllm.process.settings import check_cores, check_settings
from headway.engines.vllm.process.sizes import requested
from headway.errors import ConfigError, HeadwayError, check_all
from headway.gateway import tasks
from headway.gateway.apis.batches.runner import BatchRunner
from headway.gateway.apis.state import AppState
from headway.gateway.app import add_endpoints, new_app
from headway.gateway.control.lengths.embedding import locate
from headway.gateway.gateway import Gateway, serving
from headway.gateway.http.connections import ConnectionLimits, Connections
from headway.gateway.http.garbage import collect, spare_old_objects
from headway.gateway.http.listening import listening, steer_away
from headway.gateway.http.protocol import protocol_class
from headway.gateway.parsing.models import base_models, check_aliases
from headway.gateway.reload import Reload
from headway.gateway.requests.streaming import DeferredMiddleware
from headway.gateway.watch import json_log
from headway.gateway.watch.logs import AccessLog, configure
from headway.models.resolve import resolve
from headway.policy.core.engine_spec import check
from headway.policy.recipes.registry import find
from headway.private import directory

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_BACKLOG = 65_535  # connections that wait to be accepted; the system's own limit is net.core.somaxconn
# Connections that are accepted in one iteration of the event loop. libuv accepts one per socket, so that a
# new one would wait for an iteration, with all that others have sent meanwhile, per connection before it.
_ACCEPTED = 4
_LAST_CONNECTIONS_S = 0.5  # for connections that came before to send their requests
_TRIES = 3  # starts of an engine, before `headway serve` gives up
_LAST_WORDS_S = 2.0  # for clients to learn that their requests end with the gateway
log = logging.getLogger("headway.gateway")
OpenLink = Callable[[], contextlib.AbstractAsyncContextManager[WireLink]]


def preflight(config: Config, *, starts_engines: bool = True) -> None:
    """Raise ConfigError for everything that can be known before an engine is started.

    starts_engines: in this process, not in agents elsewhere.
    """
    own = [(i, engine) for i, engine in enumerate(config.engines) if engine.url is None]
    starts = starts_engines and bool(own)
    seen = cards() if starts and any(engine.cards is not None for _, engine in own) else []
    check_all(
        partial(check_contradictions, config),
        partial(_check_recipe, config),
        *(partial(_check_models, config.recipe, engine) for engine in config.engines),
        partial(_check_secrets, config),
        partial(base_models, config.engines),
        partial(_check_names, config),
        partial(check_aliases, config),
        *([check_installed] if starts else []),
        *(partial(check_cores, f"engines.{i}", engine.cores) for i, engine in own if starts),
        *(partial(check_cards, f"engines.{i}", engine, seen) for i, engine in own if starts),
        *(partial(check_settings, f"engines.{i}", engine) for i, engine in own),
        *(partial(resolve, model) for engine in config.engines for model in engine.served.values()),
        partial(_check_addresses, config),
    )


def _check_recipe(config: Config) -> None:
    """Raise ConfigError for an unknown recipe, or one that these engines cannot carry out."""
    recipe = find(config.recipe)
    if recipe.lengths == "oracle":
        raise ConfigError(
            f"{config.recipe} plans with the true lengths of answers, which only a simulation knows.",
            f"Serve with {config.recipe.removesuffix('-oracle')}, or try it with headway simulate.",
            param="recipe",
        )
    for engine in config.engines:
        if engine.url is None:
            engine_spec = spec(engine)
            check(engine_spec, recipe.packer(engine_spec).kv, config.recipe)
    if recipe.lengths == "padded":
        locate(config.predictor.embedding)


def _check_names(config: Config) -> None:
    """Raise ConfigError for a name that engines use for different models, or with different known contexts."""
    for name in sorted({name for engine in config.engines for name in engine.served}):
        having = [engine for engine in config.engines if name in engine.served]
        known = [engine for engine in having if engine.url is None or engine.max_model_len is not None]
        contexts = {requested(engine).max_model_len for engine in known}
        if len({engine.served[name] for engine in having}) > 1 or len(contexts) > 1:
            raise ConfigError(
                f"Engines of the same name differ in model or max_model_len: {name}.",
                "Give different models different served_name.",
            )


def _check_addresses(config: Config) -> None:
    """Raise ConfigError for addresses that no server can have."""
    hosts = {"server.host": config.server.host, "wire.host": config.wire.host}
    urls = {f"engines.{i}.url": engine.url for i, engine in enumerate(config.engines)}
    urls["tracing.endpoint"] = config.tracing.endpoint
    has_postgres = config.broker.kind == "postgres" and config.broker.postgres.url is not None
    check_all(
        *(partial(_check_host, setting, host) for setting, host in hosts.items()),
        *(partial(_check_url, setting, url) for setting, url in urls.items() if url is not None),
        *([partial(_check_postgres, config.broker.postgres)] if has_postgres else []),
    )


def _check_postgres(settings: Postgres) -> None:
    from headway.store.queue.postgres_link import address_of  # asyncpg is loaded where it is needed

    address_of(settings)


def _check_host(setting: str, host: str) -> None:
    if not is_host(host):
        problem = f"{setting} is {host!r}, which is no name or address of a machine."
        hint = "Write it like 10.0.0.5 or ::1; ports have settings of their own."
        raise ConfigError(problem, hint, param=setting)


def _check_url(setting: str, url: str) -> None:
    if not is_url(url, "http", "https"):
        problem = f"{setting} is {url!r}, which is no URL of a server."
        hint = "Write it like http://127.0.0.1:8000, with a port up to 65535."
        raise ConfigError(problem, hint, param=setting)


def _check_secrets(config: Config) -> None:
    """Raise ConfigError for secrets that are not where the configuration says, or that all could read."""
    secrets = [(config.server.operator_key, "server.operator_key")]
    secrets += ((key.key, f"keys.{i}.key") for i, key in enumerate(config.keys))
    secrets += ((engine.api_key, f"engines.{i}.api_key") for i, engine in enumerate(config.engines))
    check_all(
        *(partial(reveal, secret, setting) for secret, setting in secrets if secret is not None),
        partial(revealed, config.keys),  # of which none is there twice
        *(partial(_check_args, i, engine) for i, engine in enumerate(config.engines) if engine.url is None),
    )


def _check_args(number: int, engine: Engine) -> None:
    if any(word.split("=")[0] == "--api-key" for word in engine.args):
        problem = f"engines.{number}.args has --api-key, which every local user can read."
        hint = "Take it out: an engine that Headway starts gets a random one, which only Headway knows."
        raise ConfigError(problem, hint, param="engines.args")


def _check_models(recipe: str, engine: Engine) -> None:
    """Raise ConfigError for `models` that no swap could load, and for sleep mode where there is none."""
    names = [engine.name, *(other.name for other in engine.others)]
    duplicate = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if engine.sleep_mode and is_cpu_build():
        problem, hint = "vLLM has no sleep mode on CPUs.", "Leave out sleep_mode."
    elif not engine.models:
        return
    elif engine.url is not None:
        problem = f"models are given for {engine.url}, but what Headway did not start it cannot restart."
        hint = "Leave out url, so that Headway starts this engine, or leave out models."
    elif duplicate is not None:
        problem = f"Two models of one engine have the name {duplicate!r}."
        hint = 'Give one of them another: models = [{ model = "DIR", served_name = "NAME" }].'
    elif not find(recipe).planner().swaps:
        problem = f"The recipe {recipe} never swaps models, so {', '.join(names[1:])} would wait."
        hint = "Use a recipe that swaps, such as shepherd, or give each model an engine of its own."
    else:
        return
    raise ConfigError(problem, hint, param="engines.models")


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
    preflight(config, starts_engines=link is None)
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
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class GatewayServer(uvicorn.Server):
    """uvicorn around an open gateway; it ends when no engine can be started.

    link: opens the way to a controller and agents elsewhere, None = all is in this process.
    failed: no engine could be started.
    """

    def __init__(
        self, config: Config, log_dir: Path | None = None, file: Path | None = None, link: OpenLink | None = None
    ) -> None:
        self._app, self._file = new_app(), file
        app = DeferredMiddleware(self._app)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections = Connections(ConnectionLimits.of(config.server, files))
        super().__init__(
            uvicorn.Config(
                AccessLog(app) if config.log.access else app,
                loop="uvloop",
                log_level="warning",
                log_config=None,
                access_log=False,
                lifespan="off",
                http=protocol_class(self._connections),
                server_header=False,
                backlog=_BACKLOG,
                ws="none",
                timeout_keep_alive=config.server.idle_timeout_s,
                proxy_headers=False,
                timeout_graceful_shutdown=None if config.server.drain_s == "streams" else config.server.drain_s,
            )
        )
        self._settings, self._log_dir, self._link = config, log_dir, link
        self.failed = False
        self._state: AppState | None = None  # until the gateway is open

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the gateway and serve until a signal; HeadwayError when it cannot be opened."""
        with self.capture_signals():  # around the gateway, so that a signal does not interrupt its closing
            async with contextlib.AsyncExitStack() as stack:
                link = None if self._link is None else await stack.enter_async_context(self._link())
                opening = serving(self._settings, log_dir=self._log_dir, link=link)
                await self._serve_gateway(await stack.enter_async_context(opening), sockets)

    async def _serve_gateway(self, gateway: Gateway, sockets: list[socket.socket] | None) -> None:
        state = AppState(gateway)
        add_endpoints(self._app, state)
        self._state = state
        if self._file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, Reload(self._file, state))
        self._connections.ended = gateway.metrics.connection_ended
        _tidy()
        collect_garbage = partial(collect, lambda: len(gateway.dispatcher.control.controller.requests))
        batches = [BatchRunner(state, gateway.batches).run] if gateway.batches is not None else []
        watch = self._connections.watch
        async with tasks.running(partial(self._announce, gateway), watch, collect_garbage, *batches):
            await self._serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests in progress end, at most `drain_s`; send an error to clients whose requests are cut short.

        Other gateways go on with batches and background requests at once.
        """
        if self._settings.server.reuse_port and sockets:
            steer_away(sockets[0])
        else:
            for server in self.servers:
                server.close()
        await asyncio.sleep(_LAST_CONNECTIONS_S)
        if self._state is not None:
            await self._hand_over(self._state)
        state, drain = self.server_state, self._settings.server.drain_s
        if state.tasks:
            limit = "all the time that they take" if drain == "streams" else f"up to {drain} s"
            log.warning("stopping; requests in progress (%d) have %s (Ctrl-C ends them now)", len(state.tasks), limit)
        await super().shutdown(sockets)
        for task in [task for task in state.tasks if not task.cancelling()]:  # after a second Ctrl-C
            task.cancel()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_LAST_WORDS_S)

    async def _hand_over(self, state: AppState) -> None:
        state.stopping.set()
        if state.gateway.batches is not None:
            state.gateway.batches.changed.set()  # so that its runner ends now
        if state.gateway.broker.on_disk:
            await state.gateway.background.hand_over()

    async def _announce(self, gateway: Gateway) -> None:
        """Show progress while engines start; stop everything when one cannot start at all."""
        console = Console(stderr=True, soft_wrap=True, quiet=json_log.is_on())
        address = f"http://{netloc(self._settings.server.host, self._settings.server.port)}"
        _say(
            console,
            f"[bold]Headway[/], recipe [cyan]{escape(self._settings.recipe)}[/]: starting engines "
            f"(a vLLM takes 15 to 60 s); requests to {escape(address)} wait for them",
        )
        engines = gateway.dispatcher.engines.values()
        if self._link is None and any(engine.url is None for engine in self._settings.engines):
            logs = self._log_dir or self._settings.logs_dir
            _say(console, f"[dim]their logs: {escape(str(logs))}[/]", highlight=False)
        with console.status("starting engines ..."):
            while not all(engine.up.is_set() for engine in engines):
                for engine in engines:
                    if engine.failure is not None and (engine.given_up or engine.tries >= _TRIES):
                        self._give_up(console, engine.failure)
                        return
                await asyncio.sleep(0.2)
        for engine in [engine for engine in engines if engine.about]:
            line = f"{engine.id}: {engine.models.current}, {engine.about}"
            _say(console, f"[dim]{escape(line)}[/]", highlight=False)
        self._report_targets(console, gateway)
        models = escape(", ".join(sorted(gateway.counters)))
        _say(console, f"[green]ready[/]: {models} at {escape(address)}/v1  (Ctrl-C stops everything)")

    def _report_targets(self, console: Console, gateway: Gateway) -> None:
        """Say what measured classes promise, and which others promise more than the engines can do."""
        classes = self._settings.classes
        for line in gateway.paces.descriptions(classes):
            _say(console, escape(line), highlight=False)
        for line in gateway.paces.warnings(classes):
            log.warning("%s", line)

    def _give_up(self, console: Console, failure: HeadwayError) -> None:
        _say(console, f"[red]cannot start[/]: {escape(str(failure))}", logging.ERROR, highlight=False)
        self.failed = self.should_exit = True


def _say(console: Console, markup: str, level: int = logging.INFO, *, highlight: bool = True) -> None:
    """Print a line for people, or log it where all lines are JSON."""
    if json_log.is_on():
        log.log(level, "%s", Text.from_markup(markup).plain)
    else:
        console.print(markup, highlight=highlight)
