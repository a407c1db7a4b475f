"""Scorpio (arXiv 2505.23022), by its paper and its published code."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.rivals.base import DeadlineView, Memory, Rival, rival
from headway.policy.memory.budget import KvBudget
from headway.types import Bools, Floats, Ints, Jobs, Step

PROMPTS = 1024  # tokens of an iteration of prompts
_FULL = 0.99  # of the tightest tpot that the iterations of answers may fill
_MARGIN = 0.005  # seconds by which a first token is planned early
_LEAST = 0.1  # credit per step of an answer without a pace, so that it does not starve


@dataclass(slots=True)
class Scorpio(Rival):
    """The TTFT guard and the TPOT guard (4.2, 4.3), in iterations of prompts or of answers.

    TTFT guard: waiting prompts go by deadline; one whose wait, the prompt seconds of all before it and its
    own, exceeds its deadline goes behind all others (the code's option "delay"; its default refuses): it
    is admitted while nothing is inside that can be on time.
    What is behind has no tpot to guard.
    TPOT guard: an answer with twice the tightest tpot takes part in every second step, by credits; a prompt
    is admitted only while the iterations of the answers, counted so, stay below the tightest tpot.

    factor: of the forecast iteration, the paper's epsilon; above 1 it leaves time for prompts.
    prompts: tokens of an iteration of prompts.
    """

    factor: float = 1.25
    prompts: int = PROMPTS
    credits: Memory = field(default_factory=lambda: Memory(0.0))
    delayed: Memory = field(default_factory=lambda: Memory(0.0))

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return an iteration of whole prompts where any is admitted, else one of answers."""
        behind = self.guard_first(jobs, view, now)
        view = view._replace(pace=np.where(behind, np.inf, view.pace))
        keys = np.where(view.running, 0, 1 + np.where(behind, 1, 0))
        order = np.lexsort((view.serial, view.first_due, keys))
        order = order[~view.decodes[order]]
        if (view.promised & view.running & ~behind).any():
            order = order[keys[order] < 2]
        chosen, tokens = self._prompts(view, order, kv)
        if chosen.size:
            return self.step(jobs, view, chosen, tokens, kv)
        answers = self.by_credit(jobs, view)
        return self.step(jobs, view, answers, 0, kv)

    # ---- the TTFT guard

    def guard_first(self, jobs: Jobs, view: DeadlineView, now: float) -> Bools:
        """Put those behind whose first token would be late; return all that are behind."""
        flags = self.delayed.of(jobs)
        waits = np.flatnonzero(~view.running & (view.output_tokens == 0) & (flags[view.rows] == 0))
        waits = waits[np.argsort(view.first_due[waits], kind="stable")]
        waits = waits[np.isfinite(view.first_due[waits])]
        if waits.size and self._late(view, waits, now).any():
            ahead = 0
            for place in waits.tolist():
                tokens = ahead + int(view.missing[place])
                if now + self.prompt_wait(tokens) > view.first_due[place]:
                    flags[view.rows[place]] = 1.0
                else:
                    ahead = tokens
        return np.asarray(flags[view.rows] > 0)

    def prompt_wait(self, tokens: int) -> float:
        """Return the seconds until prompts of that many tokens together are computed."""
        base = self.seconds(0, 0, 0)
        return _MARGIN + base * -(-tokens // self.prompts) + tokens * self.token_seconds

    def _late(self, view: DeadlineView, waits: Ints, now: float) -> Bools:
        total = np.cumsum(view.missing[waits])
        base = self.seconds(0, 0, 0)
        wait = _MARGIN + base * np.ceil(total / self.prompts) + total * self.token_seconds
        return np.asarray(now + wait > view.first_due[waits])

    # ---- the TPOT guard

    def _prompts(self, view: DeadlineView, order: Ints, kv: KvBudget) -> tuple[Ints, int]:
        """Return the prompts of this iteration, whole as far as the budget goes, and their tokens."""
        begun, waits = order[view.running[order]], order[~view.running[order]]
        waits = self.filled(view, waits, self.prompts, kv)
        tokens = int(view.missing[begun].sum())
        chosen: list[int] = begun.tolist()
        shares, contexts = self.shares(view), self.contexts(view)
        runs = np.flatnonzero(view.running)
        for place in waits.tolist():
            size = int(view.missing[place])
            if chosen and tokens + size > self.prompts:
                break
            together = np.concatenate([runs, np.array(chosen[begun.size :], np.int64), [place]])
            if not self._admits(view, together, shares, contexts):
                break
            chosen.append(place)
            tokens += size
        return np.array(chosen, np.int64), tokens

    def _admits(self, view: DeadlineView, rows: Ints, shares: Floats, contexts: Floats) -> bool:
        """Tell whether these together stay below the tightest tpot; shares: 1 / pace."""
        tightest = float(view.pace[rows].min())
        if not np.isfinite(tightest) or rows.size == 1:
            return True
        size = float(np.maximum(shares[rows] * tightest, _LEAST).sum())
        return self.factor * self.seconds(size, size * float(contexts[rows].mean()), 0) <= _FULL * tightest

    @staticmethod
    def shares(view: DeadlineView) -> Floats:
        """Return 1 / pace of each row, 0 without one."""
        return np.asarray(1.0 / view.pace)

    @staticmethod
    def contexts(view: DeadlineView) -> Floats:
        """Return the tokens that each row's answer will attend to half-way."""
        whole = view.computed + np.where(view.decodes, 0, view.missing)
        return np.asarray(whole + np.maximum(view.answer - view.output_tokens, 1.0) / 2)

    def by_credit(self, jobs: Jobs, view: DeadlineView) -> Ints:
        """Return the answers whose credit is enough for this step, and charge them."""
        credits, answers = self.credits.of(jobs), np.flatnonzero(view.decodes)
        answers = answers[np.argsort(view.serial[answers])]
        rows = view.rows[answers]
        tightest = float(np.min(view.pace[answers], initial=np.inf))
        share = tightest / view.pace[answers] if np.isfinite(tightest) else np.ones(answers.size)
        credits[rows] += np.maximum(share, _LEAST)
        runs = credits[rows] >= 1.0 - 1e-9
        credits[rows[runs]] -= 1.0
        return answers[runs]


RECIPE = rival("scorpio", "Scorpio: TTFT and TPOT guards, prompts first", Scorpio)
