"""A composite of two papers, no paper's own rule: the strongest parts of SLOs-Serve and QoServe.

SLOs-Serve's greedy admission decides what goes first; QoServe orders the declined, sizes the iterations by
the slack of the answers in progress, and lets every one of these make a token in each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.rivals.base import DeadlineView, rival
from benchmarks.rivals.qoserve import QoServe, level
from benchmarks.rivals.slos_serve import SlosServe
from headway.policy.memory.budget import KvBudget
from headway.types import Jobs, Step


@dataclass(slots=True)
class Composite(QoServe):
    """Admitted prompts by deadline, then declined ones by QoServe's key, in QoServe's iterations.

    share: of SLOs-Serve's plan.
    """

    alpha: float = 17.0
    share: float = 0.85
    door: SlosServe = field(init=False)

    def __post_init__(self) -> None:
        self.door = SlosServe(self.spec, self.line, share=self.share)

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return all answers in progress, then prompts: admitted, declined, relegated."""
        admitted = self.door.admit(jobs, view, kv, now)
        flagged = self.relegated(jobs, view, now) & ~admitted
        levels = np.where(admitted, -1, level(view, flagged))
        keys = np.where(admitted, view.first_due, self.keys(view))
        order = np.lexsort((view.serial, keys, levels))
        answers, prompts = order[view.decodes[order]], order[~view.decodes[order]]
        tokens = self.tokens(view, kv, prompts, now) - answers.size
        self._learn_rate(view, answers, min(tokens, int(view.missing[prompts].sum())))
        chosen = np.concatenate([answers, self.filled(view, prompts, tokens, kv)])
        return self.step(jobs, view, chosen, tokens, kv)


RECIPE = rival("composite", "SLOs-Serve's admission, QoServe's order and iterations", Composite)
