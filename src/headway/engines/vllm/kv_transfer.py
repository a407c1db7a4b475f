"""Values of vLLM's `--kv-transfer-config` that load Headway's KV connectors (`plugin/`) into an engine."""

from __future__ import annotations

from typing import Any


def host_pool(gib: float, **extra: float) -> dict[str, Any]:
    """Return the configuration of a `HostPool` of this many GiB.

    extra: copy_seconds, to move one token's KV; measured where it is not given.
    """
    return {
        "kv_connector": "HostPool",
        "kv_connector_module_path": "headway.engines.vllm.plugin.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_gib": gib, **extra},
    }


def two_ended_pool(gib: float, **extra: float) -> dict[str, Any]:
    """Return the configuration of a `TwoEndedPool`. extra: as above, and host_tokens (instead of gib)."""
    path = "headway.engines.vllm.plugin.two_ended_pool"
    return host_pool(gib, **extra) | {"kv_connector": "TwoEndedPool", "kv_connector_module_path": path}
