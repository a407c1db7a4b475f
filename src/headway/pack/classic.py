"""What runs in the next iteration? The rules everybody knows.

`Fcfs` is vLLM's own order. `Ranked` sorts by any rank and lets the more urgent take the place of the less
urgent even when the batch is full, which vLLM's priority policy does not (its issue 40004).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.memory.ledger import Ledger
from headway.pack.room import arrange
from headway.types import Floats, Ints, Jobs, Step

Rank = Callable[[Jobs, Ints, float], tuple[Floats | Ints, ...]]


def by_priority(jobs: Jobs, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Lower priority number first, then arrival."""
    return jobs.priority[rows], jobs.arrival[rows]


def by_due(jobs: Jobs, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Earliest deadline first: first token (or whole answer), never for best effort; then arrival."""
    first = np.minimum(jobs.ttft[rows], jobs.e2e[rows])
    return jobs.arrival[rows] + first, jobs.arrival[rows]


@dataclass(frozen=True, slots=True)
class Fcfs:
    """vLLM's first come, first served: nobody is displaced, tokens go to the running ones first."""

    max_running: int

    def pack(self, jobs: Jobs, ledger: Ledger, now: float) -> Step:
        """Return running rows and enough waiting ones to fill the batch, all in order of arrival."""
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        running = jobs.running[rows]
        ahead = rows[running][np.argsort(jobs.serial[rows[running]])]
        behind = rows[~running][np.argsort(jobs.serial[rows[~running]])]
        return Step(np.concatenate([ahead, behind[: self.max_running]]), max_running=self.max_running)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The most urgent `max_running` jobs run, wherever they stand; urgency set from outside goes first."""

    rank: Rank
    max_running: int
    budget: int

    def pack(self, jobs: Jobs, ledger: Ledger, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens in rank order."""
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        columns = (jobs.urgency[rows], *self.rank(jobs, rows, now), jobs.serial[rows])
        return arrange(jobs, rows[np.lexsort(columns[::-1])], ledger, self.max_running, self.budget)
