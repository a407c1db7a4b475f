"""`headway bench default`: recipe `headway` beside every other on every ground, SIMULATED.

A cell is a ground at a load. Each recipe gets the same requests and forecasts; beside its attainment stands
the share of `sim/bound.py`'s upper bound, which no schedule can pass. Two curves show how attainment falls
when forecasts of lengths or of latency are wrong.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from headway.bench.output.results import SIMULATED, About, Grid, Report, Row, deliver, show
from headway.bench.simulate import slo_violations
from headway.bench.simulate.grounds import GROUNDS, LOADS, Ground
from headway.bench.simulate.hindsight import search
from headway.core.engine_spec import EngineSpec, KeepOptions
from headway.pack.promises.packer import Promises
from headway.ports import Lengths, Packer
from headway.recipes.recipe import Recipe
from headway.recipes.registry import find
from headway.sim.bound import bound
from headway.sim.forecasts import Noisy
from headway.sim.run import Simulation
from headway.sim.workload.traffic import Workload

DEFAULT, BOUND = "headway", "bound"
TRUE = "headway with true lengths"  # as the bound, which knows them, too
HINDSIGHT = "headway with hindsight"  # and arrivals, too: how close a search comes to the bound


def _with(**options: Any) -> Callable[[EngineSpec], Packer]:
    """Return a packer with other numbers of `KeepOptions`."""
    return partial(Promises, keep=KeepOptions(**options))


ABLATIONS: dict[str, Callable[[EngineSpec], Packer]] = {
    "headway without selection": _with(selects=False),
    "headway without prompts that yield": _with(yields=False),
    "headway without a margin of tpot": _with(margin=0.0),
    "headway without easy deadlines": _with(easy=math.inf),
    "headway without giving up answers": _with(started=0.0),
    "headway without short prompts first": _with(advances=False),
    "headway without room to grow": _with(grow=0.0),
    "headway with room to grow always": _with(eager=False),
    "headway without time for long answers": _with(long=-2.0),
    "headway without time while nothing is lost": _with(calm_sure=1.5, calm_doubt=2.0),
    "headway without longer iterations for prompts": _with(wait=0.0),
    "headway without answers that take turns": _with(turns=0.0),
    "headway without pausing answers": _with(pause=math.inf),
    "headway without late before easy": _with(late=0),
    "headway without swapping": partial(Promises, swaps=False),
}
OTHERS = (
    "slack", "edf", "priority", "vllm", "bros", "ecoserve", "srtf", "sjf", "fastgen", "sarathi", "multires",
    "vllm-v0",
)  # fmt: skip
_NOT_OTHERS = (DEFAULT, TRUE, HINDSIGHT, BOUND)
LENGTH_ERRORS = (1.0, 1.5, 2.0, 3.0)  # factors by which a forecast is off, one standard deviation
LATENCY_ERRORS = (0.8, 1.0, 1.2)  # learned seconds of an iteration, as a share of the true ones
_WRONG = ("bursty", "sharegpt-idle", "anneal-chat-code", "tight-tpot")  # grounds of both curves
_WRONG_LOAD, _WRONG_RECIPES = 1.3, (DEFAULT, "slack")
_CLOSE, _SAME_BE = 1.0, 0.95  # points below the best other, share of its best-effort tokens
_HIGH, _LOW = 50.0, 80.0  # %: a share of a bound below the first says little; one below the second is little
_QUICK_OTHERS, _QUICK_REQUESTS = ("slack", "bros", "srtf"), 600


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation.

    system: a recipe, one of `ABLATIONS`, `TRUE`, `HINDSIGHT` or "bound".
    length_error: forecasts are off by this factor (one standard deviation, and say so); 0 = the ground's.
    latency_error: `InstanceSpec.latency_error`.
    trials: simulations of the search, for `HINDSIGHT`.
    """

    ground: Ground
    load: float
    seed: int
    system: str
    length_error: float = 0.0
    latency_error: float = 1.0
    trials: int = 0

    @property
    def setting(self) -> str:
        """Return the ground, the load and what is wrong."""
        text = f"{self.ground.name}, {self.load:g}x"
        if self.length_error:
            text += f", lengths off by {self.length_error:g}x"
        return text if self.latency_error == 1.0 else f"{text}, latency learned x{self.latency_error:g}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a cell came to.

    kept: promised requests on time (of the bound: at most).
    promised: how many were promised anything.
    be_tokens: best-effort tokens per second, of answers complete within the arrivals.
    """

    kept: float
    promised: int
    be_tokens: float

    @property
    def attainment(self) -> float:
        """Return the share of the promised requests that were on time, in percent."""
        return 100 * self.kept / self.promised


def main(
    *, seeds: int = 3, hindsight: int = 0, quick: bool, as_json: bool, seed: int, out: Path | None
) -> None:
    """Run all cells with that many seeds; `quick`: 1.3x only, one seed, four recipes, fewer requests.

    hindsight: simulations of a search in each cell of the default recipe far below the bound; 0 = none.
    """
    began = time.perf_counter()
    cells = quick_cells(seed) if quick else all_cells(range(seed, seed + seeds))
    found = run(cells, bar=not as_json)
    if hindsight:
        found |= run(hindsight_cells(found, hindsight), bar=not as_json)
    rows = rows_of(found)
    count, grounds = len({cell.seed for cell in cells}), len({cell.ground.name for cell in cells})
    workload = (
        f"{SIMULATED}: {grounds} grounds, {count} seed{'s' * (count > 1)}; load = "
        "arrivals as a multiple of what stock vLLM completes of a burst; attainment = promised requests with "
        "every target met; share = of the bound that no schedule can pass."
    )
    report = Report(
        "default", "sim", f"The default recipe beside all others ({SIMULATED})", rows,
        time.perf_counter() - began, About(workload, seed), _grid(rows), notes=_notes(rows),
    )  # fmt: skip
    deliver(report, as_json=as_json, out=out, pictures=lambda: _pictures(rows))


def all_cells(seeds: Sequence[int]) -> list[Cell]:
    """Return every ground, load and recipe for each seed, and the cells of the two curves."""
    systems = (BOUND, DEFAULT, TRUE, *OTHERS, *ABLATIONS)
    cells = [Cell(*key) for key in product(GROUNDS, LOADS, seeds, systems)]
    wrong = [ground for ground in GROUNDS if ground.name in _WRONG]
    for ground, recipe, at in product(wrong, _WRONG_RECIPES, seeds):
        cell = Cell(ground, _WRONG_LOAD, at, recipe)
        cells += [replace(cell, length_error=factor) for factor in LENGTH_ERRORS]
        cells += [replace(cell, latency_error=factor) for factor in LATENCY_ERRORS if factor != 1.0]
    return cells


def quick_cells(seed: int) -> list[Cell]:
    """Return the cells of a run that ends within a minute."""
    grounds = [replace(ground, requests=min(ground.requests, _QUICK_REQUESTS)) for ground in GROUNDS]
    return [Cell(g, 1.3, seed, system) for g in grounds for system in (BOUND, DEFAULT, *_QUICK_OTHERS)]


def hindsight_cells(found: dict[Cell, Figures], trials: int) -> list[Cell]:
    """Return cells of `HINDSIGHT` where the default recipe is far below a bound that says something."""
    rows = {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows_of(found)}
    return [
        replace(cell, system=HINDSIGHT, trials=trials)
        for cell in found
        if cell.system == DEFAULT
        and rows.get(("share_of_bound", DEFAULT, cell.setting), 100.0) < _LOW
        and rows["attainment.promised", BOUND, cell.setting] > _HIGH
    ]


def run(cells: Sequence[Cell], *, bar: bool) -> dict[Cell, Figures]:
    """Compute the cells on all cores."""
    with (
        Progress(disable=not bar) as progress,
        ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool,
    ):
        task = progress.add_task("simulating", total=len(cells))
        found = {}
        for cell, figures in zip(cells, pool.map(compute, cells, chunksize=_chunk(cells)), strict=True):
            found[cell] = figures
            progress.advance(task)
    return found


def _chunk(cells: Sequence[Cell]) -> int:
    """Return how many cells a process takes at once: a search takes minutes, so it is one."""
    return 1 if any(cell.trials for cell in cells) else 4


def compute(cell: Cell) -> Figures:
    """Simulate one cell, or bound it."""
    workload = cell.ground.workload(cell.load, cell.seed)
    promised = int(np.count_nonzero(workload.promised))
    if cell.system == BOUND:
        return Figures(bound(workload, cell.ground.instance()), promised, 0.0)
    spec = replace(cell.ground.instance(), latency_error=cell.latency_error)
    seconds = cell.ground.seconds(cell.load)
    until = max(seconds, last_due(workload))
    if cell.system == HINDSIGHT:
        kept = search(find(DEFAULT), spec, workload, until, cell.trials, cell.seed)
        return Figures(kept, promised, 0.0)
    lengths, recipe = _lengths(cell, workload), _recipe(cell.system)
    outcome = Simulation(recipe, [spec], workload, lengths, until=until).run()
    kept = int(np.count_nonzero(slo_violations.met(workload, outcome) & workload.promised))
    complete = ~workload.promised & (outcome.end <= seconds)
    return Figures(kept, promised, float(workload.output[complete].sum()) / seconds)


def _recipe(system: str) -> Recipe:
    if system not in ABLATIONS:
        return find(DEFAULT if system == TRUE else system)
    return replace(find(DEFAULT), packer=ABLATIONS[system])


def last_due(workload: Workload) -> float:
    """Return the instant after which no promise can be kept any more: what has not ended by then is late."""
    later = workload.output - 1
    decoding = np.where(later > 0, workload.tpot, 0.0) * np.maximum(later, 1)
    due = workload.arrival + np.minimum(workload.e2e, workload.ttft + decoding)
    return float(np.max(due, where=workload.promised, initial=0.0))


def _lengths(cell: Cell, workload: Workload) -> Lengths:
    if not cell.length_error and cell.system != TRUE:
        return cell.ground.lengths(workload, cell.seed)
    rng = np.random.default_rng([cell.seed, 2])
    return Noisy.spreading(workload, float(np.log(cell.length_error or 1.0)), rng)


# ---- rows


def rows_of(found: dict[Cell, Figures]) -> list[Row]:
    """Return a row per system, setting and figure, and those that sum up the default recipe."""
    settings = dict.fromkeys(cell.setting for cell in found)
    rows: list[Row] = []
    changes: dict[str, dict[str, float]] = {}  # points by ablation and setting
    for setting in settings:
        cells = [cell for cell in found if cell.setting == setting]
        sums = {
            system: _sum([found[cell] for cell in cells if cell.system == system])
            for system in dict.fromkeys(cell.system for cell in cells)
        }
        for system, seen in sums.items():
            if system in ABLATIONS:
                changes.setdefault(system, {})[setting] = seen.attainment - sums[DEFAULT].attainment
            else:
                rows += _rows(system, setting, seen, sums.get(BOUND))
    return rows + _summary(rows) + _ablation_rows(changes)


def _ablation_rows(changes: dict[str, dict[str, float]]) -> list[Row]:
    """Return what the default recipe changes by without each of its parts, on average and where most."""
    rows = []
    for system, points in changes.items():
        least = min(points, key=points.__getitem__)
        rows += [
            Row("ablation.mean", system, "all", float(np.mean(list(points.values()))), "points"),
            Row("ablation.least", system, least, points[least], "points"),
        ]
    return rows


def _sum(seeds: Sequence[Figures]) -> Figures:
    be = float(np.mean([one.be_tokens for one in seeds]))
    return Figures(sum(one.kept for one in seeds), sum(one.promised for one in seeds), be)


def _rows(system: str, setting: str, seen: Figures, most: Figures | None) -> list[Row]:
    rows = [Row("attainment.promised", system, setting, seen.attainment, "%")]
    if system == BOUND:
        return rows
    if most is not None:
        rows.append(Row("share_of_bound", system, setting, 100 * seen.kept / max(most.kept, 1.0), "%"))
    if system == HINDSIGHT:  # it drops best effort
        return rows
    return [*rows, Row("be.tokens_per_s", system, setting, seen.be_tokens, "tokens/s")]


def _summary(rows: Sequence[Row]) -> list[Row]:
    """Return in how many cells the default recipe falls behind, and its share of the bound."""
    at = {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows}
    settings = [row.setting for row in rows if row.system == BOUND]
    behind, short, margins = 0, 0, []
    for setting in settings:
        best, be = _best_other(at, setting)
        margins.append(at["attainment.promised", DEFAULT, setting] - best)
        behind += margins[-1] < -_CLOSE
        short += at["be.tokens_per_s", DEFAULT, setting] < _SAME_BE * be
    figures = (
        ("cells", float(len(settings)), "cells"), ("cells.behind", float(behind), "cells"),
        ("cells.less_best_effort", float(short), "cells"), ("margin.least", min(margins), "points"),
        ("margin.mean", float(np.mean(margins)), "points"),
    )  # fmt: skip
    sums = [Row(id, DEFAULT, "all", value, unit) for id, value, unit in figures]
    return sums + [row for system in (DEFAULT, TRUE, HINDSIGHT) for row in _shares(at, settings, system)]


def _shares(at: dict[tuple[str, str, str], float], settings: Sequence[str], system: str) -> list[Row]:
    """Return a system's share of the bound, the mean and the least; none where it was not run."""
    seen = {
        setting: at["share_of_bound", system, setting]
        for setting in settings
        if ("share_of_bound", system, setting) in at
    }
    if not seen:
        return []
    high = [share for name, share in seen.items() if at["attainment.promised", BOUND, name] > _HIGH]
    return [
        Row("share_of_bound.mean", system, "all", float(np.mean(list(seen.values()))), "%"),
        Row("share_of_bound.least", system, "all", min(high, default=0.0), "%"),
    ]


def _best_other(at: dict[tuple[str, str, str], float], setting: str) -> tuple[float, float]:
    """Return the best attainment of another recipe, and the best-effort tokens of the one that has it."""
    others = [
        (kept, at["be.tokens_per_s", system, setting])
        for (id, system, name), kept in at.items()
        if id == "attainment.promised" and name == setting and system not in _NOT_OTHERS
    ]
    return max(others)


# ---- what people see


def _grid(rows: Sequence[Row]) -> Grid:
    """Return the matrix, attainment by setting and system, and below it the sums."""
    kept = [row for row in rows if row.id == "attainment.promised"]
    systems = list(dict.fromkeys(row.system for row in kept))
    at = {(row.setting, row.system): show(row.ours) for row in kept}
    lines = [
        [name, *(at.get((name, system), "") for system in systems)]
        for name in dict.fromkeys(r.setting for r in kept)
    ]
    sums = [[row.id, show(row.ours), row.unit] for row in _summed(rows, DEFAULT)]
    for system in (TRUE, HINDSIGHT):
        sums += [[f"{row.id}, {row.system}", show(row.ours), row.unit] for row in _summed(rows, system)]
    removed = [row for row in rows if row.system in ABLATIONS]
    parts = [[f"{row.system}, {row.setting}", show(row.ours), row.unit] for row in removed]
    padded = [[[*line, *[""] * (len(systems) - 2)] for line in block] for block in (sums, parts)]
    return Grid(["promises kept, %", *systems], [lines, *padded])


def _summed(rows: Sequence[Row], system: str) -> list[Row]:
    return [row for row in rows if row.setting == "all" and row.system == system]


def _notes(rows: Sequence[Row]) -> list[str]:
    seen = {row.id: row.ours for row in _summed(rows, DEFAULT)}
    return [
        f"headway is more than {_CLOSE:g} point below the best other recipe in {seen['cells.behind']:g} of "
        f"{seen['cells']:g} cells (least margin {show(seen['margin.least'])} points), and has less than "
        f"{100 * _SAME_BE:g} % of that recipe's best-effort tokens in {seen['cells.less_best_effort']:g}."
    ]


def _pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    from headway.bench.simulate import default_plots

    made: dict[str, Callable[[Sequence[Row]], bytes | None]] = {
        "matrix": default_plots.matrix, "errors": default_plots.errors,
    }  # fmt: skip
    return {name: png for name, make in made.items() if (png := make(rows)) is not None}
