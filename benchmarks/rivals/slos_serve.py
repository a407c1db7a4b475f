"""SLOs-Serve (arXiv 2504.08784), by its paper and its published code, without speculation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.rivals.admission import Candidates, CurrentAnswers, edf, edf_sim
from benchmarks.rivals.base import DeadlineView, Memory, Rival, rival
from headway.policy.memory.budget import KvBudget
from headway.types import Bools, Floats, Ints, Jobs, Step

UNDECIDED, ADMITTED, DECLINED = 0.0, 1.0, 2.0


@dataclass(slots=True)
class SlosServe(Rival):
    """Admission by a plan (4.1), then batches as long as the tightest admitted answer can wait (4.2).

    Admitted prompts go by deadline into what a batch leaves beside the answers that fall due before it ends;
    others ride along where time is left. Declined requests, and those without an SLO, get only that.

    mode: the planner, see `admission.py`.
    share: of each batch's time that is planned; the rest absorbs what the plan does not know.
    retries: declined requests are tried again while their deadline has not passed (not in the paper, where
        they go on to the next replica).
    """

    mode: Literal["edf", "edf_sim"] = "edf"
    share: float = 0.85
    retries: bool = False
    tiers: Memory = field(default_factory=lambda: Memory(UNDECIDED))

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Admit, then return the batch."""
        admitted = self.admit(jobs, view, kv, now)
        order = np.lexsort((view.serial, view.due))
        mine = order[admitted[order]]
        answers, prompts = mine[view.decodes[mine]], mine[~view.decodes[mine]]
        limit = self.limit(view, answers, now)
        end = now + min(limit, self._needed(view, answers, prompts))
        rides = view.due[answers] - view.pace[answers] < end if prompts.size else np.ones(answers.size, bool)
        riders = answers[rides | ~np.isfinite(view.pace[answers])]
        before = float(view.computed[prompts[0]]) if prompts.size else 0.0
        chunk = self.chunk(riders.size, float(view.computed[riders].sum()), limit, before)
        used = min(chunk, int(view.missing[prompts].sum()))
        others = np.concatenate([answers[~rides], order[~admitted[order] & view.decodes[order]]])
        others = others[: others.size if used < chunk else 0]
        extra = self.fitting(view, riders, others, used, limit)
        rest = self._rest(view, admitted, np.concatenate([riders, extra]), chunk, used, limit, kv)
        lent = int(view.blocks[~admitted].sum())
        chosen = np.concatenate([riders, self.filled(view, prompts, used, kv, lent), extra, rest])
        return self.step(jobs, view, chosen, chunk if rest.size else used, kv)

    # ---- admission

    def admit(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Bools:
        """Decide about the requests that have come; return which of all are admitted."""
        tiers = self.tiers.of(jobs)
        tiers[view.rows[~view.promised]] = DECLINED
        tier = tiers[view.rows]
        new = tier == UNDECIDED
        if new.any():
            if self.retries:
                new |= (tier == DECLINED) & view.promised & ~view.running & (view.due > now)
            asked = np.flatnonzero(~view.decodes & (new | (tier == ADMITTED)))
            asked = asked[np.argsort(view.due[asked], kind="stable")]
            chosen = self._plan(view, tier == ADMITTED, asked, new[asked], kv, now)
            tiers[view.rows[asked]] = np.where(chosen, ADMITTED, DECLINED)
            tier = tiers[view.rows]
        return np.asarray(tier == ADMITTED)

    def _plan(self, view: DeadlineView, admitted: Bools, asked: Ints, new: Bools, kv: KvBudget, now: float) -> Bools:
        theta, alone = self.spec.latency.theta, self.seconds(0, 0, 0)
        runs = np.flatnonzero(view.decodes & admitted)
        work = np.array([self.prompt_seconds(tokens) - alone for tokens in view.missing[asked].tolist()])
        context = view.computed + view.missing + self._left(view) / 2
        grows = np.maximum(view.computed + view.missing + self._left(view) - view.blocks * kv.size, 0.0)
        all_ = Candidates(
            view.due[asked], work, view.pace[asked], context[asked], self._left(view)[asked], grows[asked], new
        )
        answers = CurrentAnswers(view.due[runs], view.pace[runs], context[runs], self._left(view)[runs])
        lent = float(view.blocks[~admitted].sum())
        room = (kv.free + lent) * kv.size - float(grows[runs].sum())
        decide = edf if self.mode == "edf" else edf_sim
        return np.asarray(decide(all_, answers, room, now, theta, self.share))

    @staticmethod
    def _left(view: DeadlineView) -> Floats:
        return np.maximum(view.answer - view.output_tokens, 1.0)

    # ---- the batch

    def limit(self, view: DeadlineView, answers: Ints, now: float) -> float:
        """Return the seconds of this batch: until an answer falls due, or its pace where it is late."""
        slack = float(np.min(view.due[answers] - now, initial=np.inf))
        tightest = float(np.min(view.pace[answers], initial=np.inf))
        return self.share * (slack if slack > 0 else tightest)

    def _needed(self, view: DeadlineView, answers: Ints, prompts: Ints) -> float:
        """Return the seconds of a batch with all of these."""
        context, prompt = float(view.computed[answers].sum()), float(view.missing[prompts].sum())
        return self.seconds(answers.size, context, min(prompt, self.spec.token_budget))

    def fitting(self, view: DeadlineView, riders: Ints, others: Ints, prompt: int, limit: float) -> Ints:
        """Return the first of `others` (answers) that fit beside the riders and that many prompt tokens."""
        if not others.size:
            return others
        context = float(view.computed[riders].sum())
        left = limit - self.seconds(riders.size, context, prompt)
        alone = self.seconds(0, 0, 0)
        base = self.seconds(1, 0, 0) - alone
        each = (self.seconds(0, 1_000_000, 0) - alone) / 1_000_000
        costs = np.cumsum(base + each * view.computed[others])
        room = max(self.spec.max_running - riders.size, 0)
        return others[: min(int(np.searchsorted(costs, left)), room)]

    def _rest(
        self, view: DeadlineView, admitted: Bools, decodes: Ints, chunk: int, used: int, limit: float, kv: KvBudget
    ) -> Ints:
        """Return the prompts of best effort that what is left of the chunk reaches, by arrival."""
        context = float(view.computed[decodes].sum())
        left = min(chunk, self.chunk(decodes.size, context, limit)) - used
        waiting = np.flatnonzero(~admitted & ~view.decodes)
        return self.filled(view, waiting[np.argsort(view.serial[waiting])], left, kv)


RECIPE = rival("slos-serve", "SLOs-Serve: admission by deadline (edf), batches by slack", SlosServe)
