"""Whose block may a request grow into, inside vLLM? The same book as in the simulator decides.

Each step the book grants rows and tokens (`engines/two_ended.account`), vLLM's own `schedule()` is shown just
these, and its block manager hands out the blocks that the book has given (BROS 5). A best-effort request that
pauses, or is on the host, stays running for vLLM and is not scheduled; one that has lost all KV is preempted,
one that has lost its end computes it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.engines.simulated.kernels import Limits, usage_of
from headway.engines.simulated.two_ended import account
from headway.engines.vllm.plugin.right_aligned_attention import reads_from_the_right
from headway.engines.vllm.plugin.slot_copies import HostSlots, copies_of
from headway.engines.vllm.plugin.two_ended_pool import TwoEndedPool
from headway.memory.budget import KvBudget
from headway.memory.two_ended import allocation, block_table, checkpoint
from headway.memory.two_ended.allocation import TwoEndedBudget
from headway.memory.two_ended.block_table import (
    BEST_EFFORT,
    DROPPED,
    EMPTY,
    HOST,
    LOAD,
    MOVE,
    ORDERS,
    REAL_TIME,
    SAVE,
    SHARED,
)
from headway.pack.bros.algorithm_1 import real_time
from headway.types import Ints, Step

_NOBODY = np.empty(0, np.int64)
_COPIES = ((SAVE, "saved_tokens"), (LOAD, "loaded_tokens"), (MOVE, "moved_tokens"))
_MULTIPLE = 32  # tokens: what the CPU attention's blocks consist of


def why_not(scheduler: Any) -> str | None:
    """Return why this engine cannot have two-ended blocks, None = it can."""
    config, cache = scheduler.vllm_config, scheduler.vllm_config.cache_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec
    plain = type(spec).__name__ == "FullAttentionSpec" and getattr(spec, "sliding_window", None) is None
    reasons = {
        "its connector was not given at start": not isinstance(scheduler.connector, TwoEndedPool),
        "it is not the CPU's attention": config.device_config.device_type != "cpu",
        "the model's layers differ in their KV, or have a window": len(groups) != 1 or not plain,
        "prefix caching is on; start with --no-enable-prefix-caching": cache.enable_prefix_caching,
        "KV is quantized": cache.cache_dtype != "auto",
        "decoding is speculative": config.speculative_config is not None,
        "scheduling is asynchronous": config.scheduler_config.async_scheduling,
        "it is vLLM's model runner V2": scheduler.use_v2_model_runner,
        f"blocks are not multiples of {_MULTIPLE} tokens": scheduler.block_size % _MULTIPLE != 0,
    }
    found = next((why for why, hinders in reasons.items() if hinders), None)
    if found or reads_from_the_right(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype):
        return found
    return "this machine's attention does not read a block from the right"


class TwoEndedKv:
    """vLLM's KV as a `memory.slots.TwoEndedTable`; a `KvPolicy`.

    TwoEndedTable block b is vLLM's block b + 1 (its block 0 is nobody's). vLLM's pool itself stays untouched: its
    manager's methods that allocate and free are replaced.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.pool, self.jobs = scheduler, scheduler.connector, scheduler.jobs
        self.manager = scheduler.kv_cache_manager
        self.blocks = self.manager.block_pool.blocks
        size, longest, total = int(scheduler.block_size), int(scheduler.max_model_len), len(self.blocks) - 1
        rows = self.jobs.data.size
        self.book = block_table.new(total, size, longest, self.pool.host_tokens, rows, decode_only=True)
        self.limits = Limits(size, scheduler._slots, scheduler.max_num_scheduled_tokens, longest)
        self.host = HostSlots(longest)
        self.inside = np.zeros(rows, np.bool_)  # rows that hold a slot and KV
        self.serial = np.zeros(rows, np.int64)  # of the job that the book knows by this row
        self.granted: dict[str, int] = {}
        self.done = dict.fromkeys((name for _, name in _COPIES), 0)
        self._known: dict[str, list[int]] = {}  # each running request's blocks, as the worker has them
        self.pool.begin()
        self._take_over()
        self._run(Step(_NOBODY, _NOBODY, _NOBODY, _NOBODY))  # compiles it

    def _take_over(self) -> None:
        manager = self.manager
        manager.allocate_slots, manager.free = self.allocate, self.free
        manager.block_pool.get_num_free_blocks = lambda: int(self.book.counts[EMPTY])

    # ---- what the hook asks

    def leave(self, row: int) -> None:
        """Its KV is free already (`free`)."""
        self.inside[row] = False

    def refresh(self, rows: Ints) -> None:
        """Let those who have come or gone into or out of the book; the table's columns are the book's."""
        jobs = self.jobs
        if jobs.data.size > self.inside.size:
            self._grow(jobs.data.size)
        for row in np.flatnonzero(~jobs.live & (self.book.kind != 0)):
            self._forget(int(row))
            self.book.kind[row] = 0
        fresh = np.flatnonzero(jobs.live & (self.serial != jobs.serial))
        for row in fresh[np.argsort(jobs.serial[fresh])]:
            allocation.enter(self.book, row, REAL_TIME if real_time(jobs.data, row) else BEST_EFFORT)
            self.inside[row], self.serial[row] = False, jobs.serial[row]
        book = self.book
        jobs.computed[:], jobs.running[:] = book.stored + book.away, self.inside
        jobs.blocks[:], jobs.saved[:] = book.held, book.host

    def _grow(self, rows: int) -> None:
        more = np.zeros(rows - self.inside.size, np.int64)
        self.book = block_table.grown(self.book, rows)
        self.serial = np.concatenate([self.serial, more])
        self.inside = np.concatenate([self.inside, more.astype(np.bool_)])

    def ledger(self, plain: KvBudget) -> TwoEndedBudget:
        """Return the account of empty blocks, and what each row needs to be read back."""
        moves = checkpoint.lost_places(self.book, np.arange(self.inside.size))
        copy, total, free = self.pool.copy_seconds, plain.total, int(self.book.counts[EMPTY])
        return TwoEndedBudget(total, free, plain.size, plain.slots, copy, moves, True)

    def plan(self, step: Step) -> Step:
        """Account the step on the book. Returns what vLLM is to carry out: who runs, who has lost all KV."""
        jobs, before = self.jobs, self.jobs.evictions.copy()
        rows, tokens = self._run(step)
        self.inside[:] = jobs.running
        self.granted = dict(zip(jobs.names(rows), tokens.tolist(), strict=True))
        self._tell(rows)
        evict = self._lost(np.flatnonzero(jobs.evictions != before))
        jobs.evictions[evict] -= 1  # the hook counts those that vLLM preempts
        return Step(rows, tokens, evict, _NOBODY, max_running=rows.size, token_budget=int(tokens.sum()))

    def _run(self, step: Step) -> tuple[Ints, Ints]:
        """Return who computes how many tokens."""
        usage = usage_of(0, np.count_nonzero(self.inside))
        rows, tokens, _, _ = account(self.jobs, self.book, usage, self.limits, step)
        return rows, tokens

    def _tell(self, rows: Ints) -> None:
        """Write down for the worker what to copy, and who writes to the right."""
        book, metadata = self.book, self.pool.metadata
        orders = book.orders[: book.counts[ORDERS]]
        for kind, name in _COPIES:
            self.done[name] += int(orders[orders[:, 0] == kind, 3].sum())
        metadata.copies += copies_of(book, self.host)
        row = rows[book.kind[rows] == BEST_EFFORT]
        last = book.held[row] - 1
        right = book.mirrored[book.table[row, last]] == 1
        metadata.right = list(zip(self.jobs.names(row[right]), last[right].tolist(), strict=True))

    def _lost(self, rows: Ints) -> Ints:
        """Of rows whose KV was taken: let those without their end go back there, return those without any."""
        out = []
        for row in rows.tolist():
            request, computed = self._request(row), int(self.jobs.computed[row])
            had = request.num_computed_tokens
            if computed == 0 and had:
                out.append(row)
                continue
            self.scheduler.stats.preempted(request.request_id, had)  # vLLM sees neither of these
            request.num_computed_tokens = min(had, computed)
        return np.array(out, np.int64)

    def begin(self, step: Step) -> None:
        """The book has given all blocks already (`plan`)."""

    def check(self, ran: dict[str, int]) -> None:
        """Take back what vLLM has left out, such as a request whose grammar is not compiled yet."""
        for id, tokens in self.granted.items():
            missing = tokens - ran.get(id, 0)
            if missing:
                row = self.jobs.row_of[id]
                allocation.trim(self.book, row, self.book.stored[row] - missing)
                self.inside[row] = self.book.stored[row] > 0
        assert ran.keys() <= self.granted.keys(), "vLLM runs what has no blocks"

    def away(self) -> int:
        """Return the tokens on the host: their requests stay running for vLLM."""
        return int(self.book.counts[HOST])

    def counters(self) -> dict[str, int]:
        """Return blocks that got a second owner, and tokens saved, read back, moved and dropped."""
        counts = self.book.counts
        return {**self.done, "shared_blocks": int(counts[SHARED]), "dropped_tokens": int(counts[DROPPED])}

    def state(self) -> dict[str, Any]:
        """Return that blocks have two ends."""
        return {"two_ended": True}

    # ---- what vLLM's scheduler asks in place of its block manager

    def allocate(self, request: Any, tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Return the blocks that are new to a request; the book has given them already."""
        id = request.request_id
        row = self.jobs.row_of[id]
        table = (self.book.table[row, : self.book.held[row]] + 1).tolist()
        known, self._known[id] = self._known.get(id, []), table
        blocks = [self.blocks[block] for block in table]
        self.manager.coordinator.single_type_managers[0].req_to_blocks[id] = blocks
        if table[: len(known)] != known:
            self.pool.metadata.tables[id] = table
            blocks, known = [], []
        return self.manager.create_kv_cache_blocks((blocks[len(known) :],))

    def free(self, request: Any) -> None:
        """Free what a request has, here and on the host: it has ended, or lost its KV."""
        id = request.request_id
        self._known.pop(id, None)
        self.manager.coordinator.single_type_managers[0].req_to_blocks.pop(id, None)
        row = self.jobs.row_of.get(id)
        if row is not None and self.serial[row] == self.jobs.serial[row]:
            self._forget(row)

    def _forget(self, row: int) -> None:
        checkpoint.forget(self.book, row)
        self.host.drop(row)
        self.inside[row] = False

    def _request(self, row: int) -> Any:
        return self.scheduler.requests[str(self.jobs.keys[row])]
