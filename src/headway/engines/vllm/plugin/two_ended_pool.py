"""A KV connector that copies single slots between device and host (BROS 5.2).

`two_ended.py` decides in the scheduler; its copies reach the worker as this connector's metadata and are
carried out, in order, before the forward pass. Without two-ended blocks the connector is a `HostPool`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from headway.engines.vllm.plugin import host_copies, right_aligned_rows
from headway.engines.vllm.plugin.connector import HostPool
from headway.engines.vllm.plugin.right_aligned_cpu import BLOCK_MULTIPLE
from headway.engines.vllm.plugin.slot_copies import IN, OUT, Copy

# Tokens per block, by "on a CPU": 16 is the smallest dimension that Triton's dot product accepts.
MULTIPLE = {True: BLOCK_MULTIPLE, False: 16}


@dataclass
class TwoEndedMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does for two-ended blocks in one step.

    copies: in order.
    tables: the whole block table of each request whose blocks changed otherwise than by new ones at the end.
    right: (request id, full blocks, tokens in the last block) of each request whose last block is filled from the
        right.
    """

    copies: list[Copy] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    right: list[tuple[str, int, int]] = field(default_factory=list)


def hindrance(config: Any, kv_cache_config: Any) -> str | None:
    """Return why an engine of this vLLM configuration cannot have two-ended blocks, None = it can."""
    cache, parallel = config.cache_config, config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    plain = type(spec).__name__ == "FullAttentionSpec" and getattr(spec, "sliding_window", None) is None
    multiple = MULTIPLE[on_cpu(config)]
    reasons = {
        "the model's layers differ in their KV, or have a window": len(groups) != 1 or not plain,
        "prefix caching is on; start with --no-enable-prefix-caching": cache.enable_prefix_caching,
        "KV is quantized": cache.cache_dtype != "auto",
        "its model answers streaming sessions, which keep KV while they wait": any(
            "Realtime" in name for name in config.model_config.architectures
        ),
        "decoding is speculative": config.speculative_config is not None,
        "scheduling is asynchronous": config.scheduler_config.async_scheduling,
        "it is vLLM's model runner V2": config.use_v2_model_runner,
        "attention is compiled together with the quantization of its output": bool(
            config.compilation_config.pass_config.fuse_attn_quant
        ),
        "KV is spread over several workers by tokens or layers": parallel.pipeline_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        f"blocks are not multiples of {multiple} tokens": cache.block_size % multiple != 0,
    }
    return next((why for why, hinders in reasons.items() if hinders), None)


def on_cpu(config: Any) -> bool:
    """Return whether the engine has vLLM's attention for CPUs."""
    return config.device_config.device_type == "cpu" and not config.attention_config.backend


class TwoEndedPool(HostPool):
    """Both sides of the connector.

    host_tokens: slots of the host pool.
    metadata: of the step being scheduled; None = two-ended blocks are off.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.host_tokens = int(options.get("host_tokens", self.free * self.size))
        self.metadata: TwoEndedMetadata | None = None
        self._slots: Any = None  # reads and writes slots of this device's attention
        self._host_slots: list[Any] = []  # the host pool, by layer

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Keep attention outside of CUDA graphs: which rows are read from the right differs between steps."""
        return True

    # ---- the scheduler's side

    def begin(self) -> None:
        """Turn two-ended blocks on."""
        self.metadata = TwoEndedMetadata()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the worker's metadata of this step."""
        if self.metadata is None:
            return super().build_connector_meta(scheduler_output)
        metadata, self.metadata = self.metadata, TwoEndedMetadata()
        return metadata

    # ---- the worker's side

    def _prepare_worker(self, kv_caches: dict[str, Any]) -> None:
        """Extend the attention for right-aligned blocks, and allocate the host pool."""
        if hindrance(self._vllm_config, self._kv_cache_config) is not None:  # as in the scheduler: stock blocks
            super()._prepare_worker(kv_caches)
            return
        layers = self._vllm_config.compilation_config.static_forward_context
        requests, device = self._vllm_config.scheduler_config.max_num_seqs, self._caches[0].device
        right_aligned_rows.install()
        right_aligned_rows.rows.allocate(requests, device)
        if all(type(layers[name].impl).__name__ == "CPUAttentionBackendImpl" for name in kv_caches):
            from headway.engines.vllm.plugin import right_aligned_cpu

            right_aligned_cpu.install()
            self._slots = right_aligned_cpu.Slots(self._caches[0], self.size)
        else:
            from headway.engines.vllm.plugin import right_aligned_gpu

            right_aligned_gpu.install(layers, kv_caches, requests, self.size)
            self._slots = right_aligned_gpu.Slots()
        for cache in self._caches:
            one = self._slots.read(cache, torch.zeros(1, dtype=torch.long, device=device))
            self._host_slots.append(host_copies.allocate((self.host_tokens, *one.shape[1:]), cache.dtype, device))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Carry out the copies; vLLM calls this before anything writes."""
        if not isinstance(kv_connector_metadata, TwoEndedMetadata):
            super().handle_preemptions(kv_connector_metadata)
        else:
            for copy in kv_connector_metadata.copies:
                self._carry_out(copy)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copies of two-ended blocks are done already (`handle_preemptions`)."""
        if not isinstance(self._get_connector_metadata(), TwoEndedMetadata):
            super().start_load_kv(forward_context, **kwargs)

    def _carry_out(self, copy: Copy) -> None:
        device, slots = self._caches[0].device, self._slots
        source, target = host_copies.index(copy.source, device), host_copies.index(copy.target, device)
        for cache, host in zip(self._caches, self._host_slots, strict=True):
            taken = host[source] if copy.way == IN else slots.read(cache, source)
            if copy.way == OUT:
                host[target] = taken
            else:
                slots.write(cache, target, taken)
