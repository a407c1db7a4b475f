"""A benchmark as one function: `main` measures, and `experiment` times it and prints and writes its result.

A `main` takes what every command is asked (`Ask`), then its own options, and returns a `Result`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Concatenate, Generic, ParamSpec, TypeVar

from rich.progress import track

from headway.whatif.output.results import About, Ask, Grid, Host, Pictures, Report, Row, deliver, row_grid, versions

P = ParamSpec("P")
JobT = TypeVar("JobT", bound=Hashable)
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class Result:
    """The findings of a benchmark.

    workload: one sentence on what was run
    pictures: called only when files are written
    grid: the table; None = a line per row
    versions: of further programs that were measured
    """

    rows: Sequence[Row]
    workload: str
    pictures: Callable[[], Pictures] | None = None
    grid: Grid | None = None
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment(Generic[P]):
    """A benchmark by the name, host and title of its report, and the function that measures."""

    bench: str
    host: Host
    title: str
    measure: Callable[Concatenate[Ask, P], Result]

    def __call__(self, ask: Ask, /, *args: P.args, **options: P.kwargs) -> None:
        """Measure, print the result, and write page and pictures when a folder is given."""
        began = time.perf_counter()
        found = self.measure(ask, *args, **options)
        report = self.report(found, time.perf_counter() - began, ask.seed)
        deliver(report, as_json=ask.as_json, out=ask.out, pictures=found.pictures)

    def report(self, found: Result, seconds: float = 0.0, seed: int = 0) -> Report:
        """Return the report of the findings."""
        about = About(found.workload, seed, versions={**versions(), **found.versions})
        grid = found.grid or row_grid(found.rows)
        return Report(self.bench, self.host, self.title, found.rows, seconds, about, grid, notes=found.notes)


def experiment(bench: str, host: Host, title: str) -> Callable[[Callable[Concatenate[Ask, P], Result]], Experiment[P]]:
    """Return a decorator that makes a benchmark of a function that measures."""
    return lambda measure: Experiment(bench, host, title, measure)


def computed(
    jobs: Iterable[JobT], compute: Callable[[JobT], FoundT], *, bar: bool, processes: int | None = None
) -> dict[JobT, FoundT]:
    """Compute each job once, on all cores."""
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn")) as pool:
        pending = {pool.submit(compute, job): job for job in dict.fromkeys(jobs)}
        done = track(as_completed(pending), "simulating", len(pending), disable=not bar)
        found = {pending[one]: one.result() for one in done}
    return {job: found[job] for job in pending.values()}
