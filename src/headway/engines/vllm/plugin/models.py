"""Models and LoRA adapters of a running engine, by routes of its API server."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


async def load_adapter(client: Any, served: Any, name: str) -> bool:
    """Load an adapter; return whether it was in memory. ValueError for one that is not registered.

    client: vLLM's engine client. served: its list of models.
    """
    adapter = served.lora_requests.get(name)
    if adapter is None:
        raise ValueError(f"no adapter {name!r} is registered")
    resident = adapter.lora_int_id in await client.list_loras()
    await client.add_lora(adapter)
    return resident


def attach_adapters(app: FastAPI) -> None:
    """Add the route `POST /headway/adapter`: LoRA adapters in a running engine.

        {"name": name}
            load an adapter into the engine's memory before a request needs it, and make it the most recently
            used one; the answer's `resident` says whether it was there already

    The engine registers its adapters when it starts (`--lora-modules`). It keeps up to `--max-cpu-loras` of them in
    memory and evicts the least recently used first. Nothing is pinned: vLLM can pin an adapter, but not unpin it.
    """

    @app.post("/headway/adapter")
    async def adapter(raw: Request) -> JSONResponse:
        state = raw.app.state
        try:
            name = str((await raw.json())["name"])
            resident = await load_adapter(state.engine_client, state.openai_serving_models, name)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
        except Exception as error:  # whatever the worker raised: the gateway gets it
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return JSONResponse({"resident": resident})


async def load_model(client: Any, served: Any, path: str, name: str) -> None:
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
            await load_model(state.engine_client, state.openai_serving_models, path, name)
        case {"op": "sleep"}:
            await state.engine_client.sleep(level=1, mode="abort")
        case {"op": "wake"}:
            await state.engine_client.wake_up()
        case _:
            raise ValueError(f"unknown message {message!r}; use load, sleep or wake")


def attach_models(app: FastAPI) -> None:
    """Add the route `POST /headway/model`: another model in a running engine.

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

    @app.post("/headway/model")
    async def model(raw: Request) -> JSONResponse:
        try:
            await execute(raw.app.state, await raw.json())
        except Exception as error:  # whatever the worker raised: the gateway gets it and restarts the engine
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return JSONResponse({})
