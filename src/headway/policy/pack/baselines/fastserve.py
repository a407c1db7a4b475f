"""FastServe: a skip-join multi-level feedback queue with proactive swapping (arXiv 2305.05920).

Requests that have computed little go first, so short answers are not held up by long ones, and no length
forecast is needed. A prompt's time is known, so a request skips the levels that its first iteration would
overrun (4.1, Algorithm 1); requests that wait give their memory to the host (4.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from headway.policy.core.engine_spec import KvUse
from headway.policy.forecast.latency.online import OnlineLatency, batch_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, missing
from headway.ports import Packer
from headway.tables import Table
from headway.types import Batch, Floats, Ints, Jobs, Step


class Ladder(Table):
    """The level of each row of an engine's `Jobs`; same row numbers, renewed when a row has a new serial.

    level: 0 is served first.
    used: seconds computed since it came to this level.
    place: order of coming to the level.
    since: when it was last given tokens, or came to the level.
    """

    COLUMNS: ClassVar[dict[str, type]] = {"serial": int, "level": int, "used": float, "place": int, "since": float}

    def cover(self, rows: int) -> None:
        """Make at least that many rows."""
        while len(self.keys) < rows:
            self._grow()


@dataclass(slots=True)
class FastServe(Packer):
    """FastServe's skip-join MLFQ with proactive swapping.

    A request of level i is demoted one level after a quantum of 2**i times the shortest iteration, by the
    learned latency. It joins the first level whose quantum covers its first iteration, and is promoted to
    level 0 when it has waited `starve` seconds. Each iteration goes to the lower levels first, in order of
    coming to the level. Where KV is short, and also while less than `spare` of all blocks is free, the
    requests that are scheduled last are swapped out.

    levels, starve: the operator's choice in the paper; the last level has no end. EcoServe (2.1) compares
        with 5 levels, a batch of 8 and KV for the longest sequence per request.
    spare: share of all blocks to be kept free.
    ladder: the level of each row.

    With a `starve` that the backlog exceeds, all requests are copied back and forth for one token each.
    Copies are not charged to a quantum, or a batch that waited for them would be demoted as one.
    """

    max_running: int
    budget: int
    latency: OnlineLatency
    levels: int = 16
    starve: float = 300.0
    spare: float = 0.02
    ladder: Ladder = field(default_factory=Ladder)
    _places: int = 0

    @property
    def kv(self) -> KvUse:
        """Requests scheduled last are swapped to the host."""
        return KvUse(saves=True)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that serves the lowest levels first."""
        rows = jobs.rows()
        self.ladder.cover(len(jobs.keys))
        self._join(jobs, rows, now)
        self._demote(rows, now)
        self._promote(rows, now)
        rows = rows[~jobs.held[rows]]
        ranked = rows[np.lexsort((self.ladder.place[rows], self.ladder.level[rows], jobs.urgency[rows]))]
        step = allocate(jobs, ranked, kv_budget, self.max_running, self.budget)
        self._charge(jobs, step, now)
        out = np.concatenate([step.evict, self._surplus(jobs, kv_budget, ranked, step)])
        return Step(step.order, step.tokens, save=out, max_running=self.max_running, token_budget=self.budget)

    def quantum(self, level: Ints) -> Floats:
        """Return the seconds that may be computed in each of these levels."""
        shortest = self.latency.seconds(Batch(1, 0, 0))
        return np.asarray(np.where(level < self.levels - 1, shortest * 2.0**level, np.inf), float)

    def _join(self, jobs: Jobs, rows: Ints, now: float) -> None:
        """Put new rows at the level whose quantum fits their first iteration."""
        new = rows[self.ladder.serial[rows] != jobs.serial[rows]]
        new = new[np.argsort(jobs.serial[new])]
        if not new.size:
            return
        first = self.latency.prefill_seconds(missing(jobs, new).astype(float))
        level = np.searchsorted(self.quantum(np.arange(self.levels)), first)
        self.ladder.serial[new] = jobs.serial[new]
        self._put(new, np.asarray(level, np.int64), now)

    def _demote(self, rows: Ints, now: float) -> None:
        """Put rows that have used up their quantum one level down."""
        done = rows[self.ladder.used[rows] >= self.quantum(self.ladder.level[rows])]
        done = done[np.argsort(self.ladder.place[done])]
        self._put(done, self.ladder.level[done] + 1, now)

    def _promote(self, rows: Ints, now: float) -> None:
        """Put rows that have starved at level 0."""
        starved = rows[(now - self.ladder.since[rows] >= self.starve) & (self.ladder.level[rows] > 0)]
        starved = starved[np.argsort(self.ladder.since[starved], kind="stable")]
        self._put(starved, np.zeros_like(starved), now)

    def _put(self, rows: Ints, level: Ints, now: float) -> None:
        """Put rows, in this order, at the ends of levels."""
        self.ladder.level[rows], self.ladder.used[rows], self.ladder.since[rows] = level, 0.0, now
        self.ladder.place[rows] = self._places + np.arange(rows.size)
        self._places += rows.size

    def _charge(self, jobs: Jobs, step: Step, now: float) -> None:
        """Charge the coming iteration to the rows that it computes."""
        tokens = missing(jobs, step.order) if step.tokens is None else step.tokens
        ran = step.order[tokens > 0]
        self.ladder.used[ran] += self.latency.seconds(batch_of(jobs, ran, tokens[tokens > 0]))
        self.ladder.since[ran] = now

    def _surplus(self, jobs: Jobs, kv_budget: KvBudget, ranked: Ints, step: Step) -> Ints:
        """Return the paused rows to swap out so that `spare` stays free for arrivals."""
        tokens = missing(jobs, step.order) if step.tokens is None else step.tokens
        grown = np.maximum(kv_budget.blocks_for(jobs.computed[step.order] + tokens), jobs.blocks[step.order])
        growth = int((grown - jobs.blocks[step.order]).sum())
        lacking = int(self.spare * kv_budget.total) - kv_budget.free - int(jobs.blocks[step.evict].sum()) + growth
        idle = ranked[jobs.running[ranked]][::-1]
        idle = idle[~np.isin(idle, np.concatenate([step.order, step.evict]))]
        before = np.cumsum(jobs.blocks[idle]) - jobs.blocks[idle]
        return np.asarray(idle[before < lacking], np.int64)
