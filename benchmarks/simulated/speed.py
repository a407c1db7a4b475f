"""Speed of the simulator, and the cost of a packer's decision beside vLLM's `schedule()`.

Simulator: one hour of ShareGPT-like chat on OPT-13B / A100, on one core, at rates up to several times the
engine's capacity; then fleets with `headway`: the same chat, and conversations with prefix caches. Decision: 256
running and 1,000 waiting requests against stock `schedule()`, alternating within one run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from rich.progress import track

from benchmarks.catalog import grounds
from benchmarks.experiment import Result, experiment
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.memory.budget import KvBudget
from headway.policy.recipes.registry import find
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Floats, Jobs, Slo
from headway.whatif.experiment import Fleet
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row

PROFILE = "opt-13b-a100"
RECIPES = ("vllm", "priority", "edf", "slack", "headway")
RATES = (2.0, 4.0, 7.0, 14.0, 28.0)
ENGINES = (4, 16, 64)
FLEET_RATE, FLEET_LOAD = 4.0, 0.7  # chat per second and engine; conversations, as a share of the capacity
RUNNING, WAITING = 256, 1000
_SLO = Slo(ttft=0.4, tpot=0.2)


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """One simulation.

    setting: as rows name it
    core_s: seconds of one core that it took
    simulated: seconds of virtual time
    traced: those of the virtual seconds that have arrivals
    """

    recipe: str
    setting: str
    rate: float
    requests: int
    iterations: int
    core_s: float
    simulated: float
    traced: float


@experiment("speed", "sim", f"Speed of the simulator ({SIMULATED})")
def main(ask: Ask) -> Result:
    """Measure; `quick` simulates 10 minutes instead of an hour, at the highest rate and for the smallest fleet only."""
    duration, rates = (600.0, RATES[-1:]) if ask.quick else (3600.0, RATES)
    points = simulate(rates, duration, ask.seed, bar=not ask.as_json)
    of_fleets = fleets(ENGINES[:1] if ask.quick else ENGINES, duration / 30, ask.seed, bar=not ask.as_json)
    ratios = decisions(200 if ask.quick else 1000, ask.seed)
    workload = (
        f"{SIMULATED}: {PROFILE}, batch limit 256, ShareGPT-like lengths, Poisson, {duration:g} s of "
        f"arrivals ({duration / 30:g} s of a fleet's; with prefix caches, conversations of interactive-chat at "
        f"{FLEET_LOAD:g}x on {grounds.PROFILE}); x_realtime = seconds of arrivals / seconds of one core. Decision: "
        f"{RUNNING} running, {WAITING} waiting."
    )
    rows = [*(row for point in points + of_fleets for row in rows_of(point)), *ratios]
    return Result(rows, workload, lambda: {"speed": plot(points)})


def simulate(rates: Sequence[float], duration: float, seed: int, *, bar: bool) -> list[SpeedPoint]:
    """Run every recipe at every rate, after one short run that compiles."""
    fleet = Fleet(PROFILE)

    def point(recipe: str, rate: float, seconds: float) -> SpeedPoint:
        workload = chat(rate, seconds, seed, fleet.max_model_len)
        return _point(recipe, fleet.instances(workload.models[0]), workload, seconds, f"{rate:g} req/s", rate)

    for recipe in RECIPES:
        point(recipe, 1.0, 60.0)
    jobs = track([*product(rates, RECIPES)], "simulating", disable=not bar)
    return [point(recipe, rate, duration) for rate, recipe in jobs]


def fleets(engines: Sequence[int], seconds: float, seed: int, *, bar: bool) -> list[SpeedPoint]:
    """Run `headway` on fleets without and with prefix caches, after a short run of each kind that compiles."""

    def point(count: int, seconds: float, caches: bool) -> SpeedPoint:
        setting = f"{count} engines"
        if caches:
            ground = grounds.GROUNDS["interactive-chat"]
            work = ground.workload(count, FLEET_LOAD, seconds, seed).between(ground.warm, math.inf)
            return _point("headway", grounds.fleet(count), work, seconds, f"{setting}, prefix caches")
        fleet, rate = Fleet(PROFILE, count), count * FLEET_RATE
        work = chat(rate, seconds, seed, fleet.max_model_len)
        return _point("headway", fleet.instances(work.models[0]), work, seconds, setting, rate)

    for caches in (False, True):
        point(2, 10.0, caches)
    jobs = track([*product(engines, (False, True))], "simulating fleets", disable=not bar)
    return [point(count, seconds, caches) for count, caches in jobs]


def rows_of(point: SpeedPoint) -> list[Row]:
    """Return the figures of one simulation."""
    figures = (
        ("sim.x_realtime", point.traced / point.core_s, "x"),
        ("sim.x_simulated", point.simulated / point.core_s, "x"),
        ("sim.requests", float(point.requests), "requests"),
        ("sim.iteration_us", point.core_s / point.iterations * 1e6, "us"),
    )
    return [Row(id, point.recipe, point.setting, ours, unit) for id, ours, unit in figures]


def _point(
    recipe: str, instances: Sequence[InstanceSpec], workload: Workload, traced: float, setting: str, rate: float = 0.0
) -> SpeedPoint:
    simulation = Simulation(find(recipe), instances, workload)
    began = time.process_time()
    outcome = simulation.run()
    core_s = time.process_time() - began
    end = float(np.nanmax(outcome.end) - workload.arrival[0])
    return SpeedPoint(recipe, setting, rate, len(workload), outcome.iterations, core_s, end, traced)


def chat(rate: float, duration: float, seed: int, longest: int) -> Workload:
    """Return ShareGPT-like chat with an SLO, without requests longer than `longest` tokens."""
    rng = np.random.default_rng(seed)
    workload = make((TrafficClass("chat", 1.0, _SLO),), poisson(rate, duration, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= longest))


# ---- the cost of a decision


def decisions(steps: int, seed: int) -> list[Row]:
    """Return packer.us and packer.ratio (to stock `schedule()` with as many running requests); needs vLLM."""
    from benchmarks.real.hook_overhead import steady

    stock = steady(RUNNING, "stock", steps, seed)
    jobs, budget = crowd(seed)
    packers = {name: find(name).packer(EngineSpec(RUNNING, 8192)) for name in RECIPES}
    times: dict[str, Floats] = {name: np.zeros(steps) for name in ("stock", *packers)}
    for step in range(steps):
        began = time.perf_counter()
        output = stock.schedule()
        times["stock"][step] = time.perf_counter() - began
        stock.complete(output, 0.02)
        for name, packer in packers.items():
            began = time.perf_counter()
            packer.pack(jobs, budget, 20.0)
            times[name][step] = time.perf_counter() - began
    setting = f"{RUNNING} running, {WAITING} waiting"
    middle = {name: float(np.median(seen)) for name, seen in times.items()}
    rows = [Row("packer.us", name, setting, seconds * 1e6, "us") for name, seconds in middle.items()]
    return rows + [Row("packer.ratio", n, setting, middle[n] / middle["stock"], "x") for n in packers]


def crowd(seed: int) -> tuple[Jobs, KvBudget]:
    """Return a table of RUNNING decoding and WAITING new requests, half of each with an SLO."""
    rng, jobs = np.random.default_rng(seed), Jobs(2048)
    for i in range(RUNNING + WAITING):
        running, output_tokens = i < RUNNING, int(rng.integers(1, 200))
        prompt = int(rng.integers(20, 800))
        state = {
            "computed": prompt + output_tokens - 1,
            "output_tokens": output_tokens,
            "first": float(rng.uniform(10, 19)),
        }
        ttft, tpot = (1.0, 0.1) if i % 2 else (np.inf, np.inf)
        jobs.add(
            f"r{i}",
            arrival=float(rng.uniform(0, 10)),
            ttft=ttft,
            tpot=tpot,
            e2e=np.inf,
            prompt=prompt,
            tokens_left=100.0,
            serial=i,
            running=running,
            blocks=-(-(prompt + output_tokens) // 16) if running else 0,
            **(state if running else {}),
        )
    held = int(jobs.blocks.sum())
    return jobs, KvBudget(held + 4000, 4000, 16, 2 * RUNNING)


def plot(points: Sequence[SpeedPoint]) -> bytes:
    """Return a PNG of the speed against the rate."""
    figure, (axes,) = sheet(1, 1, 7, 3.6)
    for recipe in RECIPES:
        mine = [point for point in points if point.recipe == recipe]
        axes.plot([p.rate for p in mine], [p.traced / p.core_s for p in mine], marker="o", label=recipe)
    axes.axhline(1000, color="#999", linewidth=1, linestyle=":")
    axes.set(xlabel="arrivals, req/s", ylabel="times real time", yscale="log", xscale="log")
    rates = sorted({point.rate for point in points})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_title("ShareGPT-like chat, OPT-13B on an A100, one core", fontsize=9)
    axes.legend(fontsize=8)
    return png(figure, SIMULATED)
