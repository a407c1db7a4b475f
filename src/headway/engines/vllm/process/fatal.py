"""Which fields of requests crash an instance: those that it tells, or those of its release on a configured device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headway.config import Engine
from headway.engines.vllm.fatal_fields import fatal_fields, known
from headway.engines.vllm.process.answers import read_strictly
from headway.engines.vllm.process.connection import EngineConnection

log = logging.getLogger("headway.engine")
# On the page of metrics of an engine that has a feature, from its start; of adapters only the header then.
_SIGNS = {"drafts": "vllm:spec_decode_num_drafts", "adapters": "vllm:lora_requests_info"}


async def read_fatal(
    engine: EngineConnection, config: Engine, state: Mapping[str, Any] | None, seconds: float
) -> tuple[str, ...]:
    """Return the fields that crash an instance.

    state: of Headway's scheduler, which tells them; None = it is not inside. Stock vLLM tells its release, but
        nothing of its device, which must be configured: on a GPU nothing is refused that it could serve.
    seconds: for each answer.
    """
    if state is not None:
        return known(state.get("fatal", ()))
    if config.device is None:
        return ()
    version = await _version(engine, seconds)
    if version is None:
        problem = "engine %s does not tell its version, so no field is refused that would crash it on a %s."
        log.warning(problem, engine.id, config.device)
        return ()
    page = await engine.metrics(seconds)
    features = ["bare workers", *(name for name, sign in _SIGNS.items() if sign in page)]
    return tuple(fatal_fields(version, config.device, features))


async def _version(engine: EngineConnection, seconds: float) -> str | None:
    try:
        found = read_strictly(await engine.get("/version", seconds))["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
