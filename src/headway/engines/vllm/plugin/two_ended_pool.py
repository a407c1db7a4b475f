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
from headway.engines.vllm.plugin.slot_copies import IN, OUT, Copy


@dataclass
class TwoEndedMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does for two-ended blocks in one step.

    copies: in order.
    tables: the whole block table of each request whose blocks changed otherwise than by new ones at the end.
    right: (request, its full blocks, tokens in its last block) where that is filled from the right.
    """

    copies: list[Copy] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    right: list[tuple[str, int, int]] = field(default_factory=list)


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
        self._config = vllm_config
        self._kv: Any = None  # how this device's attention keeps slots
        self._slots: list[Any] = []

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

    def _reserve(self, kv_caches: dict[str, Any]) -> None:
        """Let the attention read blocks from the right, and allocate the host's memory."""
        layers = self._config.compilation_config.static_forward_context
        requests, device = self._config.scheduler_config.max_num_seqs, self._caches[0].device
        right_aligned_rows.install()
        right_aligned_rows.rows.allocate(requests, device)
        if all(type(layers[name].impl).__name__ == "CPUAttentionBackendImpl" for name in kv_caches):
            from headway.engines.vllm.plugin import right_aligned_cpu as attention

            attention.install()
            self._kv = attention.Slots(self._caches[0], self.size)
        else:
            from headway.engines.vllm.plugin import right_aligned_gpu

            right_aligned_gpu.install(layers, kv_caches, requests)
            self._kv = right_aligned_gpu.Slots()
        for cache in self._caches:
            one = self._kv.read(cache, torch.zeros(1, dtype=torch.long, device=device))
            self._slots.append(host_copies.allocate((self.host_tokens, *one.shape[1:]), cache.dtype, device))

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
        device, kv = self._caches[0].device, self._kv
        source, target = host_copies.index(copy.source, device), host_copies.index(copy.target, device)
        for cache, host in zip(self._caches, self._slots, strict=True):
            taken = host[source] if copy.way == IN else kv.read(cache, source)
            if copy.way == OUT:
                host[target] = taken
            else:
                kv.write(cache, target, taken)
