"""What runs in the next iteration, so that neither compute nor KV is left unused? (EcoServe 3.2.)

Prompts need compute and generations need KV, so they wait in two queues: generations fill the KV with exact
allocations, prompts fill the iteration up to the target forward size. Generations of equal predicted length
run as a group that ends together (time-synced), and as long as no group ends nothing is scheduled anew; both
queues are ordered by deadline range, held KV and length (3.3); reserved tails are lent (3.4).

The paper's text was not at hand for every detail. Assumed: ranges of deadlines double from 0.5 s, of held KV
are 128 tokens; equal lengths are those that fill as many blocks; the pool serves prompts that wait to
generate and answers that outgrow their prediction alike; a guest may still be a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.forecast.latency.online import OnlineLatency
from headway.memory.budget import KvBudget
from headway.memory.reservations import pool_blocks
from headway.pack.ecoserve import step_buffer as places
from headway.pack.ecoserve.iteration import decide
from headway.pack.ecoserve.queues import MINE
from headway.pack.ecoserve.step_buffer import EcoServeParams
from headway.types import Ints, Jobs, Loans, Step


@dataclass(frozen=True, slots=True)
class Options:
    """How much of the method, and its numbers.

    synced: time-synced groups (else every iteration is scheduled). ordered: 3.3's order (else as they came).
    lends: KVC pipelining. tfs: target forward size, tokens of an iteration. reserve: share of the KV that is
    the pool. buffer: tokens a guest must be predicted to end before its host comes. extra: tokens an answer
    gets when it outgrows its prediction. idle: share of the KV that lies free before groups are refilled
    although none has ended.
    """

    synced: bool = True
    ordered: bool = True
    lends: bool = True
    tfs: int = 512
    reserve: float = 0.03
    buffer: int = 8
    extra: int = 32
    idle: float = 0.02

    def but(self, *, reserve: float | None = None, buffer: int | None = None) -> Options:
        """Return the same with another reserve or buffer."""
        reserve = self.reserve if reserve is None else reserve
        return replace(self, reserve=reserve, buffer=self.buffer if buffer is None else buffer)


@dataclass(slots=True)
class Counts:
    """What a packer has done so far.

    full: iterations in which generations were scheduled; kept: in which the last decision was kept. extended:
    answers that went on from the pool; stalled: that had to pause for KV. lent: loans; late: encounters of a
    host and a guest that had not gone. rescued: times when only taking somebody's KV let anybody run.
    """

    full: int = 0
    kept: int = 0
    extended: int = 0
    stalled: int = 0
    lent: int = 0
    late: int = 0
    rescued: int = 0


@dataclass(slots=True)
class EcoServe:
    """EcoServe's scheduler. It keeps its queues from one iteration to the next: one packer for one engine.

    `Jobs.left` must forecast the whole answer when a row comes in (padded, `forecast/lengths/padding.py`). budget:
    most tokens of an iteration. copy_seconds: to move one token's KV between device and host, inf = the
    engine does not swap. longest: tokens, prompt and answer together, that the engine lets one request have.
    """

    budget: int
    latency: OnlineLatency
    options: Options = field(default_factory=Options)
    copy_seconds: float = math.inf
    longest: int = 1 << 31
    mine: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, MINE))
    marks: Ints = field(default_factory=lambda: np.zeros(9, np.int64))

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        """Return the step; the engine must keep `Step.reserve` and `Step.lend`."""
        if self.mine.size < jobs.data.size:
            more = np.zeros(jobs.data.size - self.mine.size, MINE)
            self.mine = np.concatenate([self.mine, more])
        rule, theta = self.rule(ledger), self.latency.theta
        desk = decide(rule, jobs.data, self.mine, self.marks, jobs.rows(), ledger, now, theta)
        runs, loans = desk.n[places.ORDER], desk.n[places.LOANS]
        lend = None
        if loans:
            lend = Loans(desk.guest[:loans], desk.host[:loans], desk.start[:loans], desk.span[:loans])
        return Step(
            desk.order[:runs], desk.tokens[:runs], desk.evict[: desk.n[places.EVICTS]],
            desk.save[: desk.n[places.SAVES]], token_budget=self.budget, reserve=desk.hold[:runs],
            lend=lend,
        )  # fmt: skip

    def rule(self, ledger: KvBudget) -> EcoServeParams:
        """Return the options as compiled loops take them."""
        o = self.options
        idle = max(int(o.idle * ledger.total), 1)
        return EcoServeParams(
            min(o.tfs, self.budget), self.budget, pool_blocks(ledger.total, o.reserve), o.buffer, ledger.size,
            o.extra, idle, o.synced, o.ordered, o.lends, self.copy_seconds,
            min(self.longest, ledger.total * ledger.size),
        )  # fmt: skip

    @property
    def counts(self) -> Counts:
        """Return what it has done so far."""
        return Counts(*(int(count) for count in self.marks[places.FULL :]))
