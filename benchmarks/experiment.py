"""A benchmark as one function: `main` measures, and `experiment` times it and prints and writes its result.

A `main` takes what every command is asked (`Ask`), then its own options, and returns a `Result`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from joblib import Memory
from rich.console import Console
from rich.progress import Progress

from headway.compiled import cache_folder
from headway.errors import ConfigError
from headway.whatif.output.results import About, Ask, Grid, Host, Pictures, Report, Row, deliver, row_grid, versions
from headway.whatif.sweep import source_digest

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


def refuse_unknown(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that is not known, such as of a ground, before anything is measured. ConfigError."""
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no {kind} {name!r}.", f"Use some of {', '.join(known)}.")


def bars_of(rows: Sequence[Row], goals: Mapping[str, float | None]) -> bytes:
    """Return a PNG with a panel for each id of `goals`: a bar for each of its rows, and a line at its goal."""
    from headway.whatif.output.plots import png, sheet

    figure, panels = sheet(1, len(goals), 5.5 * len(goals), 3.6)
    for axes, (id, goal) in zip(panels, goals.items(), strict=True):
        shown = [row for row in rows if row.id == id]
        axes.barh([row.setting for row in shown], [row.ours or 0.0 for row in shown], color="#0072B2")
        if goal is not None:
            axes.axvline(goal, color="#D55E00", linewidth=1)
        axes.invert_yaxis()
        line = "" if goal is None else " (line: goal)"
        axes.set_title(f"{id}, {shown[0].unit}{line}" if shown else id, fontsize=8)
        axes.tick_params(labelsize=7)
    return png(figure)


def computed(
    jobs: Iterable[JobT],
    compute: Callable[[JobT], FoundT],
    *,
    sources: Sequence[str] = (),
    processes: int | None = None,
) -> dict[JobT, FoundT]:
    """Compute each job once, on all cores.

    sources: files and folders of this package on which the figures depend, beside the simulator. With them
        what is computed is kept on disk, so that a run that was stopped continues.
    """
    call = partial(_kept, compute, _store(sources)) if sources else compute
    with ProcessPoolExecutor(processes or os.cpu_count(), get_context("spawn")) as pool:
        pending = {pool.submit(call, job): job for job in dict.fromkeys(jobs)}
        with Progress(console=Console(stderr=True)) as bar:
            try:
                done = bar.track(as_completed(pending), len(pending), description="simulating")
                found = {pending[one]: one.result() for one in done}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return {job: found[job] for job in pending.values()}


def _store(sources: Sequence[str]) -> Path:
    digest = sha256(f"{source_digest()} {os.environ.get('HEADWAY_DATA')}".encode())
    for place in (Path(__file__).parent / name for name in sources):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return cache_folder() / "cells" / digest.hexdigest()[:16]


def _kept(compute: Callable[[JobT], FoundT], store: Path, job: JobT) -> FoundT:
    found: FoundT = Memory(store, verbose=0).cache(compute)(job)
    return found
