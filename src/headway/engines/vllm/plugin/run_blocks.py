"""Which cached blocks go before others: those of application runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class RunBlocks:
    """Lets KV of application runs that have ended go first; off where vLLM caches nothing or has two pools.

    vLLM gives up cached blocks least recently used first, so the conversation of an agent that has ended stays as
    long as one that waits for its tool. The gateway says when a run has ended (`{"op": "end", "runs": [...]}`); then
    the free blocks that this run alone has used go to the front of vLLM's queue. They are still found there until
    they are needed. `engines/simulated/prefix_blocks.py` has the same rule.

    A block that another run, or a request without a run, has found in the cache belongs to no run any more.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        self._pool, self._runs = manager.block_pool, dict[str, int]()  # runs by the engine's ids of requests
        self._on = bool(manager.enable_caching) and manager.num_kv_cache_groups == 1
        self._run = np.zeros(self._pool.num_gpu_blocks, np.int64)  # by block, 0 = none or several
        self._depth = self._run.copy()  # by block, of the request that cached it
        if self._on:
            self._follow(manager.coordinator)

    def enter(self, id: str, run: int) -> None:
        """Take note of a request. run: as in `prefix.run_number`, 0 = none."""
        if run and self._on:
            self._runs[id] = run

    def leave(self, id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        self._runs.pop(id, None)

    def end(self, runs: Sequence[int]) -> int:
        """Give up what only one of these runs has used and nothing holds, first after blocks that hold nothing.

        Return how many blocks that is.

        The ends of chains go first, so that what is left of a chain is still its beginning.
        """
        count = 0
        for run in filter(None, runs):
            ids = np.flatnonzero(self._run == run)
            ordered = ids[np.argsort(self._depth[ids], kind="stable")[::-1]].tolist()
            blocks = [self._pool.blocks[id] for id in ordered]
            free = [one for one in blocks if not one.ref_cnt and not one.is_null and one.block_hash is not None]
            queue = self._pool.free_block_queue
            for block in free:
                queue.remove(block)
            empty = self._leading_empty()
            for block in empty:
                queue.remove(block)
            queue.prepend_n(free)
            queue.prepend_n(empty)
            count += len(free)
        return count

    def _leading_empty(self) -> list[Any]:
        """Return the blocks at the front of vLLM's queue that hold nothing: to take these costs nothing."""
        found, block = list[Any](), self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block.block_hash is None and block.next_free_block is not None:  # the last one is the queue's own
            found.append(block)
            block = block.next_free_block
        return found

    def _follow(self, coordinator: Any) -> None:
        """Look at every block that a request finds or caches."""
        find, cache = coordinator.allocate_new_computed_blocks, self._pool.cache_full_blocks

        def allocate_new_computed_blocks(request_id: str, new_computed_blocks: Any, *args: Any, **kwargs: Any) -> None:
            find(request_id, new_computed_blocks, *args, **kwargs)
            self._found(request_id, new_computed_blocks[0])

        def cache_full_blocks(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
        ) -> None:
            cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            if num_cached_blocks >= num_full_blocks:
                return
            ids = [block.block_id for block in blocks[num_cached_blocks:num_full_blocks]]
            self._run[ids] = self._runs.get(request.request_id, 0)
            self._depth[ids] = np.arange(num_cached_blocks, num_cached_blocks + len(ids))

        coordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
        self._pool.cache_full_blocks = cache_full_blocks

    def _found(self, id: str, blocks: Sequence[Any]) -> None:
        """Let a request share the blocks that it has found."""
        mine = self._runs.get(id, 0)
        for block in reversed(blocks):
            if self._run[block.block_id] in (0, mine):
                break  # so it is of all before it
            self._run[block.block_id] = 0
