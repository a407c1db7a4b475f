"""QoServe (ASPLOS 2026, arXiv 2503.22562; earlier name Niyama), by its paper and its published code."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.rivals.base import DeadlineView, Memory, Rival, rival
from headway.policy.memory.budget import KvBudget
from headway.types import Bools, Floats, Ints, Jobs, Step

GRID = (128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552)  # tokens of an iteration that are tried
_MARGIN = 1.2  # of the forecast seconds
_SCARCE, _SMALL = 0.075, 512  # share of free KV below which an iteration has at most so many tokens
_NEWEST = 0.005  # weight of an iteration in the rate of prompt tokens
ALPHAS = (0.0, 8.0, 17.0, 34.0, 68.0)  # that the paper sweeps, as multiples of a token's prompt seconds


@dataclass(slots=True)
class QoServe(Rival):
    """Hybrid priority, dynamic chunks and eager relegation (3.2 to 3.4).

    Every running answer makes a token in every iteration. The slack of the tightest one sets the tokens of
    the iteration. Prompts go by first deadline + alpha x prompt tokens left; one that cannot start in time
    even alone is relegated, once, behind all others. Where a request has no SLO it comes between the two.

    alpha: in multiples of the seconds that a prompt token takes (8 ms on an A100 with Llama3-8B: 68).
    relegates: False = no request is relegated.
    chunk: tokens of every iteration instead of those that fit the slack; 0 = dynamic.
    by_arrival: prompts by arrival instead (Sarathi's order, the paper's baseline FCFS).
    """

    alpha: float = 68.0
    relegates: bool = True
    chunk_tokens: int = 0
    by_arrival: bool = False
    flags: Memory = field(default_factory=lambda: Memory(0.0))
    rate: float = 0.0

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return all answers in progress, then prompts by their key within the tokens of the iteration."""
        flagged = self.relegated(jobs, view, now)
        order = np.lexsort((view.serial, self.keys(view), level(view, flagged)))
        answers, prompts = order[view.decodes[order]], order[~view.decodes[order]]
        tokens = self.tokens(view, kv, prompts, now) - answers.size
        chosen = np.concatenate([answers, self.filled(view, prompts, tokens, kv)])
        self._learn_rate(view, answers, min(tokens, int(view.missing[prompts].sum())))
        return self.step(jobs, view, chosen, tokens, kv)

    def keys(self, view: DeadlineView) -> Floats:
        """Return the order of prompts: first deadline and a price of the work."""
        if self.by_arrival:
            return view.arrival
        due = np.where(np.isfinite(view.first_due), view.first_due, view.arrival)
        return np.asarray(due + self.alpha * self.token_seconds * view.missing)

    def relegated(self, jobs: Jobs, view: DeadlineView, now: float) -> Bools:
        """Flag the requests that have no KV yet and whose own prompt comes too late; return all flagged."""
        flags = self.flags.of(jobs)
        if self.relegates:
            rate = self.rate or 1.0 / self.token_seconds
            fresh = ~view.running & (view.output_tokens == 0)
            lost = fresh & (now + view.missing / rate > view.first_due)
            flags[view.rows[lost]] = 1.0
        return np.asarray(flags[view.rows] > 0)

    def tokens(self, view: DeadlineView, kv: KvBudget, prompts: Ints, now: float) -> int:
        """Return the tokens of this iteration: the most of the grid that the tightest answer can wait for."""
        budget = self.spec.token_budget
        if self.chunk_tokens:
            return min(self.chunk_tokens, budget)
        grid = [size for size in GRID if size < budget] + [budget]
        if kv.free < _SCARCE * kv.total:
            grid = [size for size in grid if size <= _SMALL] or grid[:1]
        decodes = int(view.decodes.sum())
        slack = float(np.min(view.due[view.decodes] - now, initial=np.inf))
        context, before = float(view.computed[view.decodes].sum()), 0.0
        if prompts.size:
            before = float(view.computed[prompts[0]])
        if np.isinf(slack):
            return grid[-1]
        low, high = 0, len(grid)  # seconds grow with the tokens, so halving finds the largest that fits
        while high - low > 1:
            middle = (low + high) // 2
            seconds = self.seconds(decodes, context, max(grid[middle] - decodes, 0), before)
            low, high = (middle, high) if _MARGIN * seconds <= slack else (low, middle)
        return grid[low]

    def _learn_rate(self, view: DeadlineView, answers: Ints, prompt: int) -> None:
        """Note how many prompt tokens a second the iteration computes."""
        if prompt > 0:
            seconds = self.seconds(answers.size, float(view.computed[answers].sum()), prompt)
            newest = prompt / seconds
            self.rate = self.rate + _NEWEST * (newest - self.rate) if self.rate else newest


def level(view: DeadlineView, flagged: Bools) -> Ints:
    """Return 0 for what can be on time, 1 for what was promised nothing, 2 for what was relegated."""
    return np.where(flagged, 2, np.where(view.promised, 0, 1))


RECIPE = rival("qoserve", "QoServe: slack chunks, deadline + size, eager relegation", QoServe)
