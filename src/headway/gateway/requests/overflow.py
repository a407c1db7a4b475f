"""Requests at overflow engines: anything but an answer sends the request back to the queue.

What they cost is counted in the broker: a budget holds over restarts, and for all gateways that share the broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from headway import clock
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError, HeadwayError
from headway.gateway.in_flight import InFlightRequest
from headway.gateway.requests.engine_response import ERROR_EVENT, EngineResponse
from headway.policy.core.overflow import HOUR
from headway.store.queue.port import Broker, Charge

_ASIDE_S = 10.0  # seconds for which an engine that does not say how long gets no requests
_SPENT_S = 60.0  # the same of an engine whose budget is spent, as only the broker knows
_ITS_OWN = (400, 413, 422)  # statuses of errors that are about one request


log = logging.getLogger("headway.gateway")


class Declined(Exception):
    """An overflow engine did not answer a request.

    aside_s: seconds for which it is to get no others.
    """

    def __init__(self, engine: str, why: str, aside_s: float) -> None:
        super().__init__(f"the overflow engine {engine} did not answer it, and gets none for {aside_s:g} s: {why}")
        self.aside_s = aside_s


async def answered(engine: str, opening: Awaitable[EngineResponse]) -> EngineResponse:
    """Return the response of an overflow engine if it is an answer; Declined otherwise. engine: its id."""
    try:
        response = await opening
    except EngineError as error:
        raise Declined(engine, error.message, _ASIDE_S) from error
    if response.status == 200 and response.head and ERROR_EVENT not in response.head:
        return response
    retry_after = response.retry_after
    await response.close()
    aside_s = 0.0 if response.status in _ITS_OWN else _ASIDE_S if retry_after is None else float(retry_after)
    raise Declined(engine, f"status {response.status}", aside_s)


async def reserve(broker: Broker, engine: EngineView, in_flight: InFlightRequest) -> None:
    """Count what a request may cost at an overflow engine; Declined if its budget is spent, or cannot be known."""
    assert in_flight.overflow is not None, f"{in_flight.id} was not sent to overflow"
    if not (units := in_flight.overflow.reserved):
        return
    account, most = f"{engine.config.name} at {engine.config.url}", in_flight.overflow.terms.budget
    in_flight.account = account
    try:
        counted = await broker.spend(in_flight.id, Charge(account, units, most, now := clock.now(), now - HOUR))
    except asyncio.CancelledError:
        await settle(broker, in_flight, 0.0)  # it may have been counted, and nothing was sent
        raise
    except HeadwayError as error:
        raise Declined(engine.id, error.message, _ASIDE_S) from error
    if not counted:
        in_flight.account = None
        raise Declined(engine.id, "its hourly_budget is spent", _SPENT_S)


async def settle(broker: Broker, in_flight: InFlightRequest, units: float) -> None:
    """Count what a request has cost instead of what was reserved; while the broker is out, that counts."""
    if in_flight.account is None or in_flight.overflow is None:
        return
    try:
        await broker.refund(in_flight.account, in_flight.id, in_flight.overflow.reserved - units)
    except HeadwayError as error:
        log.warning("request %s counts with all that was reserved for it: %s", in_flight.id, error)
