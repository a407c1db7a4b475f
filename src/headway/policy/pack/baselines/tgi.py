"""Text Generation Inference: prompts in iterations of their own, KV held for the whole answer (BROS 7.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, grant, missing
from headway.policy.pack.baselines.arrival_order import by_arrival, fitting, free_slots, in_prompt
from headway.ports import Packer
from headway.types import Ints, Jobs, Step


@dataclass(slots=True)
class Tgi(Packer):
    """TGI's router, as its releases 1.4 and 2.0 have it (`batching_task` and `State::next_batch`).

    BROS (1, 7.1) says that TGI schedules first come, first served, and nothing more. New requests are taken
    by arrival as far as their prompts fit into `budget` tokens, and prompt and whole answer into the KV that
    is not held for others; so none is preempted. Their prompts are one iteration, in which the others pause.
    Before the next prompts comes at least one iteration of answers; and with answers in progress, prompts
    come only if they are at least `waiting_served_ratio` times as many, or `max_waiting_tokens` iterations
    after the last ones.

    TGI knows the longest answer of a request (`max_new_tokens`); here it is the forecast one. In the paper's
    tests it is the true length, as models must generate a given number of tokens (7.1). An answer that
    outgrows it takes free KV; where there is none the last to arrive is computed again.

    Unlike there, a prompt beyond the budget is not refused, but computed in several iterations.

    waiting_served_ratio, max_waiting_tokens: the launcher's defaults (release 2.0).
    since: iterations of answers since the last prompts.
    """

    max_running: int
    budget: int
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    since: int = 0

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return a step of prompts only, or of answers only."""
        running, waiting = by_arrival(jobs)
        running = running[: self.max_running]
        prompts = running[in_prompt(jobs, running)]
        if not prompts.size and (self.since or not running.size):
            prompts = self._next_batch(jobs, kv_budget, running, waiting)
        if prompts.size:
            self.since = 0
            tokens = grant(jobs, prompts, self.budget)
            return Step(prompts, tokens, max_running=self.max_running, token_budget=self.budget)
        self.since += 1
        return allocate(jobs, running, kv_budget, self.max_running, self.budget)

    def _next_batch(self, jobs: Jobs, kv_budget: KvBudget, running: Ints, waiting: Ints) -> Ints:
        """Return the waiting rows whose prompts are next; none when they are too few."""
        inside = np.flatnonzero(jobs.running & jobs.live)
        room = kv_budget.total - int(self.reserved(jobs, inside, kv_budget).sum())
        admitted = waiting[: free_slots(jobs, kv_budget, running, self.max_running)]
        count = fitting(self.reserved(jobs, admitted, kv_budget), room)
        want = missing(jobs, admitted[:count])
        whole = fitting(want, self.budget)
        if count and not whole:
            whole = 1  # longer than the whole budget
        waited = self.since + 1 >= self.max_waiting_tokens
        least = 0 if waited else int(self.waiting_served_ratio * running.size)
        return admitted[: whole if whole >= least else 0]

    def reserved(self, jobs: Jobs, rows: Ints, kv_budget: KvBudget) -> Ints:
        """Return the blocks held for each row's prompt and whole answer: what it has at least."""
        tokens = np.ceil(jobs.prompt[rows] + jobs.output_tokens[rows] + jobs.tokens_left[rows])
        blocks = kv_budget.blocks_for(tokens.astype(np.int64))
        return np.asarray(np.clip(blocks, jobs.blocks[rows], kv_budget.total), np.int64)
