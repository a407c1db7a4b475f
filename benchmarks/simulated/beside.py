"""`headway bench beside`: interactive requests beside a batch on two engines, SIMULATED.

The shape of a published trial of a batch gateway (llm-d/llm-d-batch-gateway, issue 491, September 2026): bursts of
interactive requests at 88 % of the knee, with idle time between them, and a batch of 3,000 requests that are queued
at 500 requests/s; every prompt has 512 tokens and every answer 128. Here the batch comes 15 s before the first
burst, which therefore begins on full engines. The trial ran gpt-oss-120b, one A100 per engine.

The knee is the load beyond which two stock engines complete no more requests/s however many arrive, as in the trial:
above it the queue, and with it the ttft, grows as long as the load lasts (rows `alone.ttft.p95`).
`benchmarks/real/beside.py` runs the same on real engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.simulated.grounds import Ground
from headway.policy.recipes.registry import find
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.arrivals import poisson
from headway.simulate.workload.traffic import Workload, concat, single
from headway.types import Bools, Floats, Slo
from headway.whatif.output.plots import colours, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid

ALONE, UNPROTECTED = "alone", "vllm"
SYSTEMS = (UNPROTECTED, "vllm-priority", "llm-d-like", "slack", "headway")
BATCH_RATE, KNEE_SHARE = 500.0, 0.88
BATCH_SLO, BATCH_PRIORITY = Slo(e2e=86_400.0), 10  # due after a day, as OpenAI's batches are
_GROUND = Ground("beside", "llama-2-7b-a100", ())
_ENGINES, _PROMPT, _ANSWER = 2, 512, 128
_INTERACTIVE = Slo(ttft=0.5, tpot=0.1)
_SWEEP = (0.5, 0.75, KNEE_SHARE, 1.0, 1.1)  # loads as shares of the knee
_PAPER = {  # of the trial, which measured the protected systems after some bursts
    ("ttft.p50", ALONE): 60.0,
    ("ttft.p95", ALONE): 91.0,
    ("ttft.p50", UNPROTECTED): 232.0,
    ("ttft.p95", UNPROTECTED): 1901.0,
    ("ttft.p95_of_alone", UNPROTECTED): 1901.0 / 91.0,
    ("ttft.p95_of_alone", "llm-d-like"): 1.6,
    ("batch.done", "llm-d-like"): 3000.0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How much arrives, and when.

    batch: requests. lead: seconds from the first of them to the first burst.
    burst, idle: seconds of each burst, and of the time without requests after it. bursts: how many.
    onset: first seconds of a burst that have a figure of their own.
    """

    batch: int = 3000
    lead: float = 15.0
    burst: float = 90.0
    idle: float = 90.0
    bursts: int = 3
    onset: float = 10.0

    def interactive(self, rate: float, rng: np.random.Generator) -> Floats:
        """Return the seconds at which interactive requests arrive; rate: requests/s in a burst."""
        starts = self.lead + (self.burst + self.idle) * np.arange(self.bursts)
        return np.concatenate([start + poisson(rate, self.burst, rng) for start in starts])

    def due(self) -> Floats:
        """Return the seconds at which the requests of the batch arrive."""
        return np.arange(self.batch) / BATCH_RATE

    def begins(self, at: Floats) -> Bools:
        """Tell which of these instants are in the first seconds of a burst."""
        return np.asarray((at - self.lead) % (self.burst + self.idle) < self.onset)


QUICK = Shape(batch=600, burst=20.0, idle=20.0, bursts=2)


@dataclass(frozen=True, slots=True)
class Seen:
    """A run's figures: of interactive requests that arrived before the batch was complete, and of the batch.

    ttft: by request, s, inf = no first token. onset: which of them came in the first seconds of a burst.
    seconds: from the batch's first arrival to its last end, inf = some failed. done: complete. None = no batch.
    """

    ttft: Floats
    onset: Bools
    seconds: float | None = None
    done: int | None = None

    @classmethod
    def of(cls, shape: Shape, at: Floats, ttft: Floats, ends: Floats | None = None) -> Seen:
        """Return the figures of interactive requests by arrival, and of a batch by its ends (inf = failed)."""
        if ends is None:
            return cls(ttft, shape.begins(at))
        counts = at < ends.max()
        return cls(ttft[counts], shape.begins(at[counts]), float(ends.max()), int(np.isfinite(ends).sum()))


def rows_of(found: dict[str, Seen], setting: str) -> list[Row]:
    """Return the figures of all systems; the ratio is to stock vLLM without a batch. None: some requests failed."""
    rows, alone = [], float(np.quantile(found[ALONE].ttft, 0.95, method="higher"))
    for system, seen in found.items():
        p50, p95, p99 = (float(np.quantile(seen.ttft, share, method="higher")) for share in (0.5, 0.95, 0.99))
        onset = float(np.quantile(seen.ttft[seen.onset], 0.95, method="higher"))
        figures: list[tuple[str, float, str]] = [
            ("ttft.p50", 1000 * p50, "ms"),
            ("ttft.p95", 1000 * p95, "ms"),
            ("ttft.p99", 1000 * p99, "ms"),
            ("ttft.p95_of_alone", p95 / alone, "x"),
            ("onset.ttft.p95", 1000 * onset, "ms"),
        ]
        if seen.seconds is not None and seen.done is not None:
            figures += [("batch.seconds", seen.seconds, "s"), ("batch.done", float(seen.done), "")]
        rows += [Row(id, system, setting, value if math.isfinite(value) else None, unit) for id, value, unit in figures]
    return rows


# ---- the simulation


def _interactive(at: Floats) -> Workload:
    return single(at, _PROMPT, _ANSWER, slo=_INTERACTIVE, tier="interactive")


def _run(system: str, workload: Workload) -> Outcome:
    spec = _GROUND.instance()
    engines = [
        replace(spec, instance=replace(spec.instance, id=f"e{i}"), host_tokens=0)  # as stock vLLM, which has no pool
        for i in range(_ENGINES)
    ]
    return Simulation(find(system), engines, workload).run()


def knee(seconds: float, rng: np.random.Generator) -> float:
    """Return the requests/s that two stock engines complete when too many arrive, without the first third."""
    workload = _interactive(poisson(60.0, seconds, rng))
    end = _run(UNPROTECTED, workload).end
    return float(((end > seconds / 3) & (end < seconds)).sum() / (seconds * 2 / 3))


def measure(system: str, shape: Shape, at: Floats) -> Seen:
    """Simulate one system, or stock vLLM without the batch (`ALONE`); at: arrivals of interactive requests."""
    workload = _interactive(at)
    if system == ALONE:
        return Seen.of(shape, at, _run(UNPROTECTED, workload).first - at)
    batch = single(shape.due(), _PROMPT, _ANSWER, slo=BATCH_SLO, priority=BATCH_PRIORITY, tier="batch")
    both = concat(workload, batch).sorted()
    outcome, mine = _run(system, both), both.priority == 0
    return Seen.of(shape, at, (outcome.first - both.arrival)[mine], np.nan_to_num(outcome.end[~mine], nan=np.inf))


def sweep(most: float, seconds: float, seed: int) -> Iterable[Row]:
    """Yield the ttft p95 of interactive requests alone by load; most: the knee in requests/s."""
    for share in _SWEEP:
        at = poisson(share * most, seconds, np.random.default_rng([seed, 1]))
        p95 = float(np.quantile(_run(UNPROTECTED, _interactive(at)).first - at, 0.95))
        yield Row("alone.ttft.p95", ALONE, f"{share:.0%} of the knee, {seconds:g} s", 1000 * p95, "ms")


@experiment("beside", "sim", f"Interactive requests beside a batch ({SIMULATED})")
def main(ask: Ask) -> Result:
    """Simulate; `quick`: a fifth of the batch, and two short bursts."""
    shape, seconds = (QUICK, 20.0) if ask.quick else (Shape(), 60.0)
    most = knee(seconds, np.random.default_rng([ask.seed, 2]))
    at = shape.interactive(KNEE_SHARE * most, np.random.default_rng(ask.seed))
    setting = f"{shape.batch} in the batch"
    rows = rows_of({system: measure(system, shape, at) for system in (ALONE, *SYSTEMS)}, setting)
    if not ask.quick:
        rows = [replace(row, paper=_PAPER.get((row.id, row.system))) for row in rows]
    rows += [Row("knee", ALONE, f"{seconds:g} s", most, "requests/s"), *sweep(most, seconds, ask.seed)]
    workload = (
        f"{SIMULATED}: {_ENGINES} engines of {_GROUND.profile}, prompts of {_PROMPT} and answers of {_ANSWER} tokens; "
        f"{shape.bursts} bursts of {shape.burst:g} s at {KNEE_SHARE:.0%} of the knee, {shape.idle:g} s apart; "
        f"{shape.batch} requests at {BATCH_RATE:g}/s from {shape.lead:g} s before the first burst on, due after a day."
    )
    return Result(rows, workload, lambda: {"beside": plot(rows, SIMULATED)}, system_grid(rows))


def plot(rows: Sequence[Row], mark: str = "") -> bytes:
    """Return a PNG: ttft p50, p95 and onset of interactive requests, and the batch's seconds, by system.

    mark: text on the picture, such as SIMULATED
    """
    at = {(row.id, row.system): row.ours or 0.0 for row in rows}
    systems = [row.system for row in rows if row.id == "ttft.p50"]
    figure, (left, right) = sheet(1, 2, 10, 4)
    place, ids = np.arange(len(systems)), ("ttft.p50", "ttft.p95", "onset.ttft.p95")
    for k, (id, colour) in enumerate(colours(ids).items()):
        left.bar(place + 0.25 * (k - 1), [at[id, one] for one in systems], 0.25, label=id, color=colour)
    left.set(ylabel="ms (log)", yscale="log")
    left.legend()
    right.bar(place, [at.get(("batch.seconds", one), 0.0) for one in systems], 0.4)
    right.set(ylabel="batch, s")
    for axes in (left, right):
        axes.set_xticks(place, systems, rotation=20)
    return png(figure, mark)
