"""SLO-aware scheduling inside one engine: the order of all its requests, annealed when their set changes.

The paper orders what waits in front of an engine (4.4). Here what runs can be ordered with it: it has only
the rest of its answer to make, and a less urgent one pauses for a more urgent one. Between two changes of
the set, iterations keep the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.policy.core.annealing import sequence
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.mapping import Records, Targets, costs_of
from headway.policy.forecast.latency.laws import SloAware, sampled
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate, free_to_run
from headway.ports import Packer
from headway.types import Ints, Jobs, Step

_REFIT = 256  # iterations after which the law is taken anew from the learned latency


@dataclass(slots=True)
class Annealed(Packer):
    """The packer of recipe `anneal`.

    spec: of the engine.
    preempts: running requests are ordered with the waiting ones; otherwise they go first.
    seed: of the search.
    """

    spec: EngineSpec
    preempts: bool = True
    seed: int = 0
    _rows: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # of the last set
    _serials: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    _order: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # places in `_rows`
    _law: SloAware | None = None
    _taught: int = 0

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        """Return the step that gives slots, blocks and tokens in the annealed order."""
        rows = free_to_run(jobs)
        serials = jobs.serial[rows]
        if not (np.array_equal(rows, self._rows) and np.array_equal(serials, self._serials)):
            self._rows, self._serials = rows, serials
            self._order = self._sequence(jobs, rows, now)
        order = rows[self._order]
        # A rank from outside decides before the packer's own order.
        order = order[np.argsort(jobs.urgency[order], kind="stable")]
        spec = self.spec
        return allocate(jobs, order, kv_budget, spec.max_running, spec.token_budget)

    def _sequence(self, jobs: Jobs, rows: Ints, now: float) -> Ints:
        """Return the places of the rows in the order in which they should be served."""
        arrived = np.argsort(jobs.serial[rows], kind="stable")
        first = arrived[:0] if self.preempts else arrived[jobs.running[rows[arrived]]]
        rest = arrived if self.preempts else arrived[~jobs.running[rows[arrived]]]
        chosen = rows[rest]
        targets = _targets(jobs, chosen, now)
        promised = np.minimum(np.minimum(jobs.ttft[chosen], jobs.tpot[chosen]), jobs.e2e[chosen]) < np.inf
        due = now + np.minimum(targets.ttft, targets.e2e)
        costs = self._costs(jobs, chosen, targets, now)
        seed = self.seed + int(jobs.serial[rows].max(initial=0))
        order, _ = sequence(costs, due, promised, self.spec.max_running, seed)
        return np.asarray(np.concatenate([first, rest[order]]), np.int64)

    def _costs(self, jobs: Jobs, rows: Ints, targets: Targets, now: float) -> Records:
        """Return what each row still takes: the prompt, or all that it lost, and the rest of its answer."""
        known = jobs.prompt[rows] + jobs.output_tokens[rows]
        missing = known - jobs.computed[rows]
        missing = np.where(missing > 1, missing, 0)
        output = np.maximum(jobs.tokens_left[rows], 1.0)
        return costs_of(self._law_now(), missing, known, output, targets, now - jobs.arrival[rows])

    def _law_now(self) -> SloAware:
        latency = self.spec.latency
        if self._law is None or latency.steps >= self._taught + _REFIT:
            self._law, self._taught = sampled(latency.seconds, self.spec.max_running), latency.steps
        return self._law


def _targets(jobs: Jobs, rows: Ints, now: float) -> Targets:
    """Return the SLOs from now on.

    An answer in progress owes no first token any more; if that was late, its SLO cannot be met. Its tpot says
    when its last token is due, pauses included.
    """
    waited, out = now - jobs.arrival[rows], jobs.output_tokens[rows] > 0
    tpot, after_first = jobs.tpot[rows], jobs.output_tokens[rows] - 1 + jobs.tokens_left[rows]
    ends = np.maximum(jobs.first[rows], jobs.line_from[rows]) + tpot * np.maximum(after_first, 1.0) - now
    e2e = np.where(out, np.minimum(jobs.e2e[rows] - waited, ends), jobs.e2e[rows] - waited)
    late = out & (jobs.first[rows] - jobs.arrival[rows] > jobs.ttft[rows])
    return Targets(
        np.where(out, np.inf, jobs.ttft[rows] - waited), np.where(out, np.inf, tpot), np.where(late, -np.inf, e2e)
    )
