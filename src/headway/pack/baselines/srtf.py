"""What runs in the next iteration, if the shortest goes first?

The time a request still needs is its prompt by the pace and its answer by the forecast length. Without
preemption this is shortest job first; with it, shortest remaining time first, which no schedule of one server
beats in mean completion time as far as the forecasts are right (Schrage 1968).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.forecast.latency.online import OnlineLatency
from headway.memory.budget import KvBudget
from headway.pack.allocation import allocate, missing
from headway.ports import Packer
from headway.types import Batch, Floats, Ints, Jobs, Step

_CONTEXT = 512  # tokens per answer in the batch that a token's time is taken from


@dataclass(frozen=True, slots=True)
class Srtf(Packer):
    """Srtf first, by forecast. `preempts`: also before what runs already.

    Who is displaced pauses, and is recomputed later when its blocks are needed (`room.py`).
    """

    max_running: int
    budget: int
    latency: OnlineLatency
    preempts: bool = True

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens to the shortest."""
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        seconds = self.remaining(jobs, rows)
        if not self.preempts:
            seconds = np.where(jobs.running[rows], -1.0, seconds)
        order = rows[np.lexsort((jobs.serial[rows], seconds))]
        return allocate(jobs, order, ledger, self.max_running, self.budget)

    def remaining(self, jobs: Jobs, rows: Ints) -> Floats:
        """Return the seconds each row still needs: prompt (or all it lost) and an iteration per token."""
        want = missing(jobs, rows)
        prompt = np.where(want > 1, self.latency.prefill_seconds(want.astype(float)), 0.0)
        token = self.latency.seconds(Batch(self.max_running, self.max_running * _CONTEXT, 0))
        return np.asarray(prompt + jobs.tokens_left[rows] * token, float)
