"""Requests by the rank that the planner gave them; who yields is recomputed or swapped by cost (QLM 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.core.sorting import ordered
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.preemption_cost import are_swapped
from headway.policy.pack import kernels
from headway.policy.pack.allocation import allocate, free_to_run
from headway.ports import Packer
from headway.types import Jobs, Step


@dataclass(frozen=True, slots=True)
class ByRank(Packer):
    """The requests of the lowest rank run, those of one rank by arrival (request eviction, QLM 5).

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
