"""MultiRes: fill both the compute and the memory of each iteration (EcoServe 2.1).

Every waiting request asks for tokens of the iteration and for KV; the one whose two demands are nearest to
what is free of both is admitted, and so on until none fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.core.engine_spec import KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, missing
from headway.policy.pack.baselines.arrival_order import by_arrival, free_slots
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Step


@dataclass(frozen=True, slots=True)
class MultiRes(Packer):
    """EcoServe's comparator: the nearest demand first, iteration by iteration.

    No running request is displaced. Free tokens: the `budget` less what those inside compute; free KV: all
    blocks less what is allocated. KV is allocated for prompt + forecast answer at once (exact allocation),
    and the distance is Euclid's (2.1). We assume what the paper leaves open: each demand counts as a share
    of the whole resource, a prompt that does not fit beside a full batch is cut to the free tokens, and where
    an answer outgrows its allocation the last to arrive is swapped to the host (vLLM's rule) and comes back
    before any new request.
    """

    max_running: int
    budget: int

    @property
    def kv(self) -> KvUse:
        """Preempted requests are swapped to the host."""
        return KvUse(saves=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the running, the swapped, and the new requests that fill the batch best."""
        running, waiting = by_arrival(jobs)
        swapped = jobs.saved[waiting] > 0
        old = np.concatenate([running, waiting[swapped]])
        new = self._nearest(jobs, kv_budget, old, waiting[~swapped])
        step = allocate(jobs, np.concatenate([old, new]), kv_budget, self.max_running, self.budget)
        return Step(step.order, step.tokens, save=step.evict, max_running=self.max_running, token_budget=self.budget)

    def _nearest(self, jobs: Jobs, kv_budget: KvBudget, old: Ints, waiting: Ints) -> Ints:
        """Return the waiting rows to admit beside `old`, in the order of choice."""
        whole = np.array([self.budget, kv_budget.total], float)
        inside = np.union1d(old, np.flatnonzero(jobs.running & jobs.live))
        free = whole - self._demand(jobs, kv_budget, inside).sum(0)
        if not old.size:
            free = whole
        demand, chosen = self._demand(jobs, kv_budget, waiting), np.zeros(waiting.size, np.bool_)
        order: list[int] = []
        urgency, long = jobs.urgency[waiting], missing(jobs, waiting) > self.budget - self.max_running
        for _ in range(free_slots(jobs, kv_budget, old, self.max_running)):
            demand[long, 0] = np.minimum(demand[long, 0], max(free[0], 1.0))
            fits = ~chosen & (demand <= free).all(1)
            if not fits.any():
                break
            apart = np.square((free - demand) / whole).sum(1)
            first = fits & (urgency == urgency[fits].min())
            pick = int(np.where(first, apart, np.inf).argmin())
            free, chosen[pick] = free - demand[pick], True
            order.append(pick)
        return waiting[np.array(order, np.int64)]

    def _demand(self, jobs: Jobs, kv_budget: KvBudget, rows: Ints) -> Floats:
        """Return (rows, 2): tokens in this iteration, and blocks for the prompt with the whole answer."""
        tokens = np.minimum(missing(jobs, rows), self.budget)
        length = np.ceil(jobs.prompt[rows] + jobs.output_tokens[rows] + jobs.tokens_left[rows]).astype(np.int64)
        blocks = np.clip(kv_budget.blocks_for(length), jobs.blocks[rows], kv_budget.total)
        return np.stack([tokens, blocks], 1).astype(float)
