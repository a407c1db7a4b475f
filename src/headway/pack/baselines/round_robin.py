"""Round robin between real-time and best-effort requests (BROS 6.1, baseline)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.memory.budget import KvBudget
from headway.pack.allocation import allocate
from headway.ports import Packer
from headway.types import Ints, Jobs, Step


@dataclass(frozen=True, slots=True)
class RoundRobin(Packer):
    """Round robin over two queues, the simple way to share one engine.

    Requests with a promise and those without stand in queues of their own, each first come, first served.
    Slots of the batch, blocks and tokens go to the two in turn, a promised one first; where one queue is
    empty the other takes the rest. The paper does not say what takes turns: we assume slots.
    """

    max_running: int
    budget: int

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that gives slots to both queues in turn."""
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        rows = rows[np.lexsort((jobs.serial[rows], jobs.urgency[rows]))]
        return allocate(jobs, rows[_turns(jobs, rows)], kv_budget, self.max_running, self.budget)


def _turns(jobs: Jobs, rows: Ints) -> Ints:
    """Return the order of rows, given by urgency and arrival: by urgency and place in their own queue."""
    promised = np.isfinite(np.minimum(np.minimum(jobs.ttft[rows], jobs.tpot[rows]), jobs.e2e[rows]))
    place = np.where(promised, np.cumsum(promised), np.cumsum(~promised))
    return np.asarray(np.lexsort((~promised, place, jobs.urgency[rows])), np.int64)
