"""Who came first? What baselines go by that know nothing else of a request."""

from __future__ import annotations

import numpy as np

from headway.memory.budget import KvBudget
from headway.pack.allocation import missing
from headway.types import Bools, Ints, Jobs


def by_coming(jobs: Jobs) -> tuple[Ints, Ints]:
    """Return the rows that hold a slot and those that wait, each in order of coming; held rows in neither."""
    rows = jobs.rows()
    rows = rows[~jobs.held[rows]]
    rows = rows[np.argsort(jobs.serial[rows])]
    running = jobs.running[rows]
    return rows[running], rows[~running]


def in_prompt(jobs: Jobs, rows: Ints) -> Bools:
    """Tell which running rows still compute what comes before their next token (a prompt, or all again)."""
    return np.asarray((jobs.output_tokens[rows] == 0) | (missing(jobs, rows) > 1), np.bool_)


def places(jobs: Jobs, ledger: KvBudget, running: Ints, max_running: int) -> int:
    """Return how many may be admitted beside `running`; rows that control holds keep their slots."""
    holders = int(np.count_nonzero(jobs.running & jobs.live))
    return max(min(max_running - running.size, ledger.slots - holders), 0)


def fitting(needs: Ints, room: int) -> int:
    """Return how many of `needs`, from the first on, fit into `room` together."""
    return int(np.searchsorted(np.cumsum(needs), room, "right"))
