"""Iterations of a fixed number of tokens: Dynamic SplitFuse and Sarathi-Serve.

Answers go first, one token each; the rest of a fixed token budget is filled with parts of prompts, so that a
long prompt does not hold up the answers and a short one does not leave the GPU half empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate
from headway.policy.pack.baselines.arrival_order import by_arrival, in_prompt
from headway.ports import Packer
from headway.types import Jobs, Step


@dataclass(frozen=True, slots=True)
class Chunked(Packer):
    """Dynamic SplitFuse of DeepSpeed-FastGen (arXiv 2401.08671, 3) and Sarathi-Serve (OSDI'24, Algorithm 3).

    Both fill `budget` tokens in the same order: every answer in progress, prompts begun before, then new
    prompts by arrival as far as their KV fits, the last one cut where the budget ends. They differ in
    the budget: FastGen takes what saturates the GPU, Sarathi-Serve what the promised time between tokens
    allows (512 in most of its evaluation). EcoServe (2.1, 4) fills FastGen to the forward size that saturates
    the GPU. Where blocks run out the last to arrive yield (`allocation.py`).
    """

    max_running: int
    budget: int

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that fills the budget."""
        running, waiting = by_arrival(jobs)
        begun = in_prompt(jobs, running)
        ranked = np.concatenate([running[~begun], running[begun], waiting[: self.max_running]])
        return allocate(jobs, ranked, kv_budget, self.max_running, self.budget)
