"""The limits of an instance as it reports them; those that it does not report are as configured.

Headway's scheduler reports all but the context, which is in vLLM's /v1/models. Stock vLLM reports its KV
cache on /metrics, and nowhere its --max-num-seqs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headway.config import Engine
from headway.engines.vllm.fatal_fields import fatal_fields, known_fields
from headway.engines.vllm.process.answers import read_strictly
from headway.engines.vllm.process.connection import EngineConnection, EngineGone
from headway.engines.vllm.process.sizes import expected
from headway.errors import EngineError
from headway.types import Instance

log = logging.getLogger("headway.engine")
_MOST_LINES, _LONGEST_LINE = 100, 2**14
_MOST = 2**31
# Feature -> metric that an engine with it has in /metrics from its start (of adapters only the header).
_FEATURE_METRICS = {"drafts": "vllm:spec_decode_num_drafts", "adapters": "vllm:lora_requests_info"}
_OPTIONS = {"max_running": "--max-num-seqs", "max_model_len": "--max-model-len"}  # field -> vLLM's option


async def read_state(engine: EngineConnection, seconds: float) -> dict[str, Any] | None:
    """Return the state of Headway's scheduler, None = stock vLLM. EngineGone when nothing answers."""
    try:
        state = await engine.control({"op": "state", "jobs": False}, seconds)
    except EngineGone:
        raise
    except EngineError:
        return None
    return state if state.keys() >= {"block_size", "blocks_total"} else None


async def read_limits(engine: EngineConnection, state: Mapping[str, Any] | None, seconds: float) -> dict[str, int]:
    """Return the limits that an instance reports: field of `Instance` -> value.

    state: of Headway's scheduler, None = it is not inside. seconds: for each answer.
    """
    reported = {"max_model_len": await _context(engine, seconds), **(state or await _cache(engine, seconds))}
    fields = (*_OPTIONS, "block_size", "blocks_total")
    return {name: value for name in fields if type(value := reported.get(name)) is int and 0 < value < _MOST}


def instance_of(id: str, model: str, config: Engine, reported: Mapping[str, int]) -> Instance:
    """Return an instance with these limits; unknown KV is taken to be enough for all slots."""
    limits = _configured_limits(config) | {"block_size": 16} | dict(reported)
    enough = limits["max_running"] * limits["max_model_len"] // limits["block_size"]
    limits = {"blocks_total": max(enough, 1)} | limits
    assumed = tuple(sorted(limits.keys() - reported.keys()))
    return Instance(id, model, **limits, assumed=assumed, overflow=config.terms)


def describe(instance: Instance, state: Mapping[str, Any] | None) -> str:
    """Return a line with what an instance runs with; state: of Headway's scheduler, None = it is not inside."""
    blocks = f"{instance.blocks_total:,} KV blocks of {instance.block_size} tokens"
    line = f"{instance.max_running:,} requests per iteration, context {instance.max_model_len:,}, {blocks}"
    if state is None or not (settings := state.get("settings")):
        return line
    devices = f"{settings['devices']} x {settings['device']}" if settings["devices"] > 1 else settings["device"]
    modes = {"eager": settings["eager"], "async scheduling": settings["async_scheduling"]}
    extras = "".join(f", {name}" for name, on in modes.items() if on)
    kv = "" if settings["kv"] == "stock" else f", {settings['kv']} KV"
    return f"{line}; {state['token_budget']:,} tokens per iteration, {settings['dtype']} on {devices}{extras}{kv}"


def limit_warnings(config: Engine, reported: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield where an instance and its configuration differ, and which limits are assumed because neither has them.

    Each as a pair: the problem, of which the instance is the subject, and the fix ("" if there is none).
    """
    vllm = config.kind == "vllm"
    if "blocks_total" not in reported and vllm:
        yield "does not report its KV cache size; enough for all requests that run at once is assumed.", ""
    for name, option in _OPTIONS.items():
        configured, actual = getattr(config, name), reported.get(name)
        if configured is None and actual is None:
            problem = f"does not report its {option if vllm else name}; {_configured_limits(config)[name]} is assumed."
            yield problem, f"Set {name} in [[engines]] to what it has."
        elif None not in (configured, actual) and configured != actual:
            problem = f"has {option} {actual}, which counts, but its {name} in [[engines]] is {configured}."
            yield problem, f"Set it to {actual}."


def _configured_limits(config: Engine) -> dict[str, Any]:
    """Return the limits that count where an instance does not report its own."""
    sizes = expected(config)
    return {"max_running": sizes.max_running, "max_model_len": sizes.max_model_len}


def samples(page: str, *names: str) -> Iterator[Sample]:
    """Yield the samples of a Prometheus page that have one of these names; none if the text is not such a page."""
    lines = [line for line in page.splitlines() if line.startswith(names) and len(line) < _LONGEST_LINE]
    try:
        for family in text_string_to_metric_families("\n".join(lines[:_MOST_LINES]) + "\n"):
            yield from (sample for sample in family.samples if sample.name in names)
    except ValueError as error:
        log.debug("samples that cannot be read: %s", error)


async def _context(engine: EngineConnection, seconds: float) -> Any:
    try:
        answer = read_strictly(await engine.get("/v1/models", seconds))
        (context,) = {card["max_model_len"] for card in answer["data"] if card.get("max_model_len")}
        return context
    except (ValueError, KeyError, TypeError, AttributeError):  # or its models differ
        return None


async def _cache(engine: EngineConnection, seconds: float) -> dict[str, int]:
    """Return the size of stock vLLM's KV cache; one block is the null block."""
    page = await engine.metrics(seconds)
    labels = next((one.labels for one in samples(page, "vllm:cache_config_info")), {})
    size, blocks = (labels.get(name, "") for name in ("block_size", "num_gpu_blocks"))
    reported = {"block_size": int(size)} if size.isdecimal() else {}
    return reported | ({"blocks_total": int(blocks) - 1} if blocks.isdecimal() else {})


_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@dataclass(frozen=True, slots=True)
class Inside:
    """Counts of requests of all clients, each choice (`n`) by itself. paused: with their KV."""

    computing: int
    paused: int
    waiting: int


def inside_of(state: Mapping[str, Any], page: str) -> Inside | None:
    """Return what is inside an instance; None when neither reports it.

    state: of its scheduler, empty when that is not Headway's. page: its /metrics; stock vLLM pauses nothing.
    """
    running, paused, waiting = state.get("running"), state.get("paused", 0), state.get("waiting")
    if running is None:
        sums = dict[str, float]()
        for sample in samples(page, _RUNNING, _WAITING):  # one of each for every engine core
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        running, waiting = sums.get(_RUNNING), sums.get(_WAITING)
    if not (_is_count(running) and _is_count(paused) and _is_count(waiting)):
        return None
    return Inside(max(int(running) - int(paused), 0), int(paused), int(waiting))


def _is_count(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


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
