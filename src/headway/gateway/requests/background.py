"""Background requests: accepted with an id, run once, their responses kept by the broker for polling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager

from headway import clock
from headway.config import Broker as BrokerConfig
from headway.config import Config
from headway.errors import HeadwayError
from headway.gateway import tasks
from headway.gateway.bill import unused_by
from headway.gateway.budget import Held
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.in_flight import InFlightRequest, reason_of
from headway.gateway.parsing.requests import ParsedRequest
from headway.gateway.requests.closing import Closings
from headway.gateway.requests.path import RequestPath
from headway.store.queue.port import CANCELLED, Broker, Job

log = logging.getLogger("headway.gateway")


class BackgroundWork:
    """Runs background requests, each in a task of its own."""

    def __init__(self, path: RequestPath, dispatcher: Dispatcher) -> None:
        self._path, self._dispatcher = path, dispatcher
        self._running: dict[str, tuple[InFlightRequest, asyncio.Task[None]]] = {}
        self.handed_over = False  # other gateways run what is in the queue

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Stop all tasks when the block ends; their jobs stay open for the next start or another gateway."""
        try:
            yield
        finally:
            await tasks.cancel(*(task for _, task in self._running.values()))

    async def accept(self, parsed: ParsedRequest, held: Held) -> Job | None:
        """Store a request durably and run it. Its body is the broker's alone, if that keeps it on disk.

        Returns the job that was accepted before under its idempotency key, None = there is none.
        """
        if parsed.earlier is not None:
            return parsed.earlier
        try:
            in_flight = await self._path.store(parsed, held)
        except HeadwayError as error:
            if error.status != 409 or (parsed := await self._path.with_earlier(parsed)).earlier is None:
                raise
            return parsed.earlier  # it came at the same time
        if self._path.broker.on_disk:
            in_flight.drop_body()
        if self.handed_over:
            await self._give_back(in_flight)
        else:
            self.run(in_flight)
        return None

    def run(self, in_flight: InFlightRequest) -> None:
        """Run a stored request."""
        self._dispatcher.add(in_flight)  # at once: until then it counts for no limit of the queue
        task = asyncio.create_task(self._run(in_flight))
        self._running[in_flight.id] = in_flight, task
        task.add_done_callback(lambda _: self._running.pop(in_flight.id, None))

    async def _run(self, in_flight: InFlightRequest) -> None:
        try:
            response = await self._path.open(in_flight)
            await response.close()
            if response.status == 200:
                await self._path.price(in_flight, response)
                await self._path.finish(in_flight, response.output_tokens, response.head)
            else:
                reason = response.head.decode(errors="replace")[:2000]
                await self._path.fail(in_flight, f"engine_refused: {reason}")
        except HeadwayError as error:
            await self._path.fail(in_flight, *reason_of(error))
        except Exception as error:  # whatever it was, the request ends and frees its slot
            log.exception("request %s failed", in_flight.id)
            await self._path.fail(in_flight, f"internal: {error!r}")

    def __contains__(self, id: str) -> bool:
        """Return whether a request runs here."""
        return id in self._running

    def ids(self) -> list[str]:
        """Return the ids of the requests that run."""
        return list(self._running)

    async def wait(self, id: str) -> None:
        """Wait until a request does not run here, at once for one that never did."""
        if id in self._running:
            await asyncio.wait([self._running[id][1]])

    async def cancel(self, id: str) -> bool:
        """Cancel a request that has not ended, whichever gateway runs it; return whether there was one.

        Another gateway stops working on it with the next renewal of its lease. HeadwayError (503) as long as
        its end cannot be stored.
        """
        in_flight = await self._stop(id)
        if in_flight is not None:
            await self._path.fail(in_flight, CANCELLED, "cancelled")
        if id in self._path.closings:
            raise HeadwayError(
                f"{id} has ended, but the queue cannot be written at the moment.",
                "Ask again: its end is stored as soon as the disk allows.",
                status=503,
                kind="server_error",
            )
        if in_flight is not None:
            return True
        job = await self._path.broker.get(id)
        return job is not None and await self._path.broker.cancel(id, clock.now(), unused_by(job))

    async def drop(self, id: str) -> None:
        """Stop a request that another gateway runs now; its job in the broker is not touched."""
        in_flight = await self._stop(id)
        if in_flight is not None:
            self._path.abandon(in_flight, "lease_lost")

    async def hand_over(self) -> None:
        """Stop all requests, and give them, and those that still come, back to the queue for another gateway."""
        self.handed_over = True
        stopped = await asyncio.gather(*(self._stop(id) for id in self.ids()))
        await asyncio.gather(*(self._give_back(one) for one in stopped if one is not None))

    async def _give_back(self, in_flight: InFlightRequest) -> None:
        self._path.abandon(in_flight, "handed_over")
        try:
            await self._path.broker.give_back(in_flight.id)
        except HeadwayError as error:
            log.warning("%s is free once this gateway has ended: %s", in_flight.id, error)

    async def _stop(self, id: str) -> InFlightRequest | None:
        """Stop the task of a request and return the request, None when it has ended."""
        if id not in self._running:
            return None
        in_flight, task = self._running[id]
        if in_flight.ended:  # which is being stored
            await asyncio.wait([task])
            return None
        await tasks.cancel(task)
        return None if in_flight.ended else in_flight


_PAGE = 32  # jobs taken at once: a body may be megabytes
_IDS_PER_CALL = 20_000  # the answer to a question about more would hold up the lease's next renewal
_LOOK_S = 1.0  # between two looks for jobs that are free
_SWEEP, _TRIM = 600.0, 60.0  # seconds between deletions of old jobs, and of answers that are too many


class Recovery:
    """Renews the gateway's lease on its jobs, three times within its length, and recovers jobs that no gateway holds.

    Every second it takes the jobs that another gateway gave back, or left behind when it died: background jobs run
    again here, foreground ones fail, because their connections ended with that gateway. A gateway
    that is stopping takes none.

    in_flight: ids of the requests here; a job of one is kept, not recovered, when it was free for a moment.
    models: those that are served here; a background job for another one fails.
    config: after `broker.lease_seconds` without a renewal other gateways may take this one's jobs; one over
        which `server.max_attempts` engines have died is not run again.
    """

    def __init__(
        self,
        broker: Broker,
        closings: Closings,
        background: BackgroundWork,
        in_flight: Container[str],
        models: Container[str],
        config: Config,
    ) -> None:
        self._broker, self._closings, self._background, self._in_flight = broker, closings, background, in_flight
        self._models, self._lease_seconds = models, config.broker.lease_seconds
        self._max_attempts = config.server.max_attempts
        self._unasked: list[str] = []  # background jobs that the broker is still to be asked about

    async def run(self) -> None:
        """Renew and take over until cancelled."""
        every = self._lease_seconds / 3
        renew_at = clock.now() + every
        while True:
            await asyncio.sleep(min(_LOOK_S, every))
            try:
                if clock.now() < renew_at:
                    await self._take()
                else:
                    renew_at = clock.now() + every
                    await self.renew()
            except HeadwayError as error:  # the next renewal may succeed, once a full disk has space again
                log.warning("the broker's lease is not renewed, or nothing is taken over: %s", error)

    async def renew(self) -> None:
        """Renew the lease, then take over what is free."""
        if not await self._broker.renew(clock.now() + self._lease_seconds):
            self._unasked.clear()  # others may have taken any of them meanwhile
        await self._stop_gone()
        await self._take()

    async def _take(self) -> None:
        while not self._background.handed_over and (jobs := await self._broker.take(clock.now(), _PAGE)):
            for job in jobs:
                await self._recover_or_give_back(job)

    async def _stop_gone(self) -> None:
        """Stop background jobs that another gateway has cancelled or, while the lease had ended, taken.

        One call asks about the oldest; those of a backlog that are left are asked about by the next calls.
        """
        self._unasked = self._unasked or self._background.ids()
        gone = await self._broker.gone(self._unasked[:_IDS_PER_CALL])
        del self._unasked[:_IDS_PER_CALL]
        for id, ended in gone.items():
            if id in self._closings or id not in self._background:
                continue  # it has ended here
            if ended:
                await self._background.cancel(id)
            else:
                log.warning("another gateway has taken the background request %s", id)
                await self._background.drop(id)

    async def _recover_or_give_back(self, job: Job) -> None:
        """Recover a job; if that fails in any way, give it back, so that no gateway keeps it idle."""
        try:
            await self._recover(job)
        except Exception:
            log.exception("the request %s is given back", job.id)
            await self._broker.give_back(job.id)

    async def _recover(self, job: Job) -> None:
        """Run a job, or store its end: once taken, no other gateway does.

        One that was free for a moment and comes back here still runs, or its end waits to be stored.
        """
        if job.id in self._background or job.id in self._in_flight or job.id in self._closings:
            return
        reason = "client_gone: the gateway ended before the answer"
        if job.attempts >= self._max_attempts:
            reason = f"engine_killed: {job.attempts} engines died while they ran it"
        elif job.background:
            try:
                in_flight = await InFlightRequest.from_job(job)
            except ValueError as error:
                log.error("the stored request %s cannot be read: %s", job.id, error)
                reason = "internal: the stored request cannot be read"
            else:
                if in_flight.request.model in self._models:
                    self._background.run(in_flight)
                    return
                reason = f"engine_gone: {in_flight.request.model} is not served any more"
        await self._closings.fail(job.id, reason, clock.now(), unused_by(job))


async def forget_old_jobs(broker: Broker, limits: BrokerConfig) -> None:
    """Delete jobs that ended too long ago, and what is kept of a tenant beyond its limit, until cancelled."""
    forget_at = clock.now()
    while True:
        try:
            if clock.now() >= forget_at:
                forget_at = clock.now() + _SWEEP
                await broker.forget(clock.now() - limits.keep_hours * 3600)
            if limits.keeps:
                await broker.trim(limits.tenant_kept_mib * 2**20)
        except HeadwayError as error:
            log.error("old jobs are not deleted: %s", error)
        await asyncio.sleep(_TRIM)
