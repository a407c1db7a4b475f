"""Copies of KV between the device and the host that no iteration waits for (QLM 5, KV swap).

The host's memory is pinned, and the device reads and writes it by itself. What leaves is first copied aside on the
device, which takes hundreds of times less than the bus; from there it travels on a stream of its own while the
iteration computes. Nothing here waits for the device, so the next iteration can be prepared meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from headway.types import Ints

_ASIDE = 128 << 20  # bytes on a GPU for what is on its way to the host


def allocate(shape: Sequence[int], dtype: Any, device: Any) -> Any:
    """Return host memory as a tensor that the device can index: pinned, where the device is not the CPU."""
    if device.type == "cpu":
        return torch.empty(tuple(shape), dtype=dtype)
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    pinned = torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    view = get_accelerator_view_from_cpu_tensor(pinned)
    view.headway_pinned = pinned  # lives as long as its view
    return view


def index(numbers: Sequence[int] | Ints, device: Any) -> Any:
    """Return numbers as an index on the device, without waiting for it."""
    host = torch.as_tensor(numbers, dtype=torch.long)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Streams:
    """The device's stream that computes, and one that copies meanwhile. On a CPU there is one, and nothing waits."""

    def __init__(self, device: Any) -> None:
        self._copying = None if device.type == "cpu" else torch.cuda.Stream(device)

    def copying(self) -> Any:
        """Return a context: what is called in it starts after what has been called so far, and beside what follows."""
        if self._copying is None:
            return nullcontext()
        self._copying.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._copying)

    def keep(self, tensor: Any) -> None:
        """Keep the memory of what is copied until that is done."""
        if self._copying is not None:
            tensor.record_stream(self._copying)

    def join(self) -> None:
        """Let what is computed next start after all copies."""
        if self._copying is not None:
            torch.cuda.current_stream().wait_stream(self._copying)


class HostBlocks:
    """Host memory for blocks of all layers.

    caches: of each layer, the block first.
    blocks: how many the host has room for.
    aside: bytes on the device for what is on its way.
    """

    def __init__(self, caches: list[Any], blocks: int, streams: Streams, aside: int = _ASIDE) -> None:
        self._caches, self._streams, self._device = caches, streams, caches[0].device
        self._host = [allocate((blocks, *cache.shape[1:]), cache.dtype, self._device) for cache in caches]
        largest = max(cache[0].numel() * cache.element_size() for cache in caches)
        self._aside = torch.empty(max(aside, largest), dtype=torch.uint8, device=self._device)
        self._used = 0

    def save(self, blocks: list[int], places: list[int]) -> None:
        """Copy blocks to places on the host; from the next kernel on, the blocks may be written."""
        source, target = index(blocks, self._device), index(places, self._device)
        self._streams.keep(target)
        for cache, host in zip(self._caches, self._host, strict=True):
            each = cache[0].numel() * cache.element_size()
            step = self._aside.numel() // each
            for i in range(0, len(blocks), step):
                part = source[i : i + step]
                taken = self._room(part.numel() * each).view(cache.dtype).view(-1, *cache.shape[1:])
                torch.index_select(cache, 0, part, out=taken)
                with self._streams.copying():
                    host.index_copy_(0, target[i : i + step], taken)

    def _room(self, size: int) -> Any:
        """Return so many bytes aside; once around, what was there has to have left."""
        size_aligned = -(-size // 16) * 16
        if self._used + size_aligned > self._aside.numel():
            self._streams.join()
            self._used = 0
        first, self._used = self._used, self._used + size_aligned
        return self._aside[first : first + size]

    def load(self, places: list[int], blocks: list[int]) -> None:
        """Copy places on the host to blocks, before the next kernel."""
        self._streams.join()
        source, target = index(places, self._device), index(blocks, self._device)
        for cache, host in zip(self._caches, self._host, strict=True):
            cache.index_copy_(0, target, host.index_select(0, source))
