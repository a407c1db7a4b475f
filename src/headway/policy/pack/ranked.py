"""Packers that go by a fixed rank: vLLM's own order (`Fcfs`), its priorities, earliest deadline.

`Ranked` sorts by any rank and lets the more urgent displace the less urgent even when the batch is full,
which vLLM's priority policy does not (its issue 40004).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from headway.policy.core.engine_spec import EngineSpec, KvUse, PackerParams
from headway.policy.core.ranks import DUE, PRIORITY
from headway.policy.core.sorting import ordered
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.preemption_cost import are_swapped
from headway.policy.pack import kernels
from headway.policy.pack.allocation import allocate, free_to_run
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Step

Rank = Callable[[Jobs, Ints, float], tuple[Floats | Ints, ...]]
_NO_PACE = np.zeros(5)


def by_priority(jobs: Jobs, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Lower priority number first, then arrival."""
    return tuple(kernels.keys_of(PRIORITY, jobs.data, rows)[1:])


def by_due(jobs: Jobs, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Earliest deadline first: first token (or whole answer), never for best effort; then arrival."""
    return tuple(kernels.keys_of(DUE, jobs.data, rows)[1:])


_KINDS: dict[Rank, int] = {by_priority: PRIORITY, by_due: DUE}


@dataclass(frozen=True, slots=True)
class Fcfs(Packer):
    """vLLM's first come, first served: no row is displaced, tokens go to the running ones first."""

    max_running: int

    @property
    def own_order(self) -> bool:
        """vLLM decides by itself, by its own policy; only ranks from outside change the order."""
        return True

    @property
    def params(self) -> PackerParams:
        """The parameters of this packer for compiled loops."""
        return PackerParams(kernels.FCFS, self.max_running, 0, 0, 0.0)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return running rows and enough waiting ones to fill the batch, all in order of arrival."""
        step = kernels.pack(self.params, jobs.data, jobs.rows(), kv_budget, now, _NO_PACE)
        return Step(step.order, max_running=self.max_running)


@dataclass(frozen=True, slots=True)
class StockPriority(Packer):
    """vLLM's own priority policy: the most urgent is admitted first, the least urgent loses memory first.

    No row is displaced when the batch is full. Running rows are served by priority, stock serves them in the
    order in which they were admitted: with a short token budget or short memory single steps differ from it.
    """

    max_running: int

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return running rows, then enough waiting ones to fill the batch, both by priority and arrival."""
        rows = free_to_run(jobs)
        columns = np.array([jobs.urgency[rows], jobs.priority[rows], jobs.arrival[rows]], float)
        order = rows[ordered(columns, jobs.serial[rows])]
        inside, waiting = order[jobs.running[order]], order[~jobs.running[order]]
        kept = np.concatenate([inside[: self.max_running], waiting[: self.max_running]])
        return Step(kept, max_running=self.max_running)


@dataclass(frozen=True, slots=True)
class Ranked(Packer):
    """The most urgent `max_running` jobs run, wherever they stand; urgency set from outside goes first.

    max_gap: seconds that a stream may be silent while it holds its KV.
    """

    rank: Rank
    max_running: int
    budget: int
    max_gap: float = math.inf

    @property
    def params(self) -> PackerParams | None:
        """What compiled loops take for this packer; None for a rank that only Python knows."""
        kind = _KINDS.get(self.rank)
        if kind is None:
            return None
        return PackerParams(kind, self.max_running, self.budget, 0, 0.0, max_gap=self.max_gap)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens in rank order."""
        if (params := self.params) is not None:
            step = kernels.pack(params, jobs.data, jobs.rows(), kv_budget, now, _NO_PACE)
            return Step(step.order, step.caps, step.evict, max_running=self.max_running, token_budget=self.budget)
        rows = free_to_run(jobs)
        columns = (jobs.urgency[rows], *self.rank(jobs, rows, now))
        order = rows[ordered(np.array(columns, float), jobs.serial[rows])]
        order = kernels.silent_streams_first(jobs.data, order, kv_budget, now, self.max_gap)
        return allocate(jobs, order, kv_budget, self.max_running, self.budget)


@dataclass(slots=True)
class Slack(Packer):
    """Least slack first: the time until the next token is due, less the time it takes to make it (BROS 4.2).

    Best-effort jobs fill what is left. How much prompt an iteration computes follows from the smallest slack among
    the answers in progress, by the learned latency, so that they keep their promises.

    max_running: rows that compute in one iteration.
    budget: most tokens of an iteration.
    latency: as learned on this engine.
    min_chunk: prompt tokens computed in any iteration, so that no prompt starves.
    max_step: seconds no iteration with prompts should exceed, so that an arrival is seen in time.
    max_gap: seconds that a stream may be silent while it holds its KV.
    """

    max_running: int
    budget: int
    latency: OnlineLatency
    min_chunk: int = 64
    max_step: float = 0.5
    max_gap: float = math.inf

    @property
    def params(self) -> PackerParams:
        """The parameters of this packer for compiled loops."""
        return PackerParams(
            kernels.SLACK, self.max_running, self.budget, self.min_chunk, self.max_step, max_gap=self.max_gap
        )

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step: on time by least slack, then the late, then best effort by arrival.

        Slack alone pauses but never evicts: a waiting row has ever less of it, so two equals would take each
        other's KV in turn and recompute their prompts forever. Among equals what holds KV goes on.
        """
        step = kernels.pack(self.params, jobs.data, jobs.rows(), kv_budget, now, self.latency.theta)
        return Step(step.order, step.caps, step.evict, max_running=self.max_running, token_budget=self.budget)


@dataclass(frozen=True, slots=True)
class ByRank(Packer):
    """The requests of the planner's lowest rank run, those of one rank by arrival (request eviction, QLM 5).

    swaps: KV of a displaced request goes to the host where that costs less than to compute it again, and
        where the engine has a pool there (GPU-CPU state swapping).
    """

    spec: EngineSpec
    swaps: bool = True

    @property
    def kv(self) -> KvUse:
        """KV is copied where the engine has a pool on the host."""
        able = self.spec.host_tokens != 0 and math.isfinite(self.spec.copy_seconds)
        return KvUse(saves=self.swaps and able, overlaps_copies=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens by rank and arrival."""
        spec, rows = self.spec, free_to_run(jobs)
        columns = np.array([jobs.urgency[rows], jobs.arrival[rows]], float)
        order = rows[ordered(columns, jobs.serial[rows])]
        order = kernels.silent_streams_first(jobs.data, order, kv_budget, now, spec.max_gap_s)
        step = allocate(jobs, order, kv_budget, spec.max_running, spec.token_budget)
        if not (step.evict.size and self.kv.saves):
            return step
        saves = are_swapped(jobs.computed[step.evict], spec.latency.theta, spec.copy_seconds)
        return replace(step, evict=step.evict[~saves], save=step.evict[saves])
