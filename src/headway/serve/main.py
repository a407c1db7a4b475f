"""How is Headway run? Checks first, then engines and door, and nothing left behind at the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import re
import socket
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from headway.config import Config
from headway.core.engine_spec import check
from headway.engines.vllm.process.launch import check_installed, spec
from headway.errors import ConfigError, HeadwayError
from headway.models.resolve import resolve
from headway.recipes.registry import find
from headway.serve.app import build
from headway.serve.dispatcher import Dispatcher
from headway.serve.http import limited
from headway.serve.lengths.embedding import locate

_GRACE = 5  # seconds that running answers get at the end
_URL = re.compile(r"https?://[^/\s]+")


def preflight(config: Config) -> None:
    """Raise ConfigError for everything that can be known before an engine is started."""
    recipe = find(config.recipe)
    if recipe.lengths == "oracle":
        raise ConfigError(
            f"{config.recipe} plans with the true lengths of answers, which only a simulation knows.",
            f"Serve with {config.recipe.removesuffix('-oracle')}, or try it with headway simulate.",
            param="recipe",
        )
    for engine in config.engines:
        if engine.url is None:
            can = spec(engine)
            check(can, recipe.packer(can).kv, config.recipe)
    if recipe.lengths == "padded":
        locate(config.predictor.embedding)
    names = [engine.name for engine in config.engines]
    kinds = {(e.name, e.model, e.max_model_len) for e in config.engines}
    if len(kinds) > len(set(names)):
        raise ConfigError(
            f"Engines of the same name differ in model or max_model_len: {', '.join(names)}.",
            "Give different models different served_name.",
        )
    if any(engine.url is None for engine in config.engines):
        check_installed()
    for engine in config.engines:
        resolve(engine.model)
        if engine.url is not None and not _URL.match(engine.url):
            raise ConfigError(
                f"{engine.url!r} is not the address of a vLLM.", "Write it like http://127.0.0.1:8000.",
                param="engines.url",
            )  # fmt: skip


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; ConfigError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} on {host} is in use.",
                "Stop what listens there, or choose another with --port.",
                param="server.port",
            ) from error
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}.", "Check --host and --port."
        ) from error
    return sock


def serve(config: Config, *, log_dir: Path | None = None, quiet: bool = False) -> int:
    """Serve until a signal ends it; return the exit status."""
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO, format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False)],
    )  # fmt: skip
    preflight(config)
    with bind(config.server.host, config.server.port) as sock:
        driver = Dispatcher(config, log_dir=log_dir)
        server = _Server(driver, config)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it is done
            server.run(sockets=[sock])
    gc.unfreeze()  # or libraries would complain of leaks at the end
    if server.failure is not None:
        raise server.failure
    return 1 if server.failed else 0


class _Server(uvicorn.Server):
    """uvicorn, which says when the engines are up and ends when none ever comes up."""

    def __init__(self, driver: Dispatcher, config: Config) -> None:
        app = build(config, driver)
        super().__init__(
            uvicorn.Config(
                app, loop="uvloop", log_level="warning", access_log=False,
                http=limited(config.server.max_header_kib * 1024), server_header=False,
                timeout_graceful_shutdown=_GRACE, ws="none", proxy_headers=False,
            )
        )  # fmt: skip
        self._driver, self._config, self._door = driver, config, app.state.door
        self._announcer: asyncio.Task[None] | None = None
        self.failed = False
        self.failure: HeadwayError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await self._door.open()  # not in the app's lifespan, which would print a traceback for an error
        except HeadwayError as error:
            self.failure, self.should_exit = error, True
            return
        gc.collect()
        gc.freeze()  # all that was imported stays: not looking through it saves a tenth of every request
        await super().startup(sockets)
        self._announcer = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        """Show progress while engines start; stop everything when one cannot start at all."""
        console = Console(stderr=True)
        address = f"http://{self._config.server.host}:{self._config.server.port}"
        console.print(f"[bold]Headway[/] listens on {address}, recipe [cyan]{self._config.recipe}[/]")
        with console.status("starting engines (a vLLM takes 15 to 60 s) ..."):
            while not all(engine.up.is_set() for engine in self._driver.engines.values()):
                for engine in self._driver.engines.values():
                    if engine.failure is not None and engine.restarts >= 2:
                        self._give_up(console, engine.failure)
                        return
                await asyncio.sleep(0.2)
        models = ", ".join(sorted({engine.name for engine in self._config.engines}))
        console.print(f"[green]ready[/]: {models} at {address}/v1  (Ctrl-C stops everything)")

    def _give_up(self, console: Console, failure: HeadwayError) -> None:
        console.print(f"[red]cannot start[/]: {escape(str(failure))}", highlight=False)
        self.failed = self.should_exit = True
