"""KV copies between device and host that never block the CPU thread (QLM 5, KV swap).

Host memory is pinned, and the device accesses it directly. Saved blocks are first copied to a staging buffer on the
device, which is much faster than the bus; a second stream then copies them to the host while the iteration computes.
The CPU can prepare the next iteration meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from headway.types import Ints

_STAGING_BYTES = 128 << 20  # size of the staging buffer on the device for saved blocks


def allocate(shape: Sequence[int], dtype: Any, device: Any) -> Any:
    """Return host memory as a tensor that the device can index: pinned, where the device is not the CPU."""
    if device.type == "cpu":
        return torch.empty(tuple(shape), dtype=dtype)
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    pinned = torch.empty(tuple(shape), dtype=dtype)
    if not pinned.numel():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    pin_tensor(pinned)  # PyTorch itself rounds pinned memory up to a power of two
    view = get_accelerator_view_from_cpu_tensor(pinned)
    view.headway_pinned = pinned  # lives as long as its view
    return view


def index(numbers: Sequence[int] | Ints, device: Any) -> Any:
    """Return numbers as an index tensor on the device, without blocking the CPU thread."""
    host = torch.as_tensor(numbers, dtype=torch.long)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Streams:
    """The device's compute stream and a second one for copies. On a CPU, copies run at once."""

    def __init__(self, device: Any) -> None:
        self._copying = None if device.type == "cpu" else torch.cuda.Stream(device)

    def copying(self) -> Any:
        """Return a context whose operations run on the copy stream, after all queued on the compute stream so far."""
        if self._copying is None:
            return nullcontext()
        self._copying.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._copying)

    def keep(self, tensor: Any) -> None:
        """Keep this tensor's memory from being reused until the copies queued so far have run."""
        if self._copying is not None:
            tensor.record_stream(self._copying)

    def join(self) -> None:
        """Make the compute stream wait for all copies queued so far."""
        if self._copying is not None:
            torch.cuda.current_stream().wait_stream(self._copying)


class HostBlocks:
    """Host memory for blocks of all layers.

    caches: the KV cache of each layer, with the block as first dimension.
    blocks: number of blocks that the host holds.
    staging_bytes: size of the staging buffer on the device; it holds at least one block.
    """

    def __init__(self, caches: list[Any], blocks: int, streams: Streams, staging_bytes: int = _STAGING_BYTES) -> None:
        self._caches, self._streams, self._device = caches, streams, caches[0].device
        self._host = [allocate((blocks, *cache.shape[1:]), cache.dtype, self._device) for cache in caches]
        self._free = list(reversed(range(blocks)))
        largest = max(cache[0].numel() * cache.element_size() for cache in caches)
        self._staging = torch.empty(max(staging_bytes, largest), dtype=torch.uint8, device=self._device)
        self._used = 0

    def save(self, blocks: list[int]) -> list[int]:
        """Copy blocks to free places on the host, and return the places.

        Kernels queued from now on may overwrite the blocks.
        """
        places = [self._free.pop() for _ in blocks]
        source, target = index(blocks, self._device), index(places, self._device)
        self._streams.keep(target)
        for cache, host in zip(self._caches, self._host, strict=True):
            each = cache[0].numel() * cache.element_size()
            step = self._staging.numel() // each
            for i in range(0, len(blocks), step):
                part = source[i : i + step]
                taken = self._staging_slice(part.numel() * each).view(cache.dtype).view(-1, *cache.shape[1:])
                torch.index_select(cache, 0, part, out=taken)
                with self._streams.copying():
                    host.index_copy_(0, target[i : i + step], taken)
        return places

    def release(self, places: list[int]) -> None:
        """Make places free again."""
        self._free += places

    def _staging_slice(self, size: int) -> Any:
        """Return this number of bytes of the staging buffer; at its end, start over after the copies so far."""
        size_aligned = -(-size // 16) * 16
        if self._used + size_aligned > self._staging.numel():
            self._streams.join()
            self._used = 0
        first, self._used = self._used, self._used + size_aligned
        return self._staging[first : first + size]

    def load(self, places: list[int], blocks: list[int]) -> None:
        """Copy places on the host to blocks, for kernels queued from now on."""
        self._streams.join()
        source, target = index(places, self._device), index(blocks, self._device)
        for cache, host in zip(self._caches, self._host, strict=True):
            cache.index_copy_(0, target, host.index_select(0, source))
