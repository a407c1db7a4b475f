"""The EcoServe packer: neither compute nor KV is left unused (EcoServe 3.2).

Prompts need compute and generations need KV, so they wait in two queues: generations fill the KV with exact
allocations, prompts fill the iteration up to the target forward size. Generations of equal predicted length
run as a group that ends together (time-synced), and as long as no group ends nothing is scheduled anew; both
queues are ordered by urgency, deadline range, held KV and length (3.3); reserved tails are lent (3.4).

The paper leaves details open. Assumed: ranges of held KV are 128 tokens; the pool serves prompts that wait to
generate and answers that outgrow their prediction alike; an answer that outgrows it gets `extra` tokens. What
the paper states and `Options` sets otherwise by default can be chosen, one at a time: `headway bench papers
ecoserve` measures them (docs/papers.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.reservations import pool_blocks
from headway.policy.pack.ecoserve.iteration import decide
from headway.policy.pack.ecoserve.queues import ROW_STATUS
from headway.policy.pack.ecoserve.step_buffer import DONE, PROGRESS, EcoServeParams, Options
from headway.ports import Packer
from headway.types import Jobs, Loans, Step


@dataclass(slots=True)
class EcoServe(Packer):
    """EcoServe's scheduler. It keeps its queues from one iteration to the next: one packer for one engine.

    `Jobs.tokens_left` must forecast the whole answer when a row comes in
    (`policy/forecast/lengths/padding.py`). It saves to the host where the engine can copy and that is cheaper
    than computing again.
    """

    spec: EngineSpec
    options: Options = field(default_factory=Options)
    status: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ROW_STATUS))
    progress: NDArray[np.void] = field(default_factory=lambda: np.zeros(1, PROGRESS))

    @property
    def kv(self) -> KvUse:
        """It reserves whole answers, and saves where the engine can copy."""
        return KvUse(saves=math.isfinite(self.spec.copy_seconds), reserves=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step; the engine must keep `Step.reserve` and `Step.lend`."""
        if self.status.size < jobs.data.size:
            more = np.zeros(jobs.data.size - self.status.size, ROW_STATUS)
            self.status = np.concatenate([self.status, more])
        state, theta = (self.status, self.progress), self.spec.latency.theta
        made = decide(self.limits(kv_budget), jobs.data, *state, jobs.rows(), kv_budget, now, theta)
        runs, loans, saves, evicts = made.counts[["order", "loans", "saves", "evicts"]][0].tolist()
        lend = Loans(made.borrower[:loans], made.lender[:loans], made.start[:loans], made.span[:loans])
        return Step(
            made.order[:runs],
            made.tokens[:runs],
            made.evict[:evicts],
            made.save[:saves],
            self.spec.max_running,
            self.spec.token_budget,
            made.hold[:runs],
            lend if loans else None,
        )

    def limits(self, kv_budget: KvBudget) -> EcoServeParams:
        """Return the options as compiled loops take them."""
        o, spec = self.options, self.spec
        return EcoServeParams(
            o._replace(grain=o.grain or kv_budget.size),
            min(o.tfs, spec.token_budget),
            min(spec.max_running, spec.token_budget),
            pool_blocks(kv_budget.total, o.reserve),
            max(int(o.idle * kv_budget.total), 1),
            spec.copy_seconds,
            min(spec.max_model_len, kv_budget.total * kv_budget.size),
            kv_budget.row_chunk,
        )

    @property
    def counters(self) -> dict[str, int]:
        """Return the counters of what the packer has done, by the names in `DONE`."""
        return {name: int(self.progress[name][0]) for name in DONE}
