"""The gateway's lease on its jobs, and recovery of jobs that no gateway holds.

A gateway renews its lease three times within the lease's length. Every second it takes the jobs that another
gateway gave back, or left behind when it died: background jobs run again here, foreground ones fail, because their
connections ended with that gateway. One that is being stopped takes none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container

from headway import clock
from headway.config import Broker as BrokerConfig
from headway.config import Config
from headway.errors import HeadwayError
from headway.gateway.bill import unused_by
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.requests.background import BackgroundWork
from headway.gateway.requests.closing import Closings
from headway.store.queue.port import Broker, Job

_PAGE = 32  # jobs taken at once: a body may be megabytes
_IDS_PER_CALL = 20_000  # the answer to a question about more would hold up the lease's next renewal
_LOOK_S = 1.0  # between two looks for jobs that are free
_SWEEP, _TRIM = 600.0, 60.0  # seconds between deletions of old jobs, and of answers that are too many
log = logging.getLogger("headway.gateway")


class Recovery:
    """Renews the lease and takes over free jobs.

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
