"""Two-ended KV blocks in vLLM (BROS 5), accounted by the same code as in the simulator.

In each step `engines/simulated/two_ended.account` decides which rows compute how many tokens in which slots;
vLLM's own `schedule()` is shown just these, and its block manager hands out these blocks. A best-effort
request that pauses, or is on the host, stays running for vLLM and is not scheduled; one that has lost all KV
is preempted; one that has lost the end of its KV computes that again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.engines.simulated.kernels import Limits, usage_of
from headway.engines.simulated.two_ended import account
from headway.engines.vllm.plugin.right_aligned_cpu import reads_from_the_right
from headway.engines.vllm.plugin.slot_copies import HostSlots, copies_of
from headway.engines.vllm.plugin.two_ended_pool import TwoEndedPool, hindrance, on_cpu
from headway.policy.core.engine_spec import Obstacle
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.two_ended import allocation, block_table, checkpoint
from headway.policy.memory.two_ended.allocation import TwoEndedBudget
from headway.policy.memory.two_ended.block_table import BEST_EFFORT, LOAD, MOVE, REAL_TIME, SAVE
from headway.policy.pack.kernels import promised
from headway.types import Ints, Step

_NO_ROWS = np.empty(0, np.int64)
_COPIES = ((SAVE, "saved_tokens"), (LOAD, "loaded_tokens"), (MOVE, "moved_tokens"))


def obstacle(scheduler: Any) -> Obstacle | None:
    """Return why this engine cannot have two-ended blocks, None = it can."""
    if not isinstance(scheduler.connector, TwoEndedPool):
        return Obstacle("its connector was not given at start", "start the engine by Headway")
    config, kv_cache_config = scheduler.vllm_config, scheduler.kv_cache_config
    found = hindrance(config, kv_cache_config)
    if found is None and on_cpu(config):
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        if not reads_from_the_right(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype):
            found = "this machine's attention does not read a block from the right"
    return Obstacle(found, "choose bros-plain-blocks") if found else None


class TwoEndedKv:
    """vLLM's KV slots as a `TwoEndedTable`; a `KvPolicy`.

    Block b of the table is vLLM's block b + 1 (its block 0 is the null block). vLLM's block pool is not used:
    the methods of its manager that allocate and free are replaced.

    kv: the table of slots.
    host_slots: slots of the host pool.
    running: rows that hold a slot and KV.
    serial: serial of the job that the table knows by each row.
    granted: tokens of this step by request.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.pool, self.jobs = scheduler, scheduler.connector, scheduler.jobs
        self.manager = scheduler.kv_cache_manager
        self.blocks = self.manager.block_pool.blocks
        size, longest, total = int(scheduler.block_size), int(scheduler.max_model_len), len(self.blocks) - 1
        rows = self.jobs.data.size
        self.kv = block_table.new(
            total,
            size,
            longest,
            self.pool.host_tokens,
            rows,
            decode_only=True,
            most_empty=scheduler.packer.kv.most_empty,
        )
        self.limits = Limits(size, scheduler._slots, scheduler.max_num_scheduled_tokens, longest)
        self.host_slots = HostSlots(longest)
        self.running = np.zeros(rows, np.bool_)
        self.serial = np.zeros(rows, np.int64)
        self.granted: dict[str, int] = {}
        self.copied = dict.fromkeys((name for _, name in _COPIES), 0)
        # Each running request's blocks, as the worker has them
        self._worker_tables: dict[str, list[int]] = {}
        self.pool.begin()
        self._wrap_manager()
        self._run(Step(_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS))  # compiles it

    def _wrap_manager(self) -> None:
        manager = self.manager
        manager.allocate_slots, manager.free = self.allocate, self.free
        manager.block_pool.get_num_free_blocks = lambda: int(self.kv.state[0]["num_empty"])

    # ---- called by the hook

    def leave(self, row: int) -> None:
        """Note that a row has lost its slot; `free` has freed its KV."""
        self.running[row] = False

    def refresh(self, rows: Ints) -> None:
        """Enter new rows into the table of slots, remove ended ones, and read the jobs' columns from it."""
        jobs = self.jobs
        if jobs.data.size > self.running.size:
            self._grow(jobs.data.size)
        for row in np.flatnonzero(~jobs.live & (self.kv.kind != 0)):
            self._forget(int(row))
            self.kv.kind[row] = 0
        fresh = np.flatnonzero(jobs.live & (self.serial != jobs.serial))
        for row in fresh[np.argsort(jobs.serial[fresh])]:
            allocation.add_row(self.kv, row, REAL_TIME if promised(jobs.data, row) else BEST_EFFORT)
            self.running[row], self.serial[row] = False, jobs.serial[row]
        kv = self.kv
        jobs.computed[:], jobs.running[:] = kv.num_tokens + kv.swapped_tokens, self.running
        jobs.blocks[:], jobs.saved[:] = kv.num_blocks, kv.host_tokens

    def _grow(self, rows: int) -> None:
        more = np.zeros(rows - self.running.size, np.int64)
        self.kv = block_table.resized(self.kv, rows)
        self.serial = np.concatenate([self.serial, more])
        self.running = np.concatenate([self.running, more.astype(np.bool_)])

    def trim(self, request: Any) -> None:
        """Do nothing: nothing is reserved."""

    def budget(self, stock: KvBudget) -> TwoEndedBudget:
        """Return the empty blocks, and how many of them each row needs to be read back."""
        moves = checkpoint.blocks_to_restore(self.kv, np.arange(self.running.size))
        empty = int(self.kv.state[0]["num_empty"])
        return TwoEndedBudget(stock.total, empty, stock.size, stock.slots, moves, stock.row_chunk)

    def plan(self, step: Step) -> Step:
        """Account the packer's step. Returns vLLM's: the rows that run, and those that have lost all KV."""
        jobs, before = self.jobs, self.jobs.evictions.copy()
        rows, tokens = self._run(step)
        self.running[:] = jobs.running
        self.granted = dict(zip(jobs.names(rows), tokens.tolist(), strict=True))
        self._fill_metadata(rows)
        evict = self._lost_rows(np.flatnonzero(jobs.evictions != before))
        jobs.evictions[evict] -= 1  # the hook counts the preemptions by vLLM
        return Step(rows, tokens, evict, _NO_ROWS, max_running=rows.size, token_budget=int(tokens.sum()))

    def _run(self, step: Step) -> tuple[Ints, Ints]:
        """Account a step; return the rows that compute and their tokens."""
        usage = usage_of(0, int(np.count_nonzero(self.running)))
        rows, tokens, _, _ = account(self.jobs, self.kv, usage, self.limits, step)
        return rows, tokens

    def _fill_metadata(self, rows: Ints) -> None:
        """Give the worker its copies, and the rows that fill their last block from the right."""
        kv, metadata = self.kv, self.pool.metadata
        orders = kv.ops[: kv.state[0]["num_ops"]]
        for kind, name in _COPIES:
            self.copied[name] += int(orders[orders[:, 0] == kind, 3].sum())
        metadata.copies += copies_of(kv, self.host_slots)
        row = rows[kv.kind[rows] == BEST_EFFORT]
        last = kv.num_blocks[row] - 1
        right = kv.mirrored[kv.block_ids[row, last]] == 1
        kept = kv.num_tokens[row] - last * int(kv.state[0]["block_size"])
        columns = (values[right].tolist() for values in (last, kept))
        metadata.right = list(zip(self.jobs.names(row[right]), *columns, strict=True))

    def _lost_rows(self, rows: Ints) -> Ints:
        """Return the rows that have lost all KV; correct vLLM's count of those that have lost its end."""
        out = []
        for row in rows.tolist():
            request, computed = self._request(row), int(self.jobs.computed[row])
            had = request.num_computed_tokens
            if computed == 0 and had:
                out.append(row)
                continue
            self.scheduler.stats.preempted(request.request_id, had)  # vLLM knows of neither of these
            request.num_computed_tokens = min(had, computed)
        return np.array(out, np.int64)

    def begin(self, step: Step) -> None:
        """Do nothing: `plan` has allocated the blocks."""

    def check(self, ran: dict[str, int]) -> None:
        """Free the slots of requests that vLLM left out, such as one whose grammar is not compiled yet."""
        for id, tokens in self.granted.items():
            missing = tokens - ran.get(id, 0)
            if missing:
                row = self.jobs.row_of[id]
                allocation.trim(self.kv, row, self.kv.num_tokens[row] - missing)
                self.running[row] = self.kv.num_tokens[row] > 0
        assert ran.keys() <= self.granted.keys(), "vLLM runs a request that has no blocks"

    def tokens_on_host(self) -> int:
        """Return the tokens on the host, whose requests stay running for vLLM."""
        return int(self.kv.state[0]["host_tokens"])

    def counters(self) -> dict[str, int]:
        """Return the blocks that got a second owner, and the tokens saved, loaded, moved and dropped."""
        totals = {name: int(self.kv.state[0][name]) for name in ("shared_blocks", "dropped_tokens")}
        return {**self.copied, **totals}

    def state(self) -> dict[str, Any]:
        """Return that blocks are two-ended."""
        return {"two_ended": True}

    # ---- in place of vLLM's block manager

    def allocate(self, request: Any, tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `allocate_slots`: return the blocks that `plan` has newly allocated to a request."""
        id = request.request_id
        row = self.jobs.row_of[id]
        table = (self.kv.block_ids[row, : self.kv.num_blocks[row]] + 1).tolist()
        known, self._worker_tables[id] = self._worker_tables.get(id, []), table
        blocks = [self.blocks[block] for block in table]
        self.manager.coordinator.single_type_managers[0].req_to_blocks[id] = blocks
        if table[: len(known)] != known:
            self.pool.metadata.tables[id] = table
            blocks, known = [], []
        return self.manager.create_kv_cache_blocks((blocks[len(known) :],))

    def free(self, request: Any) -> None:
        """Free the KV of a request that has ended or lost it, on the device and on the host."""
        id = request.request_id
        self._worker_tables.pop(id, None)
        self.manager.coordinator.single_type_managers[0].req_to_blocks.pop(id, None)
        row = self.jobs.row_of.get(id)
        if row is not None and self.serial[row] == self.jobs.serial[row]:
            self._forget(row)

    def _forget(self, row: int) -> None:
        checkpoint.free_row(self.kv, row)
        self.host_slots.drop(row)
        self.running[row] = False

    def _request(self, row: int) -> Any:
        return self.scheduler.requests[str(self.jobs.keys[row])]
