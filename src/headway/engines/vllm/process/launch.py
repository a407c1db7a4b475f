"""Starting and ending `vllm serve` as a child process, with Headway's scheduler inside.

The child gets its own process group, so that all its processes end together, and a parent-death signal, so
that they end when Headway is killed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from random import SystemRandom

from headway import private
from headway.config import Engine
from headway.engines.vllm import parsers
from headway.engines.vllm.fatal_fields import WORKER_EXTENSION
from headway.engines.vllm.kv_transfer import host_pool, two_ended_pool
from headway.engines.vllm.process import metadata
from headway.engines.vllm.process.exits import exit_error
from headway.engines.vllm.process.memory import VISIBLE, parallel, visible_to
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.engines.vllm.process.sizes import expected, requested
from headway.errors import ConfigError, EngineError
from headway.models.resolve import resolve
from headway.policy.core.engine_spec import EngineSpec, KvUse, Obstacle
from headway.policy.recipes.registry import find

_PR_SET_PDEATHSIG = 1
_PLUGIN = "headway.engines.vllm.plugin"
_PORTS = range(20_000, 32_000)  # below Linux's net.ipv4.ip_local_port_range
_CPUINFO = Path("/proc/cpuinfo")
_TAIL = 2**16  # bytes of a log's end that are read for last lines and errors
# Triton's bindings (nanobind) and Python's resource tracker write some 30 lines when an engine ends.
_LEAKS = re.compile(r"nanobind|^ - (leaked |\.\.\. skipped )|resource_tracker")


def free_port(ports: Sequence[int] = _PORTS) -> int:
    """Return a TCP port that was free on loopback a moment ago; EngineError when none is.

    It is none of those that the system gives to connections of clients, one of which might take it meanwhile.
    """
    for port in SystemRandom().sample(ports, min(len(ports), 100)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError(f"No port from {ports[0]} to {ports[-1]} is free.", "End what listens there.")


def command(
    engine: Engine,
    port: int,
    recipe: str | None,
    policy: str = "fcfs",
    *,
    host: str = "127.0.0.1",
    on_cpu: bool | None = None,
    cpuinfo: Path = _CPUINFO,
) -> list[str]:
    """Return the `vllm serve` command line; `recipe` None is stock vLLM with its scheduling `policy`.

    Stock vLLM runs in a class that counts what its KV memory costs (`scheduler_stats.py`).
    on_cpu: None = where this environment's vLLM runs. cpuinfo: what Linux says of that CPU.
    """
    on_cpu = is_cpu_build() if on_cpu is None else on_cpu
    engine = requested(engine, on_cpu=on_cpu)
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", resolve(engine.model)]
    line += ["--host", host, "--port", str(port), "--served-model-name", engine.name]
    line += _sizes(engine, hook=recipe is not None)
    line += ["--dtype", chosen] if (chosen := dtype(engine, on_cpu=on_cpu, cpuinfo=cpuinfo)) != "auto" else []
    if engine.async_scheduling is not None:
        line += ["--async-scheduling" if engine.async_scheduling else "--no-async-scheduling"]
    line += ["--disable-access-log-for-endpoints", "/health,/headway/control"]  # asked every second
    line += ["--runner", engine.runner] if engine.runner != "generate" else []
    line += ["--enforce-eager"] if engine.eager else []
    line += ["--enable-sleep-mode"] if engine.sleep_mode else []
    line += parallel(engine)
    if engine.adapters:
        line += ["--enable-lora", "--lora-modules", *(f"{name}={at}" for name, at in engine.adapters.items())]
    line += ["--num-gpu-blocks-override", str(engine.blocks)] if engine.blocks else []
    line += parsers.options(engine)
    line += ["--worker-extension-cls", WORKER_EXTENSION]
    line += _hook_options(engine, recipe) if recipe else _stock_options(engine, policy)
    return [*line, *engine.args]


def _sizes(engine: Engine, *, hook: bool) -> list[str]:
    """Return the options for what is set; the hook may keep more requests, paused, than it runs."""
    slots = engine.max_running
    if hook:
        slots = engine.slots or (engine.max_running and 2 * engine.max_running)
    context: int | str | None = engine.max_model_len
    if context is None and engine.runner == "generate":
        context = "auto"  # of the model's context, what the KV cache holds
    values = {
        "--max-model-len": context,
        "--max-num-seqs": slots,
        "--max-num-batched-tokens": engine.max_batched_tokens,
    }
    return [word for name, value in values.items() if value is not None for word in (name, str(value))]


def dtype(engine: Engine, *, on_cpu: bool, cpuinfo: Path = _CPUINFO) -> str:
    """Return vLLM's `--dtype`; "auto" is float32 on a CPU that has no fast bfloat16.

    vLLM would take the model's, and PyTorch computes bfloat16 many times slower there than float32.
    """
    if engine.dtype == "auto" and on_cpu and not has_fast_bfloat16(cpuinfo.read_text()):
        return "float32"
    return engine.dtype


def has_fast_bfloat16(cpuinfo: str) -> bool:
    """Return whether /proc/cpuinfo has the vector instructions that oneDNN computes bfloat16 with.

    These are AVX-512 (with or without its own for bfloat16) and AMX. On other architectures than x86 it is
    assumed.
    """
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), None)
    return flags is None or not {"avx512bw", "amx_bf16"}.isdisjoint(flags.split())


def spec(engine: Engine) -> EngineSpec:
    """Return what an engine of this configuration can do, as far as it is known before it runs."""
    hinders = {
        Obstacle("shares prefixes", "Take --enable-prefix-caching out of args"): "--enable-prefix-caching"
        in engine.args,
        Obstacle("runs overlapped", "Set async_scheduling = false"): bool(engine.async_scheduling),
    }
    why = next((obstacle for obstacle, present in hinders.items() if present), None)
    sizes = expected(engine)
    return EngineSpec(
        sizes.max_running,
        sizes.max_batched_tokens,
        block_size(engine),
        sizes.max_model_len,
        host_tokens=None if engine.host_kv_gib else 0,  # how many are known when the model is loaded
        two_ended=True,
        reservations=why is None,
        why_not={} if why is None else {"reservations": why},
    )


def kv_use(engine: Engine, recipe: str) -> KvUse:
    """Return how a recipe uses the KV memory of an engine of this configuration."""
    return find(recipe).packer(spec(engine)).kv


def _hook_options(engine: Engine, recipe: str) -> list[str]:
    options = {"recipe": recipe, "max_running": engine.max_running, "max_gap_s": engine.max_gap_s}
    config = {"headway": {name: value for name, value in options.items() if value is not None}}
    line = ["--scheduler-cls", f"{_PLUGIN}.hook.scheduler", "--additional-config", json.dumps(config)]
    use = kv_use(engine, recipe)
    if use.reserves or use.two_ended:
        line += ["--no-enable-prefix-caching"]  # blocks that are lent or shared change hands
        line += ["--no-async-scheduling"] if engine.async_scheduling is None else []
    if use.two_ended:
        line += ["--kv-transfer-config", json.dumps(two_ended_pool(engine.host_kv_gib))]
    elif engine.host_kv_gib:
        line += ["--kv-transfer-config", json.dumps(host_pool(engine.host_kv_gib))]
    return line


def _stock_options(engine: Engine, policy: str) -> list[str]:
    return ["--scheduling-policy", policy, "--scheduler-cls", f"{_PLUGIN}.scheduler_stats.scheduler"]


def block_size(engine: Engine) -> int:
    """Return the tokens of a KV block: `--block-size` of `args`, else vLLM's default on this machine."""
    for word, following in pairwise((*engine.args, "")):
        name, _, value = word.partition("=")
        if name == "--block-size" and (value or following).isdecimal():
            return int(value or following)
    return 128 if is_cpu_build() else 16


def environment(engine: Engine, secret: str | None = None, recipe: str | None = None) -> dict[str, str]:
    """Return the child's environment: Headway's plugin, no telemetry, CPU settings for the CPU build.

    secret: without which the child answers nothing but /health (`plugin/guard.py`); None = it answers all.
        Other users can read a command line, but not an environment.
    recipe: the scheduling recipe of the child, None = stock vLLM or a program that is not an engine.
    """
    env = dict(os.environ) | {"VLLM_PLUGINS": "headway", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    env["HEADWAY_PARENT"] = str(os.getpid())  # `plugin/guard.py`
    if secret is not None:
        env |= {"VLLM_API_KEY": secret, "HEADWAY_ENGINE_SECRET": secret}
    if Path(resolve(engine.model)).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if (visible := visible_to(engine)) is not None:
        env[VISIBLE] = visible
    if recipe is not None and kv_use(engine, recipe).two_ended:
        env.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # V2 has no method in which block tables can be rewritten
    if is_cpu_build():
        # The cores that this process may use: a container often has only some of the machine's.
        cores = engine.cores or ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(engine.kv_gib), "VLLM_CPU_OMP_THREADS_BIND": cores}
        if cores.isdecimal():
            env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # `plugin/one_core.py`
            if env.setdefault("OMP_NUM_THREADS", "1") == "1":  # a fork has no other threads
                env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        # The n-gram drafter's numba threads and torch's spin on the same cores: iterations take 20x as long.
        env.setdefault("NUMBA_NUM_THREADS", "1")
        if requested(engine).eager:  # else all wait 10 s for a compiler at the first request for log probabilities
            env.setdefault("TORCH_COMPILE_DISABLE", "1")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [_metadata_shim(), env.get("PYTHONPATH")]))
    return env


def check_installed() -> None:
    """Raise ConfigError when vLLM is not installed in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here.",
            "On a GPU machine: pip install 'headway[vllm]'. On a CPU: pip install --no-deps -r "
            "requirements.lock. Or attach to a running one with url = ... in [[engines]].",
        )


def _metadata_shim() -> str | None:
    """Return a directory with package metadata named "vllm", which vLLM reads, if the environment has none.

    `make install` has written it; after another installation nothing has.
    """
    if not metadata.lacking():
        return None
    folder = private.shared_dir() / f"vllm-metadata-{version('vllm-cpu')}"
    metadata.write(folder)
    return str(folder)


@dataclass(slots=True)
class Child:
    """One child process and its log file, to which earlier ones may have written."""

    argv: Sequence[str]
    env: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None)
    _before: int = field(default=0, init=False)  # bytes of the log that are not this process's

    def start(self) -> None:
        """Start the process; its output goes to the log file."""
        private.directory(self.log.parent)
        with os.fdopen(private.opened(self.log, os.O_WRONLY | os.O_APPEND), "ab") as out:
            self._before = out.tell()
            self.process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, grace: float = 10.0) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after `grace` seconds."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group that still runs."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of this process, without what libraries report of leaks at its end."""
        kept = [line for line in self._written().splitlines() if not _LEAKS.search(line)]
        return "\n".join(kept[-lines:])

    def died(self, name: str) -> EngineError:
        """Return the error of an engine whose child has ended."""
        code, offline = self.process.poll() if self.process else None, "HF_HUB_OFFLINE" in self.env
        return exit_error(name, code, self._written(), tail=self.tail(), offline=offline, where=str(self.log))

    def _written(self) -> str:
        """Return the end of what this process has written."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(self._before, log.seek(0, os.SEEK_END) - _TAIL))
            return log.read().decode(errors="replace")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
