"""Simulated engines with a host pool for KV, with plain or two-ended blocks (BROS 5).

`HostPoolEngine` has plain blocks and swaps whole requests to the host. `TwoEndedEngine` accounts every KV
slot in a `memory.two_ended.block_table.TwoEndedTable`: a paused best-effort request keeps its KV until a
real-time request grows into it, and only what is overwritten is copied to the host and back. Both overlap
copies with the computation, so an iteration takes max(t_exec, t_swap) (BROS 4.1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import numpy as np

from headway.compiled import compiled
from headway.engines.simulated import kernels
from headway.engines.simulated.engine import Done, Ran, SimulatedEngine, Sizes
from headway.engines.simulated.kernels import Limits, Rows, Usage
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.two_ended import allocation, checkpoint
from headway.policy.memory.two_ended import block_table as slots_of
from headway.policy.memory.two_ended.allocation import TwoEndedBudget
from headway.policy.memory.two_ended.block_table import BEST_EFFORT, FREE, REAL_TIME, TwoEndedTable
from headway.policy.pack.kernels import NO_CAP, missing_of
from headway.ports import Packer
from headway.prefix import Prefix
from headway.types import Ints, Jobs, Slo, Step


class HostPoolEngine(SimulatedEngine):
    """A simulated engine with plain blocks and a host pool, to which the packer saves requests (`Step.save`).

    host: tokens that the pool holds.
    """

    def __init__(
        self, packer: Packer, *, host: int, copy_seconds: float, overlap: bool = True, **sizes: Unpack[Sizes]
    ) -> None:
        super().__init__(packer, copy_seconds=copy_seconds, overlap=overlap, **sizes)
        self.host = host

    def schedule(self, now: float) -> Ran:
        """Decide on one iteration and account its KV; rows that do not fit on the host are evicted."""
        packer = self.packer
        self.packer = _Bounded(packer, self)
        try:
            return super().schedule(now)
        finally:
            self.packer = packer

    def fitting(self, rows: Ints) -> int:
        """Return how many of `rows`, from the first on, still fit on the host."""
        saved = int(self.usage["on_host"]) + np.cumsum(self.jobs.computed[rows])
        return int(np.searchsorted(saved, self.host, "right"))


class _Bounded(Packer):
    """A packer whose saves fit the host."""

    def __init__(self, packer: Packer, engine: HostPoolEngine) -> None:
        self.packer, self.engine = packer, engine

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        step = self.packer.pack(jobs, kv_budget, now)
        if not step.save.size or (fits := self.engine.fitting(step.save)) == step.save.size:
            return step
        lost = np.concatenate([step.evict, step.save[fits:]])
        return replace(step, evict=lost, save=step.save[:fits])


class TwoEndedEngine(HostPoolEngine):
    """A simulated engine with two-ended blocks.

    `Jobs.saved` counts a row's tokens on the host: its swap cost. A row with part of its KV there runs or
    pauses; a row with all of it there waits.

    kv: the table of slots.
    dropped: tokens whose KV the last iteration dropped, in want of slots.
    decode_only: the right end of a shared block only decodes, as in vLLM (`vllm/plugin/two_ended.py`).
    """

    def __init__(
        self,
        packer: Packer,
        *,
        host: int,
        copy_seconds: float,
        overlap: bool = True,
        decode_only: bool = False,
        **sizes: Unpack[Sizes],
    ) -> None:
        super().__init__(packer, host=host, copy_seconds=copy_seconds, overlap=overlap, **sizes)
        rows, longest = self.target.size, sizes["max_model_len"]
        self.kv = slots_of.new(
            self.blocks, self.size, longest, host, rows, decode_only=decode_only, most_empty=packer.kv.most_empty
        )
        self.dropped = 0

    @property
    def free(self) -> int:
        return int(self.kv.state[0]["num_empty"])

    @property
    def kv_budget(self) -> TwoEndedBudget:
        rows = np.arange(self.target.size)
        moves = checkpoint.blocks_to_restore(self.kv, rows)
        return TwoEndedBudget(self.blocks, self.free, self.size, self.limits.slots, moves)

    def _enter(self, row: int, slo: Slo, prefix: Prefix | None, run: int) -> None:
        if self.target.size > self.kv.kind.size:
            self.kv = slots_of.resized(self.kv, self.target.size)
        allocation.add_row(self.kv, row, BEST_EFFORT if slo.objective == "best_effort" else REAL_TIME)

    def drop(self, id: str) -> None:
        row = self.jobs.row_of[id]
        super().drop(id)
        self._free_slots(row)

    def _free_slots(self, row: int) -> None:
        checkpoint.free_row(self.kv, row)
        self.kv.kind[row] = 0

    def schedule(self, now: float) -> Ran:
        """Decide on one iteration and account its KV: real-time rows first, then best-effort rows."""
        jobs, kv, dropped = self.jobs, self.kv, int(self.kv.state[0]["dropped_tokens"])
        step = self.packer.pack(jobs, self.kv_budget, now)
        rows, tokens, lost, admitted = account(jobs, kv, self.usage, self.limits, step)
        self.dropped = int(kv.state[0]["dropped_tokens"]) - dropped
        evicted, copied = np.concatenate([step.evict, lost]), int(kv.state[0]["copied_tokens"])
        paused = self._paused(rows)
        return Ran(now, rows, tokens, paused, evicted, lost.size, admitted, copied, step.save)

    def complete(self, ran: Ran, now: float) -> Done:
        """End the iteration: output its tokens. Returns the requests that it finished."""
        jobs = self.jobs
        rows = kernels.complete(jobs.data, self.usage, self.target, ran.rows, ran.tokens, now)
        for row in rows:
            self._free_slots(row)
        done = Done(jobs.names(rows), jobs.first[rows], jobs.evictions[rows], jobs.gap[rows])
        for name in done.ids:
            jobs.remove(name)
        return done

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table of slots is consistent and agrees with the jobs' table."""
        allocation.check_integrity(self.kv)
        rows = self.jobs.rows()
        assert (self.jobs.blocks[rows] == self.kv.num_blocks[rows]).all()
        assert (self.jobs.saved[rows] == self.kv.host_tokens[rows]).all()
        assert self.usage["held_slots"] == np.count_nonzero(self.jobs.running[rows])


def account(jobs: Jobs, kv: TwoEndedTable, usage: Usage, limits: Limits, step: Step) -> tuple[Ints, Ints, Ints, int]:
    """Account a step within its own and the engine's limits; returns what `run` returns."""
    caps = np.full(step.order.size, NO_CAP) if step.tokens is None else step.tokens
    most = limits.slots if step.max_running is None else step.max_running
    budget = limits.budget if step.token_budget is None else min(step.token_budget, limits.budget)
    within = limits._replace(budget=budget)
    return run(jobs.data, kv, usage, within, step.order, caps, step.evict, step.save, most)


@compiled
def run(
    jobs: Rows, kv: TwoEndedTable, usage: Usage, limits: Limits, order: Ints, caps: Ints, evict: Ints,
    save: Ints, max_running: int,
) -> tuple[Ints, Ints, Ints, int]:  # fmt: skip
    """Account one iteration. Returns rows and tokens (aligned), rows that lost all KV, rows admitted: n."""
    allocation.begin_iteration(kv)
    for row in evict:
        _evict(jobs, kv, usage, row)
    _save(jobs, kv, usage, save)
    kv.pinned[order] = kv.kind[order] == BEST_EFFORT
    rows, tokens = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    size, admitted, budget = 0, 0, limits.budget
    # The loop takes arrays, not the whole table: each array in a call costs its reference count.
    arrays = (
        kv.block_ids, kv.num_blocks, kv.num_tokens, kv.host_tokens, kv.kind, kv.left_tokens, kv.right_tokens,
        kv.saved_tokens,
    )  # fmt: skip
    for kind in (REAL_TIME, BEST_EFFORT):
        for i in range(order.size):
            row = order[i]
            if kv.kind[row] != kind or size >= max_running:
                continue
            give = min(missing_of(jobs, row), caps[i], budget)
            fresh = not jobs["running"][row]
            overwritten = kind == BEST_EFFORT and kv.pinned[row] == 0  # by a real-time row, just now
            full = fresh and usage["held_slots"] >= limits.slots
            runs = give > 0 and not overwritten and not full
            if not runs or not (_next_slot(arrays, limits.size, row, give) or _hold(kv, row, give)):
                kv.pinned[row] = 0
                if fresh and kv.num_blocks[row] > 0:  # its KV is back, but there are no slots for new tokens
                    usage["held_slots"] += 1
                    jobs["running"][row] = True
                continue
            usage["held_slots"] += fresh
            admitted += fresh
            jobs["running"][row] = True
            rows[size], tokens[size] = row, give
            size, budget = size + 1, budget - give
            if kind == BEST_EFFORT and kv.state[0]["decode_only"]:
                allocation.refill_from_left(kv, row)
    lost = _update_columns(jobs, kv, usage)
    return rows[:size], tokens[:size], lost, admitted


@compiled
def _next_slot(arrays: tuple[Ints, ...], size: int, row: int, tokens: int) -> bool:
    """Give a row a slot for one token in its last block, if one is free: the usual case when decoding."""
    table, held, stored, host, kind, used_left, used_right, saved = arrays
    k = held[row] - 1
    if tokens != 1 or host[row] > 0 or k < 0:
        return False
    block = table[row, k]
    if kind[row] == REAL_TIME:
        used, other, mine = used_left[block], used_right[block] - saved[block], used_left
    else:
        used, other, mine = used_right[block], used_left[block], used_right
    if used + other >= size:
        return False
    mine[block] += 1
    stored[row] += 1
    return True


@compiled
def _hold(kv: TwoEndedTable, row: int, tokens: int) -> bool:
    """Bring all of a row's KV to the device and give it slots for its next tokens."""
    if kv.swapped_tokens[row] > 0:
        return allocation.swap_in(kv, row) and allocation.grow(kv, row, tokens)
    return checkpoint.restore(kv, row) and allocation.grow(kv, row, tokens)


@compiled
def _evict(jobs: Rows, kv: TwoEndedTable, usage: Usage, row: int) -> None:
    """Evict a row: free all of its KV, on the host too."""
    if kv.host_tokens[row] > 0:
        slots_of.add_op(kv, FREE, row, 0, kv.block_ids.shape[1] * kv.state[0]["block_size"], 0, 0)
    checkpoint.free_row(kv, row)
    usage["held_slots"] -= jobs["running"][row]
    jobs["running"][row] = False
    jobs["computed"][row], jobs["blocks"][row], jobs["saved"][row] = 0, 0, 0
    jobs["evictions"][row] += 1


@compiled
def _save(jobs: Rows, kv: TwoEndedTable, usage: Usage, save: Ints) -> None:
    """Copy rows to the host as a whole; rows that do not fit there lose their KV."""
    for row in save:
        if not checkpoint.swap_out(kv, row):
            _evict(jobs, kv, usage, row)
            continue
        usage["held_slots"] -= jobs["running"][row]
        jobs["running"][row] = False
        jobs["blocks"][row], jobs["saved"][row] = 0, kv.host_tokens[row]
        jobs["evictions"][row] += 1


@compiled
def _update_columns(jobs: Rows, kv: TwoEndedTable, usage: Usage) -> Ints:
    """Copy the state of the table of slots into the jobs' columns; return rows that lost all of their KV."""
    lost, size = np.empty(jobs.size, np.int64), 0
    for row in range(jobs.size):
        if not jobs["live"][row] or kv.kind[row] == 0:
            continue
        jobs["blocks"][row], jobs["saved"][row] = kv.num_blocks[row], kv.host_tokens[row]
        there = kv.num_tokens[row] + kv.swapped_tokens[row]
        if there < jobs["computed"][row]:  # some of its KV was dropped, in want of slots
            jobs["computed"][row] = there
            jobs["evictions"][row] += 1
            if there == 0 and jobs["running"][row]:
                jobs["running"][row] = False
                usage["held_slots"] -= 1
                lost[size] = row
                size += 1
    return lost[:size]
