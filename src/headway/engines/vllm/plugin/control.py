"""Control messages for a running scheduler, over HTTP.

vLLM's API server calls methods of the engine core between two iterations ("utility calls"). This module adds
one such method to the engine core and the HTTP route `POST /headway/control` that calls it:

    {"op": "state", "log": 20}
        return the state: running, waiting and held requests, free blocks, and the last 20 steps:
        [instant, tokens by id, paused, evicted, log row]
    {"op": "state", "iterations": 20, "requests": 20}
        return the state with the last 20 rows of the iteration log (`iteration_log.py`)
    {"op": "urgency", "values": {id: number}}
        set `Jobs.urgency`: lower goes first, before the recipe's own rank; 0 = the recipe's rank alone
    {"op": "pause" | "resume", "ids": [...]}
        hold requests back, keeping their KV, and let them go on

Ids are Headway's. The answer is the state; `"jobs": false` leaves out its list of requests.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

_PENDING = 4096  # urgencies kept for requests that have not arrived


class PendingUrgency:
    """Urgencies set while their requests were still on their way over HTTP; bounded, the oldest go first.

    An entry stays until its request leaves: with `n` > 1 several engine requests have one id.
    """

    def __init__(self, kept: int = _PENDING) -> None:
        self._kept = kept
        self._values: dict[str, float] = {}  # oldest first

    def __contains__(self, id: str) -> bool:
        return id in self._values

    def keep(self, id: str, urgency: float) -> None:
        """Keep the urgency of a request that has not arrived."""
        self.drop(id)
        self._values[id] = urgency
        if len(self._values) > self._kept:
            del self._values[next(iter(self._values))]

    def of(self, id: str, default: float) -> float:
        """Return the urgency that a request enters with; default: what its metadata say."""
        return self._values.get(id, default)

    def drop(self, id: str) -> None:
        """Forget a request."""
        self._values.pop(id, None)


def install() -> None:
    """Add the utility method to the engine core of this process."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.headway_control = _control


def _control(core: Any, message: dict[str, Any]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = core.scheduler.control(message)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {"error": f"malformed control message: {error!r}"}
    return state


class ControlPlugin:
    """vLLM endpoint plugin (entry point group `vllm.endpoint_plugins`)."""

    name = "headway"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        @app.post("/headway/control")
        async def control(raw: Request) -> JSONResponse:
            core = raw.app.state.engine_client.engine_core
            answer = await core.call_utility_async("headway_control", await raw.json())
            return JSONResponse(answer, 400 if "error" in answer else 200)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing to prepare: the engine core is reached through the app's state."""
