"""What vLLM's prefix cache holds of the requests that wait, and which blocks running requests share.

A waiting request needs neither tokens nor blocks for what other requests have computed of its prompt. The
cache changes with every iteration, so a request is looked up when it comes, when it has lost its KV, and when
the packer names it; a change in what was found then means that others have changed, too.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np

from headway.types import UNLIMITED, Ints, Jobs

_RECENT = 1024  # requests of which the longest cached prefix is remembered
_AHEAD = 64  # waiting requests that are looked up again when the cache has changed


class PrefixCache:
    """Keeps `computed`, `found`, `blocks` and `shared` of a scheduler's `Jobs` to what its prefix cache holds."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._on = self._manager.enable_caching and not scheduler.packer.own_order
        self._lists = self._manager.coordinator.single_type_managers[0].req_to_blocks if self._on else {}
        self._tokens, self._blocks = np.zeros(0, np.int64), np.zeros(0, np.int64)  # by row, of waiting ones
        self._shared = np.zeros(0, np.int64)  # by row, of running ones
        self._named: list[str] = []  # those that the packer wanted in the last step
        self._recount = False  # the running requests may share other blocks than before
        self._cached_tokens: deque[int] = deque(maxlen=_RECENT)  # of each request when it came

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix that was cached of the last requests when they came.

        Longer than any prompt where stock caches prefixes and this class does not follow it.
        """
        if self._manager.enable_caching and not self._on:
            return UNLIMITED
        return max(self._cached_tokens, default=0)

    def enter(self, request: Any, row: int) -> None:
        """Look a request up that has come or has lost its KV."""
        if self._on:
            if row >= self._tokens.size:
                self._grow()
            self._recount |= bool(self._shared[row])
            self._shared[row] = 0
            self._look_up(request, row)
            if not request.num_preemptions:  # else it would find what it has computed itself
                self._cached_tokens.append(int(self._tokens[row]))

    def leave(self, row: int) -> None:
        """Forget a request; those that shared its blocks may have them alone now."""
        if self._on:
            self._recount |= bool(self._shared[row])
            self._shared[row] = 0

    def refresh(self, jobs: Jobs, rows: Ints) -> None:
        """Set the columns; rows: the running ones, in stock's order."""
        if not self._on:
            return
        if self._recount or any(self._shares(name) for name in self._named):
            self._count(rows)
        size = self._tokens.size
        waiting = jobs.live[:size] & ~jobs.running[:size] & (jobs.saved[:size] == 0)
        for column, values in ((jobs.computed, self._tokens), (jobs.blocks, self._blocks)):
            np.copyto(column[:size], values, where=waiting)
        np.copyto(jobs.found[:size], self._tokens, where=waiting & (jobs.evictions[:size] == 0))
        jobs.shared[rows] = self._shared[rows]
        np.copyto(jobs.shared[:size], self._blocks, where=waiting)

    def admitted(self, output: Any) -> None:
        """Set what the requests that stock has just admitted began with: only now is it known for sure.

        The latency model learns from it. output: stock's decision.
        """
        if not self._manager.enable_caching:
            return
        jobs, requests, ran = self._scheduler.jobs, self._scheduler.requests, output.num_scheduled_tokens
        fresh = (request.req_id for request in output.scheduled_new_reqs)
        for id in (*fresh, *output.scheduled_cached_reqs.resumed_req_ids):
            jobs.computed[jobs.row_of[id]] = requests[id].num_computed_tokens - ran[id]

    def recount(self) -> None:
        """Count anew which blocks are shared: blocks were pinned or given back."""
        self._recount = True

    def renew(self, named: list[Any]) -> None:
        """Look waiting requests up that the packer names; if what is found has changed, the next ones too."""
        if not self._on:
            return
        row_of = self._scheduler.jobs.row_of
        self._named = [request.request_id for request in named]
        changed = [self._look_up(request, row_of[request.request_id]) for request in named]
        if any(changed):
            for request in islice(self._scheduler.waiting, _AHEAD):
                self._look_up(request, row_of[request.request_id])

    def _grow(self) -> None:
        for name in ("_tokens", "_blocks", "_shared"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(self._scheduler.jobs.data.size - old.size, np.int64)]))

    def _look_up(self, request: Any, row: int) -> bool:
        """Look a request up; return whether another part of it is cached than before."""
        before, manager = int(self._tokens[row]), self._manager
        self._tokens[row] = self._blocks[row] = 0
        if not request.num_computed_tokens and manager.prefix_cache_lookup_enabled(request):
            groups, tokens, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
            self._tokens[row] = tokens
            self._blocks[row] = sum(block.ref_cnt > 0 and not block.is_null for block in groups[0])
        return bool(before != self._tokens[row])

    def _shares(self, name: str) -> bool:
        """Return whether a request has come in with blocks of others; those are the first of its list."""
        blocks = self._lists.get(name)
        return bool(blocks and blocks[0].ref_cnt > 1)

    def _count(self, rows: Ints) -> None:
        """Count the blocks that each running request shares."""
        self._recount, self._named = False, []
        for request, row in zip(self._scheduler.running, rows.tolist(), strict=True):
            blocks = self._lists[request.request_id]
            self._shared[row] = sum(block.ref_cnt > 1 and not block.is_null for block in blocks)
