"""JITServe (NSDI 2026, arXiv 2504.20068; first version: Tempo), by the rule of its published artifact."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.rivals.base import DeadlineView, Memory, Rival, rival
from headway.policy.memory.budget import KvBudget
from headway.types import Bools, Floats, Ints, Jobs, Step

_DECODE_VALUE = 8.0  # of an output token; a prompt token's is 1
_HIGH = 1.645  # standard deviations above the mean: the 0.95 quantile of an answer
_LEAST = 1e-6  # of the share of a value that is left when a deadline is missed
_SWAPS = 3  # running rows that are displaced at a refresh, at most
_NEWEST = 0.05  # weight of an iteration in the mean
BATCHES = (32, 64, 128)  # rows of the batch: the artifact's script has 32


@dataclass(slots=True)
class JitServe(Rival):
    """The best value per second of service, in a batch that changes slowly (4.1, 4.2).

    A request is worth its tokens, times (deadline / expected end) ** sharpness where that is later. Every
    `frame` seconds the `batch` best by value / remaining seconds are chosen; running ones outside are paused,
    three at most. In between places that become free go to those that wait, by the same order, and the batch
    runs as plain chunked prefill by arrival. Compound requests are plain ones with an e2e deadline here.

    frame: 50 iterations there, about 300 ms (4.2). sharpness: 100 in the artifact's script.
    """

    batch: int = 128
    frame: float = 0.3
    sharpness: float = 100.0
    inside: Memory = field(default_factory=lambda: Memory(0.0))
    refreshed: float = -np.inf
    mean: float = 0.02

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return the batch's answers, and its prompts by arrival within the token budget."""
        members = self.members(jobs, view, now)
        order = np.flatnonzero(members)
        order = order[np.argsort(view.serial[order])]
        answers, prompts = order[view.decodes[order]], order[~view.decodes[order]]
        chunk = self.spec.token_budget - answers.size
        chosen = np.concatenate([answers, self.filled(view, prompts, chunk, kv)])
        tokens = min(chunk, int(view.missing[prompts].sum()))
        seconds = self.seconds(answers.size, float(view.computed[answers].sum()), tokens)
        self.mean += _NEWEST * (seconds - self.mean)
        return self.step(jobs, view, chosen, tokens, kv)

    def members(self, jobs: Jobs, view: DeadlineView, now: float) -> Bools:
        """Return the rows of the batch, after a refresh where one is due."""
        inside = self.inside.of(jobs)
        size = min(self.batch, self.spec.max_running)
        due = now - self.refreshed >= self.frame
        free = size - int((inside[view.rows] > 0).sum())
        if due or free > 0:
            order = np.lexsort((view.serial, -self.keys(jobs, view, now)))
            outside = order[inside[view.rows[order]] == 0]
            inside[view.rows[outside[: max(free, 0)]]] = 1.0
            if due:
                self.refreshed = now
                self._swap(inside, view, order, size)
        return np.asarray(inside[view.rows] > 0)

    @staticmethod
    def _swap(inside: Floats, view: DeadlineView, order: Ints, size: int) -> None:
        """Let the best that are outside take the places of the worst inside."""
        best = order[:size]
        coming = best[inside[view.rows[best]] == 0]
        behind = order[size:][::-1]
        going = behind[inside[view.rows[behind]] > 0]
        count = min(coming.size, going.size, _SWAPS)
        inside[view.rows[going[:count]]] = 0.0
        inside[view.rows[coming[:count]]] = 1.0

    def keys(self, jobs: Jobs, view: DeadlineView, now: float) -> Floats:
        """Return value / remaining seconds; 0 for what was promised nothing."""
        data = jobs.data[view.rows]
        left = np.maximum(view.answer * (1 + _HIGH * data["spread"]) - view.output_tokens, 1.0)
        rest = self.mean * left
        end = now - view.arrival + rest
        whole = np.where(np.isfinite(data["tpot"]), data["tpot"] * (view.output_tokens + left), 0.0)
        whole = np.minimum(data["ttft"] + whole, data["e2e"])
        value = _DECODE_VALUE * left * self._kept(whole, end)
        first = self._kept(np.minimum(data["ttft"], data["e2e"]), now - view.arrival + self.mean)
        prompt = data["prompt"] * np.where(view.output_tokens == 0, first, 1.0)
        value += prompt + _DECODE_VALUE * view.output_tokens
        return np.where(view.promised, value / rest, 0.0)

    def _kept(self, deadline: Floats, end: Floats) -> Floats:
        """Return the share of a value that is left when it ends so many seconds after its arrival."""
        return np.asarray(np.clip(deadline / end, _LEAST, 1.0) ** self.sharpness)


RECIPE = rival("jitserve", "JITServe: value per second of service, a batch of 128", JitServe)
