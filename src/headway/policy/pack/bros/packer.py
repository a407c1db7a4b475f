"""The BROS packer: real-time requests in time, best effort with what is left (BROS, Algorithm 1, 4.2).

Real-time requests go by urgency and the time they have left, then best-effort ones by ascending swap cost,
first into free places of the batch and then in place of the least urgent real-time ones, as long as the
forecast of the iteration, max(t_exec, t_swap), keeps within the smallest time left. `BatchSize` adapts
the batch size.

Assumed where the paper is silent:
- The time left is T_SLO - t_i - (k_i - 1) T_avg with the T_SLO of the phase: ttft for the first token, k_i
  tpots for the k_i-th after it. That is `due_of` less now: tokens made early count.
- What an answer has gained lets it wait (be replaced), but does not make iterations longer: it bounds them by
  at most its tpot. A first token that is late already bounds nothing, since it cannot be kept any more.
- A real-time request is replaced when its time left is `spare` iterations like this one or more, and only
  while none is kept waiting and they all hold less than a `crowded` share of the KV and of the batch: one
  that pauses stays longer and keeps its KV, and without that bound answers at just the promised pace fill
  the memory and the batch.
- The partial sort ranks twice the batch size. New best-effort prompts cost nothing to swap, so a crowd
  may fill the ranking and find no blocks: where no row was chosen, all best-effort rows with KV are ranked.
- Real-time prompts are whole (no chunked prefill), unless one alone exceeds the token budget. A best-effort
  one comes in parts where it does not fit within the time bound as a whole, as long as real-time requests
  hold less than `parts_below` of the KV: without that, engines too slow for a whole prompt within the bound
  never begin one.
- On plain blocks memory comes from swapping whole best-effort requests out, the last come first; with
  two-ended ones it is there already (`policy/memory/two_ended/allocation.py`). When real-time requests alone
  do not fit, the least urgent goes to the host. On an engine without a host pool both are evicted and
  computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.two_ended.allocation import TwoEndedBudget
from headway.policy.pack.bros.algorithm_1 import algorithm_1
from headway.policy.pack.bros.batch import StepLimits
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Step

_NONE = np.empty(0, np.int64)
_NEVER = np.empty(0)


@dataclass(slots=True)
class BatchSize:
    """The batch size B of Algorithm 1 (BROS 4.2).

    A larger batch does more at once and makes every token slower. As TCP finds its window: begin with a base,
    double after every iteration whose time check kept no real-time request out, fall back to the base when
    it did.

    base: B_base, 128 in the paper.
    most: rows that the engine lets run.
    adapts: False keeps it at the base.
    size: the current B, base <= size <= most.
    """

    base: int = 128
    most: int = 256
    adapts: bool = True
    size: int = 0

    def __post_init__(self) -> None:
        self.base = min(self.base, self.most)
        self.size = self.base

    def learn(self, *, late: bool) -> None:
        """Take note of an iteration. late: its time check kept a real-time request out."""
        if self.adapts:
            self.size = self.base if late else min(2 * self.size, self.most)


@dataclass(slots=True)
class _LastTokens:
    """The instants at which a packer first saw the rows' last tokens: the end of their iterations."""

    instants: Floats = field(default_factory=lambda: np.empty(0))
    seen: Ints = field(default_factory=lambda: np.empty((2, 0), np.int64))

    def at(self, jobs: Jobs, now: float) -> Floats:
        """Return the instant of each row's last token; of a row with none, that it came."""
        data = np.stack([jobs.data["serial"], jobs.data["output_tokens"]])
        instants = np.full(data.shape[1], now)
        size = min(self.seen.shape[1], data.shape[1])
        same = (self.seen[:, :size] == data[:, :size]).all(axis=0)
        instants[:size][same] = self.instants[:size][same]
        self.instants, self.seen = instants, data
        return instants


@dataclass(slots=True)
class Bros(Packer):
    """Algorithm 1 with its adaptive batch size.

    Defaults are what gave more best effort at little loss (docs/papers.md); `bros-paper` is the paper's text.

    two_ended: use two-ended blocks where the engine has them.
    saves: False recomputes what finds no blocks (7.4.1's ablation), True copies it to the host.
    replaces: best-effort requests may take the place of real-time ones.
    spare, crowded: see above.
    lost_last: not in the paper; first tokens that are late already go behind those that can be in time.
    parts_below: best-effort prompts come in parts while real-time requests hold at most this share of the
        KV; below 0 = never.
    parts_fill: share of the time bound that such a part may fill; answers gain time by the rest.
    from_last: the time left counts from the last token (Table 1), so tokens made early do not.
    fixed_bound: what the most urgent request that can be in time has left bounds the iteration (line 4).
        Taken to the letter, a late one would let nothing run beside it.
    returns_early: the first real-time request that is not in time ends the batch (lines 11-12).
    replaces_long: replacing also where only time is short, and whoever waits (lines 24-33).
    most_empty: FindBlock and FindPreemptBlock choose two-ended blocks by their empty slots alone (5.2).
    batch_size: the adaptive B; its `most` is the engine's `max_running`.
    """

    spec: EngineSpec
    two_ended: bool = True
    saves: bool = True
    replaces: bool = True
    spare: float = 2.0
    lost_last: bool = False
    crowded: float = 0.5
    parts_below: float = 0.5
    parts_fill: float = 0.8
    from_last: bool = False
    fixed_bound: bool = False
    returns_early: bool = False
    replaces_long: bool = False
    most_empty: bool = False
    batch_size: BatchSize = field(default_factory=BatchSize)
    _seen: _LastTokens = field(default_factory=lambda: _LastTokens())

    def __post_init__(self) -> None:
        size = self.batch_size
        self.batch_size = BatchSize(size.base, self.spec.max_running, size.adapts)

    @property
    def kv(self) -> KvUse:
        """It saves where the engine has a pool of stated size, or two-ended blocks, which include one."""
        shared = self.two_ended and self.saves and self.spec.two_ended
        return KvUse(
            shared or (self.saves and bool(self.spec.host_tokens)),
            two_ended=shared,
            overlaps_copies=True,
            most_empty=shared and self.most_empty,
        )

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step; rows that control holds are left alone."""
        rows = jobs.rows()
        rows = rows[~jobs.held[rows]]
        limits, moves = self._limits(kv_budget)
        last = self._seen.at(jobs, now) if self.from_last else _NEVER
        step = algorithm_1(limits, jobs.data, rows, moves, last, now, self.spec.latency.theta)
        taken = int(step.room["chosen"][0])
        order, save = step.rows[:taken], step.save[: int(step.room["saved"][0])]
        self.batch_size.learn(late=bool(step.room["late"][0]))
        tokens = step.tokens[:taken]
        evict, save = (_NONE, save) if self.kv.saves else (save, _NONE)
        return Step(order, tokens, evict, save, max_running=limits.batch_limit, token_budget=self.spec.token_budget)

    def _limits(self, kv_budget: KvBudget) -> tuple[StepLimits, Ints]:
        spec, use = self.spec, self.kv
        moves = kv_budget.moves if isinstance(kv_budget, TwoEndedBudget) else _NONE
        copy = spec.copy_seconds if use.saves else 0.0
        batch_limit = min(self.batch_size.size, spec.max_running)
        limits = StepLimits(
            batch_limit,
            spec.token_budget,
            *kv_budget,
            copy,
            use.two_ended,
            self.replaces,
            self.spare,
            self.lost_last,
            self.crowded,
            self.parts_below,
            self.parts_fill,
            self.fixed_bound,
            self.returns_early,
            self.replaces_long,
        )
        return limits, moves
