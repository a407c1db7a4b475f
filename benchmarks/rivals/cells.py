"""The simulations of `headway bench rivals`: cells of an arena, a load, a seed and a system; searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.experiment import computed
from benchmarks.rivals.grounds import ARENAS
from benchmarks.rivals.measures import Figures, figures, with_line
from benchmarks.rivals.systems import LINE, system
from headway.simulate.run import Simulation

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
