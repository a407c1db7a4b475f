"""Shortest job first and shortest remaining time first, by forecast length.

The time a request still needs is its prompt by the learned latency and its answer by the forecast length.
With preemption no schedule of one server beats it in mean completion time as far as the forecasts are right
(Schrage 1968).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, free_to_run, missing
from headway.ports import Packer
from headway.types import Batch, Floats, Ints, Jobs, Step

_CONTEXT = 512  # tokens per answer in the batch that a token's time is taken from


@dataclass(frozen=True, slots=True)
class Srtf(Packer):
    """Shortest remaining time first.

    preempts: also before what runs already; the displaced pause, and are recomputed later when their blocks
        are needed (`allocation.py`).
    """

    max_running: int
    budget: int
    latency: OnlineLatency
    preempts: bool = True

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens to the shortest."""
        rows = free_to_run(jobs)
        seconds = self.remaining(jobs, rows)
        waits = ~jobs.running[rows] if not self.preempts else np.zeros(rows.size, np.bool_)
        order = rows[np.lexsort((jobs.serial[rows], seconds, jobs.urgency[rows], waits))]
        return allocate(jobs, order, kv_budget, self.max_running, self.budget)

    def remaining(self, jobs: Jobs, rows: Ints) -> Floats:
        """Return the seconds each row still needs: prompt (or all it lost) and an iteration per token."""
        want = missing(jobs, rows)
        prompt = np.where(want > 1, self.latency.prefill_seconds(want.astype(float)), 0.0)
        token = self.latency.seconds(Batch(self.max_running, self.max_running * _CONTEXT, 0))
        return np.asarray(prompt + jobs.tokens_left[rows] * token, float)
