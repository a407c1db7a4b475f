"""`headway bench apps`: application runs beside chat on real engines, stock vLLM and Headway's recipes.

Runs are replayed in a closed loop: the requests of a unit are sent when the units before it have ended, and a
unit outside the LLM sleeps for its recorded time. Each application is a tenant with a separate key, so that
`vtc` shares between them. Gateways receive reports of units outside the LLM and of the end of runs; stock vLLM
has no such reports. Every round sends the same runs to every system.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.real.app_load import APP_CLASS, APPS, BURSTINESS, SCALE, AppLoad, AppShape, Script, call, calls_of
from headway.config import Engine, Key
from headway.models.resolve import resolve
from headway.simulate.workload.applications import Step
from headway.types import Floats
from headway.whatif.load import generator
from headway.whatif.load.records import Record
from headway.whatif.measured.compare import rotated, steady
from headway.whatif.measured.systems import STOCK, Counts, Start, check, counts, running, total

SYSTEMS = ("vllm-fcfs", "parrot", "vtc", "hermes")
LOAD, DURATION = 1.0, 240.0  # defaults, which the settings of figures do not name
ALL = "all"  # all applications
RUNS = "headway_runs_total"
_CHAT = "chat"  # the tenant of chat
_BURST = 24  # runs whose requests, all at once, measure the capacity
_POLL, _PATIENCE = 0.5, 20  # seconds between two polls, and the largest number of polls
At = Callable[[str], AbstractAsyncContextManager[str]]  # starts a system unless it runs
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class AppsTrial:
    """The settings of a trial.

    load: runs per second as a multiple of the capacity, which is measured on the first system
    rate: runs per second, instead of `load`
    duration: seconds of arrivals per round
    together: keep all systems running; saves restarts but needs memory for all engines
    start: starts the systems, as `running` does
    """

    engine: Engine
    systems: tuple[str, ...] = SYSTEMS
    shape: AppShape = field(default_factory=AppShape)
    load: float = LOAD
    rate: float | None = None
    duration: float = DURATION
    rounds: int = 1
    together: bool = False
    seed: int = 0
    start: Start = running

    @property
    def variant(self) -> str:
        """Describe the differences from the defaults; "" if there are none."""
        words = {
            f"{self.rate:g} runs/s" if self.rate else f"{self.load:g}x": self.rate or self.load != LOAD,
            f"scale {self.shape.scale:g}": self.shape.scale != SCALE,
            f"burstiness {self.shape.burstiness:g}": self.shape.burstiness != BURSTINESS,
        }
        return ", ".join(word for word, differs in words.items() if differs)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run; times are seconds since the start of its round.

    end: end of the last unit; NaN = a request had no answer, and the run was aborted
    records: records of the run's requests
    """

    app: str
    at: float
    end: float
    records: Sequence[Record]

    @property
    def act(self) -> float:
        """Application completion time: seconds from the planned arrival to the end of the last unit."""
        return self.end - self.at


@dataclass(slots=True)
class ServedApps:
    """The results of a system over all rounds.

    counts: increments of the gateway's counters; empty for stock vLLM
    refused: reports that the gateway did not accept
    """

    runs: list[RunResult] = field(default_factory=list)
    chat: list[Record] = field(default_factory=list)
    counts: dict[tuple[str, ...], float] = field(default_factory=dict)
    refused: int = 0

    def add(self, other: ServedApps) -> None:
        """Add another round."""
        self.runs += other.runs
        self.chat += other.chat
        self.refused += other.refused
        for key, value in other.counts.items():
            self.counts[key] = self.counts.get(key, 0.0) + value


@dataclass(frozen=True, slots=True)
class AppsOutcome:
    """The results of all systems. rate: runs per second. capacity: as measured; None if the rate was given."""

    served: dict[str, ServedApps]
    rate: float
    capacity: float | None


def completion_times(runs: Sequence[RunResult], app: str = ALL) -> Floats:
    """Return the completion times of complete runs, of one application or of all."""
    seconds = np.array([run.act for run in runs if app in (ALL, run.app)], float)
    return np.asarray(seconds[~np.isnan(seconds)], float)


async def run(trial: AppsTrial) -> AppsOutcome:
    """Run all systems. Raise ConfigError or EngineError if one cannot run."""
    check(trial.systems, trial.engine)
    resolve(trial.engine.model)
    async with _systems(trial) as at:
        capacity = None if trial.rate else await _capacity(trial, at)
        rate = trial.rate or trial.load * (capacity or 0.0)
        served = {name: ServedApps() for name in trial.systems}
        for number in range(trial.rounds):
            load = trial.shape.load(rate, trial.duration, [trial.seed, number])
            load = replace(load, scripts=tuple(replace(s, id=f"{number}-{s.id}") for s in load.scripts))
            for name in rotated(trial.systems, number):
                async with at(name) as url:
                    _console.print(f"[bold]{name}[/], round {number + 1} of {trial.rounds}")
                    served[name].add(await send(name, url, trial.engine.name, load))
    return AppsOutcome(served, rate, capacity)


# ---- systems


def key_of(tenant: str) -> str:
    """Return the API key of an application, or of chat."""
    return f"headway-bench-{tenant}"


@asynccontextmanager
async def _systems(trial: AppsTrial) -> AsyncIterator[At]:
    """Yield a function that runs a system and yields its address; with `together`, start all systems first."""
    logs = Path(tempfile.mkdtemp(prefix="headway-bench-"))
    _console.print(f"[dim]logs: {logs}[/]")
    async with AsyncExitStack() as stack:
        names = trial.systems if trial.together else ()
        started = (stack.enter_async_context(_started(name, trial, logs)) for name in names)
        urls = dict(zip(names, await asyncio.gather(*started), strict=True))
        for name, url in urls.items():  # one by one: engines that compute at the same time spin on their cores
            await _warm(name, url, trial)

        @asynccontextmanager
        async def at(name: str) -> AsyncIterator[str]:
            if name in urls:
                yield urls[name]
                return
            async with _started(name, trial, logs) as url:
                await _warm(name, url, trial)
                yield url

        yield at


@asynccontextmanager
async def _started(name: str, trial: AppsTrial, logs: Path) -> AsyncIterator[str]:
    _console.print(f"[dim]starting {name} ...[/]")
    keys = tuple(Key(key_of(tenant), tenant) for tenant in (*APPS, _CHAT))
    classes = (APP_CLASS, *trial.shape.chat.names)
    async with trial.start(name, trial.engine, logs, classes, keys=keys, graphs=trial.shape.graphs()) as url:
        yield url


async def _warm(name: str, url: str, trial: AppsTrial) -> None:
    """Replay an unmeasured run of each application to warm up the system."""
    load = trial.shape.load(1.0, 60.0, [trial.seed, 1000])
    first = {script.run.app: script for script in reversed(load.scripts)}
    scripts = tuple(replace(script, id=f"warm-{app}", at=0.0) for app, script in first.items())
    chat = tuple(replace(one, at=0.0, max_tokens=8) for one in load.chat[:4])
    await send(name, url, trial.engine.name, AppLoad(scripts, chat), progress=False)


async def _capacity(trial: AppsTrial, at: At) -> float:
    """Return the runs per second, with their share of chat, that the first system serves when saturated."""
    name, shape = trial.systems[0], trial.shape
    load = shape.load(1.0, _BURST, [trial.seed, 2000])
    rng = np.random.default_rng([trial.seed, 2001])
    calls = [replace(one, at=0.0) for script in load.scripts for one in calls_of(script)]
    calls = [calls[i] for i in rng.permutation(len(calls))]  # long and short ones mixed
    chat = [replace(one, at=0.0) for one in load.chat]
    async with at(name) as url:
        one = generator.run(
            url, trial.engine.name, calls, api_key=key_of(_CHAT), endpoint="completions", progress=False
        )
        other = generator.run(url, trial.engine.name, chat, api_key=key_of(_CHAT), progress=False)
        records = [record for some in await asyncio.gather(one, other) for record in some]
    capacity = steady(records) * len(load.scripts) / len(records)
    _console.print(f"capacity of {name}: {capacity:.3f} runs/s ({len(records)} requests at once)")
    return capacity


# ---- a round


async def send(name: str, url: str, model: str, load: AppLoad, *, progress: bool = True) -> ServedApps:
    """Replay the runs on a system and send the chat; return the results and the counters' increments."""
    stock = name in STOCK
    before: Counts = {} if stock else await counts(url)
    loop = asyncio.get_running_loop()
    async with generator.session(load.requests) as http:
        client = _Client(http, url, model, loop.time(), reports=not stock)
        with _bar(len(load.scripts), shown=progress) as advance:
            async with asyncio.TaskGroup() as group:
                chat = group.create_task(generator.run(url, model, load.chat, api_key=key_of(_CHAT), progress=False))
                runs = [group.create_task(client.make(script, advance)) for script in load.scripts]
    gained = {} if stock else await _gained(url, before, len(runs))
    return ServedApps([task.result() for task in runs], chat.result(), gained, client.refused)


async def _gained(url: str, before: Counts, ended: int) -> dict[tuple[str, ...], float]:
    """Return the counters' increments once `ended` runs are counted, which happens after the last answer."""
    for _ in range(_PATIENCE):
        after = await counts(url)
        if total(after, RUNS) - total(before, RUNS) >= ended:
            break
        await asyncio.sleep(_POLL)
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


class _Client:
    """The applications' clients.

    start: event loop time at which the round starts. reports: the system accepts reports of runs.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, start: float, *, reports: bool) -> None:
        self._http, self._url, self._model = http, url, model
        self._start, self._reports, self.refused = start, reports, 0

    async def make(self, script: Script, ended: Callable[[], None]) -> RunResult:
        """Replay a run at its arrival time."""
        await asyncio.sleep(max(script.at - self._now(), 0.0))
        records: list[Record] = []
        end = math.nan
        for step, texts in zip(script.run.steps, script.prompts, strict=True):
            if not step.requests:
                await self._outside(script, step)
                continue
            asked = (
                self._ask(script, step.unit, text, output)
                for text, (_, output) in zip(texts, step.requests, strict=True)
            )
            answers = await asyncio.gather(*asked)
            records += answers
            if not all(record.ok for record in answers):
                break
        else:
            end = self._now()
        await self._report(script, "end", {})
        ended()
        return RunResult(script.run.app, script.at, end, records)

    async def _ask(self, script: Script, unit: str, text: str, output: int) -> Record:
        headers = {"x-headway-app": script.run.app, "x-headway-run": script.id, "x-headway-unit": unit}
        return await generator.ask(
            self._http,
            self._url,
            self._model,
            call(self._now(), text, output),
            self._start,
            headers=headers | _authorization(script),
            endpoint="completions",
        )

    async def _outside(self, script: Script, step: Step) -> None:
        unit = {"unit": step.unit, "backend": step.backend}
        await self._report(script, "units", unit | {"state": "started"})
        await asyncio.sleep(step.seconds)
        await self._report(script, "units", unit | {"state": "ended"})

    async def _report(self, script: Script, what: str, body: dict[str, str]) -> None:
        if not self._reports:
            return
        url = f"{self._url}/v1/runs/{script.id}/{what}"
        body = body | {"app": script.run.app}
        try:
            async with self._http.post(url, json=body, headers=_authorization(script)) as answer:
                self.refused += answer.status != 200
        except aiohttp.ClientError:
            self.refused += 1

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start


def _authorization(script: Script) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(script.run.app)}"}


@contextmanager
def _bar(runs: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar of runs; yield a function that advances it."""
    columns = (TextColumn("Runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Twice a second: the bar shares the cores with the measured engine.
    with Progress(*columns, console=_console, refresh_per_second=2, disable=not shown) as bar:
        task = bar.add_task("runs", total=runs)
        yield lambda: bar.advance(task)
