"""SLAI (arXiv 2508.01002), by its published code."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.rivals.base import DeadlineView, Memory, Rival, rival
from headway.policy.memory.budget import KvBudget
from headway.types import Floats, Jobs, Step

TOKENS, ROWS = 512, 128  # of an iteration
_NEWEST = 0.05  # weight of an iteration in the mean
FACTORS = (0.5, 1.0, 2.0, 5.0, 10.0)  # iterations before its deadline from which on an answer is urgent


@dataclass(slots=True)
class Slai(Rival):
    """Answers at their last schedulable time, then prompts, then other answers, in 512 tokens.

    The last schedulable time of an answer is the end of its last token + tpot - factor x mean iteration.
    Prompts that have begun go by arrival, waiting ones shortest first, those with an SLO before the others
    (the code's paying class). The ttft is not used, and time that an answer has gained is not carried over.

    factor: the paper has 10, for iterations a tenth as long as here.
    """

    factor: float = 2.0
    tokens: int = TOKENS
    made: Memory = field(default_factory=lambda: Memory(-1.0))
    at: Memory = field(default_factory=lambda: Memory(0.0))
    mean: float = 0.0

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return the four groups in order as far as the tokens and rows of an iteration reach."""
        last = self.last_times(jobs, view, now)
        waits = ~view.running
        group = np.where(view.decodes, np.where(last <= now, 0, 4), np.where(~waits, 1, 3 - view.promised))
        key = np.where(view.decodes, last, np.where(waits, view.missing, view.arrival))
        order = np.lexsort((view.serial, key, group))
        need = np.where(view.decodes, 1, view.missing)[order]
        budget = min(self.tokens, self.spec.token_budget)
        reached = np.cumsum(need) - need < budget
        head = order[reached][: max(min(ROWS, self.spec.max_running), 1)]
        answers = head[view.decodes[head]]
        prompt = budget - answers.size
        prompts = self.filled(view, head[~view.decodes[head]], prompt, kv)
        self._learn(view, answers.size, float(view.computed[answers].sum()), prompt, prompts.size)
        chosen = head[view.decodes[head] | np.isin(head, prompts)]
        return self.step(jobs, view, chosen, prompt if prompts.size else 0, kv)

    def last_times(self, jobs: Jobs, view: DeadlineView, now: float) -> Floats:
        """Return the last instant at which each answer may be scheduled, inf = it has no tpot."""
        made, at = self.made.of(jobs), self.at.of(jobs)
        fresh = view.rows[made[view.rows] != view.output_tokens]
        at[fresh] = now
        made[view.rows] = view.output_tokens
        return np.asarray(at[view.rows] + view.pace - self.factor * self.mean)

    def _learn(self, view: DeadlineView, decodes: int, context: float, prompt: int, prompts: int) -> None:
        """Note how long the iteration takes."""
        tokens = min(prompt, int(view.missing[~view.decodes].sum())) if prompts else 0
        seconds = self.seconds(decodes, context, tokens)
        self.mean = self.mean + _NEWEST * (seconds - self.mean) if self.mean else seconds


RECIPE = rival("slai", "SLAI: answers at their last schedulable time, shortest prompts first", Slai)
