"""Allocation of slots, KV blocks and tokens to ranked rows.

Each of the three goes to the most urgent first. A running job that ends up without a slot in the batch keeps
its KV as long as no more urgent row needs the blocks (a pause costs nothing); it is evicted when one does and
evicting less urgent rows is not enough.
"""

from __future__ import annotations

import numpy as np

from headway.policy.memory.budget import KvBudget
from headway.policy.pack import kernels
from headway.types import UNLIMITED, Ints, Jobs, Step


def allocate(jobs: Jobs, ranked: Ints, kv_budget: KvBudget, max_running: int, budget: int) -> Step:
    """Return the step in which the rows of `ranked` (most urgent first) get what there is.

    At most `max_running` rows run, their blocks fit, and at most `budget` tokens are computed,
    `kv_budget.row_chunk` for a prompt. No row is displaced for one that gets no tokens; with
    budget >= max_running (vLLM requires it) the most urgent row always gets some.
    """
    ranked = np.ascontiguousarray(ranked)
    others = int(np.count_nonzero(jobs.running & jobs.live) - np.count_nonzero(jobs.running[ranked]))
    step = kernels.allocate(jobs.data, ranked, others, kv_budget, max_running, budget, budget, 0)
    return Step(step.order, step.caps, step.evict, max_running=max_running, token_budget=budget)


def missing(jobs: Jobs, rows: Ints) -> Ints:
    """Return the tokens each row must compute before its next token comes out: 1 for a decode."""
    return np.asarray(np.maximum(jobs.prompt[rows] + jobs.output_tokens[rows] - jobs.computed[rows], 1), np.int64)


def grant(jobs: Jobs, order: Ints, budget: int, chunk: int | None = None) -> Ints:
    """Share a token budget: one token for every running decode, the rest to prompts in order.

    Prompts get at most `chunk` tokens together (None = the whole rest). Returns the tokens per row of
    `order`; rows that get nothing have 0.
    """
    most = budget if chunk is None else chunk
    return kernels.grant(jobs.data, np.ascontiguousarray(order), budget, most, UNLIMITED)


def free_to_run(jobs: Jobs) -> Ints:
    """Return the rows that control does not hold, ascending."""
    return np.flatnonzero(jobs.live & ~jobs.held)
