"""Observers of a simulated engine for figures that papers report: utilization and per-token deadlines.

Also recipes in the papers' set-up: every request waits inside the engine, and decisions are timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.policy.core.cluster import Cluster
from headway.policy.core.engine_spec import EngineSpec, KvUse
from headway.policy.memory.budget import KvBudget
from headway.policy.plan.dispatch import sends
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer, Planner
from headway.simulate.outcome import Observer
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Floats, Ints, Jobs, Plan, Step

_ROUNDING = 1e-9  # seconds


def inside(recipe: Recipe, clock: list[float]) -> Recipe:
    """Return a recipe whose requests all wait inside the engine, with the forecasts of the simulation.

    clock: receives the wall seconds of each decision
    """

    def packer(spec: EngineSpec) -> Packer:
        return _TimedPacker(recipe.packer(spec), clock)

    return replace(recipe, lengths="learned", packer=packer, planner=_AtOnce)


class _AtOnce(Planner):
    """A planner that sends every request immediately and leaves their order to the engine."""

    pull = False

    def plan(self, cluster: Cluster, now: float) -> Plan:
        new = np.flatnonzero(cluster.backlog.live & ~cluster.backlog.sent)
        return Plan(sends(dict.fromkeys(cluster.instances, new), cluster, now, pull=False))


@dataclass(slots=True)
class _TimedPacker(Packer):
    """A packer whose decisions are timed."""

    packer: Packer
    clock: list[float]

    @property
    def kv(self) -> KvUse:
        return self.packer.kv

    @property
    def counters(self) -> Mapping[str, int]:
        return self.packer.counters

    def pack(self, jobs: Jobs, budget: KvBudget, now: float) -> Step:
        began = time.perf_counter()
        step = self.packer.pack(jobs, budget, now)
        self.clock.append(time.perf_counter() - began)
        return step


@dataclass(slots=True)
class Gauges(Observer):
    """Sums over the iterations that begin before `until`.

    kv: tokens of the whole KV cache
    compute: tokens of an iteration that saturate the device
    until: the last arrival; afterwards the engine drains, which would distort its utilization
    clock: wall seconds of each decision so far
    busy: seconds computed
    written: seconds x KV tokens written
    forward: seconds x tokens computed
    thinking: wall seconds of decisions
    """

    kv: int
    compute: int
    until: float
    clock: list[float]
    busy: float = 0.0
    written: float = 0.0
    forward: float = 0.0
    thinking: float = 0.0

    @property
    def kv_utilization(self) -> float:
        """Return the mean share of the KV slots that hold a token."""
        return self.written / (self.busy * self.kv)

    @property
    def compute_utilization(self) -> float:
        """Return the mean tokens per iteration as a share of `compute`."""
        return self.forward / (self.busy * self.compute)

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        """Add an iteration to the sums."""
        if ran.start >= self.until:
            return
        jobs, tokens = engine.jobs, int(ran.tokens.sum())
        written = int(jobs.computed[jobs.live & jobs.running].sum()) + tokens
        self.busy += seconds
        self.thinking += self.clock[-1]
        self.written += seconds * written
        self.forward += seconds * min(tokens, self.compute)


class TokenDeadlines(Observer):
    """Counts the tokens that met their deadline on one instance, except first tokens, which count as TTFT.

    steady: tokens at most tpot after the previous one, by request
    ahead: k-th tokens after the first by arrival + ttft + k x tpot, by request
    """

    def __init__(self, workload: Workload) -> None:
        size = len(workload)
        self.steady: Ints = np.zeros(size, np.int64)
        self.ahead: Ints = np.zeros(size, np.int64)
        self._tpot: Floats = np.where(np.isfinite(workload.tpot), workload.tpot, 0.0)  # avoids inf x 0
        self._start: Floats = workload.arrival + workload.ttft
        self._last: Floats = np.full(size, np.nan)
        self._request: Ints = np.zeros(256, np.int64)

    def entered(self, request: int, instance: int, row: int) -> None:
        """Map the engine's row to the request."""
        if row >= self._request.size:
            more = max(row + 1 - self._request.size, self._request.size)
            self._request = np.concatenate([self._request, np.zeros(more, np.int64)])
        self._request[row] = request

    def returned(self, request: int, now: float) -> None:
        """Do nothing: the row is mapped again when the request enters an engine."""

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        """Count the tokens that this iteration generates."""
        jobs, now = engine.jobs.data[ran.rows], ran.start + seconds - _ROUNDING
        generates: Bools = jobs["computed"] + ran.tokens >= jobs["prompt"] + jobs["output_tokens"]
        request, output_tokens = self._request[ran.rows[generates]], jobs["output_tokens"][generates]
        later = output_tokens > 0
        tpot = self._tpot[request]
        self.steady[request] += later & (now - self._last[request] <= tpot)
        self.ahead[request] += later & (now <= self._start[request] + output_tokens * tpot)
        self._last[request] = now
