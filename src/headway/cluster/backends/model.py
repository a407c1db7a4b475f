"""A model in worker processes: loaded by a function that the configuration names, called once per unit.

The function and the model are the operator's own code, as trusted as the gateway: a worker has the gateway's
environment and serves all tenants, one unit at a time. It stays loaded for `keep_s` after a unit.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from headway.cluster.backends.pool import WorkerPool
from headway.cluster.backends.port import Backend, BackendError, HeldWorker, UnitResult
from headway.cluster.backends.worker import Worker
from headway.config import Backend as Settings
from headway.errors import ConfigError, RequestError


class _ModelWorker:
    """A worker with the model loaded, and a task that discards its log."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._log = asyncio.create_task(_discard(worker.errors))

    @property
    def alive(self) -> bool:
        return self.worker.alive

    async def end(self) -> None:
        await self.worker.end()
        self._log.cancel()


class Model(Backend):
    """The backend `kind = "model"`. ConfigError without `load`. pool: its worker processes."""

    def __init__(self, name: str, settings: Settings, share: float = 1.0) -> None:
        if settings.load is None or ":" not in settings.load:
            raise ConfigError(
                f"backends.{name} is a model, but nothing says how to load it.",
                'Name a function that returns a callable: load = "module:function".',
                param=f"backends.{name}.load",
            )
        self._name, self._settings, self._load = name, settings, settings.load
        self._most = settings.output_kib * 1024
        self.pool = WorkerPool(
            name, self._start, most=settings.processes, waiting=settings.waiting, share=share, keep_s=settings.keep_s
        )

    @property
    def shared(self) -> bool:
        return True

    async def warm(self) -> HeldWorker | None:
        """Load the model ahead of time, or keep a worker that has loaded it."""
        return await self.pool.warm()

    async def run(self, tenant: str, input: Any) -> UnitResult:
        """Call the model with the input and return what it returns."""
        async with self.pool.worker(tenant) as taken:
            output = await self._call(taken.worker.worker, input)
        return UnitResult(output, taken.warm, taken.waited, taken.started)

    async def close(self) -> None:
        await self.pool.close()

    async def _start(self) -> _ModelWorker:
        options = json.dumps(self._settings.options)
        argv = [sys.executable, "-m", "headway.cluster.backends.model_main", self._load, options, str(self._most)]
        return _ModelWorker(
            await Worker.start(
                self._name, argv, os.environ, limit=self._most + 1024, seconds=self._settings.start_timeout_s
            )
        )

    async def _call(self, worker: Worker, input: Any) -> Any:
        """Send the input and return the answer; kill a worker that is cancelled or too slow."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await worker.write(json.dumps({"input": input}).encode() + b"\n")
                line = await worker.output.readline()
        except BaseException as error:  # also when cancelled: a late answer would be taken for the next unit's
            await asyncio.shield(worker.end())
            if isinstance(error, TimeoutError):
                raise BackendError(
                    f"The backend {self._name} did not answer within {self._settings.timeout_s:g} s.",
                    "Ask for less, or raise its timeout_s.",
                    status=504,
                    code="backend_timeout",
                ) from None
            raise
        if not line.endswith(b"\n"):
            await worker.end()
            raise BackendError(f"The backend {self._name} ended during a unit.", "Try again.")
        return self._result(json.loads(line))

    def _result(self, reply: dict[str, Any]) -> Any:
        if "refused" in reply:
            raise RequestError(
                f"The backend {self._name} refused the input: {reply['refused']}.",
                "Correct the input.",
                param="input",
                code="backend_refused",
            )
        if "failed" in reply:
            raise BackendError(
                f"The backend {self._name} failed: {reply['failed']}.", "Check its code.", code="backend_failed"
            )
        return reply["output"]


async def _discard(pipe: asyncio.StreamReader) -> None:
    """Discard a worker's log output, so that it never blocks on a full pipe."""
    while await pipe.read(65536):
        pass
