"""Virtual Token Counter inside the engine, which counts tokens as they are served and forecasts none.

`vtc-served` is OSDI '24, algorithm 2, between applications. Hermes' published code calls two other orders VTC, in
which each run counts by itself and none is lifted. In branch ATC25 (`CoInferenceVTC`) the run with the fewest output
tokens is next: `vtc-runs`. In branch SC25 (`ApplicationVTCPolicy`) it is the run that has received least beside its
equal share of all that was served since it came, so that a new run waits behind those that have waited: `vtc-shares`.
Recipe `vtc` stands in the queue before the engine, and charges the expected answer when a request leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headway.policy.core.ranks import ARRIVAL
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import free_to_run
from headway.policy.plan.baselines.vtc import ANSWER_WEIGHT, PROMPT_WEIGHT
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer
from headway.simulate.workload.applications import Applications
from headway.types import Floats, Ints, Jobs, Step


def served_tokens(apps: Applications) -> Recipe:
    """Return algorithm 2 with the applications as its clients."""
    names = list(dict.fromkeys(run.app for run in apps.runs))
    owners = np.array([names.index(run.app) for run in apps.runs])[apps.workload.run]
    return _recipe("vtc-served", apps, owners, PROMPT_WEIGHT, ANSWER_WEIGHT, lifts=True)


def fewest_output_tokens(apps: Applications) -> Recipe:
    """Return the order of Hermes' earlier code."""
    return _recipe("vtc-runs", apps, apps.workload.run, 0.0, 1.0, lifts=False)


def least_beside_its_share(apps: Applications) -> Recipe:
    """Return the order of Hermes' later code. Here runs earn no share while they are outside the LLM."""
    return _recipe("vtc-shares", apps, apps.workload.run, 0.1, 1.0, lifts=False, shares=True)


def _recipe(
    name: str, apps: Applications, owners: Ints, prompt: float, answer: float, *, lifts: bool, shares: bool = False
) -> Recipe:
    def owner(id: str) -> int:
        return int(owners[apps.workload.row_of(id)])

    return Recipe(
        name,
        "Virtual Token Counter by tokens served",
        lambda: Ordered(ARRIVAL, displaces=False, pull=False),
        lambda spec: ServedTokens(spec.max_running, owner, prompt, answer, lifts=lifts, shares=shares),
    )


@dataclass(slots=True)
class ServedTokens(Packer):
    """Running requests go on; of those that wait, the oldest of the owner with the smallest counter is next.

    owner: number of a request's owner, from 0. prompt_weight, answer_weight: what a token costs its owner, charged when
        a request is admitted (its prompt, and its last token, after which it is not seen again) and after each token.
    lifts: an owner with nothing waiting starts no lower than the lowest that waits, or left the queue last.
    shares: what is charged is taken from the counters again, in equal parts of those with requests here.
    """

    max_running: int
    owner: Callable[[str], int]
    prompt_weight: float
    answer_weight: float
    lifts: bool = True
    shares: bool = False
    served: Floats = field(default_factory=lambda: np.zeros(0))  # by owner
    _serial: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # by row, the request that was seen there
    _owner: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    _charged: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # tokens; -1 = not admitted yet
    _last: int = -1

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return running rows by arrival, those that lost their KV, then the others by their owners' turns."""
        rows = free_to_run(jobs)
        rows = rows[np.argsort(jobs.serial[rows], kind="stable")]
        self._note(jobs, rows)
        before = self.served.sum()
        self._charge(jobs, rows)
        if self.shares and rows.size:
            here = np.unique(self._owner[rows])
            self.served[here] -= (self.served.sum() - before) / here.size
        begun = jobs.running[rows] | (self._charged[rows] >= 0)
        first, waiting = rows[begun], rows[~begun]
        first = first[np.argsort(~jobs.running[first], kind="stable")]
        return Step(np.concatenate([first, self._turns(jobs, waiting)]), max_running=self.max_running)

    def _note(self, jobs: Jobs, rows: Ints) -> None:
        """Take in requests that have come, in their order."""
        if rows.size and (more := int(rows.max()) + 1 - self._serial.size) > 0:
            self._serial = np.concatenate([self._serial, np.full(more, -1)])
            self._owner, self._charged = (np.resize(old, self._serial.size) for old in (self._owner, self._charged))
        new = self._serial[rows] != jobs.serial[rows]
        known = rows[~new]
        queue = set(self._owner[known[self._charged[known] < 0]].tolist())
        for row, id in zip(rows[new].tolist(), jobs.names(rows[new]), strict=True):
            owner = self.owner(id)
            if owner >= self.served.size:
                self.served = np.concatenate([self.served, np.zeros(owner + 1 - self.served.size)])
            others = list(queue or {self._last} - {-1})
            if self.lifts and owner not in queue and others:
                self.served[owner] = max(self.served[owner], self.served[others].min())
            queue.add(owner)
            self._serial[row], self._owner[row], self._charged[row] = jobs.serial[row], owner, -1

    def _charge(self, jobs: Jobs, rows: Ints) -> None:
        """Charge prompts that were admitted, and tokens that have come out."""
        admitted = rows[jobs.running[rows] & (self._charged[rows] < 0)]
        if admitted.size:
            self._last = int(self._owner[admitted[-1]])
            cost = self.prompt_weight * jobs.prompt[admitted] + self.answer_weight
            np.add.at(self.served, self._owner[admitted], cost)
            self._charged[admitted] = 0
        inside = rows[self._charged[rows] >= 0]
        tokens = jobs.output_tokens[inside] - self._charged[inside]
        np.add.at(self.served, self._owner[inside], self.answer_weight * tokens)
        self._charged[inside] = jobs.output_tokens[inside]

    def _turns(self, jobs: Jobs, waiting: Ints) -> Ints:
        """Return the rows as the owners' turns come, each at its counter and its own earlier prompts."""
        order = waiting[np.argsort(self._owner[waiting], kind="stable")]
        cost, owner = self.prompt_weight * jobs.prompt[order], self._owner[order]
        begins = np.flatnonzero(np.diff(owner, prepend=-1))
        before = np.cumsum(cost) - cost
        before -= np.repeat(before[begins], np.diff(begins, append=owner.size))
        return np.asarray(order[np.lexsort((jobs.serial[order], self.served[owner] + before))], np.int64)
