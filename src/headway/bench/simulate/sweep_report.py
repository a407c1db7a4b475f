"""How does it change with the load?

The cells of a sweep become one figure per recipe, rate and class: the mean over seeds, between the smallest
and the largest. The same figures as a table, as JSON by the contract, as curves with a band, and as one page.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from headway.bench.load.metrics import ALL, Row
from headway.bench.load.mix import promise
from headway.bench.output.page import About, Page, contract, save
from headway.bench.output.report import SIMULATED
from headway.bench.output.results import hand_over, tabulate
from headway.bench.simulate import sweep as sweeps
from headway.bench.simulate.sweep import Cell, Sweep
from headway.types import Slo

_STOPPED = 130  # as a shell says it of a command that Ctrl-C ended
_SHOWN = (
    "attainment", "ttft.p50", "ttft.p99", "tpot.p99", "e2el.p50", "goodput.req_per_s",
    "throughput.tokens_per_s", "preemptions",
)  # fmt: skip
_ONCE = ("goodput.req_per_s", "throughput.tokens_per_s", "preemptions")  # shown over all classes only


@dataclass(frozen=True, slots=True)
class Point:
    """One figure at one rate over its seeds: mean, smallest, largest; None when no seed has it."""

    mean: float | None
    low: float | None
    high: float | None
    unit: str
    seeds: int


@dataclass(frozen=True, slots=True)
class Curves:
    """points: {(recipe, class, figure): {rate: Point}}; `slo`: what chat was promised."""

    points: Mapping[tuple[str, str, str], Mapping[float, Point]]
    recipes: tuple[str, ...]
    rates: tuple[float, ...]
    classes: tuple[str, ...]
    slo: Slo

    def of(self, recipe: str, tier: str, figure: str) -> Mapping[float, Point]:
        """Return a curve, empty when there is none. `attainment` is that of the class."""
        name = f"attainment.{tier}" if figure == "attainment" else figure
        return self.points.get((recipe, tier, name), {})

    def promised(self, tier: str) -> bool:
        """Tell whether a class could be late: chat can, and another that was."""
        points = [p for recipe in self.recipes for p in self.of(recipe, tier, "attainment").values()]
        return tier == "chat" or any(point.low is not None and point.low < 100 for point in points)


def main(sweep: Sweep, *, jobs: int | None, as_json: bool, out: Path) -> None:
    """Compute what is missing, then print and write all. Exits with 1 when a cell failed, 130 on Ctrl-C."""
    sweep.check()
    began, cells, folder = time.perf_counter(), sweep.cells(), out / "cells"
    console = Console(stderr=True, soft_wrap=True)
    try:
        failed = _compute(cells, folder, jobs or len(os.sched_getaffinity(0)), console)
    except KeyboardInterrupt:
        ready = sum(sweeps.done(cell, folder) is not None for cell in cells)
        console.print(f"stopped: {ready} of {len(cells)} cells are done; the same command goes on from there")
        raise typer.Exit(_STOPPED) from None
    found = {cell: data for cell in cells if (data := sweeps.done(cell, folder)) is not None}
    curves, seconds = collect(sweep, found), time.perf_counter() - began
    result = contract(rows(curves), bench="sweep", host="sim", seconds=seconds)
    about = About(shlex.join(["headway", *sys.argv[1:]]), sweep.seed, describe(sweep))
    notes = [f"failed: {cell}: {error}" for cell, error in failed.items()]
    _write(out, result, curves, notes, about)
    hand_over(result, lambda: table(curves, [about.workload, *notes]), as_json=as_json, out=out)
    if failed:
        raise typer.Exit(1)


def _compute(cells: Sequence[Cell], folder: Path, jobs: int, console: Console) -> dict[Cell, str]:
    """Compute the cells that are not there yet; return the errors of those that failed."""
    missing = [cell for cell in cells if sweeps.done(cell, folder) is None]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are there already")
    failed: dict[Cell, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("sweep (SIMULATED)", total=len(missing))
        with closing(sweeps.run(missing, folder, jobs)) as ends:  # also when Ctrl-C comes just here
            for cell, error in ends:
                progress.advance(task)
                if error is not None:
                    failed[cell] = error
                    progress.console.print(f"[red]failed:[/] {escape(str(cell))}: {escape(error)}")
    return failed


# ---- figures


def collect(sweep: Sweep, found: Mapping[Cell, dict[str, Any]]) -> Curves:
    """Return the curves of the cells that are there."""
    seen: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    units: dict[str, str] = {}
    for cell, data in found.items():
        for figure, tier, ours, unit in data["rows"]:
            values = seen.setdefault((cell.recipe, tier, figure), {}).setdefault(cell.rate, [])
            values += [] if ours is None else [ours]
            units[figure] = unit
    points = {
        key: {rate: _point(values, units[key[2]]) for rate, values in by_rate.items()}
        for key, by_rate in seen.items()
    }
    tiers = dict.fromkeys(tier for _, tier, _ in points if tier != ALL)
    return Curves(points, sweep.recipes, tuple(sorted(set(sweep.rates))), (*tiers, ALL), promise(sweep.slo))


def _point(values: list[float], unit: str) -> Point:
    if not values:
        return Point(None, None, None, unit, 0)
    return Point(float(np.mean(values)), min(values), max(values), unit, len(values))


def rows(curves: Curves) -> list[Row]:
    """Return one row per figure: ID is the mean over seeds; with several, ID.min and ID.max are their range.

    setting: "CLASS at RATE req/s".
    """
    return [
        Row(f"{figure}{end}", recipe, f"{tier} at {rate:g} req/s", value, point.unit)
        for (recipe, tier, figure), by_rate in curves.points.items()
        for rate, point in sorted(by_rate.items())
        for end, value in (("", point.mean), (".min", point.low), (".max", point.high))
        if not end or point.seeds > 1
    ]


def describe(sweep: Sweep) -> str:
    """Return the line that says what was simulated."""
    fleet = sweep.fleet
    return (
        f"{SIMULATED}: {fleet.count} x {fleet.profile}, batch limit {fleet.max_running}; {sweep.duration:g} s "
        f"of Poisson arrivals, 60% chat (ShareGPT-like lengths, {sweep.slo}), 40% best effort (512-1024 in, "
        f"32-128 out); mean over {sweep.seeds} seed{'s' if sweep.seeds > 1 else ''}"
    )


# ---- for people


def table(curves: Curves, notes: Iterable[str] = ()) -> Table:
    """Return a rich table of the means: a line per class, figure and rate, a column per recipe."""
    groups = [
        [["" if number else cells[0], *cells[1:]] for number, cells in enumerate(group)]
        for group in _lines(curves, ranges=False)
    ]
    title, header = f"How does it change with the load? ({SIMULATED})", ("figure", "req/s", *curves.recipes)
    return tabulate(title, header, groups, caption="\n".join(notes), wrap=False)


def _lines(curves: Curves, *, ranges: bool) -> list[list[list[str]]]:
    """Return the table's lines, in groups of one figure of one class, with or without the seeds' range."""
    wanted = [
        (tier, figure) for tier in curves.classes for figure in _SHOWN if _belongs(curves, tier, figure)
    ]
    groups = [[_line(curves, *pair, rate, ranges) for rate in curves.rates] for pair in wanted]
    full = [[line for line in group if any(cell != "-" for cell in line[2:])] for group in groups]
    return [group for group in full if group]


def _belongs(curves: Curves, tier: str, figure: str) -> bool:
    """Tell whether a figure is worth a line: attainment of what can be late, totals of all classes."""
    if figure == "attainment":
        return tier == ALL or curves.promised(tier)
    return (figure in _ONCE) == (tier == ALL)


def _line(curves: Curves, tier: str, figure: str, rate: float, ranges: bool) -> list[str]:
    points = [curves.of(recipe, tier, figure).get(rate) for recipe in curves.recipes]
    unit = next((point.unit for point in points if point), "")
    label = f"{tier}: {figure}" + (f" {unit}" if unit in ("ms", "%") else "")
    return [label, f"{rate:g}", *(_show(point, ranges) for point in points)]


def _show(point: Point | None, ranges: bool) -> str:
    if point is None or point.mean is None or point.low is None or point.high is None:
        return "-"
    mean, low, high = (_number(value, point.unit) for value in (point.mean, point.low, point.high))
    return f"{mean} ({low}-{high})" if ranges and low != high else mean


def _number(value: float, unit: str) -> str:
    digits = 2 if unit == "req/s" else 0 if unit == "count" or abs(value) >= 100 else 1
    return f"{value:.{digits}f}"


def _write(out: Path, result: dict[str, Any], curves: Curves, notes: Sequence[str], about: About) -> None:
    from headway.bench.simulate import (
        sweep_plots,  # matplotlib takes a while: only those who write reports wait for it
    )

    lines = [line for group in _lines(curves, ranges=True) for line in group]
    title, header = f"sweep ({SIMULATED})", ["figure", "req/s", *curves.recipes]
    save(out, result, Page(title, header, lines, sweep_plots.draw(curves), notes), about)
