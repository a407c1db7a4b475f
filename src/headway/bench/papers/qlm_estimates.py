"""QLM's estimator and the cost of its planning, measured without a fleet at work (figures 3, 17 and 19)."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.bench.papers.qlm_workloads import (
    BATCH,
    FIVE,
    INTERACTIVE,
    LONGEST,
    RUNNING,
    Setting,
    burst,
    capacity,
)
from headway.core.cluster import Cluster
from headway.core.controller import Controller
from headway.events import Arrived, Event, InstanceUp
from headway.forecast.lengths.task import TaskLengths
from headway.ports import Planner
from headway.recipes.recipe import Recipe
from headway.recipes.registry import find
from headway.sim import fleet
from headway.sim.instance import SimulatedInstance
from headway.sim.run import Simulation
from headway.types import Floats, Plan, Request, Slo

# The models of QLM 8 by their latency profile: 70B needs four A100s.
ESTIMATED: Mapping[str, str] = {
    "mistral-7b on A100": "llama-2-7b-a100",
    "mistral-7b on A10": "llama-2-7b-a10",
    "vicuna-13b on A100": "opt-13b-a100",
    "llama-70b on 4 A100": "llama-2-70b-a100-tp4",
}


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds until the first token of requests that wait in a queue, forecast and simulated."""

    name: str
    forecast: Floats
    simulated: Floats

    @property
    def r2(self) -> float:
        """Return the coefficient of determination of the forecast."""
        off = np.square(self.simulated - self.forecast).sum()
        return float(1 - off / np.square(self.simulated - self.simulated.mean()).sum())


def waits(name: str, profile: str, count: int, seed: int) -> Waits:
    """Forecast the waits of a queue of `count` ShareGPT requests by Equation 2, and simulate them.

    The forecast knows the mean answer and the throughput of another queue, not the answers of this one.
    """
    work = burst("m", count, seed + 1)
    spec = fleet.Spec(profile, model="m", max_running=RUNNING, max_model_len=LONGEST)
    first = Simulation(find("vllm"), fleet.build([spec]), work).run().first
    mean = float(burst("m", 2000, 0).output.mean())
    ahead = mean * np.maximum(np.arange(len(work)) - RUNNING, 0)
    return Waits(name, ahead / (mean * capacity(profile)), first)


# ---- planning time


class _Timed(Planner):
    """A planner whose plans, and events it takes note of, are timed."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.noting, self.planning = planner, 0.0, 0.0

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        began = time.perf_counter()
        self.planner.on(event, cluster, now)
        self.noting += time.perf_counter() - began

    def plan(self, cluster: Cluster, now: float) -> Plan:
        began = time.perf_counter()
        plan = self.planner.plan(cluster, now)
        self.planning += time.perf_counter() - began
        return plan


@dataclass(frozen=True, slots=True)
class Planning:
    """Wall seconds of a planner with a queue.

    noting: of all arrivals.
    planning: of the first plan for them, in which nothing of an earlier one can be used again.
    """

    queued: int
    instances: int
    noting: float
    planning: float

    @property
    def us_per_request(self) -> float:
        """Return microseconds of planning per queued request."""
        return self.planning / self.queued * 1e6


def planning(recipe: Recipe, queued: int, gpus: int, seed: int) -> Planning:
    """Fill a queue for five models, start a fleet of A100s and plan."""
    setting = Setting("planning", (("a100", gpus),), FIVE, 1.0, 1.0)
    rng, timed = np.random.default_rng(seed), _Timed(recipe.planner())
    core = Controller(timed, TaskLengths(), max_queued=1 << 40)
    work = burst("m", queued + queued // 10, seed)
    model = rng.integers(0, len(FIVE), len(work)).tolist()
    slos: list[Slo] = [INTERACTIVE, BATCH]
    urgent = (rng.random(len(work)) < 0.2).tolist()
    gc.disable()  # nothing is freed while the queue is filled
    for i, (prompt, fast) in enumerate(zip(work.prompt[:queued].tolist(), urgent, strict=False)):
        slo, tier = slos[0 if fast else 1], "interactive" if fast else "batch"
        request = Request(f"r{i}", FIVE[model[i]].name, prompt, 512, i / 1e4, slo, task=tier, tier=tier)
        core.note(Arrived(request), i / 1e4)
    gc.enable()
    now, noting = queued / 1e4, timed.noting
    for spec in setting.instances():
        core.note(InstanceUp(SimulatedInstance(spec, recipe).instance()), now)
    core.decide(now)
    return Planning(queued, gpus, noting, timed.planning)
