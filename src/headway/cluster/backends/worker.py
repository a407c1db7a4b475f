"""One child process that a backend talks to over pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headway.cluster.backends.port import BackendError

READY = b"ready\n"  # the first line that a child writes
_TAIL = 2000  # bytes of its standard error that an error message quotes
_END_S = 5.0  # limit for a killed process to end
_TRY_S = 20.0  # limit for a command that `failure` tries


def failure(*argv: str) -> str | None:
    """Run a command; return why it failed, None = it succeeded. May block for 20 s."""
    try:
        tried = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if tried.returncode == 0 else tried.stderr.strip() or f"exit status {tried.returncode}"


class Worker:
    """A child process in a new session; `kill` ends the whole session.

    It reports ready with the line `READY` on its standard output.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        seconds: float,
        limit: int,
        cwd: Path | None = None,
    ) -> Worker:
        """Start a child and wait until it is ready.

        limit: bytes of the longest line that it may write. BackendError when it ends before it is ready, or is not
        ready within `seconds`.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, env=dict(env), cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=limit
            )
        except OSError as error:
            raise BackendError(
                f"The backend {name} cannot start {argv[0]}: {error.strerror or error}.", "Install it."
            ) from error
        worker = cls(name, process)
        try:
            async with asyncio.timeout(seconds):
                line = await worker.output.readline()
        except TimeoutError:
            await worker.end()
            raise BackendError(
                f"The backend {name} was not ready within {seconds:g} s.", "Raise its start_timeout_s."
            ) from None
        except BaseException:
            await asyncio.shield(worker.end())
            raise
        if line != READY:
            raise await worker.failed("ended before it was ready")
        return worker

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def output(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def errors(self) -> asyncio.StreamReader:
        assert self._process.stderr is not None
        return self._process.stderr

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Write to the child's standard input, and close it after the `last` write."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # its output will show that it has ended
            stdin.write(data)
            await stdin.drain()
            if last:
                stdin.close()

    async def wait(self) -> int:
        """Wait until the child ends and return its exit status, negative for a signal."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill every process of its session that is still in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the child and wait a few seconds for its end."""
        self.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)

    async def failed(self, what: str) -> BackendError:
        """End the child and return an error that quotes the tail of its standard error."""
        tail = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while part := await self.errors.read(65536):
                    tail = (tail + part)[-_TAIL:]
        await self.end()
        quoted = tail.decode(errors="replace").strip()
        return BackendError(
            f"The backend {self.name} {what} (exit status {self._process.returncode}): {quoted}",
            "Check its settings in [backends] of the configuration.",
        )
