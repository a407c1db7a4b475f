"""What vLLM's prefix cache takes in and gives up, by the keys that gateways make of prompts (`headway/prefix.py`).

vLLM can publish such events itself (`--kv-events-config`): with the tokens of every block, over a socket that drops
events which are not read in time. Here the gateway asks for what is new to it (`{"op": "cache"}`), so nothing is
dropped, and a block is eight bytes.

Blocks behind the first image of a prompt, or of prompts that are given as embeddings, have no key: only vLLM knows
what such a prompt is made of.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any
from uuid import uuid4

import numpy as np

from headway.prefix import GRAIN, CacheReport, prompt_seed, token_keys

_KEPT = 1 << 17  # changes; a reader that is further behind gets all that is cached


class CacheLog:
    """Follows a scheduler's prefix cache; off where it caches nothing, or in blocks that keys cannot name."""

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self._size = int(scheduler.block_size)
        self.on = bool(manager.enable_caching) and manager.num_kv_cache_groups == 1 and self._size % GRAIN == 0
        self._key_of: dict[int, int] = {}  # block -> key
        self._copies: dict[int, int] = {}  # key -> blocks that have it
        self._changes: deque[tuple[int, bool]] = deque(maxlen=_KEPT)
        self._position, self._epoch = 0, uuid4().hex
        if self.on:
            self._follow(manager.block_pool)

    def since(self, epoch: str, position: int) -> CacheReport:
        """Return what has changed after a position of an epoch; all that is cached if that is not known any more."""
        new = self._position - position
        whole = epoch != self._epoch or not 0 <= new <= len(self._changes)
        if whole:
            added, removed, position = list(self._copies), list[int](), 0
        else:
            last = dict(islice(self._changes, len(self._changes) - new, None))
            added = [key for key, there in last.items() if there]
            removed = [key for key, there in last.items() if not there]
        return CacheReport(self._epoch, position, self._position, _packed(added), _packed(removed), whole=whole)

    def _follow(self, pool: Any) -> None:
        """Look at every block that the pool caches or gives up."""
        cache, forget, reset = pool.cache_full_blocks, pool._remove_cached_block_hashes, pool.reset_prefix_cache

        def cache_full_blocks(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
        ) -> None:
            cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            self._take_in(request, blocks, num_cached_blocks, num_full_blocks)

        def remove(block: Any) -> Any:
            self._give_up(block.block_id)
            return forget(block)

        def reset_prefix_cache() -> bool:
            done = bool(reset())
            if done:
                self._key_of.clear()
                self._copies.clear()
                self._changes.clear()
                self._position, self._epoch = 0, uuid4().hex
            return done

        pool.cache_full_blocks, pool._remove_cached_block_hashes = cache_full_blocks, remove
        pool.reset_prefix_cache = reset_prefix_cache

    def _take_in(self, request: Any, blocks: Any, cached: int, full: int) -> None:
        """Note the keys of a request's blocks from `cached` to `full`."""
        if request.prompt_embeds is not None:
            return
        if request.mm_features:
            full = min(full, min(one.mm_position.offset for one in request.mm_features) // self._size)
        before = self._key_of.get(blocks[cached - 1].block_id) if cached else 0
        if cached >= full or before is None:
            return
        adapter = request.lora_request.lora_name if request.lora_request is not None else None
        ids = request.all_token_ids[cached * self._size : full * self._size]
        keys = token_keys(ids, prompt_seed(adapter, request.cache_salt), before)
        grains = self._size // GRAIN
        for block, key in zip(blocks[cached:full], keys[grains - 1 :: grains].tolist(), strict=True):
            if block.is_null or block.block_hash is None:
                return
            self._give_up(block.block_id)
            self._key_of[block.block_id] = key
            copies = self._copies.get(key, 0)
            self._copies[key] = copies + 1
            if not copies:
                self._note(key, True)

    def _give_up(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is None:
            return
        copies = self._copies[key] - 1
        if copies:
            self._copies[key] = copies
        else:
            del self._copies[key]
            self._note(key, False)

    def _note(self, key: int, there: bool) -> None:
        self._changes.append((key, there))
        self._position += 1


def _packed(keys: list[int]) -> bytes:
    return np.array(keys, np.int64).tobytes()
