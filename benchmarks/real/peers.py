"""Servers for gateway benchmarks: a FAKE engine, and a gateway in front of it."""

from __future__ import annotations

import json
import os
import subprocess
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
from headway.errors import ConfigError
from headway.whatif.measured.systems import START_S, attempts
from headway.whatif.output.results import Row

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


LITELLM, SGLANG_ROUTER = "litellm", "sglang-router"
KNOWN = (LITELLM, SGLANG_ROUTER)  # names of packages, and of the commands that they install
_READY = {LITELLM: "/health/readiness", SGLANG_ROUTER: "/readiness"}
_ENVIRONMENT: Mapping[str, Mapping[str, str | None]] = {
    LITELLM: {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # instead of fetching it from the network
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # loopback only; Headway has no key here
        "LITELLM_MASTER_KEY": None,
        "DATABASE_URL": None,
        "REPEATED_STREAMING_CHUNK_LIMIT": "1000000",  # the FAKE engine repeats one word
    },
    SGLANG_ROUTER: {},
}
_COMPARED = ("gateway.req_per_s", "gateway.tokens_per_s", "gateway.added_ms.p50", "gateway.added_ms.p99")


def place() -> Path:
    """Return the environment of the peers: `$HEADWAY_PEERS`, else `.venv-peers` in the current directory."""
    return Path(os.environ.get("HEADWAY_PEERS", ".venv-peers")).absolute()


def installed(name: str) -> bool:
    """Return True if the peer is installed."""
    return (place() / "bin" / name).exists()


def chosen(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated list, without repetitions; None gives an empty tuple.

    Raise ConfigError if a name is unknown or a peer is not installed.
    """
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError("--peers names no gateway.", f"Name some of: {', '.join(KNOWN)}.")
    for name in names:
        if name not in KNOWN:
            raise ConfigError(f"{name!r} is not a peer that can be measured.", f"Known: {', '.join(KNOWN)}.")
        if not installed(name):
            raise ConfigError(
                f"The peer {name} is not installed in {place()}.",
                "Install it with `make peers`, or name an environment that has it: HEADWAY_PEERS=DIRECTORY.",
            )
    return names


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return {name: version} of installed peers."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    argv = [_program("python"), "-c", code, *names]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


@contextmanager
def gateway(name: str, engine: Peer, folder: Path) -> Iterator[Peer]:
    """Run a peer in front of the engine until the block ends, with its log and configuration in the folder."""
    port = free_port()
    argv = _litellm(folder, engine.port, port) if name == LITELLM else router_argv([_address(engine.port)], port)
    env = {"PYTHONPATH": None, **_ENVIRONMENT[name]}
    with serving(name, argv, port, _READY[name], folder, env) as peer:
        yield peer


def _litellm(folder: Path, engine: int, port: int) -> list[str]:
    model = {"model": "hosted_vllm/smollm2", "api_base": f"http://127.0.0.1:{engine}/v1"}
    config = folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "smollm2", "litellm_params": model}]}))
    return [
        _program("litellm"),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--num_workers",
        "1",
    ]


def _address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def router_argv(engines: Sequence[str], port: int, *options: str) -> list[str]:
    """Return the command of `sglang-router` in front of engines at these addresses."""
    return [
        _program("python"),
        "-m",
        "sglang_router.launch_router",
        "--worker-urls",
        *engines,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(free_port()),
        "--log-level",
        "warn",
        *options,
    ]


def _program(name: str) -> str:
    return str(place() / "bin" / name)


def ratio_rows(rows: Sequence[Row]) -> list[Row]:
    """Return Headway's throughput per core and added latency, divided by those of each peer in the rows."""
    ours = {(row.id, row.setting): row.ours for row in rows if row.system == HEADWAY}
    found = []
    for row in rows:
        if row.system in KNOWN and row.id in _COMPARED:
            mine, theirs = ours[row.id, row.setting], row.ours
            ratio = mine / theirs if mine is not None and theirs is not None and theirs > 0 else None
            found.append(Row(f"{row.id}.ratio", HEADWAY, f"over {row.system}, {row.setting}", ratio, "x"))
    return found
