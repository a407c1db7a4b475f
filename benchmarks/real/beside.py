"""`headway bench beside --real`: interactive bursts beside a batch with a deadline, on real engines.

Like `simulated/beside.py`, with a batch as large as the engine can finish before the deadline. Each system
serves the interactive requests alone, and again beside the batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.simulated import beside
from benchmarks.simulated.beside import ALONE, BESIDE, Figures
from headway.config import Engine
from headway.engines.vllm.process.sizes import expected
from headway.types import Slo
from headway.whatif.load import mix, report
from headway.whatif.load.metrics import attainment, values
from headway.whatif.load.records import Call, Record, Results
from headway.whatif.measured import compare
from headway.whatif.measured.systems import Start, running
from headway.whatif.output.results import Ask

_INTERACTIVE = mix.TrafficTier("interactive", 0.5, Slo(ttft=1.5, tpot=0.150), "sharegpt_first_turn", max_tokens=128)
_PHASES = 6  # three bursts, each followed by idle time
_QUICK_SECONDS, _QUICK_TOKENS, _QUICK_CAPACITY = 4.0, 32, 6.0  # capacity: requests/s with such short answers

Found = dict[tuple[str, str], list[Record]]


@dataclass(frozen=True, slots=True)
class BesideTrial:
    """The settings of a trial.

    seconds: time until the batch is due; the interactive requests arrive within the same time
    capacity: requests/s of the engine; None = measured on the first system
    interactive: the class of interactive requests with a promise; the others are copies with other SLOs
    start: starts the systems, as `systems.running` does
    """

    engine: Engine
    systems: tuple[str, ...]
    seconds: float
    rounds: int = 1
    seed: int = 0
    capacity: float | None = None
    interactive: mix.TrafficTier = _INTERACTIVE
    start: Start = running

    @property
    def plain(self) -> mix.TrafficTier:
        """The class of interactive requests without an SLO."""
        return replace(self.interactive, name=beside.PLAIN, slo=Slo())

    @property
    def batch(self) -> mix.TrafficTier:
        """The class of the batch: due at the deadline, less urgent than all others."""
        return replace(self.interactive, name="batch", slo=Slo(e2e=self.seconds), priority=10)

    def calls(self, capacity: float, number: int) -> tuple[list[Call], list[Call]]:
        """Return a round's interactive requests, and the batch, which is sent at the start."""
        rng = np.random.default_rng([self.seed, number])
        at = beside.bursts(capacity, _PHASES, self.seconds / _PHASES, rng)
        due = np.zeros(max(round(capacity * beside.LEFT * beside.USED * self.seconds), 1))
        alone = mix.Mix("interactive", (self.interactive, self.plain))
        batch = mix.Mix("batch", (self.batch,))
        warn = _silent if number else None  # warn once, in the first round
        return mix.calls(alone, at, rng, warn=warn), mix.calls(batch, due, rng, warn=_silent)


@dataclass(frozen=True, slots=True)
class BesideOutcome:
    """The records by system and setting, and the engine's capacity in requests/s."""

    found: Found
    capacity: float


async def run(trial: BesideTrial) -> BesideOutcome:
    """Run all systems, with and without the batch. Raise ConfigError or EngineError if one cannot run."""
    setup = compare.CompareSetup(
        mix.Mix("beside", (trial.interactive, trial.plain, trial.batch)),
        without_prefixes(trial.engine),
        trial.systems,
        rounds=trial.rounds,
        seed=trial.seed,
        together=True,
        start=trial.start,
    )
    async with compare.started(setup) as systems:
        capacity = trial.capacity or await systems.capacity()
        found: Found = {(name, setting): [] for name in trial.systems for setting in (ALONE, BESIDE)}
        for number in range(trial.rounds):
            alone, batch = trial.calls(capacity, number)
            for name in compare.rotated(trial.systems, number):
                for setting, calls in ((ALONE, alone), (BESIDE, [*batch, *alone])):
                    label = f"{setting}, round {number + 1} of {trial.rounds}"
                    records, _ = await systems.send(name, calls, label)
                    found[name, setting] += records
    return BesideOutcome(found, capacity)


def without_prefixes(engine: Engine) -> Engine:
    """Return the engine without prefix caching, which would let the second run reuse the first's prompts."""
    return replace(engine, args=(*engine.args, "--no-enable-prefix-caching"))


def _silent(_: str) -> None:
    """Discard a warning."""


def figures(records: Sequence[Record]) -> Figures:
    """Return the figures of a run; a request without a first token has an infinite ttft."""
    batch = [record for record in records if record.tier == "batch"]
    plain = [record for record in records if record.tier == beside.PLAIN]
    mine = [record for record in records if record.tier not in ("batch", beside.PLAIN)]
    silence = float(values(mine + plain, "itl").max(initial=0.0))
    return Figures(_p99(mine), _p99(plain), silence, attainment(mine) or 0.0, attainment(batch))


def _p99(records: Sequence[Record]) -> float:
    with np.errstate(invalid="ignore"):  # between two infinite values it is NaN
        return float(np.quantile([record.ttft for record in records], 0.99)) if records else math.nan


@experiment("beside", "vllm", "Interactive bursts beside a batch with a deadline on vLLM")
def main(ask: Ask, trial: BesideTrial) -> Result:
    """Run the benchmark. `quick`: a few seconds of short answers at a fixed capacity."""
    if ask.quick:
        trial = replace(
            trial,
            seconds=min(trial.seconds, _QUICK_SECONDS),
            rounds=1,
            capacity=trial.capacity or _QUICK_CAPACITY,
            interactive=replace(trial.interactive, max_tokens=_QUICK_TOKENS),
        )
    outcome = asyncio.run(run(trial))
    plain = beside.rows_of({key: figures(records) for key, records in outcome.found.items()})
    rows = [replace(row, setting=f"{row.setting}, {trial.seconds:g} s") for row in plain]
    runs: Results = {f"{name}, {kind}": (records, {}) for (name, kind), records in outcome.found.items()}
    notes, workload = report.warnings(runs), _describe(trial, outcome)
    return Result(rows, workload, lambda: {"beside": beside.plot(plain)}, notes=notes)


def _describe(trial: BesideTrial, outcome: BesideOutcome) -> str:
    records = next(found for (_, setting), found in outcome.found.items() if setting == BESIDE)
    batch = sum(record.tier == "batch" for record in records)
    measured = "" if trial.capacity else ", measured on the first system"
    classes = mix.describe(mix.Mix("beside", (trial.interactive, trial.plain)))
    return (
        f"{classes}; {len(records) - batch} requests in "
        f"{trial.seconds / _PHASES:g} s bursts at {beside.BURST:g} x capacity and as long at "
        f"{beside.IDLE:g} x (capacity {outcome.capacity:.3f} req/s{measured}); a batch of {batch} such "
        f"requests, due after {trial.seconds:g} s; {trial.rounds} x {trial.seconds:g} s, batch limit "
        f"{expected(trial.engine).max_running}, no prefix caching."
    )
