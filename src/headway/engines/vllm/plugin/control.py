"""How do messages reach a scheduler that is running?

vLLM's API server calls methods of the engine core between two iterations ("utility calls"). This module adds
one such method, and the HTTP route `POST /headway/control` that reaches it:

    {"op": "state", "log": 20}                 what runs, waits, is held; free blocks; the last 20 steps:
                                               [instant, tokens by id, paused, evicted, row of the diary]
    {"op": "state", "iterations": 20,          the last 20 rows of the diary (diary.py): shapes and times of
     "requests": 20}                           iterations; when requests entered, began to answer, ended
    {"op": "urgency", "values": {id: number}}  lower goes first, before the recipe's own rank; 0 = normal
    {"op": "pause" | "resume", "ids": [...]}   hold requests back, keeping their KV, and let them go on

Ids are Headway's. Every message is answered with the state.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


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
