"""What do papers report that a simulation's outcome does not say?

Observers of one engine's run: how full its memory and its compute are, which tokens came in time. And recipes
as the papers run them: everything waits inside the engine, and decisions are timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.core.cluster import Cluster
from headway.core.engine_spec import EngineSpec, KvUse
from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.memory.budget import KvBudget
from headway.ports import Packer, Planner
from headway.recipes.recipe import Recipe
from headway.sim.observer import Observer
from headway.sim.workload.traffic import Workload
from headway.types import Bools, Floats, Ints, Jobs, Plan, Step

_ROUNDING = 1e-9  # seconds


def inside(recipe: Recipe, clock: list[float]) -> Recipe:
    """Return a recipe whose requests all wait inside the engine, as in the papers, by its caller's forecasts.

    clock: gets the wall seconds of each decision.
    """

    def packer(spec: EngineSpec) -> Packer:
        return _Timed(recipe.packer(spec), clock)

    return replace(recipe, lengths="learned", packer=packer, planner=_AtOnce)


class _AtOnce(Planner):
    """All that comes goes in: there is nothing to order where everything is inside one engine."""

    pull = False

    def plan(self, cluster: Cluster, now: float) -> Plan:
        new = np.flatnonzero(cluster.backlog.live & ~cluster.backlog.sent)
        return Plan(dict.fromkeys(cluster.instances, new))


@dataclass(slots=True)
class _Timed(Packer):
    packer: Packer
    clock: list[float]

    @property
    def kv(self) -> KvUse:
        return self.packer.kv

    @property
    def counters(self) -> Mapping[str, int]:
        return self.packer.counters

    def pack(self, jobs: Jobs, ledger: KvBudget, now: float) -> Step:
        began = time.perf_counter()
        step = self.packer.pack(jobs, ledger, now)
        self.clock.append(time.perf_counter() - began)
        return step


@dataclass(slots=True)
class Gauges(Observer):
    """Sums over the iterations that begin before `until`: seconds computed, seconds x KV tokens written,
    seconds x tokens computed, wall seconds of decisions. kv, compute: tokens that stand for full. clock:
    wall seconds of each decision so far.

    What comes after the last arrival is an engine running empty, which says nothing of its utilization.
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
        """Return the mean share of the KV that holds a token's keys and values."""
        return self.written / (self.busy * self.kv)

    @property
    def compute_utilization(self) -> float:
        """Return the mean forward size as a share of the one that saturates the device."""
        return self.forward / (self.busy * self.compute)

    def iteration(
        self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int
    ) -> None:
        """Add an iteration to the sums."""
        if ran.start >= self.until:
            return
        jobs, tokens = engine.jobs, int(ran.tokens.sum())
        written = int(jobs.computed[jobs.live & jobs.running].sum()) + tokens
        self.busy += seconds
        self.thinking += self.clock[-1]
        self.written += seconds * written
        self.forward += seconds * min(tokens, self.compute)


class Prompt(Observer):
    """Which tokens came when they were due? For one instance; the first is not counted, it has its TTFT.

    steady: per promised request, tokens at most tpot after the one before. ahead: those by arrival + ttft
    + k x tpot (k-th after the first), as a client needs them who reads at that pace.
    """

    def __init__(self, workload: Workload) -> None:
        size = len(workload)
        self.steady: Ints = np.zeros(size, np.int64)
        self.ahead: Ints = np.zeros(size, np.int64)
        self._tpot: Floats = np.where(np.isfinite(workload.tpot), workload.tpot, 0.0)  # inf x 0 is no time
        self._start: Floats = workload.arrival + workload.ttft
        self._last: Floats = np.full(size, np.nan)
        self._request: Ints = np.zeros(256, np.int64)

    def entered(self, request: int, instance: int, row: int) -> None:
        """Note which row a request has."""
        if row >= self._request.size:
            more = max(row + 1 - self._request.size, self._request.size)
            self._request = np.concatenate([self._request, np.zeros(more, np.int64)])
        self._request[row] = request

    def returned(self, request: int, now: float) -> None:
        """Its row is void; nothing to note."""

    def iteration(
        self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int
    ) -> None:
        """Note the tokens that come out at this iteration's end."""
        jobs, now = engine.jobs.data[ran.rows], ran.start + seconds - _ROUNDING
        comes: Bools = jobs["computed"] + ran.tokens >= jobs["prompt"] + jobs["output_tokens"]
        who, output_tokens = self._request[ran.rows[comes]], jobs["output_tokens"][comes]
        later = output_tokens > 0
        tpot = self._tpot[who]
        self.steady[who] += later & (now - self._last[who] <= tpot)
        self.ahead[who] += later & (now <= self._start[who] + output_tokens * tpot)
        self._last[who] = now
