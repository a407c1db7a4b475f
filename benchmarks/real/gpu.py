"""`headway bench gpu`: stock vLLM and Headway on this machine's device, in one table.

Stock `vllm serve` (first come first served, then by priority) and `headway` start one after the other. Each gets
the same requests at 0.9 and 1.3 times the capacity that the first one has under saturation. The engine of
`headway` is profiled, too, and the simulator, with that profile, forecasts the same runs. In the end its
model is loaded again in place, and the engine is put to sleep and woken. Without a GPU this is a rehearsal of the same
steps on the CPU.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from benchmarks.experiment import Result, experiment
from benchmarks.real import hook_overhead
from benchmarks.validate.replay import (
    ReplayRun,
    ReplaySetup,
    TwinPair,
    answered,
    calls_at,
    capacity_of,
    live,
    pair,
    profiled,
    warm,
)
from benchmarks.validate.report import compared, overheads
from headway.config import Engine
from headway.engines.vllm.process.memory import cards
from headway.errors import EngineError
from headway.models.compare import weight_bytes
from headway.models.resolve import resolve
from headway.policy.forecast.latency.measurement import Limits
from headway.whatif.load import metrics, mix, plots
from headway.whatif.load.records import Record
from headway.whatif.measured.profile import ProfileTarget, device, engine_state
from headway.whatif.measured.systems import STOCK, running
from headway.whatif.output.results import SIMULATED, Ask, Row

LOADS = {"0.9x": 0.9, "1.3x": 1.3}
REHEARSAL = "There is no GPU here: this is a rehearsal of the same steps on the CPU, where vLLM has no sleep mode."
NO_WEIGHTS = "Weights are made up, or there are none, so the time of a model swap was not measured."
_QUICK_RATES, _QUICK_SECONDS, _QUICK_TOKENS = {"0.9x": 3.0, "1.3x": 6.0}, 3.0, 32
_SHOWN = ("attainment.all", "throughput.output_tokens_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "failed")
_RUNNING, _STEPS = 256, 200  # with which the cost of the hook is measured


@dataclass(slots=True)
class GpuFindings:
    """The measurements.

    started: seconds from the start of each system until it was ready.
    records: of each system and setting.
    capacity: requests/s of the first system, None with fixed rates.
    """

    started: dict[str, float] = field(default_factory=dict)
    records: dict[tuple[str, str], list[Record]] = field(default_factory=dict)
    capacity: float | None = None
    run: ReplayRun | None = None
    pairs: list[TwinPair] = field(default_factory=list)
    hook: list[Row] = field(default_factory=list)
    swaps: list[Row] = field(default_factory=list)


@experiment("gpu", "vllm", f"Stock vLLM and Headway on this device, with the simulator's forecast ({SIMULATED})")
def main(ask: Ask, model: str, dummy: bool, mix_: mix.Mix, duration: float) -> Result:
    """Measure; dummy: weights are made up, so the model's directory needs none."""
    engine = Engine(model=model, args=("--load-format", "dummy") if dummy else (), sleep_mode=bool(cards()))
    setup = ReplaySetup(mix_, engine, ("headway",), dict(LOADS), None, duration, ask.seed, quick=True)
    stock = tuple(STOCK)
    if ask.quick:
        setup, stock = shortened(setup), stock[:1]
    found = asyncio.run(measure(setup, stock, together=ask.quick and not cards()))
    found.hook = hook_overhead.cost(_RUNNING, 0, ("headway",), _STEPS, ask.seed)
    notes = ([] if cards() else [REHEARSAL]) + ([NO_WEIGHTS] if dummy or not weight_bytes(resolve(model)) else [])
    workload = f"{device()}, {model}{' with dummy weights' if dummy else ''}; {mix.describe(setup.mix)}"
    return Result(rows(found), workload, lambda: pictures(found), notes=notes)


def shortened(setup: ReplaySetup) -> ReplaySetup:
    """Return a short setup: fixed rates, a few seconds of short answers, and on a CPU small batches."""
    tiers = tuple(replace(tier, max_tokens=min(tier.max_tokens, _QUICK_TOKENS)) for tier in setup.mix.tiers)
    engine = setup.engine if cards() else replace(setup.engine, max_running=8)
    return replace(
        setup,
        mix=replace(setup.mix, tiers=tiers),
        engine=engine,
        rates=dict(_QUICK_RATES),
        duration=min(setup.duration, _QUICK_SECONDS),
    )


async def measure(setup: ReplaySetup, stock: Sequence[str], *, together: bool = False) -> GpuFindings:
    """Run stock vLLM with each of its policies, then `headway`, and simulate the runs of `headway`.

    together: all are started at once, which needs memory for all engines.
    """
    found, logs = GpuFindings(), Path(tempfile.mkdtemp(prefix="headway-gpu-"))
    names = (*stock, "headway")
    async with AsyncExitStack() as stack:
        up = dict[str, ProfileTarget]()
        if together:
            each = (stack.enter_async_context(_started(name, setup, logs, found)) for name in names)
            up = dict(zip(names, await asyncio.gather(*each), strict=True))
        for name in names:
            async with AsyncExitStack() as own:
                if name not in up:
                    up[name] = await own.enter_async_context(_started(name, setup, logs, found))
                target = up[name]
                await warm(target, setup)
                if name in STOCK:
                    await _load(name, target, setup, found)
                    continue
                found.run = run = await profiled(name, target, setup, found.capacity)
                setup = replace(setup, engine=await _resolved(target, setup.engine, run.measured.limits))
                found.swaps = await _swaps(target, setup.engine)
    for replay in run.replays:
        found.records[replay.system, replay.setting] = replay.records
        found.pairs.append(pair(replay, run, setup))
    return found


@asynccontextmanager
async def _started(name: str, setup: ReplaySetup, logs: Path, found: GpuFindings) -> AsyncIterator[ProfileTarget]:
    """Start a system, note how long that takes, yield its addresses, then stop it."""
    began, engine = time.perf_counter(), setup.engine
    if name not in STOCK:
        async with live(name, engine, logs, setup.mix.names) as target:
            found.started[name] = time.perf_counter() - began
            yield target
        return
    plain = replace(engine, args=(*engine.args, "--no-enable-prefix-caching"))  # as `live` has it
    async with running(name, plain, logs, setup.mix.names) as url:
        found.started[name] = time.perf_counter() - began
        yield ProfileTarget(url, url, engine.name, resolve(engine.model))


async def _load(name: str, target: ProfileTarget, setup: ReplaySetup, found: GpuFindings) -> None:
    """Send the requests of each load to a stock system; the first one's capacity decides on the rates."""
    if setup.rates is None and found.capacity is None:
        found.capacity = await capacity_of(target, setup, 2 * (await _state(target))["max_running"])
    for number, (setting, load) in enumerate(setup.loads.items()):
        rate = setup.rates[setting] if setup.rates else load * (found.capacity or 0.0)
        found.records[name, setting] = await answered(target, calls_at(setup, rate, number))


async def _resolved(target: ProfileTarget, engine: Engine, limits: Limits) -> Engine:
    """Return the engine with the sizes that its vLLM has chosen, for its simulated twin."""
    sizes = replace(engine, max_running=limits.max_running, max_model_len=limits.max_model_len)
    return replace(sizes, max_batched_tokens=(await _state(target))["token_budget"])


async def _state(target: ProfileTarget) -> dict[str, int]:
    async with aiohttp.ClientSession() as session:
        return await engine_state(session, target)


async def _swaps(target: ProfileTarget, engine: Engine) -> list[Row]:
    """Return seconds per GB to load the model in place (files in the page cache), and seconds to sleep and to wake."""
    # vLLM cannot load weights in the place of made-up ones.
    gigabytes = 0.0 if "dummy" in engine.args else weight_bytes(target.model) / 1e9

    async def seconds(op: str, **more: str) -> float:
        began = time.perf_counter()
        async with (
            aiohttp.ClientSession(target.control, timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post("/headway/model", json={"op": op, **more}) as answer,
        ):
            if answer.status != 200:
                raise EngineError(f"The engine failed to {op}: {(await answer.text())[:500]}.", "See its log.")
        return time.perf_counter() - began

    load = sleep = wake = None
    if gigabytes:
        for _ in range(2):  # the first load brings the files into the page cache; the second is measured
            load = await seconds("load", path=target.model, name=target.name) / gigabytes
    if engine.sleep_mode:
        sleep, wake = await seconds("sleep"), await seconds("wake")
    return [
        Row("swap.s_per_gb", "headway", "in place", load, "s/GB"),
        Row("sleep_s", "headway", "level 1", sleep, "s"),
        Row("wake_s", "headway", "level 1", wake, "s"),
    ]


# ---- figures


def rows(found: GpuFindings) -> list[Row]:
    """Return start-up, capacity, figures of each system and load, the hook's cost, profile and forecast.

    start_s: from the start of the process until it is ready. capacity.req_per_s: of vllm-fcfs. simulated.*, error.*:
    the forecast for `headway`, and how far it is off. law.error_pct.KIND: mean error of the
    profile's law on its own samples of a kind of iteration. swap.s_per_gb: None if the model's directory
    has no weights. sleep_s, wake_s: None if vLLM has no sleep mode here.
    """
    lines = [Row("start_s", name, "start", seconds, "s") for name, seconds in found.started.items()]
    lines.append(Row("capacity.req_per_s", next(iter(found.started)), "saturation", found.capacity, "req/s"))
    for (name, setting), records in found.records.items():
        all_ = [row for row in metrics.figures({name: (records, {})}) if row.setting == metrics.ALL]
        lines += [replace(row, setting=setting) for row in all_ if row.id in _SHOWN]
    lines += found.hook + found.swaps
    if found.run is not None:
        fits = found.run.fits
        for kind, error in fits.errors[fits.best].items():
            lines.append(Row(f"law.error_pct.{kind}", "headway", fits.best, 100 * error.mean, "%"))
        lines += overheads(found.run)
    for one in found.pairs:
        lines.append(Row("pace.bias_pct", "headway", one.replay.setting, 100 * one.bias, "%"))
        for figure in compared(one):
            unit = "percentage points" if figure.points else "%"
            lines.append(Row(f"simulated.{figure.id}", "headway", figure.setting, figure.simulated, figure.unit))
            lines.append(Row(f"error.{figure.id}", "headway", figure.setting, figure.error, unit))
    return lines


def pictures(found: GpuFindings) -> dict[str, bytes]:
    """Return the plots of the higher load."""
    setting = next(reversed(LOADS))
    return plots.draw({name: (records, {}) for (name, of), records in found.records.items() if of == setting})
