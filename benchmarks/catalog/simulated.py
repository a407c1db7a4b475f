"""`headway bench catalog`: the workloads of Kubernetes' inference-perf on a fleet, in the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.catalog.grid import SOURCES, Cell, Grid
from benchmarks.catalog.grounds import GROUNDS, PROFILE, checked
from benchmarks.catalog.margins import HEADWAY, WITHIN, Case, margin_rows, margins
from benchmarks.experiment import Result, computed, experiment
from benchmarks.placement import routers
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Bools
from headway.whatif.output.plots import colours, legend, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid
from headway.whatif.slo_violations import met

PRIORITY = "vllm-priority"
STOCK = {"vllm-fcfs": "sglang", PRIORITY: "sglang+priority"}  # behind the router of vLLM and SGLang
SYSTEMS = (HEADWAY, *STOCK, "llm-d", "slack", "edf")
_QUICK = Grid(
    (HEADWAY, "vllm-fcfs", "llm-d"),
    ("interactive-chat", "batch-summarization-rag", "long-prompts-2048"),
    (2,),
    (1.0,),
    60.0,
)
_WHOLE = Grid(SYSTEMS, tuple(GROUNDS), (4, 16), (0.7, 1.0, 1.3, 2.0), 240.0)
_UNITS = {"attainment.promised": "%", "ttft.p99": "s", "e2e.mean": "s"}


@experiment("catalog", "sim", f"The workload catalog ({SIMULATED})")
def main(ask: Ask, asked: Grid) -> Result:
    """Simulate; what is not given: `quick`, three grounds on two engines at their capacity, three systems; else all."""
    grid = asked.within(_QUICK if ask.quick else _WHOLE)
    checked(grid.grounds, GROUNDS)
    for name in grid.systems:
        system(name)
    cells = [one for one in grid.cells(ask.seed) if one.system != PRIORITY or GROUNDS[one.ground].several]
    found = computed(cells, figures_of, sources=() if ask.quick else SOURCES)
    kept = {
        Case(cell.load, cell.setting(kind), cell.system): value
        for cell, figures in found.items()
        for (id, kind), value in figures.items()
        if id == "attainment.promised" and value is not None
    }
    rows = [
        Row(id, cell.system, cell.setting(kind), value, _UNITS[id])
        for cell, figures in found.items()
        for (id, kind), value in figures.items()
    ]
    rows += margin_rows(kept, set(grid.systems) - {HEADWAY})
    workload = (
        f"{SIMULATED}: engines of {PROFILE} with prefix caches; {grid.seconds:g} s of each ground once conversations "
        f"of all ages are there. Each system is on a ground's whole workload; lines with a colon are of one part of it."
    )
    return Result(rows, workload, lambda: _pictures(rows), system_grid(rows), tuple(_behind(kept, grid.systems)))


def system(name: str) -> Recipe:
    """Return a system: stock vLLM, a router, or a recipe. ConfigError for an unknown one."""
    name = STOCK.get(name, name)
    return routers.recipe(name) if name in routers.NAMES else find(name)


def figures_of(cell: Cell) -> dict[tuple[str, str], float | None]:
    """Simulate a cell and return its figures by id and workload, "" = all of the ground."""
    ground = GROUNDS[cell.ground]
    work = ground.workload(cell.engines, cell.load, cell.seconds, cell.seed)
    outcome = Simulation(system(cell.system), ground.fleet(cell.engines), work).run()
    rows = work.arrival >= ground.warm
    found = dict(_figures(work, outcome, rows, ""))
    if len(work.tiers) > 1:
        for code, name in enumerate(work.tiers):
            found |= _figures(work, outcome, rows & (work.tier == code), name)
    return found


def _figures(
    work: Workload, outcome: Outcome, rows: Bools, kind: str
) -> Iterator[tuple[tuple[str, str], float | None]]:
    """Yield the figures of some requests; None = there are none, or nothing is promised."""
    ttft, e2e, promised = outcome.first - work.arrival, outcome.end - work.arrival, rows & work.promised
    kept = 100 * float(met(work, outcome)[promised].mean()) if promised.any() else None
    yield ("attainment.promised", kind), kept
    yield ("ttft.p99", kind), float(np.quantile(ttft[rows], 0.99)) if rows.any() else None
    yield ("e2e.mean", kind), float(e2e[rows].mean()) if rows.any() else None


def _behind(kept: dict[Case, float], systems: Sequence[str]) -> Iterator[str]:
    """Yield where Headway is more than a point behind the best of the others."""
    for (load, setting), (margin, best) in margins(kept, set(systems) - {HEADWAY}).items():
        if margin < -WITHIN:
            there = kept[Case(load, setting, best)]
            yield f"{setting}: {best} keeps {there:.1f} %, {-margin:.1f} points more than headway."


def _pictures(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw promises kept against the load, one plot for each ground and number of engines."""
    places: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        if row.id == "attainment.promised" and row.ours is not None and ":" not in row.setting:
            place, _, load = row.setting.rpartition(", ")
            places.setdefault(place, {}).setdefault(row.system, {})[float(load[:-1])] = row.ours
    if not places:  # nothing was promised
        return {}
    systems = list(dict.fromkeys(name for lines in places.values() for name in lines))
    shades, columns = colours(systems), min(len(places), 3)
    height = math.ceil(len(places) / columns)
    figure, grid = sheet(height, columns, 3.5 * columns, 2.5 * height + 0.5)
    for axes, (place, lines) in zip(grid, places.items(), strict=False):
        for name, points in lines.items():
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, color=shades[name])
        axes.set(title=place, xlabel="load, x capacity", ylabel="promises kept, %", ylim=(0, 102))
    for axes in grid[len(places) :]:
        axes.set_visible(False)
    legend(figure, systems)
    return {"catalog": png(figure)}
