"""The report of `headway sweep`: latency and attainment against the load, by recipe.

The terminal shows means over seeds, the page also their ranges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headway.whatif import sweep as sweeps
from headway.whatif.load.metrics import ALL
from headway.whatif.output.results import SIMULATED, About, Grid, Pictures, Report, Row, deliver
from headway.whatif.sweep import Cell, CurvePoint, Curves, Sweep, collect

_STOPPED = 130  # exit status of a shell command that Ctrl-C ended
_SHOWN = (
    "attainment",
    "ttft.p50",
    "ttft.p99",
    "tpot.p99",
    "e2el.p50",
    "goodput.req_per_s",
    "throughput.tokens_per_s",
    "preemptions",
)
_ONCE = ("goodput.req_per_s", "throughput.tokens_per_s", "preemptions")  # shown over all classes only


def main(sweep: Sweep, *, jobs: int | None, as_json: bool, out: Path) -> None:
    """Compute the missing cells, then print and write the result. Exits with 1 when a cell failed."""
    sweep.check()
    began, cells, folder = time.perf_counter(), sweep.cells(), out / "cells"
    console = Console(stderr=True, soft_wrap=True)
    try:
        failed = _compute(cells, folder, jobs or len(os.sched_getaffinity(0)), console)
    except KeyboardInterrupt:
        ready = sum(sweeps.done(cell, folder) is not None for cell in cells)
        console.print(f"stopped: {ready} of {len(cells)} cells are done; run the same command again to continue")
        raise typer.Exit(_STOPPED) from None
    found = {cell: data for cell in cells if (data := sweeps.done(cell, folder)) is not None}
    curves = collect(sweep, found)
    result = build(sweep, curves, failed, time.perf_counter() - began)
    deliver(result, as_json=as_json, out=out, pictures=lambda: _pictures(curves))
    if failed:
        raise typer.Exit(1)


def _compute(cells: Sequence[Cell], folder: Path, jobs: int, console: Console) -> dict[Cell, str]:
    """Compute the missing cells; return the errors of those that failed."""
    missing = [cell for cell in cells if sweeps.done(cell, folder) is None]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are already computed")
    failed: dict[Cell, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("sweep (SIMULATED)", total=len(missing))
        with closing(sweeps.run(missing, folder, jobs)) as ends:  # also when Ctrl-C arrives here
            for cell, error in ends:
                progress.advance(task)
                if error is not None:
                    failed[cell] = error
                    progress.console.print(f"[red]failed:[/] {escape(str(cell))}: {escape(error)}")
    return failed


def _pictures(curves: Curves) -> Pictures:
    from headway.whatif import sweep_plots

    return sweep_plots.draw(curves)


# ---- the report


def build(sweep: Sweep, curves: Curves, failed: Mapping[Cell, str], seconds: float) -> Report:
    """Return the report; a failed cell is a note."""
    return Report(
        "sweep",
        "sim",
        f"sweep ({SIMULATED})",
        rows(curves),
        seconds,
        About(describe(sweep), sweep.seed),
        _grid(curves, ranges=False),
        _grid(curves, ranges=True),
        [f"failed: {cell}: {error}" for cell, error in failed.items()],
    )


def rows(curves: Curves) -> list[Row]:
    """Return the rows of each figure: ID is the mean over seeds, ID.min and ID.max are their range.

    The setting is "CLASS at RATE req/s".
    """
    return [
        Row(f"{figure}{end}", recipe, f"{tier} at {rate:g} req/s", value, point.unit)
        for (recipe, tier, figure), by_rate in curves.points.items()
        for rate, point in sorted(by_rate.items())
        for end, value in (("", point.mean), (".min", point.low), (".max", point.high))
        if not end or point.seeds > 1
    ]


def describe(sweep: Sweep) -> str:
    """Return the workload line of the report."""
    fleet = sweep.fleet
    return (
        f"{SIMULATED}: {fleet.count} x {fleet.profile}, batch limit {fleet.max_running}; "
        f"{sweep.duration:g} s of Poisson arrivals, 60% chat (ShareGPT-like lengths, "
        f"{sweep.slo}), 40% best effort (512-1024 in, 32-128 out); "
        f"mean over {sweep.seeds} seed{'s' if sweep.seeds > 1 else ''}"
    )


def _grid(curves: Curves, *, ranges: bool) -> Grid:
    """Return a line per class, figure and rate, a column per recipe, with or without the range over seeds."""
    wanted = [(tier, figure) for tier in curves.classes for figure in _SHOWN if _belongs(curves, tier, figure)]
    groups = [[_line(curves, *pair, rate, ranges) for rate in curves.rates] for pair in wanted]
    full = [[line for line in group if any(cell != "-" for cell in line[2:])] for group in groups]
    return Grid(["figure", "req/s", *curves.recipes], [group for group in full if group])


def _belongs(curves: Curves, tier: str, figure: str) -> bool:
    """Tell whether a class shows a figure: attainment with an SLO, totals over all classes only."""
    if figure == "attainment":
        return tier == ALL or curves.has_slo(tier)
    return (figure in _ONCE) == (tier == ALL)


def _line(curves: Curves, tier: str, figure: str, rate: float, ranges: bool) -> list[str]:
    points = [curves.of(recipe, tier, figure).get(rate) for recipe in curves.recipes]
    unit = next((point.unit for point in points if point), "")
    label = f"{tier}: {figure}" + (f" {unit}" if unit in ("ms", "%") else "")
    return [label, f"{rate:g}", *(_show(point, ranges) for point in points)]


def _show(point: CurvePoint | None, ranges: bool) -> str:
    if point is None or point.mean is None or point.low is None or point.high is None:
        return "-"
    mean, low, high = (_number(value, point.unit) for value in (point.mean, point.low, point.high))
    return f"{mean} ({low}-{high})" if ranges and low != high else mean


def _number(value: float, unit: str) -> str:
    digits = 2 if unit == "req/s" else 0 if unit == "count" or abs(value) >= 100 else 1
    return f"{value:.{digits}f}"
