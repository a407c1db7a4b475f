"""Runs the batches of a directory: of the gateways that share it one at a time, the others stand by."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from headway import clock
from headway.serve import tasks
from headway.serve.app_state import AppState
from headway.serve.batches.execution import Execution, Slots
from headway.serve.batches.files import sweep
from headway.serve.batches.records import Batch
from headway.serve.batches.store import Store

_LOOK_S = 1.0  # between two looks at what other gateways have changed, and at the time
log = logging.getLogger("headway.serve")


class BatchRunner:
    """Runs all batches that have not ended."""

    def __init__(self, state: AppState, store: Store) -> None:
        self._state, self._store = state, store
        self._slots = dict[str, Slots]()  # by tenant
        self._running = dict[str, tuple[Execution, asyncio.Task[None]]]()

    async def run(self) -> None:
        """Run batches until cancelled; what has not ended then goes on at the next start, or elsewhere."""
        async with self._alone():
            await self._store.ask(sweep, self._store)
            threads = ThreadPoolExecutor(1, "batch-lines")
            try:
                while True:
                    self._store.changed.clear()
                    await self._look(threads)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._store.changed.wait(), _LOOK_S)
            finally:
                await tasks.cancel(*(task for _, task in self._running.values()))
                threads.shutdown(wait=False)

    async def _look(self, threads: ThreadPoolExecutor) -> None:
        """Begin new batches, and stop those that were cancelled or whose time is over."""
        batches = await self._store.ask(self._store.open_batches)
        self._state.gateway.metrics.batches(batches)
        for batch in batches:
            if batch.id not in self._running:
                self._begin(batch, threads)
            if batch.cancelling is not None or clock.now() >= batch.due:
                self._running[batch.id][0].stop.set()

    def _begin(self, batch: Batch, threads: ThreadPoolExecutor) -> None:
        if batch.tenant not in self._slots:
            self._slots[batch.tenant] = Slots.of(batch.tenant, self._state.config)
        execution = Execution(self._state, self._store, batch, threads, self._slots[batch.tenant])
        task = asyncio.create_task(self._run(batch.id, execution))
        self._running[batch.id] = execution, task

    async def _run(self, id: str, execution: Execution) -> None:
        try:
            await execution.run()
        except Exception:  # whatever it was, other batches go on, and this one begins again
            log.exception("the batch %s was interrupted", id)
            self._state.gateway.metrics.loop_failed("batch")
        finally:
            del self._running[id]

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Wait until no other gateway runs batches. The kernel drops a lock when its process dies."""
        handle = os.open(self._store.folder / "runner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                if _locked(handle):
                    break
                await asyncio.sleep(_LOOK_S)
            yield
        finally:
            os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
