"""What the rivals have in common: deadlines of tokens, a shape's seconds, and the step that follows.

Every rival gets what the default recipe gets: the latency learned on this engine and the length forecasts in
`Jobs`. A rule names the rows of an iteration and its prompt tokens; slots and KV blocks follow from the order
as for every other packer (`policy/pack/allocation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.ranks import ARRIVAL
from headway.policy.forecast.latency.online import prefill_of, seconds_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, free_to_run
from headway.policy.pack.kernels import Rows, missing_of, promised
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer
from headway.types import Bools, Floats, Ints, Jobs, Step

SLOWEST_PACE = 0.4  # seconds per token


class DeadlineView(NamedTuple):
    """The rows that control does not hold, with the deadlines of their next tokens, as aligned arrays.

    A request with an e2e promise alone has neither a first deadline nor a pace in these papers' rules, except in
    QoServe, which plans 0.4 s per token for deadlines of minutes. Here every rival plans for it alike: at most that
    pace, in at most a share of the promise, half of it unless a rival says more, at least the seconds of an
    iteration; the first token is due so that the expected answer fits behind it. (With the mean + 2 standard
    deviations of QoServe's text instead of the mean, it keeps 3 to 6 points less on its own ground.)

    missing: tokens to compute before the next one comes out. decodes: it is one, of a running row.
    first_due: instant by which the first token is due; due: the next one; inf = never.
    pace: seconds per token after the first, promised or planned; inf = none.
    answer: expected tokens of the whole answer.
    promised: it has an SLO.
    serial, arrival, output_tokens: as in `Jobs`. blocks: that it holds alone.
    """

    rows: Ints
    missing: Ints
    decodes: Bools
    running: Bools
    computed: Ints
    first_due: Floats
    due: Floats
    pace: Floats
    answer: Floats
    promised: Bools
    serial: Ints
    arrival: Floats
    output_tokens: Ints
    blocks: Ints

    def take(self, which: Ints | Bools) -> DeadlineView:
        """Return some of the rows, in that order."""
        columns: list[Any] = [column[which] for column in self]
        return DeadlineView(*columns)


@compiled
def view_of(jobs: Rows, rows: Ints, theta: Floats, from_first: bool, share: float) -> DeadlineView:
    """Return these rows.

    from_first: the deadlines of a row with a tpot begin at its first token. share: of an e2e promise that
    decoding may take.
    """
    n, decoding, context = rows.size, 0, 0.0
    whole, real, yes = np.zeros((6, n), np.int64), np.zeros((5, n)), np.zeros((3, n), np.bool_)
    for i in range(n):
        row = rows[i]
        yes[1, i], whole[0, i] = jobs["running"][row], missing_of(jobs, row)
        yes[0, i], yes[2, i] = yes[1, i] and whole[0, i] == 1, promised(jobs, row)
        whole[1, i], whole[2, i] = jobs["computed"][row], jobs["serial"][row]
        whole[3, i] = jobs["output_tokens"][row]
        whole[4, i] = jobs["blocks"][row] - jobs["shared"][row]
        real[3, i], real[4, i] = jobs["output_tokens"][row] + jobs["tokens_left"][row], jobs["arrival"][row]
        if yes[0, i]:
            decoding, context = decoding + 1, context + whole[1, i]
    step = seconds_of(theta, decoding, context, 0.0, 0.0)
    for i in range(n):
        real[0, i], real[2, i] = targets(jobs, rows[i], real[3, i], step, share)
        real[1, i] = next_due(jobs, rows[i], real[0, i], real[2, i], from_first)
    return DeadlineView(
        rows,
        whole[0],
        yes[0],
        yes[1],
        whole[1],
        real[0],
        real[1],
        real[2],
        real[3],
        yes[2],
        whole[2],
        real[4],
        whole[3],
        whole[4],
    )


@compiled
def targets(jobs: Rows, row: int, answer: float, step: float, share: float) -> tuple[float, float]:
    """Return the instant by which a row's first token is due and its seconds per token after it.

    answer: expected tokens; step: seconds of an iteration; share: of the promise that decoding may take.
    """
    e2e, pace = jobs["e2e"][row], jobs["tpot"][row]
    if e2e == np.inf:
        return jobs["arrival"][row] + jobs["ttft"][row], pace
    if pace == np.inf:
        pace = max(min(share * e2e / answer, SLOWEST_PACE), step)
    return jobs["arrival"][row] + min(jobs["ttft"][row], e2e - answer * pace), pace


@compiled
def next_due(jobs: Rows, row: int, first_due: float, pace: float, from_first: bool) -> float:
    """Return the instant by which a row's next token is due, inf = never."""
    out, start = jobs["output_tokens"][row], jobs["first"][row]
    if out == 0:
        return float(first_due)
    if first_due < np.inf and not (from_first and jobs["tpot"][row] < np.inf):
        start = max(start, first_due)
    return float(start + out * pace)


Line = Literal["first", "arrival"]
_NONE: Ints = np.empty(0, np.int64)


@dataclass(slots=True)
class Rival(Packer):
    """A packer by the rule of a paper; subclasses decide in `decide`.

    spec: of the engine.
    line: where the deadlines of tokens begin for a request with a tpot. "first": at its first token, as
        mean tpot counts; "arrival": at arrival + ttft, the papers' token line, on which a first token that
        is early becomes time for the others.
    decoding: share of an e2e promise that decoding may take.
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
