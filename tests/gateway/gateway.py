"""A gateway in a thread of this process, with real sockets, and a fake engine in another process."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai

from headway.config import BATCH, Broker, Config, Engine, Server, Sqlite, Tier
from headway.engines.vllm.process.launch import Child, free_port
from headway.gateway import gateway as inner
from headway.gateway.http.listening import bind
from headway.gateway.main import GatewayServer as HttpServer
from headway.gateway.main import OpenLink
from headway.policy.core.controller import Controller

# One client for all tests: making one reads the machine's certificates, which takes longer than most calls.
WEB = httpx.Client(verify=False, timeout=15, limits=httpx.Limits(max_keepalive_connections=0))
CHAT = "/v1/chat/completions"
SAY = [{"role": "user", "content": "Say something."}]
OPERATOR = {"authorization": "Bearer sk-operator-1"}
CLASSES = {"default": Tier(), "chat": Tier(ttft_ms=1500.0, tpot_ms=150.0), "batch": BATCH}


_HELD = socket.socket()  # bound, and never listening: no other server gets its port
_HELD.bind(("127.0.0.1", 0))
DEAD = f"http://127.0.0.1:{_HELD.getsockname()[1]}"  # refuses every connection


def until(true: Callable[[], Any], seconds: float = 8.0) -> Any:
    """Wait until something is true and return it."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)
    return value


@dataclass
class Fake:
    """The fake instant engine, which may be stopped and started again at the same port."""

    folder: Path
    port: int = field(default_factory=free_port)
    child: Child | None = None
    options: tuple[str, ...] = ()  # beside the port
    module: str = "testing.fake_engine"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Fake:
        argv = [sys.executable, "-m", self.module, "--port", str(self.port), "--tokens", "8", *self.options]
        self.child = Child(argv, dict(os.environ), self.folder / f"fake-{self.port}.log")
        self.child.start()
        until(self.answers, 20)
        return self

    def answers(self) -> bool:
        try:
            return WEB.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self.child is not None:
            self.child.stop(grace=0.0)

    def release(self, name: str) -> None:
        """Let go of the answers that `fakes(hold=name)` holds back, now and from now on."""
        assert WEB.post(f"{self.url}/release/{name}").status_code == 200

    def last(self) -> dict[str, Any]:
        """Return what it was asked last, and its counts."""
        return dict(WEB.get(f"{self.url}/last").json())


class Served(HttpServer):
    """The server of `headway serve`, which hands out its event loop and its gateway once they are there."""

    def __init__(self, config: Config, log_dir: Path, link: OpenLink | None = None) -> None:
        super().__init__(config, log_dir, link=link)
        self.opened: Future[tuple[asyncio.AbstractEventLoop, inner.Gateway]] = Future()

    async def _serve_gateway(self, gateway: inner.Gateway, sockets: list[socket.socket] | None) -> None:
        self.opened.set_result((asyncio.get_running_loop(), gateway))
        await super()._serve_gateway(gateway, sockets)


@dataclass
class Gateway:
    """A gateway that runs, with its inside."""

    config: Config
    inner: inner.Gateway
    server: Served
    loop: asyncio.AbstractEventLoop
    url: str

    @property
    def controller(self) -> Controller:
        return self.inner.dispatcher.control.controller

    def all_up(self) -> bool:
        """Return whether every engine is up: a gateway is ready with the first one."""
        return all(engine.up.is_set() for engine in self.inner.dispatcher.engines.values())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return WEB.get(self.url + path, **more)

    def post(self, body: Any = None, path: str = CHAT, **more: Any) -> httpx.Response:
        """Post a chat (or to another path), by default one that is answered at once."""
        if body is not None:
            more["json"] = body
        return WEB.post(self.url + path, **more)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a chat request."""
        return {"model": "smollm2", "messages": SAY, "max_tokens": 8, **fields}

    def control(self, message: Any, **more: Any) -> httpx.Response:
        """Send a message to the first engine's scheduler, as the operator."""
        return self.post(message, "/headway/control/e0", **({"headers": OPERATOR} | more))

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def jobs(self) -> dict[str, tuple[str, str | None]]:
        """Return what the queue on disk says: {id: (state, reason)}, oldest first."""
        rows = self._stored("SELECT id, state, reason FROM jobs ORDER BY seq")
        return {id: (state, reason) for id, state, reason in rows}

    def spent(self) -> float:
        """Return what all overflow engines of this store have cost in its last hour, what is reserved included."""
        return float(self._stored("SELECT coalesce(sum(units), 0) FROM spent")[0][0])

    def _stored(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.config.broker.sqlite.path}?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()

    def newest(self) -> tuple[str, str | None]:
        """Wait until the newest request has its end, and return how it ended."""
        return until(lambda: (end := list(self.jobs().values())[-1])[0] != "open" and end)  # type: ignore[no-any-return]

    def metric(self, name: str) -> float:
        """Return the value of the sample whose line begins with `name`, 0 when there is none."""
        page = self.get("/metrics", headers=OPERATOR).text
        return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the gateway's own event loop."""
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return done.result(15)


def configuration(folder: Path, *urls: str, broker: Broker | None = None, **fields: Any) -> Config:
    """Return a configuration that attaches to engines; `server` may be a dict of its fields."""
    server = fields.pop("server", {})
    engine = fields.pop("engine", {})
    engines = tuple(Engine(**({"url": url, "max_running": 32} | engine)) for url in urls)
    queue = broker or Broker(sqlite=Sqlite(str(folder / f"queue-{free_port()}.sqlite"), "normal"))
    classes = {"classes": CLASSES} | fields
    return Config(
        server=Server(**({"port": free_port(), "operator_key": "sk-operator-1"} | server)),
        engines=engines,
        broker=queue,
        **classes,
    )


@contextmanager
def serving(
    config: Config, *, ready: bool = True, link: OpenLink | None = None, port: int = 0, logs: Path | None = None
) -> Iterator[Gateway]:
    """Run `headway serve` in a thread of this process until the block ends.

    link: to a controller and agents elsewhere. port: 0 = a free one. logs: of engines; unset, beside the queue.
    At the end of the block no client is about to ask, so the gateway does not wait for connections to send their last
    requests: half a second of each test.
    """
    with bind(config.server.host, port, shared=config.server.reuse_port) as sock:
        port = sock.getsockname()[1]
        config = replace(config, server=replace(config.server, port=port))
        server = Served(config, logs or Path(config.broker.sqlite.path or ".").parent, link)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="gateway")
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive(), 300)
            loop, opened = server.opened.result(0)
            gateway = Gateway(config, opened, server, loop, config.server.url)
            if ready:
                until(lambda: gateway.get("/ready").status_code == 200)
            yield gateway
        finally:
            server.last_connections_s = 0.0
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
