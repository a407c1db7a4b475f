"""vLLM as the papers measured it: prompts in iterations of their own (SOSP'23, 4.3 and 4.5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.core.engine_spec import KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import missing
from headway.policy.pack.baselines.arrival_order import by_arrival, fitting, free_slots, in_prompt
from headway.ports import Packer
from headway.types import Ints, Jobs, Step

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class VllmV0(Packer):
    """vLLM 0.2 to 0.4, `Scheduler._schedule`: first come, first served, the last to arrive yields.

    As long as no request is swapped out and the first waiting prompts fit, whole, into `budget` tokens and
    the free blocks less a `watermark` share of all, the iteration computes only these. Otherwise every
    running request makes one token. There must be a free block for each, one after the other; where there is
    none the last to arrive loses its KV, to be recomputed (`swap`: copied to the host, 4.5). Swapped requests
    come back, by arrival, in an iteration that preempted none.

    Unlike there, a prompt beyond the budget or the watermark is not refused: it is computed in several
    iterations of prompts, and admitted when no other request is inside.
    """

    max_running: int
    budget: int
    swap: bool = False
    watermark: float = 0.01

    @property
    def kv(self) -> KvUse:
        """Preempted requests are swapped to the host."""
        return KvUse(saves=self.swap)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return a step of prompts only, or of answers only."""
        running, waiting = by_arrival(jobs)
        running = running[: self.max_running]
        swapped = waiting[jobs.saved[waiting] > 0]
        if not swapped.size:
            order, tokens = self._prompts(jobs, kv_budget, running, waiting)
            if order.size:
                return self._step(order, tokens)
        return self._answers(jobs, kv_budget, running, swapped)

    def _prompts(self, jobs: Jobs, kv_budget: KvBudget, running: Ints, waiting: Ints) -> tuple[Ints, Ints]:
        """Return the prompts for this iteration and their tokens; empty when none can be computed."""
        begun = running[in_prompt(jobs, running)]
        rest = missing(jobs, begun)
        pledged = int((kv_budget.blocks_for(jobs.computed[begun] + rest) - jobs.blocks[begun]).sum())
        room = kv_budget.free - pledged - self._watermark(kv_budget)
        admitted = waiting[: free_slots(jobs, kv_budget, running, self.max_running)]
        want = missing(jobs, admitted)
        # Of what a prefix cache has, only the blocks that others hold need none that is free.
        needs = kv_budget.blocks_for(jobs.computed[admitted] + want) - jobs.blocks[admitted]
        spare = self.budget - int(rest.sum())
        count = min(fitting(needs, room), fitting(want, spare))
        if not count and admitted.size and not begun.size:
            alone = not running.size and needs[0] <= kv_budget.free
            count = int((needs[0] <= room and want[0] > self.budget) or alone)
        order, tokens = np.concatenate([begun, admitted[:count]]), np.concatenate([rest, want[:count]])
        return order, np.clip(self.budget - (np.cumsum(tokens) - tokens), 0, tokens)

    def _answers(self, jobs: Jobs, kv_budget: KvBudget, running: Ints, swapped: Ints) -> Step:
        """Return the step in which every running row makes a token, as far as blocks go."""
        needs = kv_budget.blocks_for(jobs.computed[running] + 1) - jobs.blocks[running]
        keep = self._keep(needs, jobs.blocks[running], kv_budget.free)
        if keep < running.size:
            stay, go = running[:keep], running[keep:][::-1]
            ones = np.ones(keep, np.int64)
            return self._step(stay, ones, save=go) if self.swap else self._step(stay, ones, evict=go)
        back = swapped[: free_slots(jobs, kv_budget, running, self.max_running)]
        back = back[: self._back(jobs, kv_budget, back, kv_budget.free - int(needs.sum()), not running.size)]
        order = np.concatenate([running, back])
        return self._step(order, np.ones(order.size, np.int64))

    @staticmethod
    def _keep(needs: Ints, holds: Ints, free: int) -> int:
        """Return how many of the running keep their blocks, by arrival; the first always does.

        The n first can go on if one block is free at the last one's turn: after those before took what they
        need, and those after gave back what they hold.
        """
        count = needs.size
        given = np.cumsum(holds[::-1])[::-1] - holds  # what those after each one hold
        enough = free + given - (np.cumsum(needs) - needs) >= 1
        return max(int(np.flatnonzero(enough)[-1]) + 1 if enough.any() else 0, min(count, 1))

    def _back(self, jobs: Jobs, kv_budget: KvBudget, swapped: Ints, free: int, alone: bool) -> int:
        """Return how many of the swapped may come back into `free` blocks."""
        grown = kv_budget.blocks_for(jobs.saved[swapped] + 1)
        asked = kv_budget.blocks_for(jobs.saved[swapped]) + 1
        fits = free - (np.cumsum(grown) - grown) - asked >= self._watermark(kv_budget)
        count = int(fits.argmin()) if not fits.all() else fits.size
        return count or int(alone and grown.size > 0 and grown[0] <= free)

    def _watermark(self, kv_budget: KvBudget) -> int:
        return int(self.watermark * kv_budget.total)

    def _step(self, order: Ints, tokens: Ints, evict: Ints = _NONE, save: Ints = _NONE) -> Step:
        return Step(order, tokens, evict, save, self.max_running, self.budget)
