"""What if? Recipes on a simulated fleet, in the figures of real runs and labelled as simulated."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from headway.bench import report
from headway.bench.mix import promise
from headway.bench.records import Record
from headway.errors import ConfigError
from headway.forecast import pacefile
from headway.recipes import find
from headway.sim import runfolder
from headway.sim.recorder import Recorder, Recording
from headway.sim.run import Node, Outcome, Simulation
from headway.sim.runfolder import Header, Machine, Run
from headway.sim.workload import TrafficClass, Workload, make, poisson
from headway.types import Instance, Slo

_NO_GAPS = np.empty(0, np.float32)  # a simulated client sees no chunks
_KV_WITHOUT_FIGURE = "Give --kv-tokens: the pace file does not say how much KV fits."


@dataclass(frozen=True, slots=True)
class Fleet:
    """`count` equal instances of one pace file. kv_tokens None: as the file says."""

    pace: str
    count: int = 1
    max_running: int = 256
    budget: int = 2048
    max_model_len: int = 2048
    kv_tokens: int | None = None

    def nodes(self, model: str) -> list[Node]:
        """Return the simulated instances. ConfigError for an unknown pace file or a fleet that cannot run."""
        file = pacefile.load(self.pace)
        tokens = self.kv_tokens or file.kv_tokens
        if tokens is None:
            raise ConfigError(f"How much KV has {self.pace}?", _KV_WITHOUT_FIGURE)
        blocks = tokens // file.block_size
        if blocks * file.block_size < self.max_model_len:
            raise ConfigError(
                f"{tokens} tokens of KV hold no request of {self.max_model_len} tokens.",
                "Give more --kv-tokens or a smaller --max-model-len.",
            )
        if self.budget < self.max_running:
            raise ConfigError(
                f"{self.budget} tokens per iteration are fewer than {self.max_running} running requests.",
                "Raise --budget or lower --max-running.",
            )
        return [
            Node(
                Instance(f"e{i}", model, self.max_running, blocks, file.block_size, self.max_model_len),
                file.pace(), 2 * self.max_running, self.budget, file.copy_seconds(),
            )
            for i in range(self.count)
        ]  # fmt: skip


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


def chat_batch(rate: float, duration: float, seed: int, chat: Slo, longest: int) -> Workload:
    """Return 60 % ShareGPT-like chat with a promise and 40 % best effort (BROS's uniform lengths), Poisson.

    Requests longer than `longest` tokens, which no instance would take, are left out.
    """
    rng = np.random.default_rng(seed)
    classes = (
        TrafficClass("chat", 0.6, chat, 0, "sharegpt"),
        TrafficClass("batch", 0.4, Slo(), 10, "bros-best-effort"),
    )
    workload = make(classes, poisson(rate, duration, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= longest))


def simulate(
    recipes: Sequence[str], fleet: Fleet, workload: Workload, *, bar: bool = True, keep: Keep | None = None
) -> Results:
    """Run the workload under each recipe; return records per recipe and how fast the simulator was.

    keep: record each run as well, and keep it as its folder.
    """
    found = Results({}, {}, {})
    with Progress(disable=not bar, transient=True) as progress:
        for name in recipes:
            task = progress.add_task(name, total=workload.arrival.size)
            nodes = fleet.nodes(workload.models[0])
            recorder = Recorder(keep.megabytes) if keep else None
            began = time.perf_counter()
            outcome = Simulation(find(name), nodes, workload).run(
                lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
                recorder,
            )
            wall = time.perf_counter() - began
            found.records[name] = (records(workload, outcome), float(outcome.evictions.sum()))
            end = float(np.nanmax(outcome.end, initial=0.0))
            found.speeds[name] = Speed(wall, end, outcome.iterations, workload.arrival.size)
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
        self, recipe: str, nodes: Sequence[Node], workload: Workload, outcome: Outcome, recording: Recording
    ) -> Run:
        """Write a run folder and return its run."""
        machines = tuple(map(Machine.of, nodes))
        header = Header(recipe, machines, self.seed, self.command, self.about)
        run = Run(header, workload, outcome, recording)
        runfolder.save(run, self.folder / "runs" / file_name(recipe))
        return run


def file_name(recipe: str) -> str:
    """Return a recipe's name as files may be called: those from outside have a colon and dots."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", recipe)


def main(
    recipes: Sequence[str], fleet: Fleet, *, rate: float, duration: float, slo: str, seed: int,
    as_json: bool, out: Path | None, record_mb: float = 1000.0,
) -> None:  # fmt: skip
    """Simulate, print a table or one JSON object, and write the files when a folder is given."""
    began = time.perf_counter()
    workload = chat_batch(rate, duration, seed, promise(slo), fleet.max_model_len)
    command, text = shlex.join(["headway", *sys.argv[1:]]), _describe(fleet, rate, duration, slo)
    about = report.About(command, seed, text)
    keep = Keep(out, record_mb, seed, command, text) if out else None
    found = simulate(recipes, fleet, workload, bar=not as_json, keep=keep)
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
            f"{speed.wall * 1e6 / max(speed.iterations, 1):.0f} us each[/]"
        )


def _write(out: Path, found: Results, seconds: float, about: report.About) -> None:
    """Write the page with everything, and say where it and the runs are."""
    from headway.bench import plots_run  # matplotlib takes a while: only those who write reports wait for it

    more = {f"engine-{file_name(name)}": plots_run.draw(run) for name, run in found.runs.items()}
    report.write(out, found.records, bench="simulate", host="sim", seconds=seconds, about=about, more=more)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"written: {out}/report.html")
    for name in found.runs:
        console.print(f"why was a request late: headway explain {out}/runs/{file_name(name)} --worst 10")


def _describe(fleet: Fleet, rate: float, duration: float, slo: str) -> str:
    return (
        f"SIMULATED: {fleet.count} x {fleet.pace}, batch limit {fleet.max_running}; {rate:g} req/s for "
        f"{duration:g} s: 60% chat (ShareGPT-like lengths, {slo}), 40% best effort (512-1024 in, 32-128 out)"
    )


@dataclass(frozen=True, slots=True)
class Results:
    """records: what `report` reads. speeds: per recipe. runs: those that were kept."""

    records: dict[str, tuple[list[Record], float | None]]
    speeds: dict[str, Speed]
    runs: dict[str, Run]


def records(workload: Workload, outcome: Outcome) -> list[Record]:
    """Return the simulated requests as records, to be judged by the code that judges real ones."""
    slos = {code: Slo(*promise) for code, promise in _promises(workload).items()}
    columns = zip(
        workload.tier.tolist(), workload.arrival.tolist(), outcome.first.tolist(), outcome.end.tolist(),
        workload.prompt.tolist(), workload.output.tolist(), strict=True,
    )  # fmt: skip
    return [
        Record(workload.tiers[tier], at, at, first, end, prompt, output, _NO_GAPS, 200, None, slos[tier])
        for tier, at, first, end, prompt, output in columns
    ]


def _promises(workload: Workload) -> dict[int, tuple[float | None, float | None, float | None]]:
    """Return each class's promise, None where there is none (the columns say inf)."""
    first = {
        code: int(np.flatnonzero(workload.tier == code)[0]) for code in np.unique(workload.tier).tolist()
    }
    columns = (workload.ttft, workload.tpot, workload.e2e)
    return {
        code: tuple(float(c[i]) if np.isfinite(c[i]) else None for c in columns)  # type: ignore[misc]
        for code, i in first.items()
    }
