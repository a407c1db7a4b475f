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
from dataclasses import asdict, dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.reservations import pool_blocks
from headway.policy.pack.ecoserve.iteration import decide
from headway.policy.pack.ecoserve.queues import ROW_STATUS
from headway.policy.pack.ecoserve.step_buffer import PROGRESS, EcoServeParams
from headway.ports import Packer
from headway.types import Jobs, Loans, Step


@dataclass(frozen=True, slots=True)
class Options:
    """Which parts of the method are on, and its numbers.

    synced: time-synced groups (else every iteration is scheduled).
    ordered: 3.3's order (else by arrival).
    lends: KVC pipelining.
    tfs: target forward size, tokens of an iteration.
    reserve: share of the KV that is the pool.
    buffer: tokens that a borrower must be predicted to end before its lender comes,
    buffer_share: and this share of the tokens that it is predicted to make.
    extra: tokens an answer gets when it outgrows its prediction.
    idle: share of the KV that lies free before groups are refilled although none has ended.
    grain: tokens by which predicted lengths are equal, 0 = a block.
    loose: of borrowers of equal length the one with the latest deadline, else the first in the queue.
    fixed_ranges: deadlines in 3.3's ranges, of which the last begins at 2 s; else ranges that double.
    hosts_first: generations get allocations of their own before others may borrow, else after.
    lends_to_prompts: a borrower may be a prompt that waits.
    whole: a prompt is admitted with the KV of its answer where that is free, else with its own alone.
    by_cost: a row that must give way is copied, computed again or waited for, whichever is cheapest; else a
        borrower always gives way, and its KV is copied where the engine can.
    """

    synced: bool = True
    ordered: bool = True
    lends: bool = True
    tfs: int = 512
    reserve: float = 0.03
    buffer: int = 8
    extra: int = 32
    idle: float = 0.02
    buffer_share: float = 0.0
    grain: int = 0
    loose: bool = False
    fixed_ranges: bool = False
    hosts_first: bool = False
    lends_to_prompts: bool = True
    whole: bool = True
    by_cost: bool = True


@dataclass(slots=True)
class Counts:
    """What a packer has done so far.

    full: iterations in which generations were scheduled.
    kept: iterations in which the last decision was kept.
    extended: answers that went on from the pool.
    stalled: answers that had to pause for KV.
    lent: loans.
    late: times when a lender met a borrower that had not gone.
    rescued: times when only taking a row's KV let any row run.
    """

    full: int = 0
    kept: int = 0
    extended: int = 0
    stalled: int = 0
    lent: int = 0
    late: int = 0
    rescued: int = 0


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
        idle = max(int(o.idle * kv_budget.total), 1)
        return EcoServeParams(
            min(o.tfs, spec.token_budget),
            min(spec.max_running, spec.token_budget),
            pool_blocks(kv_budget.total, o.reserve),
            o.buffer,
            o.buffer_share,
            o.grain or kv_budget.size,
            o.extra,
            idle,
            o.synced,
            o.ordered,
            o.lends,
            o.loose,
            o.fixed_ranges,
            o.hosts_first,
            o.lends_to_prompts,
            o.whole,
            o.by_cost,
            spec.copy_seconds,
            min(spec.max_model_len, kv_budget.total * kv_budget.size),
            kv_budget.row_chunk,
        )

    @property
    def counts(self) -> Counts:
        """Return what it has done so far."""
        return Counts(**{entry.name: int(self.progress[entry.name][0]) for entry in fields(Counts)})

    @property
    def counters(self) -> dict[str, int]:
        """Return `counts` by name."""
        return asdict(self.counts)
