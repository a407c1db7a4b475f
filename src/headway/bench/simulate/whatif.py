"""What if? Recipes on a simulated fleet, in the figures of real runs and labelled as simulated."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from headway.bench.load.mix import promise
from headway.bench.load.records import Counters, Record
from headway.bench.output import report
from headway.core.engine_spec import EngineSpec
from headway.errors import ConfigError
from headway.forecast.latency.online import OnlineLatency
from headway.recipes.registry import find
from headway.sim import fleet as fleets
from headway.sim.instance import words
from headway.sim.record import run_folder
from headway.sim.record.recorder import Recorder, Recording
from headway.sim.record.run_folder import Header, Machine, Run
from headway.sim.run import InstanceSpec, Outcome, Simulation, no_time
from headway.sim.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Slo

_NO_GAPS = np.empty(0, np.float32)  # a simulated client sees no chunks


@dataclass(frozen=True, slots=True)
class Fleet:
    """`count` equal instances of one latency profile. kv_tokens None: as the file says."""

    profile: str
    count: int = 1
    max_running: int = 256
    budget: int = 2048
    max_model_len: int = 2048
    kv_tokens: int | None = None

    def nodes(self, model: str) -> list[InstanceSpec]:
        """Return the simulated instances. ConfigError for an unknown latency profile or a fleet that cannot run."""
        spec = fleets.Spec(
            self.profile, self.count, model, self.max_running, self.budget, self.max_model_len, self.kv_tokens
        )
        return spec.nodes()


@dataclass(frozen=True, slots=True)
class Mixed:
    """Instances of unlike kinds, which may serve and load several models."""

    specs: tuple[fleets.Spec, ...]

    def nodes(self, model: str = "") -> list[InstanceSpec]:
        """Return the simulated instances; each has the model that its spec names."""
        return fleets.build(self.specs)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the simulator itself was: wall seconds for simulated seconds, and what it did in them."""

    wall: float
    simulated: float
    iterations: int
    requests: int

    @property
    def times_real(self) -> float:
        return self.simulated / self.wall


def chat_and_batch(chat: Slo, models: Sequence[str] = ("default",)) -> tuple[TrafficClass, ...]:
    """Return 60 % ShareGPT-like chat with a promise and 40 % best effort (BROS's uniform lengths), for each
    model alike."""
    return tuple(
        traffic
        for model in models
        for traffic in (
            TrafficClass("chat", 0.6, chat, 0, "sharegpt", model),
            TrafficClass("batch", 0.4, Slo(), 10, "bros-best-effort", model),
        )
    )


def chat_batch(rate: float, duration: float, seed: int, chat: Slo, longest: int) -> Workload:
    """Return `chat_and_batch` with Poisson arrivals.

    Requests longer than `longest` tokens, which no instance would take, are left out.
    """
    rng = np.random.default_rng(seed)
    workload = make(chat_and_batch(chat), poisson(rate, duration, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= longest))


def simulate(
    recipes: Sequence[str], fleet: Fleet | Mixed, workload: Workload, *, bar: bool = True,
    plan_seconds: Callable[[int], float] = no_time, keep: Keep | None = None,
) -> Results:  # fmt: skip
    """Run the workload under each recipe; return records per recipe and how fast the simulator was.

    keep: record each run as well, and keep it as its folder.
    """
    _check(recipes, fleet.nodes(workload.models[0]))
    found = Results({}, {}, {}, {})
    with Progress(disable=not bar, transient=True) as progress:
        for name in recipes:
            task = progress.add_task(name, total=workload.arrival.size)
            nodes = fleet.nodes(workload.models[0])
            recorder = Recorder(keep.megabytes) if keep else None
            began = time.perf_counter()
            simulation = Simulation(find(name), nodes, workload, plan_seconds=plan_seconds)
            outcome = simulation.run(
                lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
                recorder,
            )
            wall = time.perf_counter() - began
            found.records[name] = (
                records(workload, outcome),
                {"preemptions": float(outcome.evictions.sum())},
            )
            end = float(np.nanmax(outcome.end, initial=0.0))
            found.speeds[name] = Speed(wall, end, outcome.iterations, workload.arrival.size)
            found.told[name] = _told(outcome)
            if keep and recorder:
                found.runs[name] = keep.run(name, nodes, workload, outcome, recorder.recording())
    return found


@dataclass(frozen=True, slots=True)
class Keep:
    """Where recorded runs go (`folder`/runs/RECIPE), how large a recording may be, and what they say."""

    folder: Path
    megabytes: float
    seed: int
    command: str
    about: str

    def run(
        self,
        recipe: str,
        nodes: Sequence[InstanceSpec],
        workload: Workload,
        outcome: Outcome,
        recording: Recording,
    ) -> Run:
        """Write a run folder and return its run."""
        machines = tuple(map(Machine.of, nodes))
        header = Header(recipe, machines, self.seed, self.command, self.about)
        run = Run(header, workload, outcome, recording)
        run_folder.save(run, self.folder / "runs" / file_name(recipe))
        return run


def file_name(recipe: str) -> str:
    """Return a recipe's name as files may be called: those from outside have a colon and dots."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", recipe)


def _check(recipes: Sequence[str], nodes: Sequence[InstanceSpec]) -> None:
    """Raise ConfigError for an unknown recipe, or one that copies KV where a copy's time is not known."""
    for name in recipes:
        recipe = find(name)
        unknown = [
            node.instance.id
            for node in nodes
            if not math.isfinite(node.copy_seconds) and recipe.packer(node.spec(OnlineLatency())).kv.saves
        ]
        if unknown:
            needs = recipe.packer(EngineSpec(1, 1)).kv.saves
            other = "take another recipe" if needs else "say host_kv_gib=0 in --instance"
            raise ConfigError(
                f"{name} copies KV to the host, and how fast {unknown[0]} does that is not known.",
                f"Add kv_copy_gb_s to a copy of its latency profile, or {other}.",
                param="recipes",
            )


@dataclass(frozen=True, slots=True)
class Question:
    """What is simulated: a fleet, classes of traffic arriving as a Poisson process, and planner time.

    plan_us: virtual microseconds that a plan takes per queued request.
    """

    fleet: Fleet | Mixed
    classes: tuple[TrafficClass, ...]
    about: str
    rate: float
    duration: float
    seed: int
    plan_us: float = 0.0

    def workload(self) -> tuple[Workload, int]:
        """Return the requests that some instance can hold, and how many longer ones were left out."""
        rng = np.random.default_rng(self.seed)
        whole = make(self.classes, poisson(self.rate, self.duration, rng), rng)
        fits = fleets.holds(self.fleet.nodes(whole.models[0]), whole)
        return whole.take(fits), int(np.count_nonzero(~fits))

    def plan_seconds(self, queued: int) -> float:
        return self.plan_us * 1e-6 * queued


def main(
    recipes: Sequence[str], question: Question, *, as_json: bool, out: Path | None, record_mb: float = 1000.0
) -> None:
    """Simulate, print a table or one JSON object, and write the files when a folder is given."""
    began = time.perf_counter()
    workload, longer = question.workload()
    left_out = f"; {longer} requests longer than any instance holds left out" if longer else ""
    nodes = question.fleet.nodes(workload.models[0])
    told = "".join(f"; {name}: {how}" for name in recipes if (how := words(find(name), nodes[0])))
    about = report.About(
        shlex.join(["headway", *sys.argv[1:]]), question.seed, question.about + left_out + told
    )
    keep = Keep(out, record_mb, question.seed, about.command, about.workload) if out else None
    found = simulate(
        recipes, question.fleet, workload, bar=not as_json, plan_seconds=question.plan_seconds, keep=keep
    )
    seconds = time.perf_counter() - began
    if out is not None:
        _write(out, found, seconds, about)
    if as_json:
        data = report.to_json(found.records, bench="simulate", host="sim", seconds=seconds)
        print(json.dumps(data, allow_nan=False))
        return
    console = Console()
    console.print(report.table(found.records, about, title="What if? (SIMULATED)"))
    for name, speed in found.speeds.items():
        console.print(
            f"[dim]{name}: {speed.times_real:.0f}x real time, {speed.iterations} iterations, "
            f"{speed.wall * 1e6 / max(speed.iterations, 1):.0f} us each{found.told[name]}[/]"
        )


def _write(out: Path, found: Results, seconds: float, about: report.About) -> None:
    """Write the page with everything, and say where it and the runs are."""
    from headway.bench.simulate import (
        run_plots,  # matplotlib takes a while: only those who write reports wait for it
    )

    more = {f"engine-{file_name(name)}": run_plots.draw(run) for name, run in found.runs.items()}
    report.write(out, found.records, bench="simulate", host="sim", seconds=seconds, about=about, more=more)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"written: {out}/report.html")
    for name in found.runs:
        console.print(f"why was a request late: headway explain {out}/runs/{file_name(name)} --worst 10")


def alike(fleet: Fleet, rate: float, duration: float, slo: str, seed: int, plan_us: float = 0.0) -> Question:
    """Return the question for equal instances of one model under chat and best effort."""
    about = (
        f"SIMULATED: {fleet.count} x {fleet.profile}, batch limit {fleet.max_running}; {rate:g} req/s for "
        f"{duration:g} s: 60% chat (ShareGPT-like lengths, {slo}), 40% best effort (512-1024 in, 32-128 out)"
    )
    return Question(fleet, chat_and_batch(promise(slo)), about, rate, duration, seed, plan_us)


def unlike(
    specs: Sequence[fleets.Spec], classes: Sequence[TrafficClass], rate: float, duration: float, slo: str,
    seed: int, plan_us: float = 0.0,
) -> Question:  # fmt: skip
    """Return the question for instances of unlike kinds; no classes: chat and best effort for every model."""
    fleet = Mixed(tuple(specs))
    models = fleets.models(fleet.nodes())
    kinds = ", ".join(f"{spec.count} x {spec.profile}" for spec in specs)
    dealt = tuple(classes) or chat_and_batch(promise(slo), models)
    names = ", ".join(f"{traffic.name} of {traffic.model} {traffic.share:g}" for traffic in dealt)
    about = f"SIMULATED: {kinds}; {rate:g} req/s for {duration:g} s, shares: {names}"
    return Question(fleet, dealt, about, rate, duration, seed, plan_us)


def _told(outcome: Outcome) -> str:
    """Say what a table of answers does not show: refusals, swaps, the planner's time."""
    parts = {
        "requests shed": outcome.shed, "requests failed": outcome.failed, "model swaps": outcome.swaps,
        "s of planning": round(outcome.planning, 3),
    }  # fmt: skip
    return "".join(f", {count:g} {what}" for what, count in parts.items() if count)


@dataclass(frozen=True, slots=True)
class Results:
    """records: what `report` reads. speeds, told (refusals, swaps, planner time in words): per recipe. runs:
    those that were kept."""

    records: dict[str, tuple[list[Record], Counters]]
    speeds: dict[str, Speed]
    told: dict[str, str]
    runs: dict[str, Run]


def records(workload: Workload, outcome: Outcome) -> list[Record]:
    """Return the simulated requests as records, to be judged by the code that judges real ones."""
    slos = _promises(workload)
    columns = zip(
        workload.tier.tolist(), workload.arrival.tolist(), outcome.first.tolist(), outcome.end.tolist(),
        workload.prompt.tolist(), workload.output.tolist(), slos, strict=True,
    )  # fmt: skip
    return [_record(workload.tiers[tier], *rest) for tier, *rest in columns]


def _record(tier: str, at: float, first: float, end: float, prompt: int, output: int, slo: Slo) -> Record:
    """Return one request's record; one without an end was refused by the planner or found no room."""
    if math.isfinite(end):
        return Record(tier, at, at, first, end, prompt, output, _NO_GAPS, 200, None, slo)
    return Record(tier, at, at, None, None, prompt, 0, _NO_GAPS, 429, "dropped: shed or too long", slo)


def _promises(workload: Workload) -> list[Slo]:
    """Return each request's promise; equal ones are one object, so that 100,000 are quickly made."""
    columns = np.stack([workload.ttft, workload.tpot, workload.e2e], axis=1)
    kinds, which = np.unique(columns, axis=0, return_inverse=True)
    slos = [Slo(*(limit if math.isfinite(limit) else None for limit in kind)) for kind in kinds.tolist()]
    return [slos[kind] for kind in which.ravel().tolist()]
