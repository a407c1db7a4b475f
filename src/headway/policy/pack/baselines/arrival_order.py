"""Rows by arrival and what fits beside those that run, for baselines that know nothing else of a request."""

from __future__ import annotations

import numpy as np

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import missing
from headway.types import Bools, Ints, Jobs


def by_arrival(jobs: Jobs) -> tuple[Ints, Ints]:
    """Return the rows that hold a slot and those that wait, by urgency and arrival; held rows in neither."""
    rows = jobs.rows()
    rows = rows[~jobs.held[rows]]
    rows = rows[np.lexsort((jobs.serial[rows], jobs.urgency[rows]))]
    running = jobs.running[rows]
    return rows[running], rows[~running]


def in_prompt(jobs: Jobs, rows: Ints) -> Bools:
    """Tell which running rows still compute their prompt, or recompute what they had."""
    return np.asarray((jobs.output_tokens[rows] == 0) | (missing(jobs, rows) > 1), np.bool_)


def free_slots(jobs: Jobs, kv_budget: KvBudget, running: Ints, max_running: int) -> int:
    """Return how many rows may be admitted beside `running`; rows that control holds keep their slots."""
    holders = int(np.count_nonzero(jobs.running & jobs.live))
    return max(min(max_running - running.size, kv_budget.slots - holders), 0)


def fitting(needs: Ints, room: int) -> int:
    """Return how many of `needs`, from the first on, fit into `room` together."""
    return int(np.searchsorted(np.cumsum(needs), room, "right"))
