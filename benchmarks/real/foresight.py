"""`headway bench advise`: the predictions of `headway advise` for a real engine against its measured figures.

A gateway serves a mix at the first load and keeps its journal. The simulator is calibrated from that journal
alone and predicts the attainment at every load; the same requests are then really sent at those loads.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.experiment import Result, experiment
from headway.config import Engine
from headway.engines.vllm.process.launch import free_port
from headway.engines.vllm.process.sizes import expected
from headway.policy.recipes.registry import find
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload import arrivals
from headway.simulate.workload.traffic import Workload
from headway.store.journal.reader import JournalReader, read
from headway.whatif.experiment import records
from headway.whatif.journal.calibrate import Calibration, instances_of
from headway.whatif.journal.replay import traffic_of
from headway.whatif.load import generator, metrics, mix
from headway.whatif.load.records import Call, Record
from headway.whatif.measured.compare import BURST, steady
from headway.whatif.measured.systems import answering, gateway
from headway.whatif.output.results import Ask, Row
from headway.whatif.scenario import faster

_SETTLE_S = 4.0  # until the journal's last rows are written
_QUICK_SECONDS, _QUICK_CAPACITY = 14.0, 6.0
_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class ForesightTrial:
    """The settings of a trial.

    loads: multiples of the capacity; the journal is recorded at the first. duration: seconds of arrivals at the
    first load. capacity: requests/s; None = measured.
    """

    mix: mix.Mix
    engine: Engine
    recipe: str
    loads: tuple[float, ...]
    duration: float
    seed: int
    capacity: float | None = None


@dataclass(frozen=True, slots=True)
class ForesightOutcome:
    """The records at each load, the journal of the first load, and the capacity in requests/s."""

    served: dict[float, list[Record]]
    journal: JournalReader
    capacity: float


async def run(trial: ForesightTrial) -> ForesightOutcome:
    """Serve the mix at every load. Raise EngineError if the gateway does not start."""
    folder = Path(tempfile.mkdtemp(prefix="headway-bench-"))
    port, notes = free_port(), folder / "journal"
    engine = replace(trial.engine, args=(*trial.engine.args, "--no-enable-prefix-caching"))
    child = gateway(trial.recipe, (engine,), port, folder, trial.mix.names, journal=str(notes))
    url, served, journal = f"http://127.0.0.1:{port}", dict[float, list[Record]](), JournalReader()
    _console.print(f"[dim]logs: {folder}[/]\nstarting {trial.recipe} ...")
    async with answering(trial.recipe, child, f"{url}/ready"):
        await generator.run(url, engine.name, _at_once(trial, 16, 8), progress=False)
        capacity = trial.capacity or await _capacity(trial, url)
        for load in trial.loads:
            _console.print(f"[bold]{load:g}x[/], {capacity * load:.3f} req/s")
            began = time.time()
            served[load] = await generator.run(url, engine.name, _calls(trial, capacity, load))
            await asyncio.sleep(_SETTLE_S)
            if load == trial.loads[0]:
                journal = read(notes, since=began)
    return ForesightOutcome(served, journal, capacity)


async def _capacity(trial: ForesightTrial, url: str) -> float:
    found = await generator.run(url, trial.engine.name, _at_once(trial, BURST, None), progress=False)
    return steady(found)


def _at_once(trial: ForesightTrial, count: int, tokens: int | None) -> list[Call]:
    rng = np.random.default_rng([trial.seed, 1])
    calls = mix.calls(trial.mix, np.zeros(count), rng)
    return [replace(call, max_tokens=tokens or call.max_tokens) for call in calls]


def _calls(trial: ForesightTrial, capacity: float, load: float) -> list[Call]:
    """Return the same requests for every load, with arrivals scaled to the load."""
    rng, first = np.random.default_rng(trial.seed), trial.loads[0]
    at = arrivals.poisson(capacity * first, trial.duration, rng) * (first / load)
    return mix.calls(trial.mix, at, rng)


# ---- the prediction


def predicted(requests: Workload, kinds: Sequence[InstanceSpec], recipe: str, load: float) -> list[Record]:
    """Simulate the journal's requests at `load` times their rate."""
    work = faster(requests, load)
    return records(work, Simulation(find(recipe), list(kinds), work).run())


def rows_of(trial: ForesightTrial, outcome: ForesightOutcome) -> tuple[list[Row], dict[str, Calibration]]:
    """Return the measured and predicted figures by load and class, and the calibrations."""
    kinds, known = instances_of(outcome.journal)
    requests = traffic_of(outcome.journal, trial.seed)
    rows: list[Row] = []
    for load in trial.loads:
        guess = predicted(requests, kinds, trial.recipe, load / trial.loads[0])
        guessed = metrics.split(guess)
        for tier, real in metrics.split(outcome.served[load]).items():
            rows += _compared(trial.recipe, f"{tier}, {load:g}x", real, guessed.get(tier, []))
    return rows, known


def _compared(system: str, setting: str, real: Sequence[Record], guess: Sequence[Record]) -> list[Row]:
    rows: list[Row] = []
    truth, guessed = metrics.attainment(real), metrics.attainment(guess)
    if truth is not None and guessed is not None:
        rows.append(Row("attainment.real", system, setting, truth, "%"))
        rows.append(Row("attainment.predicted", system, setting, guessed, "%"))
        rows.append(Row("attainment.error_points", system, setting, guessed - truth, "points"))
    for metric in ("ttft", "e2el"):
        for name, found in (("real", real), ("predicted", guess)):
            values = metrics.values(found, metric)
            if values.size:
                p90 = float(np.quantile(values, 0.9)) * 1000
                rows.append(Row(f"{metric}.p90.{name}", system, setting, p90, "ms"))
    return rows


@experiment("advise", "vllm", "What was predicted from a journal, and what vLLM did")
def main(ask: Ask, trial: ForesightTrial) -> Result:
    """Run and predict."""
    if ask.quick:
        trial = replace(
            trial,
            duration=min(trial.duration, _QUICK_SECONDS),
            loads=trial.loads[:2],
            capacity=trial.capacity or _QUICK_CAPACITY,
        )
    outcome = asyncio.run(run(trial))
    rows, known = rows_of(trial, outcome)
    one = next(iter(known.values()))
    about = (
        f"{mix.describe(trial.mix)}; the first load for {trial.duration:g} s, then the same requests faster; "
        f"capacity {outcome.capacity:.3f} req/s, batch limit {expected(trial.engine).max_running}, no prefix caching. "
        f"Predicted from the journal of the first load: {one.iterations} iterations, fitted within "
        f"{one.error:.1%} of their time."
    )
    return Result(rows, about)
