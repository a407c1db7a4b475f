"""One batch from its check to its end: its lines become background requests, a few at a time.

A request's id follows from batch and line. After a crash the queue refuses what it knows already, so that a
line which was answered meanwhile, or still waits there, is followed rather than run again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar
from zlib import crc32

from headway import clock
from headway.config import Config
from headway.errors import EngineError, HeadwayError, RequestError
from headway.gateway import tasks
from headway.gateway.apis.batches.lines import (
    RESPONSES,
    LineCheck,
    as_response,
    conclude,
    error_line,
    key_of,
    parse_line,
    request_id,
    result_line,
)
from headway.gateway.apis.state import AppState
from headway.gateway.bill import BUDGET_SPENT
from headway.gateway.budget import Held
from headway.gateway.offload import offload
from headway.gateway.parsing.requests import ParsedRequest
from headway.store.batches.port import BatchStore
from headway.store.batches.records import CANCELLED, EXPIRED, Batch, Line, input_changed
from headway.store.queue.port import Job
from headway.types import Request

_AGAIN_S = 0.5  # until a line that found no room is tried again
_BUDGET_S = 10.0  # the same of a line whose tenant's budget had no room, if no other line is in progress
_ENTRY = 16  # lines that are on their way into the queue at a time
_PAGE = 64  # lines that are looked up at a time
_FAR = 1000  # lines in a row that the queue does not know, at least, before the others are not looked for
T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger("headway.gateway")


class NoRoom(Exception):
    """The queue, or the limits of the line's tenant, have no room for it now."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Room for lines of one tenant. free: places left. total: all places. most: `max_queued` of its keys.

    entry: for lines that are being queued. The queue's file takes all that come in one go, and what is
        done for each of them then would hold up all others.
    check: of one batch at a time, so that tenants take turns.
    """

    free: asyncio.Semaphore
    total: int
    most: int | None
    entry: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_ENTRY))
    check: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, tenant: str, config: Config, computed: int) -> Slots:
        """Return a tenant's: twice what all engines compute at a time, unless configured.

        At most a quarter of the queue, and half of what its keys may have there.
        """
        keys = [key.max_queued for key in config.keys if key.tenant == tenant and key.max_queued is not None]
        most = min(keys, default=None)
        lines = config.batches.lines or 2 * computed
        total = min(lines, config.server.max_queued // 4, lines if most is None else most // 2)
        return cls(asyncio.Semaphore(max(total, 1)), max(total, 1), most)


class Execution:
    """Runs one batch.

    threads: where lines are checked, of one batch at a time.
    slots: for lines of the batch's tenant that are in the queue or an engine.
    stop: to be set when the batch is cancelled, or its window has ended.
    """

    def __init__(self, state: AppState, store: BatchStore, batch: Batch, threads: Executor, slots: Slots) -> None:
        self._state, self._store, self._batch = state, store, batch
        self._threads, self._slots = threads, slots
        self.stop = asyncio.Event()
        self.tenant = batch.tenant
        self._begun = 0  # lines in the queue or an engine

    async def run(self) -> None:
        """Run the batch to its end; after a failure it can be run again."""
        batch = await self._store.batch(self._batch.tenant, self._batch.id)
        if batch is None or batch.ended is not None:  # since the caller looked
            return
        self._batch = batch
        if batch.began is None:
            async with self._slots.check:
                if not await self._check():
                    return
        if batch.finalizing is None:
            await self._answer_all()
        await conclude(self._store, batch)
        log.info("the batch %s has ended", batch.id)

    # ---- the check

    async def _check(self) -> bool:
        """Check all lines; False when the batch has ended with that."""
        id, store = self._batch.id, self._store
        check = LineCheck(self._state, self._store, self._batch)
        if self.stop.is_set():
            check.stopped.set()
        work = asyncio.get_running_loop().run_in_executor(self._threads, check.run)
        stopping: asyncio.Future[bool] = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                check.stopped.set()
            stopping.cancel()
            await asyncio.wait({work})
        if not work.result():
            await store.end(id, await self._why_stopped(), clock.now())
            return False
        if check.problems:
            log.info("the batch %s failed: %d of its lines are wrong", id, len(check.problems))
            await store.refuse(id, check.problems, clock.now())
            return False
        await store.begin(id, clock.now())
        return True

    async def _why_stopped(self) -> str:
        batch = await self._store.batch(self._batch.tenant, self._batch.id)
        return "expired" if batch is None or batch.cancelling is None else "cancelled"

    # ---- the lines

    async def _answer_all(self) -> None:
        """Return when every line has its end."""
        feeding = asyncio.create_task(self._feed())
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({feeding, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fed = feeding.done()
            stopping.cancel()
            await tasks.cancel(feeding)
        if fed:
            feeding.result()
        else:
            await self._close_open_lines()

    async def _feed(self) -> None:
        """Run the lines that have no end, in order, as many at a time as there are slots."""
        after, store = 0, self._store
        async with asyncio.TaskGroup() as group:
            while lines := await self._retry(store.open_lines, self._batch.id, after, _PAGE):
                for line in lines:
                    await self._slots.free.acquire()
                    task = group.create_task(self._answer(line))
                    task.add_done_callback(lambda _: self._slots.free.release())
                after = lines[-1].number

    async def _answer(self, line: Line) -> None:
        try:
            job = await self._run(line)
        except HeadwayError as error:
            ended = False, error_line(self._batch, line, error)
        except Exception as error:  # whatever it was, the other lines go on
            log.exception("line %d of the batch %s failed", line.number, self._batch.id)
            why = EngineError(f"Headway failed: {error!r}.", "Its trace is in the log.", status=500)
            ended = False, error_line(self._batch, line, why)
        else:
            ended = await self._outcome(line, job)
        await self._record(line, *ended)

    async def _outcome(self, line: Line, job: Job) -> tuple[bool, bytes]:
        """Return whether a line was answered, and its line of the output or error file."""
        result = job.result
        if self._batch.endpoint == RESPONSES and job.state == "done" and result is not None:
            try:
                text, created = await self._retry(self._text, line), int(clock.shown(job.arrival))
            except HeadwayError as error:
                return False, error_line(self._batch, line, error)
            response = await offload(len(result), lambda: as_response(text, job.id, created, result))
            job = replace(job, result=response)
        return result_line(self._batch, line, job)

    async def _text(self, line: Line) -> bytes:
        text = await self._store.read(self._batch.input_file, line.start, line.size)
        if line.checksum not in (None, crc32(text)):
            log.error("line %d of the batch %s has changed on the disk", line.number, self._batch.id)
            raise input_changed()
        return text

    async def _record(self, line: Line, good: bool, content: bytes) -> None:
        await self._retry(self._store.record, self._batch.id, line.number, good, content)

    async def _retry(self, call: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Call the store again until it is not out, and return the result; other lines go on meanwhile."""
        warned = False
        while True:
            try:
                return await call(*args, **named)
            except HeadwayError as error:
                if error.status < 500:
                    raise
                if not warned:
                    log.warning("the batch %s waits: %s", self._batch.id, error)
                warned = True
            await asyncio.sleep(_AGAIN_S)

    async def _run(self, line: Line) -> Job:
        """Run a line's request, unless the queue knows it; return its job, ended.

        HeadwayError when it is refused for good.
        """
        while True:
            try:
                async with self._slots.entry:
                    await self._accept(line)
                self._begun += 1
                try:
                    job = await self._wait_for_end(request_id(self._batch, line.number))
                finally:
                    self._begun -= 1
                if job is not None:  # else it was forgotten (broker.keep_hours)
                    return job
            except NoRoom:
                await asyncio.sleep(_AGAIN_S)
            except HeadwayError as error:
                if not _is_temporary(error):
                    raise
                alone = error.code == BUDGET_SPENT and not self._begun  # no other line will give back units
                await asyncio.sleep(_BUDGET_S if alone else _AGAIN_S)

    async def _accept(self, line: Line) -> None:
        """Queue a line's request; nothing if it is known."""
        gateway, batch = self._state.gateway, self._batch
        self._check_room()
        text = await self._text(line)
        _, parsed = await offload(len(text), lambda: parse_line(self._state, batch, text, None))
        request = self._with_deadline(line, parsed.request)
        parsed = replace(parsed, request=request, background=True, payer=key_of(batch))
        with gateway.bodies.hold() as held:
            held.tenant = batch.tenant
            held.add(max(len(text), len(parsed.upstream.content)))
            reject = gateway.path.admission(parsed, self._slots.most)
            if reject is not None and reject.reason != "infeasible":
                raise NoRoom
            await _run_to_end(self._put(parsed, held))

    async def _put(self, parsed: ParsedRequest, held: Held) -> None:
        gateway, tenant, now = self._state.gateway, self._batch.tenant, clock.now()
        gateway.path.check_capacity(parsed, self._slots.most)
        self._check_room()  # again: other lines came in meanwhile
        gateway.path.usage.count(tenant, now, requests=1)
        try:
            await gateway.background.accept(parsed, held)
        except HeadwayError as error:
            gateway.path.usage.count(tenant, now, requests=-1)
            if error.status != 409:  # else the queue has it
                raise

    def _check_room(self) -> None:
        """Leave half of the queue, and what its tenant's keys may use, to others than batches."""
        gateway, now = self._state.gateway, clock.now()
        if gateway.dispatcher.control.controller.queued >= (self._state.config.server.max_queued + 1) // 2:
            raise NoRoom
        for key in self._state.config.keys:
            if key.tenant == self._batch.tenant:
                try:
                    gateway.path.usage.check(key, now)
                except RequestError as error:
                    raise NoRoom from error

    def _with_deadline(self, line: Line, request: Request) -> Request:
        """Return a line's request, due at the end of the window at the latest."""
        left = max(self._batch.due - request.arrival, 1e-3)
        slo = replace(request.slo, e2e=min(left, request.slo.e2e or left), soft=None)
        request = replace(request, id=request_id(self._batch, line.number), slo=slo)
        return self._state.gateway.dispatcher.promised(request)

    async def _wait_for_end(self, id: str) -> Job | None:
        """Return a request's job once it has ended, whichever gateway runs it; None when it is not known."""
        while True:
            await self._state.gateway.background.wait(id)
            job = await self._state.gateway.broker.get(id)
            if job is None or job.state != "open":
                return job
            await asyncio.sleep(_AGAIN_S)

    # ---- when the batch is cancelled or expires

    async def _close_open_lines(self) -> None:
        """End what is left: what was answered keeps its answer, all else is cancelled."""
        after = unknown = 0
        store, id = self._store, self._batch.id
        far = max(2 * self._slots.total, _FAR)
        while unknown < far and (lines := await store.open_lines(id, after, _PAGE)):
            for line in lines:
                unknown = 0 if await self._close(line) else unknown + 1
            after = lines[-1].number
        end = EXPIRED if await self._why_stopped() == "expired" else CANCELLED
        await store.close_lines(id, end)

    async def _close(self, line: Line) -> bool:
        """Cancel a line's request, or record how it ended; False when the queue does not know it."""
        gateway, id = self._state.gateway, request_id(self._batch, line.number)
        with suppress(HeadwayError):  # its end cannot be stored at the moment
            await gateway.background.cancel(id)
        job = await gateway.broker.get(id)
        if job is not None and job.state != "open" and job.reason != "cancelled":
            await self._record(line, *await self._outcome(line, job))
        return job is not None


def _is_temporary(error: HeadwayError) -> bool:
    """Return whether the same request may be accepted later: what is full, or out, may not be so for ever."""
    return error.status >= 500 or (error.status == 429 and error.code != "infeasible")


async def _run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Do work to its end even if this task is cancelled meanwhile: half done, it would count as a failure."""
    doing = asyncio.ensure_future(work)
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


_LOOK_S = 1.0  # between two looks at what other gateways have changed, and at the time
_EXPIRED = 100  # files that are looked up at a time
_SWEEP_S = 600.0  # between two looks for what killed gateways left behind


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
