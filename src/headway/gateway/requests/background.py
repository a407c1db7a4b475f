"""Background requests: accepted with an id, run once, their responses kept by the broker for polling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway import clock
from headway.errors import HeadwayError
from headway.gateway import tasks
from headway.gateway.bill import unused_by
from headway.gateway.budget import Held
from headway.gateway.control.dispatcher import Dispatcher
from headway.gateway.in_flight import InFlightRequest, reason_of
from headway.gateway.parsing.requests import ParsedRequest
from headway.gateway.requests.path import RequestPath
from headway.store.queue.port import CANCELLED, Job

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
