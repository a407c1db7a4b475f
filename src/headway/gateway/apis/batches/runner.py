"""Runs batches: one of the gateways that share a store at a time, the others stand by."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from headway import clock
from headway.errors import HeadwayError, RequestError
from headway.gateway import tasks
from headway.gateway.apis.batches.execution import Execution, Slots
from headway.gateway.apis.state import AppState
from headway.store.batches.port import BatchStore
from headway.store.batches.records import Batch

_LOOK_S = 1.0  # between two looks at what other gateways have changed, and at the time
_EXPIRED = 100  # files that are looked up at a time
_SWEEP_S = 600.0  # between two looks for what killed gateways left behind
log = logging.getLogger("headway.gateway")


class BatchRunner:
    """Runs all batches that have not ended."""

    def __init__(self, state: AppState, store: BatchStore) -> None:
        self._state, self._store = state, store
        self._slots = dict[str, Slots]()  # by tenant
        self._running = dict[str, tuple[Execution, asyncio.Task[None]]]()
        self._sweep_at = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._last_warning = ""

    async def run(self) -> None:
        """Run batches until the gateway stops; what has not ended then goes on at the next start, or elsewhere."""
        threads = ThreadPoolExecutor(1, "batch-lines")
        try:
            while not self._state.stopping.is_set():
                self._store.changed.clear()
                await self._turn(threads)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._store.changed.wait(), _LOOK_S)
        finally:
            await self._stop()
            threads.shutdown(wait=False)
            with suppress(HeadwayError):  # else another gateway takes over when this hold expires
                await self._store.release()

    async def _turn(self, threads: ThreadPoolExecutor) -> None:
        """Run batches if this gateway holds the store; while the store is out they wait."""
        try:
            if not await self._store.hold():
                await self._stop()
            else:
                if time.monotonic() >= self._sweep_at:
                    self._sweep_at = time.monotonic() + _SWEEP_S
                    self._sweeping = asyncio.create_task(self._sweep())
                await self._look(threads)
            self._last_warning = ""
        except HeadwayError as error:
            if str(error) != self._last_warning:  # once, not every second
                log.warning("batches wait: %s", error)
            self._last_warning = str(error)

    async def _stop(self) -> None:
        """Stop all batches; another gateway goes on with them."""
        if self._sweeping is not None:
            await tasks.cancel(self._sweeping)
        if self._running:
            await tasks.cancel(*(task for _, task in self._running.values()))
            self._running.clear()  # a task that was cancelled before it began has not done so
            self._state.gateway.metrics.batches([])

    async def _sweep(self) -> None:
        """Delete expired files and what killed gateways left; it may take longer than this gateway may be silent."""
        try:
            while files := await self._store.expired(clock.now(), _EXPIRED):
                for file in files:
                    with suppress(RequestError):  # a batch has begun to read it
                        await self._store.delete_file(file.tenant, file.id)
                if len(files) < _EXPIRED:
                    break
            await self._store.sweep()
        except HeadwayError as error:
            log.warning("files that have expired, or that killed gateways left, are not deleted yet: %s", error)

    async def _look(self, threads: ThreadPoolExecutor) -> None:
        """Begin new batches, and stop those that were cancelled or whose time is over."""
        batches = await self._store.open_batches()
        self._state.gateway.metrics.batches(batches)
        for batch in batches:
            if batch.id not in self._running:
                self._begin(batch, threads)
            if batch.cancelling is not None or clock.now() >= batch.due:
                self._running[batch.id][0].stop.set()

    def _begin(self, batch: Batch, threads: ThreadPoolExecutor) -> None:
        if batch.tenant not in {execution.tenant for execution, _ in self._running.values()}:
            engines = self._state.gateway.dispatcher.engines.values()
            computed = sum(engine.instance.max_running for engine in engines)
            self._slots[batch.tenant] = Slots.of(batch.tenant, self._state.config, computed)
        execution = Execution(self._state, self._store, batch, threads, self._slots[batch.tenant])
        task = asyncio.create_task(self._run(batch.id, execution))
        self._running[batch.id] = execution, task

    async def _run(self, id: str, execution: Execution) -> None:
        try:
            await execution.run()
        except HeadwayError as error:  # the store is out, or another gateway runs batches
            log.warning("the batch %s is interrupted: %s", id, error)
        except Exception:  # whatever it was, other batches go on, and this one begins again
            log.exception("the batch %s was interrupted", id)
            self._state.gateway.metrics.loop_failed("batch")
        finally:
            self._running.pop(id, None)
