"""Orca: iteration-level scheduling with memory for the longest answer (OSDI'22, 4.2, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import grant, missing
from headway.policy.pack.baselines.arrival_order import by_arrival, fitting, free_slots
from headway.ports import Packer
from headway.types import Ints, Jobs, Step


@dataclass(frozen=True, slots=True)
class Orca(Packer):
    """Orca's `Select`: first come, first served, iteration by iteration.

    At most `max_running` are chosen. A request is admitted, by arrival, only when the KV for its prompt and
    its longest answer can be reserved beside all others'; so none is ever preempted. Prompts are whole and
    share iterations with answers.

    longest: tokens of the longest sequence that the model takes, which bounds prompt + answer.
    max_answer: tokens of an answer where users say so, None = as many as `longest` leaves room for.

    Unlike there, an iteration has a token `budget`; a prompt too long for it beside a full batch is computed
    in parts.
    """

    max_running: int
    budget: int
    longest: int
    max_answer: int | None = None

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the running requests and those that can be admitted."""
        running, waiting = by_arrival(jobs)
        running = running[: self.max_running]
        inside = np.flatnonzero(jobs.running & jobs.live)
        admitted = waiting[: free_slots(jobs, kv_budget, running, self.max_running)]
        room = kv_budget.total - int(self.reserved(jobs, inside, kv_budget).sum())
        spare = self.budget - int(missing(jobs, running).sum())
        count = fitting(self.reserved(jobs, admitted, kv_budget), room)
        want = missing(jobs, admitted[:count])
        whole = fitting(want, spare)
        if count and not whole and spare > 0 and want[0] > self.budget - self.max_running:
            whole = 1
        order = np.concatenate([running, admitted[:whole]])
        tokens = grant(jobs, order, self.budget)
        return Step(order, tokens, max_running=self.max_running, token_budget=self.budget)

    def reserved(self, jobs: Jobs, rows: Ints, kv_budget: KvBudget) -> Ints:
        """Return the blocks reserved for each row, never more than there are.

        A sequence that is longer than it should be has reserved what it has.
        """
        prompt, least = jobs.prompt[rows], jobs.prompt[rows] + jobs.output_tokens[rows]
        most = np.full_like(prompt, self.longest)
        if self.max_answer is not None:
            most = np.minimum(prompt + self.max_answer, most)
        return np.minimum(kv_budget.blocks_for(np.maximum(most, least)), kv_budget.total)
