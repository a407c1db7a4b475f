"""How far can the simulator be trusted? One trace on the real vLLM, and the same one in virtual time.

Below and above saturation, the same arrivals, prompt lengths and answer lengths (those the real run had) go
through the same recipe in both worlds; the simulator's pace is measured in the same run, before, between and
after the replays. What differs then is what the simulator does not know.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from headway.bench.live.compare import BURST, steady
from headway.bench.live.profile import Measured, Rows, Target, device, diary, measure
from headway.bench.live.systems import STOCK, running
from headway.bench.load import generator, mix
from headway.bench.load.records import Call, Record
from headway.bench.output.page import About
from headway.bench.output.results import hand_over
from headway.bench.simulate import whatif
from headway.bench.validate import conformance
from headway.bench.validate.conformance import Tally
from headway.config import Engine
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.forecast.latency.measurement import Fits, bias, disturbed
from headway.forecast.latency.profiles import LatencyProfile
from headway.models.resolve import resolve
from headway.recipes.registry import find
from headway.sim.run import InstanceSpec, Outcome, Simulation
from headway.sim.workload import traffic as loads
from headway.sim.workload.traffic import Workload
from headway.types import Instance

LOADS = {"below": 0.7, "above": 1.3}
_QUICK_RATES, _QUICK_SECONDS, _QUICK_TOKENS = {"below": 3.0, "above": 9.0}, 4.0, 48
_MANY, _FEW = {"workloads": 200, "steps": 25_000}, {"workloads": 2, "steps": 200}  # for each packer
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """What to replay. loads: arrivals as multiples of the capacity; rates (1/s, by setting) override them.

    duration: seconds of arrivals of each replay.
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
    """One load on one system: what was asked, what came back, and the engine's own rows of it."""

    system: str
    setting: str
    rate: float
    calls: list[Call]
    records: list[Record]
    rows: Rows
    requests: list[tuple[str, float, float, float]]
    started: float


@dataclass(slots=True)
class Run:
    """One system: its replays, and the profile measured around them."""

    system: str
    replays: list[Replay]
    measured: Measured
    fits: Fits
    profile: LatencyProfile


@dataclass(slots=True)
class Pair:
    """A replay beside its simulation; only requests that completed are in either.

    bias: of the pace, as a fraction, over the replay's own iterations (positive: the latency profile is too slow).
    disturbed: seconds of the real run in which another program had the machine.
    """

    replay: Replay
    real: list[Record]
    simulated: list[Record]
    outcome: Outcome
    bias: float
    disturbed: float


def check(systems: Sequence[str]) -> None:
    """Raise ConfigError unless every name is a recipe: stock vLLM has no diary to read."""
    if not systems:
        raise ConfigError("No system is named.", "Name some recipes, such as vllm,slack.")
    for name in systems:
        if name in STOCK:
            raise ConfigError(
                f"{name} is stock vLLM, which keeps no diary.", "Use the recipe vllm: it takes stock's steps."
            )
        find(name)


@dataclass(slots=True)
class Results:
    """Every system's run, the capacity of the first (requests/s; None when rates were given), and how the
    simulated engine's steps compare with vLLM's."""

    runs: list[Run]
    capacity: float | None
    conformance: dict[tuple[str, str], Tally]


async def run(setup: Setup) -> Results:
    """Run every system, then compare step by step; when it must be quick, that while the engine starts."""
    check(setup.systems)
    resolve(setup.engine.model)
    logs = Path(tempfile.mkdtemp(prefix="headway-truth-"))
    _console.print(f"[dim]logs: {logs}[/]")
    capacity: float | None = None
    runs = []
    steps = asyncio.create_task(asyncio.to_thread(_conformance, setup)) if setup.quick else None
    for name in setup.systems:
        async with live(name, setup.engine, logs) as target:
            if steps is not None:
                await steps
                gc.collect()
                gc.freeze()  # the client must not look through all of vLLM again while it measures
            await _warm(target, setup)
            if setup.rates is None and capacity is None:
                capacity = await _capacity(target, setup)
            runs.append(await _one(name, target, setup, capacity))
    gc.unfreeze()
    found = await (steps or asyncio.to_thread(_conformance, setup))
    return Results(runs, capacity, found)


@asynccontextmanager
async def live(name: str, engine: Engine, logs: Path) -> AsyncIterator[Target]:
    """Start gateway and engine of a recipe, prefix caching off; yield both addresses, and end them."""
    port = free_port()
    engine = replace(engine, port=port, args=(*engine.args, "--no-enable-prefix-caching"))
    _console.print(f"[dim]starting {name} ...[/]")
    async with running(name, engine, logs) as url:
        yield Target(url, f"http://127.0.0.1:{port}", engine.name, resolve(engine.model))


async def _one(name: str, target: Target, setup: Setup, capacity: float | None) -> Run:
    """Profile, replay, profile, replay, profile: a machine that drifts drifts into the latency profile too."""
    rng = np.random.default_rng([setup.seed, 77])
    measured = await measure(target, rng, quick=setup.quick)
    replays = []
    for number, setting in enumerate(setup.loads):
        rate = setup.rates[setting] if setup.rates else setup.loads[setting] * (capacity or 0.0)
        calls = _calls(setup, rate, number)
        _console.print(f"[bold]{name}[/], {setting}: {rate:.3f} req/s, {len(calls)} requests")
        replays.append(await _replay(name, setting, rate, calls, target))
        if not setup.quick:
            measured.add(await measure(target, rng))
    fits = measured.fits()
    return Run(name, replays, measured, fits, measured.profile(fits, device()))


async def _replay(system: str, setting: str, rate: float, calls: list[Call], target: Target) -> Replay:
    started = time.time()
    records = await generator.run(target.url, target.name, calls)
    if len(records) < len(calls) or any(generator.was_cut_off(record) for record in records):
        raise KeyboardInterrupt  # half a replay says nothing
    async with aiohttp.ClientSession() as session:
        state = await diary(session, target)
    rows = [row for row in state["iterations"] if row[0] >= started]
    requests = [tuple(row) for row in state["requests"] if row[1] >= started]
    return Replay(system, setting, rate, calls, records, rows, requests, started)


def _calls(setup: Setup, rate: float, number: int, *, duration: float | None = None) -> list[Call]:
    rng = np.random.default_rng([setup.seed, number])
    arrivals = loads.poisson(rate, duration or setup.duration, rng)
    return mix.calls(setup.mix, arrivals, rng, warn=lambda _: None if number else _console.print(_))


async def _warm(target: Target, setup: Setup) -> None:
    calls = [replace(call, at=0.0, max_tokens=8) for call in _calls(setup, 4.0, 1000, duration=3.0)]
    await generator.run(target.url, target.name, calls, progress=False)


async def _capacity(target: Target, setup: Setup) -> float:
    """Return the requests per second that the system completes when it always has enough to do."""
    calls = [replace(call, at=0.0) for call in _calls(setup, BURST / 10, 2000, duration=20.0)[:BURST]]
    capacity = steady(await generator.run(target.url, target.name, calls, progress=False))
    _console.print(f"capacity: {capacity:.3f} req/s ({len(calls)} calls at once)")
    return capacity


# ---- the same in virtual time


def pair(replay: Replay, run: Run, setup: Setup) -> Pair:
    """Return a replay and its simulation with the run's latency profile."""
    kept = [(c, r) for c, r in zip(replay.calls, replay.records, strict=True) if r.ok and r.output_tokens]
    asked = workload(kept, setup.engine.name)
    outcome = Simulation(find(replay.system), [node(run.profile, setup.engine)], asked).run()
    simulated = whatif.records(asked, outcome)
    more = len(replay.records) * (run.profile.interruption_s or 0.0)
    wrong = bias(run.profile.law, replay.rows, more=more)
    slow = disturbed(run.profile.law, replay.rows)
    return Pair(replay, [r for _, r in kept], simulated, outcome, wrong, slow)


def workload(kept: Sequence[tuple[Call, Record]], model: str) -> Workload:
    """Return the requests of a replay with the lengths that they really had."""
    tiers = tuple(dict.fromkeys(call.tier for call, _ in kept))
    promises = {
        name: np.array([getattr(c.slo, name) or np.inf for c, _ in kept]) for name in ("ttft", "tpot", "e2e")
    }
    output = np.array([record.output_tokens for _, record in kept])
    nobody = np.zeros(len(kept), np.int64)
    return Workload(
        arrival=np.array([call.at for call, _ in kept]), output=output,
        prompt=np.array([record.prompt_tokens for _, record in kept]),
        max_tokens=np.maximum([call.max_tokens for call, _ in kept], output),
        priority=np.array([call.priority for call, _ in kept]),
        tier=np.array([tiers.index(call.tier) for call, _ in kept]), model=nobody, tenant=nobody,
        ttft=promises["ttft"], tpot=promises["tpot"], e2e=promises["e2e"], tiers=tiers, models=(model,),
    )  # fmt: skip


def node(profile: LatencyProfile, engine: Engine) -> InstanceSpec:
    """Return the simulated twin of an engine: the same blocks, slots, budget and batch limit."""
    assert profile.kv_tokens is not None, "a profile always knows them"
    instance = Instance(
        "e0", engine.name, engine.max_running, profile.kv_tokens // profile.block_size, profile.block_size,
        engine.max_model_len,
    )  # fmt: skip
    return InstanceSpec(
        instance, profile.latency(), engine.slots or 2 * engine.max_running, engine.max_batched_tokens,
        request_overhead=profile.request_overhead_s or 0.0, token_overhead=profile.token_overhead_s or 0.0,
        interruption=profile.interruption_s or 0.0,
    )  # fmt: skip


# ---- the command


def fixed(text: str | None) -> dict[str, float] | None:
    """Read "1.5,2.8" as the rates below and above saturation; None = measure the capacity."""
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
        usable = 0 < low < np.inf and 0 < high < np.inf
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{text!r} are not two rates.", "Write them like --rates 1.5,2.8.")
    return {"below": low, "above": high}


def shortened(setup: Setup) -> Setup:
    """Return what fits into a minute: one system, fixed rates, a few seconds of short answers."""
    tiers = tuple(replace(t, max_tokens=min(t.max_tokens, _QUICK_TOKENS)) for t in setup.mix.tiers)
    return replace(
        setup, mix=replace(setup.mix, tiers=tiers), systems=setup.systems[:1], quick=True,
        rates=setup.rates or dict(_QUICK_RATES), duration=min(setup.duration, _QUICK_SECONDS),
    )  # fmt: skip


def main(setup: Setup, *, quick: bool, as_json: bool, out: Path | None, command: str) -> None:
    """Run everything; print a table or one JSON object, and write the files when a folder is given."""
    from headway.bench.validate import report

    setup = shortened(setup) if quick else setup
    began = time.perf_counter()
    results = asyncio.run(run(setup))
    pairs = [pair(replay, one, setup) for one in results.runs for replay in one.replays]
    found = report.Findings(pairs, results.runs, results.conformance)
    seconds = time.perf_counter() - began
    about = About(command, setup.seed, describe(setup, results))
    if out is not None:
        report.write(out, found, seconds, about)
    table = report.table(found, about)
    hand_over(report.to_json(found, seconds), lambda: table, as_json=as_json, out=out)


def _conformance(setup: Setup) -> dict[tuple[str, str], Tally]:
    workloads, steps = (_FEW if setup.quick else _MANY).values()
    total = steps * len(conformance.PAIRS)
    with Progress(console=_console, transient=True) as progress:
        task = progress.add_task("conformance, steps", total=total)
        rng = np.random.default_rng([setup.seed, 5])
        return conformance.run(
            rng, workloads=workloads, steps=steps, progress=lambda n: progress.advance(task, n)
        )


def describe(setup: Setup, results: Results) -> str:
    """Return the workload line of the report."""
    rates = {r.setting: f"{r.rate:.3f}" for run in results.runs[:1] for r in run.replays}
    known = f" (capacity {results.capacity:.3f} req/s)" if results.capacity else ""
    loads = ", ".join(f"{setting} saturation {rate} req/s" for setting, rate in rates.items())
    return (
        f"{mix.describe(setup.mix)}; Poisson arrivals, {loads}{known}, {setup.duration:g} s each; the "
        "simulator has the same arrivals and the lengths that the real run had, and a latency profile of this run"
    )
