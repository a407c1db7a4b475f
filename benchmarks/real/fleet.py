"""`headway bench fleet`: several models on two real vLLM instances that swap them, with a core each.

Each system is a real `headway serve` in front of two engines, started for its run. Every engine has all models
and serves one at a time; the planner decides which. Answers are not streamed, so that unanswered requests can
be repeated on the other engine when one swaps or dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console

from benchmarks.experiment import Result, experiment
from headway.config import Config, Engine, Model
from headway.engines.vllm.process.launch import free_port
from headway.errors import ConfigError
from headway.models.resolve import cache_dir, resolve
from headway.models.variants import vary
from headway.policy.recipes.registry import find, names
from headway.simulate.workload import traffic
from headway.types import Slo
from headway.whatif.load import generator, metrics, mix, report
from headway.whatif.load.records import Call, Record, Results
from headway.whatif.measured.systems import START_S, Counts, answering, counts, gateway, total
from headway.whatif.output.results import Ask, Row, system_grid

SYSTEMS = ("vllm-model-swap", "edf-model-swap", "shepherd", "qlm", "headway")
INSTANCES = ("e0", "e1")
RATE, TAIL, DURATION = 1.2, 0.06, 600.0  # defaults, which the settings of figures do not name
_LAYERS = 12  # layers of the variant with another shape
_NOISE = 0.01  # small enough for sensible answers
_POLL, _PATIENCE = 0.5, 20  # seconds between two polls, and the largest number of polls
FINISHED = "headway_requests_total"
_FAST = mix.TrafficTier(
    "fast", 0.6, Slo(e2e=20.0), "sharegpt_first_turn", max_tokens=32, ignore_eos=True, prompt_tokens=(8, 100)
)
_BATCH = mix.TrafficTier(
    "batch",
    0.4,
    Slo(e2e=240.0),
    "sharegpt_mixed_roles",
    max_tokens=64,
    ignore_eos=True,
    priority=10,
    prompt_tokens=(50, 250),
)
MIX = mix.Mix("fleet", (_FAST, _BATCH))
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class FleetTrial:
    """The settings of a trial.

    models: the frequent models, then the tail model; engine i first serves the i-th frequent model
    rate: arrivals per second, over all models
    tail: share of the arrivals that ask for the last model
    duration: seconds of arrivals
    kill: kill one engine (SIGKILL) after half of the duration
    start: starts a system, as `running` does; None = that
    """

    models: tuple[Model, ...]
    systems: tuple[str, ...]
    mix: mix.Mix = MIX
    rate: float = RATE
    tail: float = TAIL
    burstiness: float = 1.0
    duration: float = DURATION
    max_running: int = 8
    kill: bool = False
    seed: int = 0
    start: Callable[[str, FleetTrial, Path], AbstractAsyncContextManager[ServedFleet]] | None = None

    @property
    def shares(self) -> list[float]:
        """The share of requests for each model."""
        return shares_of(len(self.models), self.tail)

    @property
    def variant(self) -> str:
        """Describe the differences from the defaults; "" if there are none."""
        words = {
            f"{self.rate:g} req/s": self.rate != RATE,
            f"{self.tail:.0%} tail": self.tail != TAIL,
            f"{self.duration:g} s": self.duration != DURATION,
            f"burstiness {self.burstiness:g}": self.burstiness != 1.0,
            f"{len(self.models)} models": len(self.models) != 3,
            "one engine killed": self.kill,
        }
        return ", ".join(word for word, differs in words.items() if differs)

    def calls(self) -> list[Call]:
        """Return the calls, which are the same for every system."""
        rng = np.random.default_rng([self.seed, 0])
        at = traffic.gamma(self.rate, self.burstiness, self.duration, rng)
        calls = mix.calls(self.mix, at, rng)
        which = rng.choice(len(self.models), len(calls), p=self.shares)
        return [replace(call, model=self.models[m].name) for call, m in zip(calls, which, strict=True)]

    def engines(self) -> tuple[Engine, ...]:
        """Return the engines, each with a core and all models."""
        return tuple(self._engine(number) for number in range(len(INSTANCES)))

    def _engine(self, number: int) -> Engine:
        first = self.models[number % (len(self.models) - 1)]
        others = tuple(model for model in self.models if model != first)
        cores = sorted(os.sched_getaffinity(0))
        return Engine(
            first.model,
            first.name,
            others,
            host_weights_gib=1,
            max_running=self.max_running,
            max_model_len=1024,
            cores=str(cores[number % len(cores)]),
            port=free_port(),
            start_timeout_s=START_S,
        )


# ---- models and systems


def make_models(source: str, folder: Path | None = None) -> tuple[Model, ...]:
    """Return the source, a variant of the same shape and one of another; create variants that do not exist.

    folder: folder of the variants; None = in Headway's cache. Raise ConfigError if the source cannot be varied.
    """
    directory, name = Path(resolve(source)), Model(source).name
    folder = folder or cache_dir() / "variants"
    made = [Model(str(directory), name)]
    kinds: tuple[tuple[str, int | None], ...] = (("near", None), ("short", _LAYERS))
    for seed, (kind, layers) in enumerate(kinds, 1):
        out = folder / f"{directory.name}-{kind}"
        if not out.exists():
            _console.print(f"[dim]making {out} ...[/]")
            vary(source, out, seed=seed, scale=_NOISE, layers=layers)
        made.append(Model(str(out), f"{name}-{kind}"))
    return tuple(made)


def swapping() -> list[str]:
    """Return the recipes whose planner swaps models."""
    return [name for name in names() if find(name).planner().swaps]


def check(trial: FleetTrial) -> None:
    """Raise ConfigError unless every system can serve all models on two instances."""
    from headway.gateway.preflight import preflight

    if not trial.systems:
        raise ConfigError("No system is named.", f"Name some of {', '.join(swapping())}.")
    check_swaps(trial.systems)
    for name in trial.systems:
        preflight(Config(recipe=name, engines=trial.engines()))


def check_swaps(systems: Sequence[str]) -> None:
    """Raise ConfigError unless every system swaps models."""
    for name in systems:
        if not find(name).planner().swaps:
            raise ConfigError(
                f"The recipe {name} never swaps models, so it cannot serve more models than "
                f"{len(INSTANCES)} instances.",
                f"Use {', '.join(swapping())}.",
            )


def shares_of(models: int, tail: float) -> list[float]:
    """Return the share of requests for each model."""
    return [(1 - tail) / (models - 1)] * (models - 1) + [tail]


@asynccontextmanager
async def running(name: str, trial: FleetTrial, logs: Path) -> AsyncIterator[ServedFleet]:
    """Start a system, yield it once all engines are up, then stop all its processes."""
    port, engines = free_port(), trial.engines()
    child = gateway(name, engines, port, logs, trial.mix.names)
    url = f"http://127.0.0.1:{port}"
    async with answering(name, child, f"{url}/ready"):
        assert child.process is not None
        ports = {id: str(engine.port) for id, engine in zip(INSTANCES, engines, strict=True)}
        served = ServedFleet(url, child.process.pid, ports)
        await served.up()
        yield served


@dataclass(frozen=True, slots=True)
class FleetState:
    """The state of an instance: the model that it serves or loads; neither = the instance is down."""

    model: str | None
    loading: str | None = None


def kill_engine(ancestor: int, port: str) -> None:
    """Kill all processes of the engine at a port (SIGKILL). ancestor: a process above it."""
    for process in psutil.Process(ancestor).children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if port in process.cmdline() and os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ServedFleet:
    """A running system.

    pid: the gateway's process. ports: the engines' ports, by instance
    """

    url: str
    pid: int
    ports: Mapping[str, str]

    async def states(self) -> dict[str, FleetState]:
        """Return the state of each instance."""
        engines = (await self._get("/ready"))["engines"]
        return {
            id: FleetState(one["model"] if one["up"] and not one["loading"] else None, one["loading"])
            for id, one in engines.items()
        }

    async def up(self) -> None:
        """Wait until all instances serve a model."""
        while not all(state.model for state in (await self.states()).values()):  # noqa: ASYNC110
            await asyncio.sleep(_POLL)

    async def counts(self) -> Counts:
        """Return the gateway's counters."""
        return await counts(self.url)

    def kill(self, instance: str) -> None:
        """Kill all processes of an engine (SIGKILL)."""
        kill_engine(self.pid, self.ports[instance])

    async def _get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return await answer.json()


# ---- runs


@dataclass(slots=True)
class Watched:
    """The instances' history during a run; times are seconds since its start.

    states: instance -> (since, state) of each change. killed: (time, instance) of the kill, None = no kill
    """

    states: dict[str, list[tuple[float, FleetState]]] = field(default_factory=dict)
    killed: tuple[float, str] | None = None

    def note(self, now: float, states: Mapping[str, FleetState]) -> None:
        """Record the instances' states, where they changed."""
        for id, state in states.items():
            seen = self.states.setdefault(id, [])
            if not seen or seen[-1][1] != state:
                seen.append((now, state))

    @property
    def back(self) -> float | None:
        """Seconds from the kill until the engine served again; None = it did not."""
        if self.killed is None:
            return None
        when, id = self.killed
        down = [at for at, state in self.states[id] if at >= when and state.model is None]
        up = [at for at, state in self.states[id] if down and at > down[0] and state.model is not None]
        return up[0] - when if up else None


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The run of a system: records, increments of counters, and the instances' history."""

    records: Sequence[Record]
    counts: Counts
    watched: Watched


async def run(trial: FleetTrial) -> dict[str, FleetRun]:
    """Run all systems one after the other. Raise ConfigError or EngineError if one cannot run."""
    check(trial)
    start = trial.start or running
    calls, logs = trial.calls(), Path(tempfile.mkdtemp(prefix="headway-bench-"))
    _console.print(f"[dim]logs: {logs}[/]")
    found = {}
    for number, name in enumerate(trial.systems):
        _console.print(f"[dim]starting {name} ...[/]")
        async with start(name, trial, logs) as served:
            before = await _warm(served, trial)
            _console.print(f"[bold]{name}[/], system {number + 1} of {len(trial.systems)}")
            found[name] = await measure(served, trial, calls, before)
    return found


async def measure(served: ServedFleet, trial: FleetTrial, calls: Sequence[Call], before: Counts) -> FleetRun:
    """Send the calls to a system and watch its instances. Raise KeyboardInterrupt if the run was interrupted.

    before: the counters at the start.
    """
    watched, start = Watched(), time.monotonic()
    tasks = [asyncio.create_task(_watch(served, watched, start))]
    if trial.kill:
        tasks.append(asyncio.create_task(_kill(served, watched, start, trial.duration / 2)))
    try:
        records = await generator.run(served.url, "", calls, stream=False)
        if len(records) < len(calls) or any(generator.was_cut_off(record) for record in records):
            raise KeyboardInterrupt  # a comparison needs complete runs
        if trial.kill:
            await _until_back(watched)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:  # a failed watch would leave the history incomplete
        if isinstance(error, Exception):
            raise error
    after = await _counted(served, before, sum(record.ok for record in records))
    return FleetRun(records, {key: value - before.get(key, 0.0) for key, value in after.items()}, watched)


async def _watch(served: ServedFleet, watched: Watched, start: float) -> None:
    while True:
        watched.note(time.monotonic() - start, await served.states())
        await asyncio.sleep(_POLL)


async def _kill(served: ServedFleet, watched: Watched, start: float, at: float) -> None:
    """Kill the first engine that serves a model after `at` seconds."""
    await asyncio.sleep(max(start + at - time.monotonic(), 0.0))
    while watched.killed is None:
        for id, state in (await served.states()).items():
            if state.model is not None:
                watched.killed = time.monotonic() - start, id
                served.kill(id)
                return
        await asyncio.sleep(_POLL)


async def _until_back(watched: Watched) -> None:
    """Wait until the killed engine serves again, for at most two minutes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(120):
            while watched.back is None:  # noqa: ASYNC110
                await asyncio.sleep(_POLL)


async def _warm(served: ServedFleet, trial: FleetTrial) -> Counts:
    """Send a few unmeasured requests to each engine, whose first batches are slow; return the counters."""
    first = {engine.name for engine in trial.engines()}
    calls = [replace(call, at=0.0, max_tokens=8) for call in trial.calls() if call.model in first][:8]
    before = await served.counts()
    records = await generator.run(served.url, "", calls, progress=False, stream=False)
    return await _counted(served, before, sum(record.ok for record in records))


async def _counted(served: ServedFleet, before: Counts, answered: int) -> Counts:
    """Return the counters once the gateway has counted `answered` more answers."""
    for _ in range(_PATIENCE):
        after = await served.counts()
        if total(after, FINISHED, "finished") - total(before, FINISHED, "finished") >= answered:
            break
        await asyncio.sleep(_POLL)
    return after


_QUICK_SECONDS, _QUICK_TAIL = 10.0, 0.3
_SWAPS, _LOADS = "headway_model_swaps_total", "headway_model_swap_seconds"
_REQUEUED = "headway_requeue_seconds"
_DOWN, _LOADING = "#222222", "#dddddd"
Figure = tuple[str, str, float | None, str]


@experiment("fleet", "vllm", "Several models on two vLLM instances")
def main(ask: Ask, trial: FleetTrial) -> Result:
    """Run the benchmark. `quick`: one system, models of one shape only, a few seconds of arrivals."""
    if ask.quick:
        models, seconds = trial.models[:-1], min(trial.duration, _QUICK_SECONDS)
        names = tuple(name for name in trial.systems if name == "qlm") or trial.systems[:1]
        trial = replace(trial, models=models, systems=names, tail=_QUICK_TAIL, duration=seconds)
    runs = asyncio.run(run(trial))
    rows = [row for name, run in runs.items() for row in rows_of(name, run)]
    variant = f", {trial.variant}" if trial.variant else ""
    return Result(
        [replace(row, setting=row.setting + variant) for row in rows],
        _describe(trial),
        lambda: draw(runs),
        system_grid(rows),
        report.warnings({name: (run.records, {}) for name, run in runs.items()}),
    )


def _describe(trial: FleetTrial) -> str:
    arrivals = "Poisson arrivals"
    if trial.burstiness != 1.0:
        arrivals = f"arrivals of burstiness {trial.burstiness:g}"
    asked = ", ".join(f"{s:.0%} {m.name}" for s, m in zip(trial.shares, trial.models, strict=True))
    first = ", ".join(f"{id} {e.name}" for id, e in zip(INSTANCES, trial.engines(), strict=True))
    killed = f"; one engine is killed after {trial.duration / 2:g} s" if trial.kill else ""
    return (
        f"{mix.describe(trial.mix)}; not streamed; {asked}; {arrivals} at {trial.rate:g} req/s for "
        f"{trial.duration:g} s; two engines of one core, batch limit {trial.max_running}, which serve at "
        f"first: {first}{killed}."
    )


# ---- figures


def rows_of(system: str, run: FleetRun) -> list[Row]:
    """Return the figures of a system.

    attainment: share of requests that met their SLO, by class, model and over all. e2el.p99: of those that
    were answered. swaps, swap.seconds: loads that succeeded and their mean, by way and over all.
    swaps.failed. swaps.taken_back: requests that a swap sent back to the queue. lost: requests without an
    answer. answered_twice: answers by the gateway's count beyond those that clients got.
    Of a run with a kill: replanned, requests that the death sent back to the queue; replanned.seconds, mean
    until they were sent again; back.seconds, from the kill until the engine served again.
    """
    return [Row(id, system, setting, value, unit) for id, setting, value, unit in _figures(run)]


def _figures(run: FleetRun) -> Iterator[Figure]:
    records, counts = run.records, run.counts
    models = sorted({record.model for record in records if record.model is not None})
    parts = metrics.split(records)
    for tier, part in parts.items():
        yield "attainment", tier, metrics.attainment(part), "%"
    for model in models:
        yield "attainment", model, metrics.attainment([r for r in records if r.model == model]), "%"
    for tier, part in parts.items():
        seconds = metrics.values(part, "e2el")
        yield "e2el.p99", tier, float(np.quantile(seconds, 0.99)) if seconds.size else None, "s"
    answered, span = sum(record.ok for record in records), metrics.makespan(records)
    yield "throughput.req_per_s", "all", answered / span if span else None, "req/s"
    yield from _swaps(counts)
    yield "swaps.taken_back", "all", total(counts, f"{_REQUEUED}_count", "model_swap"), "count"
    yield "lost", "all", float(len(records) - answered), "count"
    finished = total(counts, FINISHED, "finished")
    yield "answered_twice", "all", max(finished - answered, 0.0), "count"
    if run.watched.killed is not None:
        again = total(counts, f"{_REQUEUED}_count", "engine_gone")
        waited = total(counts, f"{_REQUEUED}_sum", "engine_gone")
        yield "replanned", "all", again, "count"
        yield "replanned.seconds", "all", waited / again if again else None, "s"
        yield "back.seconds", "all", run.watched.back, "s"


def _swaps(counts: Counts) -> Iterator[Figure]:
    ways = ("in_place", "restart", None)
    for way in ways:
        yield "swaps", way or "all", total(counts, _SWAPS, "loaded", *([] if way is None else [way])), "count"
    for way in ways:
        labels = [] if way is None else [way]
        loads = total(counts, f"{_LOADS}_count", *labels)
        seconds = total(counts, f"{_LOADS}_sum", *labels)
        yield "swap.seconds", way or "all", seconds / loads if loads else None, "s"
    yield "swaps.failed", "all", total(counts, _SWAPS, "failed"), "count"


# ---- pictures


def draw(runs: Mapping[str, FleetRun]) -> dict[str, bytes]:
    """Return {name: PNG}: attainment and latency by class and system, and the model on each instance."""
    from headway.whatif.load import plots

    results: Results = {name: (run.records, {}) for name, run in runs.items()}
    return plots.draw(results) | {"models": _models(runs)}


def _models(runs: Mapping[str, FleetRun]) -> bytes:
    """Return a PNG with a bar per instance and system, coloured by the served model."""
    from matplotlib.patches import Patch

    from headway.whatif.output.plots import colour, png, sheet

    seen = (one for run in runs.values() for states in run.watched.states.values() for one in states)
    names = sorted({state.model for _, state in seen if state.model is not None})
    colours = {name: colour(number) for number, name in enumerate(names)}
    figure, grid = sheet(len(runs), 1, 7.2, 1.0 + 1.1 * len(runs))
    for axes, (system, run) in zip(grid, runs.items(), strict=True):
        end = max((record.last or 0.0 for record in run.records), default=0.0)
        for place, changes in enumerate(run.watched.states.values()):
            ends = [at for at, _ in changes[1:]] + [max(end, changes[-1][0])]
            for (since, state), until in zip(changes, ends, strict=True):
                shade = _LOADING if state.loading else _DOWN
                if state.model is not None:
                    shade = colours[state.model]
                axes.barh(place, until - since, left=since, height=0.8, color=shade)
        if run.watched.killed is not None:
            axes.axvline(run.watched.killed[0], color="#D55E00", linestyle="--", linewidth=1.2)
        axes.set(yticks=range(len(run.watched.states)), yticklabels=list(run.watched.states), title=system)
        axes.invert_yaxis()
    grid[-1].set_xlabel("s")
    shades = colours | {"loading": _LOADING, "down": _DOWN}
    patches = [Patch(color=shade, label=label) for label, shade in shades.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    return png(figure)
