"""The hook's setup: what its engine can do and how vLLM has set it up, and the KV policy that its packer needs."""

from __future__ import annotations

import logging
import math
from typing import Any

from vllm.platforms import current_platform

from headway.engines.vllm.plugin import reservations, two_ended
from headway.engines.vllm.plugin.connector import HostPool
from headway.engines.vllm.plugin.kv_policy import KvPolicy, StockKv
from headway.policy.core.engine_spec import EngineSpec

_log = logging.getLogger(__name__)


def spec_of(scheduler: Any, max_running: int, max_gap_s: float) -> EngineSpec:
    """Return the spec of a scheduler's engine; scheduler: the hook."""
    pool = scheduler.connector if isinstance(scheduler.connector, HostPool) else None
    obstacles = {"two_ended": two_ended.obstacle(scheduler), "reservations": reservations.obstacle(scheduler)}
    why_not = {ability: why for ability, why in obstacles.items() if why is not None}
    return EngineSpec(
        max_running,
        int(scheduler.max_num_scheduled_tokens),
        int(scheduler.block_size),
        int(scheduler.max_model_len),
        math.inf if pool is None else pool.copy_seconds,
        0 if pool is None else pool.free * pool.size,
        two_ended="two_ended" not in why_not,
        reservations="reservations" not in why_not,
        latency=scheduler.latency,
        why_not=why_not,
        max_gap_s=max_gap_s,
    )


def settings_of(scheduler: Any) -> dict[str, Any]:
    """Return the settings that vLLM has resolved for an engine, for people to read.

    scheduler: the hook, complete but for its packer's first step.
    """
    config = scheduler.vllm_config
    kv = {StockKv: "stock", reservations.ReservedKv: "reserved", two_ended.TwoEndedKv: "two-ended"}
    return {
        "device": current_platform.get_device_name(),
        "devices": int(config.parallel_config.world_size),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "eager": bool(config.model_config.enforce_eager),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "kv": kv[type(scheduler.kv_policy)],
    }


def kv_policy_of(scheduler: Any) -> KvPolicy:
    """Return the policy that the packer's use of KV needs; called last in the hook's constructor."""
    use = scheduler.packer.kv
    if use.reserves:
        return reservations.ReservedKv(scheduler.kv_cache_manager, scheduler.jobs)
    if use.two_ended:
        return two_ended.TwoEndedKv(scheduler)
    if not scheduler.recipe.wants.two_ended:
        return StockKv()
    why = scheduler.spec.why_not["two_ended"].reason
    _log.warning("%s runs without two-ended blocks here: %s.", scheduler.recipe.name, why)
    return StockKv(why)
