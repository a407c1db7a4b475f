"""The request fields that crash an instance: as its scheduler reports, else by its release and configured device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headway.config import Engine
from headway.engines.vllm.fatal_fields import fatal_fields, known_fields
from headway.engines.vllm.process.answers import read_strictly
from headway.engines.vllm.process.connection import EngineConnection

log = logging.getLogger("headway.engine")
# Feature -> metric that an engine with it has in /metrics from its start (of adapters only the header).
_FEATURE_METRICS = {"drafts": "vllm:spec_decode_num_drafts", "adapters": "vllm:lora_requests_info"}


async def read_fatal(
    engine: EngineConnection, config: Engine, state: Mapping[str, Any] | None, seconds: float
) -> tuple[str, ...]:
    """Return the request fields that crash an instance.

    state: of Headway's scheduler, which reports them; None = stock vLLM, which reports its release but not its
        device: unless one is configured, nothing is refused.
    seconds: time limit of each answer.
    """
    if state is not None:
        return known_fields(state.get("fatal", ()))
    if config.device is None:
        return ()
    version = await _version(engine, seconds)
    if version is None:
        problem = "engine %s does not report its version, so fields that would crash it on a %s are not refused."
        log.warning(problem, engine.id, config.device)
        return ()
    page = await engine.metrics(seconds)
    features = ["bare workers", *(name for name, sign in _FEATURE_METRICS.items() if sign in page)]
    return tuple(fatal_fields(version, config.device, features))


async def _version(engine: EngineConnection, seconds: float) -> str | None:
    try:
        version = read_strictly(await engine.get("/version", seconds))["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None
