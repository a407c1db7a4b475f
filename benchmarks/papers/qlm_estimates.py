"""The accuracy of QLM's estimator and the cost of its planning, without a running fleet (figures 3, 17, 19)."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.qlm_workloads import (
    ANSWER,
    BATCH,
    FIVE,
    INTERACTIVE,
    LONGEST,
    RUNNING,
    QlmModel,
    QlmSetting,
    burst,
    capacity,
)
from headway.events import Arrived, Event, InstanceUp
from headway.policy.core.cluster import Cluster
from headway.policy.core.controller import Controller
from headway.policy.forecast.completion import Pace, Tokens, pace_of
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.ports import Planner
from headway.simulate import fleet
from headway.simulate.instance import SimulatedInstance
from headway.simulate.run import Simulation
from headway.simulate.workload import lengths
from headway.types import Floats, Plan, Request

# The models of QLM 8 by their latency profile: 70B needs four A100s.
ESTIMATED: Mapping[str, str] = {
    "mistral-7b on A100": "llama-2-7b-a100",
    "mistral-7b on A10": "llama-2-7b-a10",
    "vicuna-13b on A100": "opt-13b-a100",
    "llama-70b on 4 A100": "llama-2-70b-a100-tp4",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Forecast and simulated seconds of a queue's requests, in their order.

    name: the forecast quantity and the model.
    """

    name: str
    forecast: Floats
    simulated: Floats

    @property
    def r2(self) -> float:
        """Return the coefficient of determination of the forecast."""
        off = np.square(self.simulated - self.forecast).sum()
        return float(1 - off / np.square(self.simulated - self.simulated.mean()).sum())


def estimates(name: str, profile: str, count: int, seed: int) -> list[Estimate]:
    """Forecast when each of `count` queued ShareGPT requests begins and is complete (QLM 6), and simulate it.

    The forecast knows the latency profile, and lengths and throughput of another queue (QLM 6: offline
    profiling): not the answers of this one.
    """
    history, work = burst("m", 2000, seed), burst("m", count, seed + 1)
    spec = fleet.Spec(profile, model="m", max_running=RUNNING, max_model_len=LONGEST).instances()[0]
    outcome = Simulation(find("vllm"), [spec], work).run()
    tokens = Tokens(float(history.prompt.mean()), float(history.output.mean()), float(history.output.std()))
    kv_tokens = spec.instance.blocks_total * spec.instance.block_size
    pace = pace_of(spec.latency.seconds, tokens, RUNNING, kv_tokens)
    pace = pace_of(spec.latency.seconds, tokens, RUNNING, kv_tokens, _inefficiency(profile, pace))
    begins = np.maximum(np.arange(len(work)) - pace.batch, 0) * pace.share + pace.prefill
    return [
        Estimate(f"first token, {name}", begins, outcome.first),
        Estimate(f"completion, {name}", begins + pace.decode, outcome.end),
    ]


def _inefficiency(profile: str, pace: Pace) -> float:
    """Return epsilon of Equation 4: the forecast throughput over that of a saturated engine."""
    return pace.throughput / (capacity(profile) * pace.tokens.mean)


# ---- planning time


class TimedPlanner(Planner):
    """A planner whose plans and event handlers are timed.

    noting: wall seconds of event handlers. planning: wall seconds of plans and of background computation.
    """

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

    def generate(self, cluster: Cluster, now: float) -> None:
        """Run the background computation, if one is due."""
        began = time.perf_counter()
        work = self.planner.deliberate(cluster, now)
        if work is not None:
            self.planner.conclude(work(), cluster, now)
        self.planning += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class PlanningTimes:
    """Wall seconds of a planner with a queue.

    noting: seconds to handle all arrivals.
    planning: seconds of the first plan for them, which cannot reuse an earlier plan.
    """

    queued: int
    instances: int
    noting: float
    planning: float

    @property
    def us_per_request(self) -> float:
        """Return microseconds of planning per queued request."""
        return self.planning / self.queued * 1e6

    @property
    def arrival_us(self) -> float:
        """Return the mean microseconds in which the planner handles an arrival."""
        return self.noting / self.queued * 1e6


def planning(recipe: Recipe, queued: int, gpus: int, seed: int) -> PlanningTimes:
    """Fill a fleet of A100s and a queue with requests for five models, and time the planning of the queue.

    The plan places and orders every group of the queue.
    """
    setting = QlmSetting("planning", (("a100", gpus),), FIVE, 1.0, 1.0)
    requests = crowd(FIVE, queued, gpus * RUNNING, seed)
    timed, core = filled(recipe, setting, itertools.islice(requests, gpus * RUNNING))
    timed.noting = timed.planning = now = 0.0
    gc.disable()  # nothing is freed while the queue is filled
    for request in requests:
        now = request.arrival
        core.note(Arrived(request), now)
    gc.enable()
    noting = timed.noting
    core.decide(now)
    timed.generate(core.cluster, now)
    return PlanningTimes(queued, gpus, noting, timed.planning)


def filled(recipe: Recipe, setting: QlmSetting, requests: Iterable[Request]) -> tuple[TimedPlanner, Controller]:
    """Return a planner and its controller with requests, from which it has learned the kinds of requests."""
    timed = TimedPlanner(recipe.planner())
    core = Controller(timed, TaskLengths(), max_queued=1 << 40)
    for spec in setting.instances():
        core.note(InstanceUp(SimulatedInstance(spec, recipe).instance()), 0.0)
    for request in requests:
        core.on(Arrived(request), request.arrival)
        timed.generate(core.cluster, request.arrival)
    return timed, core


def crowd(chosen: Sequence[QlmModel], queued: int, before: int, seed: int) -> Iterator[Request]:
    """Yield ShareGPT requests for these models, a fifth of them latency-sensitive: some, then a queue at once.

    The first requests arrive at 100 per second, the queue within a second.
    """
    rng, count = np.random.default_rng(seed), before + queued
    prompts, _ = lengths.draw("sharegpt", count, rng)
    models, urgent = rng.integers(0, len(chosen), count).tolist(), (rng.random(count) < 0.2).tolist()
    for i, prompt in enumerate(prompts.tolist()):
        at = i / 100 if i < before else before / 100 + (i - before) / queued
        slo, tier = (INTERACTIVE, "interactive") if urgent[i] else (BATCH, "batch")
        yield Request(f"r{i}", chosen[models[i]].name, prompt, ANSWER, at, slo, task=tier, tier=tier)
