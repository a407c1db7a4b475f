"""A KV connector with a bounded host pool for swapped requests (QLM 5, KV swap; BROS 5.2 builds on it).

vLLM V1 preempts by recomputing, and its offload connectors keep full blocks by content. This one keeps the KV
of a whole request, the partial block too: `Step.save` copies it out before its blocks are used again, and
admission copies it back before the forward pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from headway.engines.vllm.plugin.host_copies import HostBlocks, Streams

_GIB = 1 << 30
_PROBE = 32 << 20  # bytes copied to learn how fast the memory is


@dataclass
class Copies(KVConnectorMetadata):
    """What the worker does before the next forward pass, in this order.

    out: (request, block ids) to copy to the host.
    drop: requests whose copies in the pool are discarded.
    back: (request, block ids, how many of them the prefix cache has) to copy to the device.
    """

    out: list[tuple[str, list[int]]] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    back: list[tuple[str, list[int], int]] = field(default_factory=list)


class HostPool(KVConnectorBase_V1):
    """Both sides of the connector; vLLM makes one in the scheduler and one in each worker.

    saved: tokens on the host per request (scheduler side).
    copy_seconds: seconds to copy one token's KV, by the speed of this host's memory (a GPU's bus is about as
        fast).

    free: free blocks of the pool (scheduler side). Blocks released in a step become free in the next one, because the
        worker executes a step's saves before its loads.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        parallel, gib = vllm_config.parallel_config, float(options.get("host_gib", 0))
        if gib and (parallel.pipeline_parallel_size > 1 or kv_cache_config.needs_kv_cache_zeroing):
            raise RuntimeError(
                "A host pool for KV does not work with pipeline parallelism, or with a KV cache that vLLM fills with "
                "zeros. Set host_kv_gib = 0."
            )
        # Each tensor's size is that of the allocation which all of them share.
        size = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
        each = max(size // max(kv_cache_config.num_blocks, 1), 1)
        self.free = int(gib * _GIB / parallel.world_size) // each  # each worker has its part of every block
        self._num_host_blocks = self.free
        self.num_blocks, self.size = kv_cache_config.num_blocks, vllm_config.cache_config.block_size
        self.copy_seconds = float(options.get("copy_seconds") or _copy_seconds(each / self.size))
        self.saved: dict[str, int] = {}
        self._held: dict[str, int] = {}  # blocks of the pool per request
        self._released = 0  # blocks that become free in the next step
        self._next = Copies()
        self._caches: list[Any] = []
        self._host: HostBlocks | None = None
        self._places: dict[str, list[int]] = {}

    # ---- the scheduler's side

    def save(self, id: str, blocks: list[int], tokens: int) -> bool:
        """Keep the KV of a request whose blocks are about to be freed. False when the pool is too full."""
        if len(blocks) > self.free or not tokens:
            return False
        self.free -= len(blocks)
        self.saved[id], self._held[id] = tokens, len(blocks)
        self._next.out.append((id, list(blocks)))
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many more tokens than the prefix cache the pool has, to be loaded within the step."""
        return max(self.saved.get(request.request_id, 0) - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the copy back of a request that has blocks again."""
        id = request.request_id
        if num_external_tokens:
            ids, tokens = blocks.get_block_ids()[0], self.saved[id]
            there = (tokens - num_external_tokens) // self.size
            self._next.back.append((id, ids[: -(-tokens // self.size)], there))
            self._release(id)
        elif id in self.saved:  # the prefix cache had all of it
            self._forget(id)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """Return the worker's copies of this step."""
        self.free, self._released = self.free + self._released, 0
        copies, self._next = self._next, Copies()
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Discard the KV of a request that was aborted while it was on the host."""
        if request.request_id in self.saved:
            self._forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Discard all KV on the host: it is from other weights. Its requests are computed again."""
        for id in list(self.saved):
            self._forget(id)
        return True

    def _forget(self, id: str) -> None:
        self._release(id)
        self._next.drop.append(id)

    def _release(self, id: str) -> None:
        self.saved.pop(id)
        self._released += self._held.pop(id)

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep each layer's cache as a view whose first dimension is the block."""
        distinct = {cache.data_ptr(): cache for cache in kv_caches.values()}  # layers may share their KV
        self._caches = [self._by_block(cache) for cache in distinct.values()]
        self._prepare_worker(kv_caches)

    def _prepare_worker(self, kv_caches: dict[str, Any]) -> None:
        """Allocate the host's memory at start: pinning it takes too long for an iteration."""
        if self._num_host_blocks and self._caches:
            self._host_blocks()

    def _by_block(self, cache: Any) -> Any:
        if self.num_blocks not in cache.shape:  # the attention's blocks are parts of vLLM's
            return cache.unflatten(0, (self.num_blocks, -1))
        return cache.movedim(list(cache.shape).index(self.num_blocks), 0)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy freed blocks to the host; vLLM calls this before anything writes."""
        metadata = kv_connector_metadata
        for id, blocks in metadata.out:
            self._places[id] = self._host_blocks().save(blocks)
        for id in metadata.drop:
            self._host_blocks().release(self._places.pop(id))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy restored blocks to the device, before the forward pass."""
        for id, blocks, there in self._get_connector_metadata().back:
            places = self._places.pop(id)
            self._host_blocks().load(places[there:], blocks[there:])
            self._host_blocks().release(places)

    def _host_blocks(self) -> HostBlocks:
        """Return the pool; a `TwoEndedPool` allocates it only if two-ended blocks turn out to be off."""
        if self._host is None:
            self._host = HostBlocks(self._caches, self._num_host_blocks, Streams(self._caches[0].device))
        return self._host

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: `start_load_kv` queued the copies on the compute stream, before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: copies to the host come before the forward pass."""

    def wait_for_save(self) -> None:
        """Do nothing: copies to the host come before the forward pass."""


def _copy_seconds(size: float) -> float:
    """Return the seconds that copying `size` bytes takes as part of many, measured once."""
    probe = torch.zeros(_PROBE, dtype=torch.uint8)
    began = time.perf_counter()
    probe.clone()
    return (time.perf_counter() - began) * size / _PROBE
