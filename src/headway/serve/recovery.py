"""Recovery of what an earlier gateway process left open, and deletion of what is old."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container

from headway.broker.port import Broker
from headway.errors import HeadwayError
from headway.serve.background import BackgroundWork
from headway.serve.requests import InFlightRequest

_SWEEP = 600.0  # seconds between deletions
log = logging.getLogger("headway.serve")


async def recover(broker: Broker, background: BackgroundWork, models: Container[str]) -> None:
    """Run background jobs again and fail foreground ones, whose connections ended with the earlier process.

    models: those that are served; a background job for another one fails.
    """
    async for job in broker.open():
        if not job.background:
            reason = "client_gone: the gateway ended before the answer"
            await broker.fail(job.id, reason, time.time())
            continue
        in_flight = InFlightRequest.from_job(job)
        if in_flight.request.model in models:
            background.run(in_flight)
        else:
            reason = f"engine_gone: {in_flight.request.model} is not served any more"
            await broker.fail(job.id, reason, time.time())


async def forget_old_jobs(broker: Broker, keep_seconds: float) -> None:
    """Delete closed jobs once they are older than this, until cancelled."""
    while True:
        try:
            await broker.forget(time.time() - keep_seconds)
        except HeadwayError as error:
            log.error("old jobs are not deleted: %s", error)
        await asyncio.sleep(_SWEEP)
