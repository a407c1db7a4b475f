"""Gateways of other projects that `headway bench overhead --peers` compares with Headway.

They are installed in a separate environment (`make peers`) and started as documented by their projects: one
worker process in front of one engine, without a database, key checks or request logs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.real.peers import HEADWAY, Peer, serving
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.whatif.output.results import Row

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
