"""The simulations of `headway bench rivals`: cells of an arena, a load, a seed and a system; searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from benchmarks.experiment import computed
from benchmarks.rivals.grounds import ARENAS
from benchmarks.rivals.systems import LINE, system
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Floats
from headway.whatif import slo_violations


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, or their means over seeds.

    promised: requests with an SLO; kept, line: those on time, by all targets and by the token line, in %.
    tardiness: p99 of the seconds by which a promised request missed a target, 0 where it missed none.
    tokens, best_effort: answer tokens/s from the first arrival to the last completion, and of best effort
    that is complete when arrivals end. in_time: tokens/s of promised requests that were on time (JITServe's
    goodput), over the arrivals. ttft: median, seconds. e2e: p99 of all requests, seconds.
    classes: kept by class, in %.
    """

    promised: float
    kept: float
    line: float
    tardiness: float
    tokens: float
    best_effort: float
    in_time: float
    ttft: float
    e2e: float
    classes: dict[str, float] = field(default_factory=dict)


def figures(workload: Workload, outcome: Outcome, seconds: float) -> Figures:
    """Return the figures of a run; seconds: of arrivals."""
    promised, met = workload.promised, slo_violations.met(workload, outcome)
    seen = slo_violations.seen(workload, outcome)
    late = np.max(list(slo_violations.late(workload, outcome).values()), axis=0)
    last = float(np.nanmax(outcome.end)) - float(workload.arrival.min())
    lulls = ~promised & (outcome.end <= seconds)
    return Figures(
        float(promised.sum()),
        _percent(met[promised]),
        _percent(slo_violations.met(with_line(workload), outcome)[promised]),
        float(np.quantile(late[promised], 0.99)),
        float(workload.output.sum()) / last,
        float(workload.output[lulls].sum()) / seconds,
        float(workload.output[promised & met].sum()) / seconds,
        float(np.median(seen["ttft"])),
        float(np.quantile(seen["e2e"], 0.99)),
        _classes(workload, met),
    )


def with_line(workload: Workload) -> Workload:
    """Return the requests with the token line as what their tpot promises."""
    both = np.isfinite(workload.ttft) & np.isfinite(workload.tpot)
    return replace(workload, line=both.astype(np.int64))


def mean(seeds: Sequence[Figures]) -> Figures:
    """Return the means; of what was promised over all promised requests."""
    weights = np.array([one.promised for one in seeds])

    def of(name: str, weighted: bool = False) -> float:
        values = np.array([getattr(one, name) for one in seeds])
        return float(np.average(values, weights=weights if weighted else None))

    classes = {name: float(np.mean([one.classes[name] for one in seeds])) for name in seeds[0].classes}
    return Figures(
        float(weights.sum()),
        of("kept", True),
        of("line", True),
        of("tardiness"),
        of("tokens"),
        of("best_effort"),
        of("in_time"),
        of("ttft"),
        of("e2e"),
        classes,
    )


def _percent(which: Bools) -> float:
    return 100 * float(which.mean())


def _classes(workload: Workload, met: Bools) -> dict[str, float]:
    masks: dict[str, Floats] = {}
    for code, name in enumerate(workload.tiers):
        mask = (workload.tier == code) & workload.promised
        if mask.any():
            masks[name] = np.asarray(met[mask], float)
    return {name: 100 * float(mask.mean()) for name, mask in masks.items()}


STEPS = tuple(round(0.05 * k, 2) for k in range(4, 41))  # loads that a search looks at


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation.

    arena, system: their names. seconds: of arrivals, 0 = the arena's, or with `quick` its short ones.
    """

    arena: str
    load: float
    seed: int
    system: str
    quick: bool = False
    seconds: float = 0.0

    @property
    def setting(self) -> str:
        """Return ground and load."""
        return f"{self.arena}, {self.load:g}x"


@dataclass(frozen=True, slots=True)
class Search:
    """The highest load at which no more than `missed` % miss their promise, or the token line (`by`).

    seconds: of arrivals, 0 = the arena's.
    """

    arena: str
    seed: int
    system: str
    missed: float
    by: Literal["kept", "line"] = "kept"
    seconds: float = 0.0


Job = Cell | Search


def compute(job: Job) -> Figures | float:
    """Run a job."""
    return highest(job) if isinstance(job, Search) else simulate(job)


def simulate(cell: Cell) -> Figures:
    """Simulate a cell to the end of its last answer."""
    arena = ARENAS[cell.arena]
    if cell.seconds:
        arena = arena.lasting(cell.seconds)
    workload = arena.workload(cell.load, cell.seed, quick=cell.quick)
    lengths = arena.lengths(workload, cell.seed)
    asked = with_line(workload) if cell.system == LINE else workload
    outcome = Simulation(system(cell.system), [arena.instance()], asked, lengths).run()
    return figures(workload, outcome, arena.window(cell.load, quick=cell.quick))


def highest(search: Search, figures_of: Callable[[Cell], Figures] = simulate) -> float:
    """Return the highest of `STEPS` with few enough missed, by halving; 0 = not even the lowest has.

    figures_of: runs a cell.
    """
    low, high = -1, len(STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        cell = Cell(search.arena, STEPS[middle], search.seed, search.system, seconds=search.seconds)
        if 100 - getattr(figures_of(cell), search.by) <= search.missed:
            low = middle
        else:
            high = middle
    return STEPS[low] if low >= 0 else 0.0


def run(jobs: Sequence[Job], *, processes: int | None = None) -> dict[Job, Figures | float]:
    """Compute the jobs on all cores, the searches first, which take longest."""
    jobs = sorted(jobs, key=lambda job: isinstance(job, Cell))
    return computed(jobs, compute, sources=("rivals",), processes=processes)
