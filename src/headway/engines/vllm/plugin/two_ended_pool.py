"""A KV connector that copies single slots between device and host (BROS 5.2).

`two_ended.py` decides in the scheduler; its copies reach the worker as this connector's metadata and are
carried out, in order, before the forward pass. Without two-ended blocks the connector is a `HostPool`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from headway.engines.vllm.plugin import right_aligned_attention
from headway.engines.vllm.plugin.connector import HostPool
from headway.engines.vllm.plugin.slot_copies import IN, OUT, Copy


@dataclass
class TwoEndedMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does for two-ended blocks in one step.

    host_slots: size of the host pool.
    copies: in order.
    tables: the whole block table of each request whose blocks changed otherwise than by new ones at the end.
    right: (request, k) for requests whose last block, the k-th, is filled from the right.
    """

    host_slots: int = 0
    copies: list[Copy] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    right: list[tuple[str, int]] = field(default_factory=list)


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
        self._slots: list[torch.Tensor] = []
        if role == KVConnectorRole.WORKER and vllm_config.device_config.device_type == "cpu":
            right_aligned_attention.install()

    # ---- the scheduler's side

    def begin(self) -> None:
        """Turn two-ended blocks on."""
        self.metadata = TwoEndedMetadata(self.host_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the worker's metadata of this step."""
        if self.metadata is None:
            return super().build_connector_meta(scheduler_output)
        metadata, self.metadata = self.metadata, TwoEndedMetadata(self.host_tokens)
        return metadata

    # ---- the worker's side

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Carry out the copies; vLLM calls this before anything writes."""
        if not isinstance(kv_connector_metadata, TwoEndedMetadata):
            super().handle_preemptions(kv_connector_metadata)
        elif kv_connector_metadata.copies:
            self._prepare(kv_connector_metadata.host_slots)
            for copy in kv_connector_metadata.copies:
                self._carry_out(copy)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copies of two-ended blocks are done already (`handle_preemptions`)."""
        if not isinstance(self._get_connector_metadata(), TwoEndedMetadata):
            super().start_load_kv(forward_context, **kwargs)

    def _prepare(self, host_slots: int) -> None:
        if not self._slots:
            self._where = right_aligned_attention.layout(self._caches[0], self.size)
            width = self._where.shape[1]
            self._slots = [torch.empty((host_slots, width), dtype=cache.dtype) for cache in self._caches]

    def _carry_out(self, copy: Copy) -> None:
        source, target = torch.tensor(copy.source), torch.tensor(copy.target)
        for cache, host in zip(self._caches, self._slots, strict=True):
            taken = host[source] if copy.way == IN else self._view(cache)[self._index(source)]
            if copy.way == OUT:
                host[target] = taken
            else:
                self._view(cache)[self._index(target)] = taken

    def _view(self, cache: Any) -> Any:
        return cache.view(self.num_blocks, -1)

    def _index(self, slots: Any) -> tuple[Any, Any]:
        """Return the index into `_view` of the slots' KV, one row each."""
        return slots[:, None] // self.size, self._where[slots % self.size]
