"""A pool of sandboxes: each executes the Python code of one unit and ends with it.

A sandbox is a fresh interpreter without the gateway's environment, with limits on memory, files and time.
With `isolation = "namespaces"` it also has separate files, users and processes, and no network
(`namespaces_main.py`); with "docker" it is a container (`containers`). With "process" it is an ordinary process of
the gateway's user in a temporary directory, which can read and change all that this user can.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headway.cluster.backends import namespaces_main, sandbox_main
from headway.cluster.backends.containers import PROCESSES, Container, command_env
from headway.cluster.backends.pool import WorkerPool
from headway.cluster.backends.port import Backend, HeldWorker, UnitResult
from headway.cluster.backends.worker import Worker, failure
from headway.config import Backend as Settings
from headway.errors import ConfigError, RequestError

_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/usr/share/zoneinfo",
)


def namespace_argv(argument: str, disk_mib: int, memory_mib: int) -> list[str]:
    """Return the command that runs `sandbox_main` in namespaces. argument: for `sandbox_main`."""
    command = [sys.executable, "-I", "-c", Path(sandbox_main.__file__).read_text(), argument]
    shown = chain.from_iterable(_visible().items())
    limits = [str(disk_mib), str(memory_mib)]
    return [sys.executable, "-I", "-S", namespaces_main.__file__, *limits, *shown, "--", *command]


def check_namespaces(name: str) -> None:
    """Raise ConfigError if sandboxes cannot be confined here. May block for 20 s."""
    why = failure(*namespace_argv(json.dumps({"limits": {}, "imports": []}), 1, 64))
    if why is not None:
        raise ConfigError(
            f"backends.{name} cannot isolate its sandboxes by namespaces here: {why}.",
            "Run the gateway on Linux 5.12 or later, as root with CAP_SYS_ADMIN or as another user where "
            "unprivileged user namespaces are allowed (in a container also by its seccomp and AppArmor "
            'profiles), or set isolation = "docker"; "process" only if you trust all code that is sent.',
            param=f"backends.{name}.isolation",
        )


@cache
def _visible() -> dict[str, str]:
    """Return the paths that the interpreter needs, {inside: outside}: none nested, links resolved outside."""
    paths = sysconfig.get_paths()
    wanted = {
        *_SYSTEM,
        *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        f"{sys.base_prefix}/lib",
        f"{sys.prefix}/pyvenv.cfg",
        sys.executable,
        os.path.realpath(sys.executable),
    }
    found: dict[str, str] = {}
    for path in sorted(wanted):
        if os.path.exists(path) and not any(Path(path).is_relative_to(above) for above in found):
            found[path] = os.path.realpath(path)
    return found


_MIB = 1 << 20
_FILES = 256  # open at a time
_DRAIN_S = 5.0  # limit for the output of a killed sandbox to end
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Code(BaseModel):
    """The input of a sandbox. code: a Python program."""

    model_config = ConfigDict(extra="forbid")

    code: Annotated[str, Field(strict=True)]


class _Sandbox:
    """One sandbox: its process, and the removal of its directory or container."""

    def __init__(self, worker: Worker, clean: Callable[[], Awaitable[object]]) -> None:
        self.worker, self._clean = worker, clean

    @property
    def alive(self) -> bool:
        return self.worker.alive

    async def end(self) -> None:
        """Kill it and remove its directory or container."""
        await self.worker.end()
        await self._clean()


class Sandboxes(Backend):
    """The backend `kind = "sandbox"`. ConfigError for settings of a model. pool: its worker processes."""

    def __init__(self, name: str, settings: Settings, share: float = 1.0) -> None:
        if settings.load is not None or settings.options:
            raise ConfigError(
                f"backends.{name} is a sandbox, which neither loads a model nor has options.",
                "Leave out load and options.",
                param=f"backends.{name}",
            )
        self._name, self._settings = name, settings
        self.pool = WorkerPool(
            name, self._start, most=settings.processes, waiting=settings.waiting, share=share, keep_s=None
        )

    @property
    def shared(self) -> bool:
        return False

    async def warm(self) -> HeldWorker | None:
        """Start a sandbox ahead of time. It is fresh, so it may serve a unit of any tenant."""
        return await self.pool.warm()

    async def run(self, tenant: str, input: Any) -> UnitResult:
        """Execute code; return `exit_code`, `stdout`, `stderr`, `truncated`, `timed_out`."""
        try:
            code = Code.model_validate(input)
        except ValidationError as error:
            raise RequestError(
                f"A sandbox cannot execute this input: {error.errors(include_url=False)[0]['msg']}.",
                'Send {"input": {"code": "print(6 * 7)"}}.',
                param="input",
            ) from None
        async with self.pool.worker(tenant) as taken:
            output = await self._execute(taken.worker.worker, code.code)
        return UnitResult(output, taken.warm, taken.waited, taken.started)

    async def close(self) -> None:
        await self.pool.close()

    async def _start(self) -> _Sandbox:
        """Start a sandbox; of the gateway's environment it gets only the variables that the settings name."""
        passed = {name: os.environ[name] for name in self._settings.env if name in os.environ}
        if self._settings.isolation == "docker":
            container = Container(self._name, self._settings)
            argv = container.argv(self._argument(), _env("/tmp"), passed)
            env = command_env(passed)
            return await self._started(argv, env, None, container.remove, container.remove_unfinished)
        if self._settings.isolation == "namespaces":
            argv = namespace_argv(self._argument(), self._settings.disk_mib, self._settings.memory_mib)
            return await self._started(argv, {"PATH": os.defpath} | _env("/tmp") | passed, None, _nothing)
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="headway-sandbox-"))
        env = {"PATH": os.defpath} | _env(str(folder)) | passed
        argv = [sys.executable, "-I", str(Path(sandbox_main.__file__)), self._argument()]
        return await self._started(argv, env, folder, partial(_remove, folder))

    async def _started(
        self,
        argv: list[str],
        env: Mapping[str, str],
        folder: Path | None,
        clean: Callable[[], Awaitable[object]],
        clean_unfinished: Callable[[], Awaitable[object]] | None = None,
    ) -> _Sandbox:
        try:
            worker = await Worker.start(
                self._name, argv, env, cwd=folder, limit=_MIB, seconds=self._settings.start_timeout_s
            )
        except BaseException:
            await asyncio.shield((clean_unfinished or clean)())
            raise
        return _Sandbox(worker, clean)

    def _argument(self) -> str:
        """Return the argument for `sandbox_main`."""
        settings = self._settings
        limits = {"AS": settings.memory_mib * _MIB, "FSIZE": settings.disk_mib * _MIB, "CORE": 0, "NOFILE": _FILES}
        task: dict[str, Any] = {"limits": limits, "imports": settings.imports}
        if settings.isolation == "namespaces":
            limits["NPROC"] = PROCESSES
        if settings.isolation == "docker":  # a container does not end with the gateway
            task["seconds"] = settings.timeout_s + _DRAIN_S
        return json.dumps(task)

    async def _execute(self, worker: Worker, code: str) -> dict[str, Any]:
        """Execute code until it ends or times out, then kill the sandbox."""
        most = self._settings.output_kib * 1024
        began = time.monotonic()
        reading = [asyncio.create_task(_read(pipe, most)) for pipe in (worker.output, worker.errors)]
        writing = worker.write(json.dumps({"code": code}).encode() + b"\n", last=True)
        ending = asyncio.gather(writing, worker.wait(), *reading)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ending), self._settings.timeout_s)
            timed_out = not ending.done()
            worker.kill()
            # Without namespaces, a process that the code started may still hold the output open.
            await asyncio.wait([ending], timeout=_DRAIN_S)
        finally:
            ending.cancel()
        (stdout, stdout_cut), (stderr, stderr_cut) = (_text(task) for task in reading)
        return {
            "exit_code": await worker.wait(),
            "stdout": stdout,
            "stderr": stderr,
            "truncated": stdout_cut or stderr_cut,
            "timed_out": timed_out,
            "seconds": time.monotonic() - began,
        }


def _env(home: str) -> dict[str, str]:
    return _THREADS | {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}


async def _nothing() -> None:
    """Remove nothing: a sandbox in namespaces ends with its last process."""


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _read(pipe: asyncio.StreamReader, most: int) -> tuple[bytes, bool]:
    """Read to the end, and return the first `most` bytes and whether there were more."""
    kept, more = bytearray(), False
    while part := await pipe.read(65536):
        free = most - len(kept)
        kept += part[: max(free, 0)]
        more |= len(part) > free
    return bytes(kept), more


def _text(task: asyncio.Task[tuple[bytes, bool]]) -> tuple[str, bool]:
    """Return the output as text, and whether it was cut; empty if the pipe never ended."""
    if not task.done() or task.cancelled():
        return "", True
    data, more = task.result()
    return data.decode(errors="replace"), more
