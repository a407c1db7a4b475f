"""Requests at overflow engines: whatever such an engine answers but an answer, the request goes back to the queue."""

from __future__ import annotations

from collections.abc import Awaitable

from headway.errors import EngineError
from headway.gateway.requests.engine_response import ERROR_EVENT, EngineResponse

_ASIDE_S = 10.0  # seconds for which an engine that does not say how long gets no requests
_ITS_OWN = (400, 413, 422)  # statuses of errors that are about one request


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
