"""Round robin between real-time and best-effort requests (BROS 2.2; the baseline of 7.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate
from headway.ports import Packer
from headway.types import Bools, Ints, Jobs, Step


@dataclass(slots=True)
class RoundRobin(Packer):
    """Round robin over two queues by iterations, the simple way to share one engine.

    Requests with a promise and those without stand in queues of their own, each first come, first served.
    The two have every other iteration; one that has nothing to run leaves its turn to the other. Requests
    that pause keep their KV until neither queue has room to go on: then the last of the other queue lose it.
    The paper does not say what becomes of it.

    promised_next: whose turn is next.
    """

    max_running: int
    budget: int
    promised_next: bool = True

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the iteration of the queue whose turn it is, or of the other one."""
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        rows = rows[np.lexsort((jobs.serial[rows], jobs.urgency[rows]))]
        promised = _promised(jobs, rows)
        for turn in (self.promised_next, not self.promised_next):
            step = allocate(jobs, rows[promised == turn], kv_budget, self.max_running, self.budget)
            if step.order.size:
                self.promised_next = not turn
                return step
        first = rows[np.argsort(promised != self.promised_next, kind="stable")]
        return allocate(jobs, first, kv_budget, self.max_running, self.budget)


def _promised(jobs: Jobs, rows: Ints) -> Bools:
    return np.asarray(np.isfinite(np.minimum(np.minimum(jobs.ttft[rows], jobs.tpot[rows]), jobs.e2e[rows])))
