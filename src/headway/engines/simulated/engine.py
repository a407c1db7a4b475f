"""The simulated engine: vLLM's scheduling on numpy columns, without vLLM.

It applies a packer's `Step` as `engines/vllm/plugin/hook.py` and vLLM's `schedule()` apply it together, on
the same `Jobs` table, and accounts KV blocks itself. `tests/engine/test_licence.py` requires identical steps
from vLLM's own scheduler. The seconds of an iteration come from a latency model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from headway.engines.simulated import kernels
from headway.engines.simulated.kernels import Limits, Usage
from headway.policy.forecast.latency.online import batch_of
from headway.policy.memory import reservations
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.kernels import NO_CAP
from headway.ports import Packer
from headway.prefix import Prefix
from headway.types import Batch, Floats, Ints, Jobs, Slo

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Ran:
    """One iteration.

    rows, tokens: rows that computed and their tokens, aligned.
    paused: rows that hold a slot and did not compute.
    evicted: rows that lost their KV.
    preempted: how many of these lost it because blocks ran out (vLLM's rule), not by the packer.
    admitted: number of rows admitted.
    copied: tokens of KV copied between device and host for this iteration, both directions together.
    saved: rows whose KV was copied to the host.
    queried, hits: tokens of the requests that were admitted for the first time, and how many of these a
        prefix cache had (`caching.py`).
    """

    start: float
    rows: Ints
    tokens: Ints
    paused: Ints
    evicted: Ints
    preempted: int
    admitted: int
    copied: int = 0
    saved: Ints = field(default_factory=lambda: _NO_ROWS)
    queried: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The requests that an iteration finished.

    first: instants of their first tokens.
    evictions: how often each lost its KV.
    gap: the longest silence of each between two tokens, seconds.
    """

    ids: list[str]
    first: Floats
    evictions: Ints
    gap: Floats


class Sizes(TypedDict):
    """The sizes of an engine, as `SimulatedEngine` has them."""

    blocks: int
    size: int
    slots: int
    budget: int
    max_model_len: int


class SimulatedEngine:
    """One engine: its jobs, its blocks, its packer.

    blocks: usable KV blocks of `size` tokens. slots: requests that may hold KV. budget: tokens per iteration.
    copy_seconds: to move one token's KV between device and host.
    overlap: copies run beside the computation instead of before it.
    """

    def __init__(
        self,
        packer: Packer,
        *,
        blocks: int,
        size: int,
        slots: int,
        budget: int,
        max_model_len: int,
        copy_seconds: float = 0.0,
        overlap: bool = False,
    ) -> None:
        self.packer, self.blocks, self.size = packer, blocks, size
        self.copy_seconds, self.overlap = copy_seconds, overlap
        self.limits = Limits(size, slots, budget, max_model_len)
        self.account = kernels.account_of(blocks)
        self.usage: Usage = self.account[0]
        self.jobs = Jobs(256)
        self.target: Ints = np.zeros(256, np.int64)
        self._serial = 0

    @property
    def free(self) -> int:
        """Free KV blocks."""
        return int(self.usage["free_blocks"])

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix that was cached of the last requests when they came."""
        return 0

    @property
    def kv_budget(self) -> KvBudget:
        """The KV budget that the packer reads."""
        return KvBudget(self.blocks, self.free, self.size, self.limits.slots)

    def add(
        self, id: str, prompt: int, output: int, *, arrival: float, slo: Slo | None = None,
        priority: int = 0, tokens_left: float | None = None, urgency: float = 0.0,
        spread: float = 0.0, prefix: Prefix | None = None, soft: float | None = None, run: int = 0,
    ) -> int:  # fmt: skip
        """Queue a request that will answer with exactly `output` tokens; return its row.

        tokens_left: expected output tokens, None = the true number. urgency, spread, soft: as in `Jobs`.
        prefix: what it has in common with others; run: its application run (`prefix.run_number`), 0 = none. Both are
        of use only to an engine with a prefix cache.
        """
        self._serial += 1
        targets = slo or Slo()
        row = self.jobs.add(
            id, arrival=arrival, prompt=prompt, priority=priority, serial=self._serial,
            tokens_left=float(output if tokens_left is None else tokens_left), urgency=urgency, spread=spread,
            ttft=_or_never(targets.ttft), tpot=_or_never(targets.per_token), e2e=_or_never(targets.e2e),
            itl=_or_never(targets.itl),
            line_from=arrival + (targets.ttft or 0.0) if targets.line else -math.inf, weight=targets.weight,
            soft=(targets.soft or 0.0) if soft is None else soft,
        )  # fmt: skip
        if row >= self.target.size:
            self.target = np.concatenate([self.target, np.zeros(len(self.jobs.keys) - self.target.size, int)])
        self.target[row] = output
        self._enter(row, targets, prefix, run)
        return row

    def _enter(self, row: int, slo: Slo, prefix: Prefix | None, run: int) -> None:
        """Account KV for a row that was just added; for engines with another kind of KV."""

    def drop(self, id: str) -> None:
        """Abort a request between two iterations, and free its KV."""
        row = self.jobs.row_of[id]
        kernels.release(self.jobs.data, self.usage, row)
        self.jobs.remove(id)

    def rerank(self, ranks: Mapping[str, float]) -> None:
        """Set `Jobs.urgency` of requests by id; those that are not inside have ended."""
        row_of = self.jobs.row_of
        for id, rank in ranks.items():
            if id in row_of:
                self.jobs.urgency[row_of[id]] = rank

    @property
    def busy(self) -> bool:
        return len(self.jobs) > 0

    def schedule(self, now: float) -> Ran:
        """Decide on one iteration that begins now, and account its KV."""
        jobs, limits = self.jobs, self.limits
        step = self.packer.pack(jobs, self.kv_budget, now)
        kernels.evict(jobs.data, self.usage, step.evict)
        copied = kernels.save(jobs.data, self.usage, step.save)
        if step.lend is not None:
            reservations.begin_loans(jobs.data, step.lend.borrower, step.lend.lender, step.lend.start, step.lend.blocks)
        caps = np.full(step.order.size, NO_CAP) if step.tokens is None else step.tokens
        running = limits.slots if step.max_running is None else step.max_running
        budget = limits.budget if step.token_budget is None else step.token_budget
        paused = self._paused(step.order)
        reserve = np.zeros(step.order.size, np.int64) if step.reserve is None else step.reserve
        ran = kernels.run_reserved(jobs.data, self.usage, limits, step.order, caps, reserve, running, budget)
        assert step.lend is None or jobs.running[step.lend.borrower].all(), "a borrower was not admitted"
        lost = np.concatenate([step.evict, ran.lost])
        moved = copied + ran.copied
        return Ran(now, ran.rows, ran.tokens, paused, lost, ran.lost.size, ran.admitted, moved, step.save)

    def complete(self, ran: Ran, now: float) -> Done:
        """End the iteration: output its tokens. Returns the requests that it finished."""
        jobs = self.jobs
        rows = kernels.complete(jobs.data, self.usage, self.target, ran.rows, ran.tokens, now)
        done = Done(jobs.names(rows), jobs.first[rows], jobs.evictions[rows], jobs.gap[rows])
        for name in done.ids:
            jobs.remove(name)
        return done

    def batch(self, ran: Ran) -> Batch:
        """Return the shape of a scheduled iteration that is not complete."""
        return batch_of(self.jobs, ran.rows, ran.tokens)

    def seconds(self, ran: Ran, execution: float) -> float:
        """Return the seconds of an iteration that computes for `execution` seconds, with its copies."""
        if not ran.copied:  # `copy_seconds` may be inf
            return execution
        copying = ran.copied * self.copy_seconds
        return max(execution, copying) if self.overlap else execution + copying

    def _paused(self, order: Ints) -> Ints:
        """Return the rows that hold a slot and are not in `order`."""
        paused = self.jobs.running & self.jobs.live
        paused[order] = False
        return np.flatnonzero(paused)


def _or_never(target: float | None) -> float:
    return float("inf") if target is None else target
