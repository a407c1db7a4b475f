"""Another model in a running engine: the route `POST /headway/model` of vLLM's API server.

    {"op": "load", "path": directory, "name": name}
        put the weights of this directory in the place of those that are loaded (`worker.py`); the model
        must have the same shape and tokenizer (`headway/models/compare.py`). From then on the engine answers
        to this name alone.
    {"op": "sleep"}
        move the weights to host memory and give the accelerator's memory free (vLLM's sleep mode, level 1)
    {"op": "wake"}
        bring them back

What still runs is aborted, and no KV of the model before is found again, neither in the prefix cache nor in a
host pool. An engine that failed half-way has weights of two models: it stays paused and has to be restarted.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


async def load(client: Any, served: Any, path: str, name: str) -> None:
    """Load the weights of `path` in place. client: vLLM's engine client. served: its list of models."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath

    await client.pause_generation(mode="abort", clear_cache=True)
    await client.collective_rpc("headway_load", kwargs={"path": path})
    if not await client.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the prefix cache was not reset")
    # The list is shared with vLLM's registry: it decides which names are accepted and which one answers bear.
    served.base_model_paths[:] = [BaseModelPath(name=name, model_path=path)]
    await client.resume_generation()


async def execute(state: Any, message: dict[str, Any]) -> None:
    """Execute a message. state: of the API server's app. ValueError for one that is unknown."""
    match message:
        case {"op": "load", "path": str(path), "name": str(name)}:
            await load(state.engine_client, state.openai_serving_models, path, name)
        case {"op": "sleep"}:
            await state.engine_client.sleep(level=1, mode="abort")
        case {"op": "wake"}:
            await state.engine_client.wake_up()
        case _:
            raise ValueError(f"unknown message {message!r}; use load, sleep or wake")


def attach(app: FastAPI) -> None:
    """Add the route."""

    @app.post("/headway/model")
    async def model(raw: Request) -> JSONResponse:
        try:
            await execute(raw.app.state, await raw.json())
        except Exception as error:  # whatever the worker raised: the gateway gets it and restarts the engine
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return JSONResponse({})
