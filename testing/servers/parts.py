"""A complete Headway cluster on this machine: real processes, RabbitMQ and PostgreSQL, and FAKE engines.

With proxies, each process has private connections to RabbitMQ, and each gateway to PostgreSQL, so that one
process can be cut off while all others continue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil  # type: ignore[import-untyped]
import tomli_w
from yarl import URL

from headway.engines.vllm.process.launch import Child, free_port
from headway.errors import EngineError
from testing.servers import postgres, rabbitmq
from testing.servers.both import both
from testing.servers.proxy import Proxy, proxied

LEASE_S = 2.0  # lease of gateways, agents and background requests; short, so that faults are noticed soon
_HEALTH_S = 0.5  # time limit of an engine's health check
_START_S = 60.0
_CONFIG = "headway.toml"
T = TypeVar("T")


class Wires:
    """Proxies, run in a background thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faults-proxies")
        self._thread.start()
        self._stack = AsyncExitStack()

    def through(self, url: str) -> tuple[Proxy, str]:
        """Return a new proxy for the server at a URL, and the URL that goes through it."""
        return self._do(self._stack.enter_async_context(proxied(url)))

    def call(self, change: Callable[[], None]) -> None:
        """Call a function that changes proxies, in their thread."""

        async def changed() -> None:
            change()

        self._do(changed())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        """Close all proxies and end the thread."""
        self._do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(slots=True)
class ClusterPart:
    """A process of the cluster that may be killed, paused or cut off, and started again.

    port, path: address of its readiness check. wires: its proxies to RabbitMQ. database: its proxy to
    PostgreSQL.
    """

    name: str
    port: int
    child: Child
    path: str = "/ready"
    wires: list[Proxy] = field(default_factory=list)
    database: list[Proxy] = field(default_factory=list)

    def start(self) -> None:
        self.child.start()

    def kill(self) -> None:
        self.child.signal(signal.SIGKILL)
        if self.child.process is not None:
            self.child.process.wait(30)

    def pause(self) -> None:
        self.child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.child.signal(signal.SIGCONT)

    def ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{self.path}", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def leads(self) -> bool:
        """Return True if the process is the leading controller."""
        return bool(self.says().get("leads"))

    def says(self) -> dict[str, Any]:
        """Return the state reported at /ready; empty if the process does not answer."""
        try:
            return dict(httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=5).json())
        except httpx.HTTPError:
            return {}

    @property
    def process(self) -> Any:
        """Return the process as a psutil.Process."""
        assert self.child.process is not None
        return psutil.Process(self.child.process.pid)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Number of processes per role, and their settings.

    nodes: RabbitMQ nodes. proxies: connect through proxies. max_queued, max_running: as in [server] and
        [[engines]]. lease_s: lease of gateways, agents and background requests. heartbeat_s: RabbitMQ drops a
        process that is silent for two heartbeats.
    """

    nodes: int = 1
    gateways: int = 2
    controllers: int = 2
    engines: int = 2
    proxies: bool = False
    max_queued: int = 10_000
    max_running: int = 256
    lease_s: float = LEASE_S
    heartbeat_s: int = 1


@dataclass(slots=True)
class HeadwayCluster:
    """A running cluster: its processes by role, its servers and its proxies."""

    folder: Path
    shape: ClusterShape
    wires: Wires
    rabbit: rabbitmq.RabbitCluster
    database: postgres.PostgresServer
    engines: list[ClusterPart] = field(default_factory=list)
    gateways: list[ClusterPart] = field(default_factory=list)
    controllers: list[ClusterPart] = field(default_factory=list)
    agents: list[ClusterPart] = field(default_factory=list)

    @property
    def parts(self) -> list[ClusterPart]:
        return [*self.engines, *self.controllers, *self.agents, *self.gateways]

    def leader(self) -> ClusterPart:
        """Return the leading controller; while none leads, the first."""
        return next((one for one in self.controllers if one.leads()), self.controllers[0])

    def computed(self) -> list[str]:
        """Return the ids of all requests that engines received, with repetitions."""
        texts = ((self.folder / f"{engine.name}.journal").read_text() for engine in self.engines)
        return [id for text in texts for id in text.split("\n") if id]

    # ---- making

    def add_engine(self, name: str) -> None:
        port = free_port()
        argv = [sys.executable, "-m", "testing.fake_paced", "--port", str(port)]
        argv += ["--journal", str(self.folder / f"{name}.journal")]
        self.engines.append(ClusterPart(name, port, self._child(name, argv, dict(os.environ)), "/health"))

    def write_config(self) -> None:
        """Write the configuration that all processes share; their environments hold the differences."""
        engine = {"max_running": self.shape.max_running, "health_timeout_s": _HEALTH_S}
        config = {
            "recipe": "headway",
            "server": {"max_queued": self.shape.max_queued, "max_attempts": 1000, "class_share": 1.0},
            "engines": [{"url": f"http://127.0.0.1:{one.port}", **engine} for one in self.engines],
            "wire": {"url": "env:HEADWAY_RABBITMQ_URL", "lease_seconds": self.shape.lease_s},
            "broker": {
                "kind": "postgres",
                "lease_seconds": self.shape.lease_s * 1.5,
                "postgres": {"url": "env:HEADWAY_POSTGRES_URL", "timeout_s": 2.0},
            },
        }
        (self.folder / _CONFIG).write_text(tomli_w.dumps(config))

    def add(self, name: str, role: str, *more: str) -> ClusterPart:
        """Return a new process with this role, not yet started."""
        port, urls, wires = free_port(), list[str](), list[Proxy]()
        for node in self.rabbit.nodes:
            urls.append(self._through(str(URL(node.url) % {"heartbeat": str(self.shape.heartbeat_s)}), wires))
        env = dict(os.environ) | {"HEADWAY_RABBITMQ_URL": ",".join(urls), "XDG_STATE_HOME": str(self.folder)}
        database = list[Proxy]()
        env["HEADWAY_POSTGRES_URL"] = self._through(self.database.url, database)
        argv = [sys.executable, "-m", "headway.cli", role, "-c", str(self.folder / _CONFIG), *more]
        child = self._child(name, [*argv, "--port", str(port)], env)
        return ClusterPart(name, port, child, wires=wires, database=database if role == "gateway" else [])

    def _through(self, url: str, proxies: list[Proxy]) -> str:
        """Return the URL through which a part reaches a server, and add its proxy, if any, to `proxies`."""
        if self.shape.proxies:
            proxy, url = self.wires.through(url)
            proxies.append(proxy)
        return url

    def _child(self, name: str, argv: Sequence[str], env: dict[str, str]) -> Child:
        return Child(argv, env, self.folder / f"{name}.log")

    def wait(self, seconds: float = _START_S) -> None:
        """Wait until all parts are ready. Raise EngineError if one is not ready in time."""
        deadline = time.monotonic() + seconds
        waiting = list(self.parts)
        while waiting := [one for one in waiting if not one.ready()]:
            if time.monotonic() > deadline:
                one = waiting[0]
                raise EngineError(f"{one.name} is not ready. {one.child.tail()}", "Try again on an idle machine.")
            time.sleep(0.05)


@contextmanager
def clusters(folder: Path, shape: ClusterShape) -> Iterator[HeadwayCluster]:
    """Yield a cluster whose gateways, controllers, agents and FAKE engines are ready."""
    with ExitStack() as stack:
        wires = Wires()
        stack.callback(wires.close)
        rabbit, database = stack.enter_context(both(shape.nodes))
        made = HeadwayCluster(folder, shape, wires, rabbit, database)
        for i in range(shape.engines):
            made.add_engine(f"engine-{i}")
        made.write_config()
        made.controllers = [made.add(f"controller-{i}", "controller") for i in range(shape.controllers)]
        made.agents = [
            made.add(f"agent-{i}", "agent", "--name", f"agent-{i}", "--engine", f"e{i}") for i in range(shape.engines)
        ]
        made.gateways = [made.add(f"gateway-{i}", "gateway") for i in range(shape.gateways)]
        for part in made.parts:
            stack.callback(part.child.stop, 0.0)
            part.start()
        made.wait()
        yield made
