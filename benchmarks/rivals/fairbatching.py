"""FairBatching (arXiv 2510.14392), by its paper; no code was found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.rivals.base import DeadlineView, Rival, rival
from headway.policy.memory.budget import KvBudget
from headway.types import Ints, Jobs, Step


@dataclass(slots=True)
class FairBatching(Rival):
    """Three groups by slack within a budget of time: urgent answers, prompts, other answers.

    The budget of an iteration is the least slack of an answer, at least the tightest tpot. An answer is
    urgent if its slack is less than the budget and a tightest tpot more; others are skipped where prompts
    fill the budget. Nothing is given up: what is late is the most urgent.

    share: of the budget that the forecast may fill; the rest absorbs its error.
    """

    share: float = 0.85

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return the three groups as far as the budget reaches."""
        slack = view.due - now
        order = np.lexsort((view.serial, slack))
        tightest = float(np.min(view.pace, initial=np.inf))
        budget = max(float(np.min(slack[view.decodes], initial=np.inf)), tightest)
        if not view.decodes.any():
            budget = tightest
        urgent = view.decodes & (slack < budget + tightest)
        if not np.isfinite(budget):  # nobody inside has a pace: nobody may be skipped for a prompt
            urgent = view.decodes
        limit = self.share * budget
        first = order[urgent[order]]
        first = first[: self.count(view, first, 0.0, limit)]
        prompts = order[~view.decodes[order]]
        context = float(view.computed[first].sum())
        before = float(view.computed[prompts[0]]) if prompts.size else 0.0
        chunk = self.chunk(first.size, context, limit, before)
        used = min(chunk, int(view.missing[prompts].sum()))
        others = order[view.decodes[order] & ~urgent[order]]
        left = limit - self.seconds(first.size, context, used)
        others = others[: self.count(view, others, self.seconds(0, 0, 0), left + self.seconds(0, 0, 0))]
        room = max(self.spec.max_running - first.size, 0)
        chosen = np.concatenate([first, self.filled(view, prompts, used, kv)[:room], others])
        return self.step(jobs, view, chosen, used, kv)

    def count(self, view: DeadlineView, answers: Ints, spent: float, limit: float) -> int:
        """Return how many of these answers, in order, fit into `limit` seconds; at least one if any."""
        alone = self.seconds(0, 0, 0)
        base = self.seconds(1, 0, 0) - alone
        each = (self.seconds(0, 1_000_000, 0) - alone) / 1_000_000
        costs = (spent or alone) + np.cumsum(base + each * view.computed[answers])
        return max(int(np.searchsorted(costs, limit)), int(not spent))


RECIPE = rival("fairbatching", "FairBatching: urgent answers, prompts, other answers by slack", FairBatching)
