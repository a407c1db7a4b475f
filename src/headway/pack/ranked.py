"""What runs in the next iteration? The rules everybody knows.

`Fcfs` is vLLM's own order. `Ranked` sorts by any rank and lets the more urgent take the place of the less
urgent even when the batch is full, which vLLM's priority policy does not (its issue 40004).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.core.engine_spec import PackerParams
from headway.memory.budget import KvBudget
from headway.pack import kernels
from headway.pack.allocation import allocate, free_to_run
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Step

Rank = Callable[[Jobs, Ints, float], tuple[Floats | Ints, ...]]
_NO_PACE = np.zeros(5)


def by_priority(jobs: Jobs, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Lower priority number first, then arrival."""
    return tuple(kernels.keys_of(kernels.PRIORITY, jobs.data, rows)[1:])


def by_due(jobs: Jobs, rows: Ints, now: float) -> tuple[Floats | Ints, ...]:
    """Earliest deadline first: first token (or whole answer), never for best effort; then arrival."""
    return tuple(kernels.keys_of(kernels.DUE, jobs.data, rows)[1:])


_KINDS: dict[Rank, int] = {by_priority: kernels.PRIORITY, by_due: kernels.DUE}


@dataclass(frozen=True, slots=True)
class Fcfs(Packer):
    """vLLM's first come, first served: nobody is displaced, tokens go to the running ones first."""

    max_running: int

    @property
    def params(self) -> PackerParams:
        """What compiled loops take for this packer."""
        return PackerParams(kernels.FCFS, self.max_running, 0, 0, 0.0)

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return running rows and enough waiting ones to fill the batch, all in order of arrival."""
        step = kernels.pack(self.params, jobs.data, jobs.rows(), ledger, now, _NO_PACE)
        return Step(step.order, max_running=self.max_running)


@dataclass(frozen=True, slots=True)
class StockPriority(Packer):
    """vLLM's own priority policy: who is more urgent comes in first, who is least urgent loses memory first.

    Nobody is displaced when the batch is full. Those inside are served by priority, stock serves them in the
    order in which they came in: with a short token budget or short memory single steps differ from it.
    """

    max_running: int

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return running rows, then enough waiting ones to fill the batch, both by priority and arrival."""
        rows = free_to_run(jobs)
        waiting = ~jobs.running[rows]
        columns = np.array([waiting, jobs.priority[rows], jobs.arrival[rows]], float)
        order = rows[kernels.ordered(columns, jobs.serial[rows])]
        most = rows.size - int(np.count_nonzero(waiting)) + self.max_running
        return Step(order[:most], max_running=self.max_running)


@dataclass(frozen=True, slots=True)
class Ranked(Packer):
    """The most urgent `max_running` jobs run, wherever they stand; urgency set from outside goes first."""

    rank: Rank
    max_running: int
    budget: int

    @property
    def params(self) -> PackerParams | None:
        """What compiled loops take for this packer; None for a rank that only Python knows."""
        kind = _KINDS.get(self.rank)
        return None if kind is None else PackerParams(kind, self.max_running, self.budget, 0, 0.0)

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens in rank order."""
        rows = free_to_run(jobs)
        columns = (jobs.urgency[rows], *self.rank(jobs, rows, now))
        order = kernels.ordered(np.array(columns, float), jobs.serial[rows])
        return allocate(jobs, rows[order], ledger, self.max_running, self.budget)
