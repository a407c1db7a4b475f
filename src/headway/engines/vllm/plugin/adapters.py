"""LoRA adapters in a running engine: the route `POST /headway/adapter` of vLLM's API server.

    {"name": name}
        load an adapter into the engine's memory before a request needs it, and make it the most recently
        used one; the answer's `resident` says whether it was there already

The engine registers its adapters when it starts (`--lora-modules`) and keeps as many in memory as
`--max-cpu-loras` says, least recently used ones leaving first. Nothing is pinned: vLLM can pin an adapter,
but not unpin it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


async def load(client: Any, served: Any, name: str) -> bool:
    """Load an adapter; return whether it was in memory. ValueError for one that is not registered.

    client: vLLM's engine client. served: its list of models.
    """
    adapter = served.lora_requests.get(name)
    if adapter is None:
        raise ValueError(f"no adapter {name!r} is registered")
    resident = adapter.lora_int_id in await client.list_loras()
    await client.add_lora(adapter)
    return resident


def attach(app: FastAPI) -> None:
    """Add the route."""

    @app.post("/headway/adapter")
    async def adapter(raw: Request) -> JSONResponse:
        state = raw.app.state
        try:
            name = str((await raw.json())["name"])
            resident = await load(state.engine_client, state.openai_serving_models, name)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
        except Exception as error:  # whatever the worker raised: the gateway gets it
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return JSONResponse({"resident": resident})
