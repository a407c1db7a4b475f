"""`headway bench beside`: interactive bursts beside a batch with a completion deadline, SIMULATED.

The shape of a published trial of a batch gateway (llm-d/llm-d-batch-gateway, issue 491): interactive traffic
that alternates between bursts and idle time, and a batch that should be complete by a deadline. There the
ttft p99 of interactive requests rose to 7 to 11 times that without the batch. Here a batch of 30 jobs of 100
requests takes about three quarters of what the interactive traffic leaves of the engine. `live/beside.py`
has the same on real engines. Half of the interactive requests promise nothing (class `plain`), as those of
clients that know of no SLOs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.simulated.grounds import Ground, capacity
from headway.policy.recipes.registry import find
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.arrivals import phases
from headway.simulate.workload.traffic import TrafficClass, Workload, concat
from headway.types import Floats, Slo
from headway.whatif import slo_violations
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row

SYSTEMS = ("vllm", "vllm-priority", "slack", "headway")
ALONE, BESIDE = "interactive alone", "beside the batch"
PLAIN = "plain"
_INTERACTIVE = TrafficClass("interactive", 0.5, Slo(ttft=1.0, tpot=0.1), 0, "sharegpt")
_PLAIN = TrafficClass(PLAIN, 0.5, lengths="sharegpt")
GROUND = Ground("beside", "opt-13b-a100", (_INTERACTIVE, _PLAIN))
BURST, IDLE = 0.6, 0.04  # arrivals as a share of the engine's capacity; the trial's ratio of 15 to 1
_PHASE = 45.0  # seconds of a burst, and of the idle time after it
_JOBS, _JOB = 30, 100
USED = 0.75  # of what the interactive traffic leaves of the engine, by the batch until its deadline
LEFT = 1.0 - (BURST + IDLE) / 2  # of the engine, by the interactive traffic


@dataclass(frozen=True, slots=True)
class Figures:
    """Latency of interactive requests and the batch in time: ttft p99 and silence in s, shares in percent.

    plain: ttft p99 of interactive requests without a promise. silence: the longest of an interactive stream.
    in_time: of the batch's requests, complete by the deadline; None without a batch.
    """

    ttft_p99: float
    plain: float
    silence: float
    attainment: float
    in_time: float | None


def deadline(share: float = 1.0) -> float:
    """Return the seconds that the batch has: what is left of the engine does it in `USED` of them."""
    return share * _JOBS * _JOB / (capacity(GROUND) * LEFT * USED)


def interactive(seconds: float, rng: np.random.Generator) -> Workload:
    """Return bursts and idle time by turns, beginning with a burst."""
    return GROUND.requests_at(bursts(capacity(GROUND), int(np.ceil(seconds / _PHASE)), _PHASE, rng), rng)


def bursts(capacity: float, count: int, phase: float, rng: np.random.Generator) -> Floats:
    """Return the arrivals of `count` phases of `phase` seconds: a burst, idle time, and so on.

    capacity: of the engine, requests/s
    """
    return phases([capacity * (IDLE if k % 2 else BURST) for k in range(count)], phase, rng)


def batch(seconds: float, count: int, rng: np.random.Generator) -> Workload:
    """Return the batch's requests, all at 0, due after `seconds`."""
    one = TrafficClass("batch", 1.0, Slo(e2e=seconds), 10, "sharegpt")
    return replace(GROUND, classes=(one,)).requests_at(np.zeros(count), rng)


def measure(system: str, workload: Workload) -> Figures:
    """Simulate one system."""
    outcome = Simulation(find(system), [GROUND.instance()], workload).run()
    return figures(workload, outcome)


def figures(workload: Workload, outcome: Outcome) -> Figures:
    """Return the figures of a run; the class "batch" is the batch."""
    ttft = slo_violations.seen(workload, outcome)["ttft"]
    met = slo_violations.met(workload, outcome)
    mine, plain, batch = (
        np.array([workload.tiers[tier] == name for tier in workload.tier]) for name in ("interactive", PLAIN, "batch")
    )
    return Figures(
        float(np.quantile(ttft[mine], 0.99)),
        float(np.quantile(ttft[plain], 0.99)),
        float(outcome.gap[mine | plain].max()),
        100 * float(met[mine].mean()),
        100 * float(met[batch].mean()) if batch.any() else None,
    )


def rows_of(found: dict[tuple[str, str], Figures]) -> list[Row]:
    """Return the figures by system and setting; the ratio is to the same system without the batch.

    A ttft p99 that is infinite, because requests failed, is None.
    """
    rows = []
    for (system, setting), seen in found.items():
        rows += [
            Row("ttft.p99", system, setting, _known(1000 * seen.ttft_p99), "ms"),
            Row("plain.ttft.p99", system, setting, _known(1000 * seen.plain), "ms"),
            Row("gap.max", system, setting, _known(1000 * seen.silence), "ms"),
            Row("attainment.interactive", system, setting, seen.attainment, "%"),
        ]
        if seen.in_time is not None:
            alone = found[system, ALONE]
            rows += [
                Row("ttft.p99_ratio", system, setting, _known(seen.ttft_p99 / alone.ttft_p99), "x"),
                Row("plain.ttft.p99_ratio", system, setting, _known(seen.plain / alone.plain), "x"),
                Row("batch.in_time", system, setting, seen.in_time, "%"),
            ]
    return rows


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compute(systems: Sequence[str], share: float, seed: int) -> tuple[list[Row], str]:
    """Run all systems with and without the batch; share: of the whole batch. Return figures and workload."""
    rng, seconds = np.random.default_rng(seed), deadline(share)
    alone = interactive(seconds, rng)
    both = concat(alone, batch(seconds, int(share * _JOBS * _JOB), rng)).sorted()
    found = {}
    for system in systems:
        found[system, ALONE] = measure(system, alone)
        found[system, BESIDE] = measure(system, both)
    workload = (
        f"{SIMULATED}: {GROUND.profile}, {len(alone)} interactive requests in {_PHASE:g} s bursts at "
        f"{BURST:g} x capacity and as long at {IDLE:g} x; a batch of {len(both) - len(alone)} requests, "
        f"due after {seconds:.0f} s."
    )
    return rows_of(found), workload


@experiment("beside", "sim", f"Interactive bursts beside a batch with a deadline ({SIMULATED})")
def main(ask: Ask) -> Result:
    """Simulate; `quick`: a quarter of the batch and of its time."""
    rows, workload = compute(SYSTEMS, 0.25 if ask.quick else 1.0, ask.seed)
    return Result(rows, workload, lambda: {"beside": plot(rows, SIMULATED)})


def plot(rows: Sequence[Row], mark: str = "") -> bytes:
    """Return a PNG: ttft p99 with and without the batch, and the batch in time, by system.

    mark: text on the picture, such as SIMULATED
    """
    at = {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows}
    systems = list(dict.fromkeys(row.system for row in rows))
    figure, (left, right) = sheet(1, 2, 9, 4)
    place = np.arange(len(systems))
    bars = [("ttft.p99", "with a promise"), ("plain.ttft.p99", "without")]
    for k, (id, kind) in enumerate(bars):
        for offset, setting in ((-0.3, ALONE), (0.1, BESIDE)):
            height = [at[id, s, setting] for s in systems]
            left.bar(place + offset + 0.2 * k, height, 0.2, label=f"{kind}, {setting}")
    left.set(ylabel="ttft p99, ms (log)", yscale="log")
    left.legend()
    right.bar(place, [at["batch.in_time", s, BESIDE] for s in systems], 0.4)
    right.set(ylabel="batch in time, %", ylim=(0, 105))
    for axes in (left, right):
        axes.set_xticks(place, systems)
    return png(figure, mark)
