"""Replays of one trace on a real vLLM, with a latency profile measured before, between and after them.

A replay keeps the calls, the client's records and the engine's own log of iterations; `pair` simulates the
same calls with the same lengths.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.validate import conformance, features, prefixes
from benchmarks.validate.conformance import StepTally
from headway import clock
from headway.config import Engine
from headway.engines.vllm.process.launch import Child, command, environment, free_port
from headway.engines.vllm.process.sizes import expected
from headway.errors import ConfigError
from headway.models.resolve import resolve
from headway.policy.forecast.latency.measurement import Fits, bias, disturbed
from headway.policy.forecast.latency.profiles import LatencyProfile
from headway.policy.recipes.registry import find
from headway.simulate.run import InstanceSpec, Simulation
from headway.simulate.workload import traffic
from headway.simulate.workload.traffic import Workload
from headway.types import Instance
from headway.whatif import experiment
from headway.whatif.load import generator, mix
from headway.whatif.load.records import Call, Record
from headway.whatif.measured.compare import BURST, steady
from headway.whatif.measured.profile import ProfileMeasurement, ProfileTarget, Rows, device, engine_state, measure
from headway.whatif.measured.systems import STOCK, answering, running

LOADS = {"below": 0.7, "above": 1.3}
_MANY, _FEW = {"workloads": 200, "steps": 25_000}, {"workloads": 2, "steps": 200}  # for each packer
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """The settings of a replay.

    systems: recipes
    loads: {setting: multiple of the measured capacity}
    rates: {setting: requests/s}, instead of `loads`
    duration: seconds of arrivals of each replay
    """

    mix: mix.Mix
    engine: Engine
    systems: tuple[str, ...] = ("vllm", "slack")
    loads: dict[str, float] = field(default_factory=lambda: dict(LOADS))
    rates: dict[str, float] | None = None
    duration: float = 600.0
    seed: int = 0
    quick: bool = False


@dataclass(slots=True)
class Replay:
    """The replay of one load on one system.

    rate: arrivals per second
    records: what the client measured
    rows: the engine's log of iterations
    """

    system: str
    setting: str
    rate: float
    calls: list[Call]
    records: list[Record]
    rows: Rows


@dataclass(slots=True)
class ReplayRun:
    """The replays of one system, and the latency profile measured around them."""

    system: str
    replays: list[Replay]
    measured: ProfileMeasurement
    fits: Fits
    profile: LatencyProfile


@dataclass(slots=True)
class ReplayResults:
    """All measurements.

    capacity: requests/s of the first system; None when rates are given
    conformance: {(recipe, host): steps compared with vLLM's scheduler}
    """

    runs: list[ReplayRun]
    capacity: float | None
    conformance: dict[tuple[str, str], StepTally]


def check(systems: Sequence[str]) -> None:
    """Raise ConfigError unless every name is a recipe: stock vLLM keeps no log of iterations."""
    if not systems:
        raise ConfigError("No system is named.", "Name some recipes, such as vllm,slack.")
    for name in systems:
        if name in STOCK:
            raise ConfigError(
                f"{name} is stock vLLM, which keeps no log of iterations.",
                "Use the recipe vllm: it takes the same steps.",
            )
        find(name)


async def run(setup: ReplaySetup) -> ReplayResults:
    """Run every system, then the step-by-step comparison; with `quick`, compare while the first engine starts."""
    check(setup.systems)
    resolve(setup.engine.model)
    logs = Path(tempfile.mkdtemp(prefix="headway-truth-"))
    _console.print(f"[dim]logs: {logs}[/]")
    capacity: float | None = None
    runs = []
    steps = asyncio.create_task(asyncio.to_thread(_conformance, setup)) if setup.quick else None
    for name in setup.systems:
        async with live(name, setup.engine, logs, setup.mix.names) as target:
            if steps is not None:
                await steps
                gc.collect()
                gc.freeze()  # keeps the garbage collector from scanning vLLM's objects while it measures
            await warm(target, setup)
            if setup.rates is None and capacity is None:
                capacity = await capacity_of(target, setup)
            runs.append(await profiled(name, target, setup, capacity))
    gc.unfreeze()
    found = await (steps or asyncio.to_thread(_conformance, setup))
    return ReplayResults(runs, capacity, found)


@asynccontextmanager
async def live(name: str, engine: Engine, logs: Path, classes: Sequence[str]) -> AsyncIterator[ProfileTarget]:
    """Start engine and gateway of a recipe without prefix caching, yield both addresses, then stop them.

    The engine is not the gateway's child, as only the gateway could read that one's log of iterations.
    """
    port = free_port()
    engine = replace(engine, args=(*engine.args, "--no-enable-prefix-caching"))
    address = f"http://127.0.0.1:{port}"
    _console.print(f"[dim]starting {name} ...[/]")
    child = Child(command(engine, port, name), environment(engine, recipe=name), logs / f"{name}-engine.log")
    async with answering(name, child, f"{address}/health"):
        served = Engine(model=engine.model, served_name=engine.name, url=address)
        async with running(name, served, logs, classes) as url:
            yield ProfileTarget(url, address, engine.name, resolve(engine.model))


async def profiled(name: str, target: ProfileTarget, setup: ReplaySetup, capacity: float | None) -> ReplayRun:
    """Profile, replay, profile, replay, profile, so that the latency profile covers the machine's drift."""
    rng = np.random.default_rng([setup.seed, 77])
    measured = await measure(target, rng, quick=setup.quick)
    replays = []
    for number, setting in enumerate(setup.loads):
        rate = setup.rates[setting] if setup.rates else setup.loads[setting] * (capacity or 0.0)
        calls = calls_at(setup, rate, number)
        _console.print(f"[bold]{name}[/], {setting}: {rate:.3f} req/s, {len(calls)} requests")
        replays.append(await _replay(name, setting, rate, calls, target))
        if not setup.quick:
            measured.add(await measure(target, rng))
    fits = measured.fits()
    return ReplayRun(name, replays, measured, fits, measured.profile(fits, device(), "dummy" in setup.engine.args))


async def _replay(system: str, setting: str, rate: float, calls: list[Call], target: ProfileTarget) -> Replay:
    started = clock.now()
    records = await answered(target, calls)
    async with aiohttp.ClientSession() as session:
        state = await engine_state(session, target)
    rows = [row for row in state["iterations"] if row[0] >= started]
    return Replay(system, setting, rate, calls, records, rows)


async def answered(target: ProfileTarget, calls: Sequence[Call]) -> list[Record]:
    """Send the calls and return their records. Raise KeyboardInterrupt if any was cut off."""
    records = await generator.run(target.url, target.name, calls)
    if len(records) < len(calls) or any(generator.was_cut_off(record) for record in records):
        raise KeyboardInterrupt
    return records


def calls_at(setup: ReplaySetup, rate: float, number: int, *, duration: float | None = None) -> list[Call]:
    """Return the calls of a replay; number: of the replay, which decides on arrivals and lengths."""
    rng = np.random.default_rng([setup.seed, number])
    arrivals = traffic.poisson(rate, duration or setup.duration, rng)
    return mix.calls(setup.mix, arrivals, rng, warn=lambda _: None if number else _console.print(_))


async def warm(target: ProfileTarget, setup: ReplaySetup) -> None:
    """Send a few requests that are not measured: the first batches of a new engine are slow."""
    calls = [replace(call, at=0.0, max_tokens=8) for call in calls_at(setup, 4.0, 1000, duration=3.0)]
    await generator.run(target.url, target.name, calls, progress=False)


async def capacity_of(target: ProfileTarget, setup: ReplaySetup, burst: int = BURST) -> float:
    """Return the requests per second that the system completes when `burst` come at once."""
    calls = [replace(call, at=0.0) for call in calls_at(setup, burst / 10, 2000, duration=20.0)[:burst]]
    capacity = steady(await generator.run(target.url, target.name, calls, progress=False))
    _console.print(f"capacity: {capacity:.3f} req/s ({len(calls)} calls at once)")
    return capacity


def _conformance(setup: ReplaySetup) -> dict[tuple[str, str], StepTally]:
    workloads, steps = (_FEW if setup.quick else _MANY).values()
    mixed = steps // 2  # there are many mixes of features: 100,000 steps in total
    pairs = prefixes.PAIRS[::4] if setup.quick else prefixes.PAIRS
    total = steps * (len(conformance.PAIRS) + len(pairs)) + mixed * len(features.MIXES)
    with Progress(console=_console, transient=True) as progress:
        task = progress.add_task("conformance, steps", total=total)
        rng = np.random.default_rng([setup.seed, 5])

        def advance(steps: int) -> None:
            progress.advance(task, steps)

        found = conformance.run(rng, workloads=workloads, steps=steps, progress=advance)
        found |= features.run(rng, steps=mixed, progress=advance)
        return found | prefixes.run(np.random.default_rng([setup.seed, 6]), pairs, steps=steps, progress=advance)


@dataclass(slots=True)
class TwinPair:
    """A replay beside its simulation, both without requests that did not complete.

    bias: relative error of the latency profile over the replay's iterations; positive: the profile is too slow
    disturbed: seconds of the replay in which another program used the machine
    """

    replay: Replay
    real: list[Record]
    simulated: list[Record]
    bias: float
    disturbed: float


def pair(replay: Replay, run: ReplayRun, setup: ReplaySetup) -> TwinPair:
    """Return a replay and its simulation with the run's latency profile."""
    kept = [(c, r) for c, r in zip(replay.calls, replay.records, strict=True) if r.ok and r.output_tokens]
    load = workload(kept, setup.engine.name)
    outcome = Simulation(find(replay.system), [instance(run.profile, setup.engine)], load).run()
    more = len(replay.records) * (run.profile.interruption_s or 0.0)
    wrong = bias(run.profile.law, replay.rows, more=more)
    slow = disturbed(run.profile.law, replay.rows)
    return TwinPair(replay, [r for _, r in kept], experiment.records(load, outcome), wrong, slow)


def workload(kept: Sequence[tuple[Call, Record]], model: str) -> Workload:
    """Return the requests of a replay with the lengths that they had in the real run."""
    tiers = tuple(dict.fromkeys(call.tier for call, _ in kept))
    slo = {name: np.array([getattr(c.slo, name) or np.inf for c, _ in kept]) for name in ("ttft", "tpot", "e2e", "itl")}
    output = np.array([record.output_tokens for _, record in kept])
    zeros = np.zeros(len(kept), np.int64)
    return Workload(
        arrival=np.array([call.at for call, _ in kept]),
        output=output,
        prompt=np.array([record.prompt_tokens for _, record in kept]),
        max_tokens=np.maximum([call.max_tokens for call, _ in kept], output),
        priority=np.array([call.priority for call, _ in kept]),
        tier=np.array([tiers.index(call.tier) for call, _ in kept]),
        model=zeros,
        tenant=zeros,
        ttft=slo["ttft"],
        tpot=slo["tpot"],
        e2e=slo["e2e"],
        tiers=tiers,
        models=(model,),
    )


def instance(profile: LatencyProfile, engine: Engine) -> InstanceSpec:
    """Return the simulated twin of an engine: the same blocks, request slots, budget and batch limit."""
    assert profile.kv_tokens is not None, "a measured profile has them"
    sizes = expected(engine)
    shape = Instance(
        "e0",
        engine.name,
        sizes.max_running,
        profile.kv_tokens // profile.block_size,
        profile.block_size,
        sizes.max_model_len,
    )
    return InstanceSpec(
        shape,
        profile.latency(),
        engine.slots or 2 * sizes.max_running,
        sizes.max_batched_tokens,
        request_overhead=profile.request_overhead_s or 0.0,
        token_overhead=profile.token_overhead_s or 0.0,
        interruption=profile.interruption_s or 0.0,
    )
