"""Servers for gateway benchmarks: a FAKE engine, and a gateway in front of it."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import tomli_w

from headway.engines.vllm.process.launch import Child, free_port
from headway.whatif.measured.systems import START_S, attempts

DIRECT, HEADWAY = "direct", "headway"
QUEUE, _CONFIG = "queue.sqlite", "headway.toml"


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server.

    process: psutil.Process of its main process
    """

    name: str
    port: int
    process: Any

    def cpu(self) -> float:
        """Return the CPU seconds used so far by the process and its descendants, in user and kernel mode."""
        used = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has just ended, and counts in its parent's children
                times = process.cpu_times()
                used += times.user + times.system + times.children_user + times.children_system
        return used

    def request(self, prompt: str, **more: Any) -> bytes:
        """Return the bytes of a chat request."""
        body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], **more}
        data = json.dumps(body).encode()
        lines = (
            "POST /v1/chat/completions HTTP/1.1",
            f"host: 127.0.0.1:{self.port}",
            "content-type: application/json",
            f"content-length: {len(data)}",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


Peers = tuple[Peer, Peer]  # direct, then Headway


@contextmanager
def servers(
    folder: Path,
    recipe: str = "slack",
    server: Mapping[str, Any] | None = None,
    engines: Mapping[str, float] | None = None,
    keys: Sequence[Mapping[str, str]] = (),
) -> Iterator[Peers]:
    """Run the FAKE engine and a gateway in front of it until the block ends.

    server, engines: further settings in [server] and [[engines]]. keys: the gateway's [[keys]].
    """
    engine, gateway = free_port(), free_port()
    write_config(folder, engine, gateway, recipe, server, engines, keys)
    with ExitStack() as stack:
        direct = stack.enter_context(fake_engine(folder, engine))
        yield direct, stack.enter_context(serving(HEADWAY, gateway_argv(folder), gateway, "/ready", folder))


def write_config(
    folder: Path,
    engine: int,
    gateway: int,
    recipe: str = "slack",
    server: Mapping[str, Any] | None = None,
    engines: Mapping[str, float] | None = None,
    keys: Sequence[Mapping[str, str]] = (),
    lease_seconds: float = 30.0,
) -> None:
    """Write a gateway's configuration. engine, gateway: their ports. The rest is as in `servers`."""
    queue = {"path": str(folder / QUEUE), "synchronous": "full"}
    config = {
        "recipe": recipe,
        "server": {"port": gateway, "max_queued": 10_000, **(server or {})},
        "engines": [{"url": f"http://127.0.0.1:{engine}", "max_running": 256, **(engines or {})}],
        "keys": list(keys),
        "broker": {"kind": "sqlite", "lease_seconds": lease_seconds, "sqlite": queue},
    }
    (folder / _CONFIG).write_text(tomli_w.dumps(config))


def gateway_argv(folder: Path, run: str = "from headway.cli.main import main; main()") -> list[str]:
    """Return the command of a gateway with the configuration in the folder. run: Python code that starts it."""
    return [sys.executable, "-c", run, "serve", "--config", str(folder / _CONFIG)]


def fake_engine(folder: Path, port: int, *more: str) -> AbstractContextManager[Peer]:
    """Run the FAKE engine until the block ends. more: further options."""
    argv = [sys.executable, "-m", "testing.fake_paced", "--port", str(port), *more]
    return serving(DIRECT, argv, port, "/health", folder)


def set_answers(engine: Peer, tokens: int, delay: float) -> None:
    """Set the FAKE engine's answers to at most `tokens` tokens, with `delay` seconds before each."""
    url = f"http://127.0.0.1:{engine.port}/answers/{tokens}/{delay}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
        return


@contextmanager
def serving(
    name: str,
    argv: Sequence[str],
    port: int,
    path: str,
    folder: Path,
    env: Mapping[str, str | None] | None = None,
    patience: float = START_S,
) -> Iterator[Peer]:
    """Run a server until the block ends; the block begins when a GET of `path` succeeds.

    env: changes of the environment; None removes a variable. patience: seconds that the start may take.
    """
    environment = {key: value for key, value in {**os.environ, **(env or {})}.items() if value is not None}
    child = Child(argv, environment, folder / f"{name}.log")
    child.start()
    try:
        _wait(child, f"http://127.0.0.1:{port}{path}", name, patience)
        assert child.process is not None
        yield Peer(name, port, psutil.Process(child.process.pid))
    finally:
        child.stop()


def _wait(child: Child, url: str, name: str, patience: float) -> None:
    """Wait until a GET returns 200."""
    for _ in attempts(name, child, patience):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
