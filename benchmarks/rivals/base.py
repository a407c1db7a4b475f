"""What the rivals have in common: deadlines of tokens, a shape's seconds, and the step that follows.

Every rival gets what the default recipe gets: the latency learned on this engine and the length forecasts in
`Jobs`. A rule names the rows of an iteration and its prompt tokens; slots and KV blocks follow from the order
as for every other packer (`policy/pack/allocation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.rivals.deadlines import DeadlineView, view_of
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.ranks import ARRIVAL
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, free_to_run
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer
from headway.types import Floats, Ints, Jobs, Step

Line = Literal["first", "arrival"]
_NONE: Ints = np.empty(0, np.int64)


@dataclass(slots=True)
class Rival(Packer):
    """A packer by the rule of a paper; subclasses decide in `decide`.

    spec: of the engine.
    line: where the deadlines of tokens begin for a request with a tpot. "first": at its first token, as
        mean tpot counts; "arrival": at arrival + ttft, the papers' token line, on which a first token that
        is early becomes time for the others.
    decoding: share of an e2e promise that decoding may take (`deadlines.py`).
    """

    spec: EngineSpec
    line: Line = "first"
    decoding: float = 0.5

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step; rows that control holds are left alone."""
        theta = self.spec.latency.theta
        view = view_of(jobs.data, free_to_run(jobs), theta, self.line == "first", self.decoding)
        return self.decide(jobs, DeadlineView(*view), kv_budget, now)

    def decide(self, jobs: Jobs, view: DeadlineView, kv: KvBudget, now: float) -> Step:
        """Return the step of this paper's rule."""
        raise NotImplementedError

    # ---- seconds, by the learned latency

    def seconds(self, decodes: float, context: float, prompt: float, before: float = 0.0) -> float:
        """Return the seconds of an iteration; before: tokens of the prompt that are computed already."""
        pairs = prompt * before + prompt * prompt / 2
        return float(seconds_of(self.spec.latency.theta, decodes, context, prompt, pairs))

    def prompt_seconds(self, tokens: float) -> float:
        """Return the seconds to compute a prompt of these tokens alone."""
        return float(prefill_of(self.spec.latency.theta, tokens))

    @property
    def token_seconds(self) -> float:
        """Seconds per prompt token, without the base of an iteration and without attention."""
        return max(self.seconds(0, 0, 64) - self.seconds(0, 0, 0), 1e-9) / 64

    def chunk(self, decodes: float, context: float, limit: float, before: float = 0.0) -> int:
        """Return the most prompt tokens that fit an iteration of `limit` seconds; 0 = none do."""
        most, theta = max(self.spec.token_budget - int(decodes), 0), self.spec.latency.theta
        left = limit - self.seconds(decodes, context, 0)
        if left <= 0:
            return 0
        alone = self.seconds(0, 0, 0)
        token = float(seconds_of(theta, 0, 0, 1e3, 0)) / 1e3 - alone / 1e3
        pair = float(seconds_of(theta, 0, 0, 0, 1e6)) / 1e6 - alone / 1e6
        slope = token + pair * before
        root = math.sqrt(slope * slope + 2 * pair * left)
        if slope + root <= 0 or 2 * left >= most * (slope + root):
            return most
        return int(2 * left / (slope + root))

    # ---- the step

    def step(self, jobs: Jobs, view: DeadlineView, chosen: Ints, prompt: int, kv: KvBudget) -> Step:
        """Return the step of `chosen` (places in the view), most urgent first, with at most `prompt` tokens.

        Running rows that are not chosen pause and keep their KV as long as no chosen one needs the room.
        Where nothing of it fits, any row that does runs instead: an engine must not stand still.
        """
        rest = view.running.copy()
        rest[chosen] = False
        ranked = view.rows[np.concatenate([chosen, np.flatnonzero(rest)])]
        decodes = view.rows[chosen[view.decodes[chosen]]]
        tokens = decodes.size + int(jobs.drafts[decodes].sum()) + max(prompt, 0)
        if chosen.size and tokens:
            most, budget = min(chosen.size, self.spec.max_running), min(tokens, self.spec.token_budget)
            step = allocate(jobs, ranked, kv, most, budget)
            if step.order.size:
                return step
        return self._any(jobs, view, ranked, kv)

    def _any(self, jobs: Jobs, view: DeadlineView, ranked: Ints, kv: KvBudget) -> Step:
        others = np.setdiff1d(view.rows, ranked)
        spec = self.spec
        every = np.concatenate([ranked, others[np.argsort(jobs.serial[others])]])
        return allocate(jobs, every, kv, spec.max_running, spec.token_budget)

    def filled(self, view: DeadlineView, order: Ints, prompt: int, kv: KvBudget, lent: int = 0) -> Ints:
        """Return the first prompts of `order` (places) that `prompt` tokens reach and that have room.

        Of those that wait, no more than the batch limit leaves beside the rows that hold KV, and those whose
        prompt fits into free blocks; lent: blocks that others hold and would give up.
        """
        if prompt <= 0 or not order.size:
            return _NONE
        reached = int(np.searchsorted(np.cumsum(view.missing[order]), prompt)) + 1
        head = order[:reached]
        waits = ~view.running[head]
        size, count, blocks = np.cumsum(waits), *self.room(view, kv)
        needs = np.cumsum(np.where(waits, kv.blocks_for(view.missing[head] + 1) + 1, 0))
        fits = (size <= count) & ((needs <= blocks + lent) | ((size == 1) & (not view.running.any())))
        return np.asarray(head[~waits | fits], np.int64)

    def room(self, view: DeadlineView, kv: KvBudget) -> tuple[int, int]:
        """Return the places of the batch and the KV blocks that newcomers may take.

        Prompts that have begun keep the blocks for their rest.
        """
        begun = view.running & ~view.decodes
        rest = kv.blocks_for(view.computed[begun] + view.missing[begun] + 1) - view.blocks[begun]
        count = max(self.spec.max_running - int(view.running.sum()), 0)
        return count, kv.free - int(np.maximum(rest, 0).sum())


class Memory:
    """A number per request of one engine, by its row; a row that another request has taken starts anew."""

    def __init__(self, value: float) -> None:
        self._value = value
        self._owner: Ints = _NONE
        self._values: Floats = np.empty(0)

    def of(self, jobs: Jobs) -> Floats:
        """Return the numbers by row, to be read and written in place until the next call."""
        if self._owner.size < jobs.serial.size:
            more = jobs.serial.size - self._owner.size
            self._owner = np.concatenate([self._owner, np.full(more, -1)])
            self._values = np.concatenate([self._values, np.full(more, self._value)])
        fresh = self._owner != jobs.serial
        self._values[fresh], self._owner[fresh] = self._value, jobs.serial[fresh]
        return self._values


def rival(name: str, about: str, packer: Callable[[EngineSpec], Packer]) -> Recipe:
    """Return a recipe whose whole queue is inside the engine, where the packer sees it."""
    return Recipe(name, about, lambda: Ordered(ARRIVAL, displaces=False, pull=False), packer)
