"""Which cached blocks stay longer than vLLM keeps them: pinned prefixes.

What vLLM's prefix cache does not hold for a request is given up least recently used first. A pin keeps the
blocks of a chain of tokens (a system prompt that is needed soon) until it is taken back;
`engines/simulated/caching.py` has the same two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PinsMixin:
    """Gives a scheduler pins, which end when its cache is reset: vLLM resets it only when all is free."""

    _pins: PinnedPrefixes | None = None

    @property
    def pins(self) -> PinnedPrefixes:
        """The pins of this scheduler."""
        if self._pins is None:
            self._pins = PinnedPrefixes(self)
        return self._pins

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Take all pins back and reset the cache."""
        self.pins.unpin_all()
        return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]


class PinnedPrefixes:
    """The pins of one scheduler, by the name of the chain; none where it caches nothing or has two pools."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._held: dict[str, list[Any]] = {}

    @property
    def possible(self) -> bool:
        """Return whether this scheduler has prefixes that can be pinned."""
        manager = self._scheduler.kv_cache_manager
        return bool(manager.enable_caching) and manager.num_kv_cache_groups == 1

    def pin(self, chain: str, tokens: Sequence[int]) -> int:
        """Hold what is cached of a chain that begins with these tokens; return how many tokens that is.

        A pin replaces the chain's pin before. Pins leave room for the longest request: what does not fit
        beside it is not held. To make blocks the last that are given up, pin and unpin them. KV of adapters
        and of prompts with a cache salt or images is not found.
        """
        self.unpin(chain)
        scheduler = self._scheduler
        if not self.possible:
            return 0
        pool, size = scheduler.kv_cache_manager.block_pool, int(scheduler.block_size)
        blocks: list[Any] = []
        for hash in self._hashes(tokens):
            cached = pool.get_cached_block(hash, [0])
            if not cached:
                break
            blocks.append(cached[0])
        pinned = {block.block_id for held in self._held.values() for block in held}
        most = pool.num_gpu_blocks - 1 - -(-int(scheduler.max_model_len) // size) - len(pinned)
        self._held[chain] = blocks[: max(most, 0)]
        pool.touch(self._held[chain])
        scheduler._prefix_cache.recount()
        return len(self._held[chain]) * size

    def unpin(self, chain: str) -> None:
        """Give a chain's blocks back, as the last of vLLM's queue. A chain without a pin is ignored."""
        pool = self._scheduler.kv_cache_manager.block_pool
        pool.free_blocks(reversed(self._held.pop(chain, [])))
        self._scheduler._prefix_cache.recount()

    def unpin_all(self) -> None:
        """Give all chains' blocks back."""
        for chain in list(self._held):
            self.unpin(chain)

    def _hashes(self, tokens: Sequence[int]) -> list[Any]:
        """Return the hashes of the full blocks of a prompt, as vLLM's engine core makes them."""
        from vllm import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        scheduler = self._scheduler
        algorithm = get_hash_fn_by_name(scheduler.vllm_config.cache_config.prefix_caching_hash_algo)
        hasher = get_request_block_hasher(int(scheduler.block_size), algorithm)
        prompt = Request("pin", list(tokens), SamplingParams(), None, block_hasher=hasher)
        return list(prompt.block_hashes)
