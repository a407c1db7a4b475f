"""`headway bench default`: recipe `headway` beside every other on every ground, SIMULATED.

A cell is a ground at a load. Each recipe gets the same requests and forecasts; beside its attainment stands
the share of `simulate/bound.py`'s upper bound, which no schedule can pass. Two curves show how attainment
falls when forecasts of lengths or of latency are wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.experiment import Result, computed, experiment
from benchmarks.simulated import default_rows
from benchmarks.simulated.default_figures import BOUND, DEFAULT, HINDSIGHT, STOCK, TRUE, Cell, Figures, figures
from benchmarks.simulated.default_rows import HIGH, MEASURES, grid, notes, places_of
from benchmarks.simulated.grounds import GROUNDS, Ground
from benchmarks.simulated.held_grounds import HELD
from headway.policy.core.engine_spec import EngineSpec, PromisesConfig
from headway.policy.pack.promises.packer import Promises
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.ports import Lengths, Packer
from headway.simulate.bound import bound
from headway.simulate.forecasts import Noisy, Oracle
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Floats, Ints
from headway.whatif import slo_violations
from headway.whatif.output.plots import colour, png, sheet
from headway.whatif.output.results import SIMULATED, Ask, Row, show


def _with(**options: Any) -> Callable[[EngineSpec], Packer]:
    """Return a packer with other numbers of `PromisesConfig`."""
    return partial(Promises, keep=PromisesConfig(**options))


_LOST, _CALM = PromisesConfig().lost, PromisesConfig().calm
_HASTY = _CALM._replace(answer_safety=_LOST.answer_safety, lost_below_stds=_LOST.lost_below_stds)
ABLATIONS: dict[str, Callable[[EngineSpec], Packer]] = {
    "headway without selection": _with(selects_largest_set=False),
    "headway without prompts that yield": _with(prompts_yield=False),
    "headway without a margin of tpot": _with(tpot_margin=0.0),
    "headway without far deadlines that wait": _with(defer_beyond_s=math.inf),
    "headway without begun answers that go on": _with(lost=_LOST._replace(keeps_begun=False)),
    "headway without a lead for answers": _with(leading_share=1.0, lost=_LOST._replace(burst_lead_s=0.0)),
    "headway without a lead for bursts": _with(lost=_LOST._replace(burst_lead_s=0.0)),
    "headway without an end of pressure": _with(overload_s=math.inf),
    "headway without giving up answers": _with(begun_size_share=0.0),
    "headway without short prompts first": _with(short_prompts_first=False),
    "headway without room to grow": _with(growth_share=0.0),
    "headway with room to grow always": _with(scales_growth=False),
    "headway without time for long answers": _with(long_answer_stds=-2.0),
    "headway without time while nothing is lost": _with(calm=_HASTY),
    "headway without longer iterations for prompts": _with(ttft_share=0.0),
    "headway without iterations for urgent prompts": _with(alone_share=math.inf),
    "headway without short iterations for first tokens": _with(urgent_share=math.inf),
    "headway without streams that go on": lambda spec: Promises(replace(spec, max_gap_s=math.inf)),
    "headway without answers that take turns": _with(turn_capacity=0.0),
    "headway without pausing answers": _with(pause_lead_tokens=math.inf),
    "headway without swapping": partial(Promises, swaps=False),
}
OTHERS = (
    "slack",
    "edf",
    "priority",
    "vllm",
    "bros",
    "ecoserve",
    "srtf",
    "sjf",
    "fastgen",
    "sarathi",
    "multires",
    "vllm-v0",
)
LENGTH_ERRORS = (1.0, 1.5, 2.0, 3.0)  # factors by which a forecast is off, one standard deviation
LATENCY_ERRORS = (0.8, 1.0, 1.2)  # learned seconds of an iteration, as a share of the true ones
_WRONG = ("bursty", "sharegpt-idle", "anneal-chat-code", "tight-tpot")  # grounds of both curves
_WRONG_LOAD, _WRONG_RECIPES = 1.3, (DEFAULT, "slack")
_LOW = 80.0  # %: a search with hindsight is made where the share of the bound is below this
_QUICK_LOAD, _QUICK_OTHERS = 1.3, (STOCK, "slack", "bros", "srtf")
_QUICK_OTHERS_HELD = (STOCK, "slack", "edf")  # compiled loops, all of them
_QUICK_REQUESTS, _QUICK_HELD = 600, 200
_FILES = ("default", "default_figures", "grounds", "held_grounds", "hindsight")
_SOURCES = (*(f"simulated/{name}.py" for name in _FILES), "papers/ecoserve_setup.py")


@experiment("default", "sim", f"The default recipe beside all others ({SIMULATED})")
def main(ask: Ask, seeds: int = 3, hindsight: int = 0, some: Sequence[Cell] = ()) -> Result:
    """Run all cells with that many seeds; `quick`: 1.3x only, one seed, four recipes, fewer requests.

    hindsight: simulations of a search in each cell of the default recipe far below the bound; 0 = none. some: cells
        to run instead of all.
    """
    cells = some or (quick_cells(ask.seed) if ask.quick else all_cells(range(ask.seed, ask.seed + seeds)))
    found = computed(cells, compute, sources=_SOURCES)
    if hindsight:
        found |= computed(hindsight_cells(found, hindsight), compute, sources=_SOURCES)
    rows = rows_of(found)
    count, grounds = len({cell.seed for cell in cells}), len({cell.ground.name for cell in cells})
    workload = (
        f"{SIMULATED}: {grounds} grounds, {count} seed{'s' * (count > 1)}; load = "
        "arrivals as a multiple of what stock vLLM completes of a burst; attainment = promised requests with "
        "every target met; share = of the bound that no schedule can pass."
    )
    return Result(rows, workload, lambda: _pictures(rows), grid(rows, ABLATIONS), notes(rows, places_of(found)))


def all_cells(seeds: Sequence[int]) -> list[Cell]:
    """Return every ground, load and recipe for each seed, and the cells of the two curves."""
    cells = []
    for ground in (*GROUNDS, *HELD):
        parts = () if ground.held else tuple(ABLATIONS)
        systems = (BOUND, DEFAULT, TRUE, *OTHERS, *ground.rivals, *parts)
        cells += [Cell(ground, *key) for key in product(ground.loads, seeds, systems)]
    wrong = [ground for ground in GROUNDS if ground.name in _WRONG]
    for ground, recipe, at in product(wrong, _WRONG_RECIPES, seeds):
        cell = Cell(ground, _WRONG_LOAD, at, recipe)
        cells += [replace(cell, length_error=factor) for factor in LENGTH_ERRORS]
        cells += [replace(cell, latency_error=factor) for factor in LATENCY_ERRORS if factor != 1.0]
    return cells


def quick_cells(seed: int) -> list[Cell]:
    """Return the cells of a run that ends within a minute: one load of each ground, fewer requests."""
    return [
        Cell(_fewer(ground), _QUICK_LOAD if _QUICK_LOAD in ground.loads else ground.loads[-1], seed, system)
        for ground in (*GROUNDS, *HELD)
        for system in (BOUND, DEFAULT, *(_QUICK_OTHERS_HELD if ground.held else _QUICK_OTHERS))
    ]


def _fewer(ground: Ground) -> Ground:
    return replace(ground, requests=min(ground.requests, _QUICK_HELD if ground.held else _QUICK_REQUESTS))


def hindsight_cells(found: dict[Cell, Figures], trials: int) -> list[Cell]:
    """Return cells of `HINDSIGHT` where the default recipe is far below a bound that says something."""
    rows = {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows_of(found)}
    return [
        replace(cell, system=HINDSIGHT, trials=trials)
        for cell in found
        if cell.system == DEFAULT
        and not cell.ground.held
        and rows.get(("share_of_bound", DEFAULT, cell.setting), 100.0) < _LOW
        and rows["attainment.promised", BOUND, cell.setting] > HIGH
    ]


def compute(cell: Cell) -> Figures:
    """Simulate one cell to its last completion, or bound it."""
    workload = cell.ground.workload(cell.load, cell.seed)
    promised = int(np.count_nonzero(workload.promised))
    if cell.system == BOUND:
        return Figures(bound(workload, cell.ground.instance()) if promised else 0.0, promised, 0.0)
    spec = replace(cell.ground.instance(), latency_error=cell.latency_error)
    if cell.system == HINDSIGHT:
        until = max(cell.ground.seconds(cell.load), last_due(workload))
        kept = search(find(DEFAULT), spec, workload, until, cell.trials, cell.seed)
        return Figures(kept, promised, 0.0)
    outcome = Simulation(_recipe(cell.system), [spec], workload, _lengths(cell, workload)).run()
    return figures(cell, workload, outcome)


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


# ---- what people see


def rows_of(found: Mapping[Cell, Figures]) -> list[Row]:
    """Return a row per system, setting and figure, and those that sum up the default recipe."""
    return default_rows.rows_of(found, ABLATIONS)


def _pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    made: dict[str, Callable[[Sequence[Row]], bytes | None]] = {
        "matrix": matrix,
        "measures": measures,
        "spread": spread,
        "errors": errors,
    }
    return {name: png for name, make in made.items() if (png := make(rows)) is not None}


_ADDED = (0.01, 0.03, 0.1, 0.3)  # shares of the requests left out that a trial brings in
_SWAPS = 0.3  # share of the trials that also drop `_DROPPED` of the kept ones
_DROPPED = 0.01


def search(recipe: Recipe, spec: InstanceSpec, workload: Workload, until: float, trials: int, seed: int) -> int:
    """Return how many promises `recipe` keeps on the best subset of `workload` that `trials` runs find.

    until: simulated seconds; what has not ended by then is late.

    Each trial brings in some of the promised requests that the best subset so far leaves out, short ones
    more likely, at times drops some of its own, long ones more likely, and is kept if it is no worse. So the
    result only grows with `trials`; the first run is of all promised requests.
    """
    rng = np.random.default_rng([seed, 3])
    best = _met(recipe, spec, workload, until, workload.promised)
    tokens = (workload.prompt + workload.output).astype(float)
    for _ in range(trials):
        keep = best.copy()
        out = workload.promised & ~best
        keep[_some(rng, out, 1 / tokens, rng.choice(_ADDED))] = True
        if rng.random() < _SWAPS:
            keep[_some(rng, best, tokens, _DROPPED)] = False
        met = _met(recipe, spec, workload, until, keep)
        if np.count_nonzero(met) >= np.count_nonzero(best):
            best = met
    return int(np.count_nonzero(best))


def _some(rng: np.random.Generator, rows: Bools, weight: Floats, share: float) -> Ints:
    """Return the indices of a share of `rows`, one at least, drawn by weight."""
    found = np.flatnonzero(rows)
    if not found.size:
        return found
    chances = weight[found] / weight[found].sum()
    return rng.choice(found, max(int(share * found.size), 1), replace=False, p=chances)


def _met(recipe: Recipe, spec: InstanceSpec, workload: Workload, until: float, keep: Bools) -> Bools:
    """Return which promises are kept when only the requests `keep` arrive."""
    part, met = workload.take(keep), np.zeros(len(workload), bool)
    if len(part):
        outcome = Simulation(recipe, [spec], part, Oracle(part), until=until).run()
        met[keep] = slo_violations.met(part, outcome) & part.promised
    return met


_WRONG_COLOURS = re.compile(r"^(.*), (lengths off by|latency learned x) ?([\d.]+)x?$")
_RATIOS = ("mean_wait.weighted", "unpromised.e2el.p99", "worst_wait")
_PANELS = {
    "tokens_per_s": "tokens/s, x stock",
    "mean_wait.weighted": "mean wait by work, x stock",
    "unpromised.e2el.p99": "unpromised e2e p99, x stock",
    "gap.over_1s": "streams silent for over 1 s, %",
    "tardiness.p99": "p99 of seconds late",
    "worst_wait": "longest wait, x stock",
}
_RATIO_TICKS = (0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8, 16)
_TICKS = (0, 1, 10, 100, 1000)  # of seconds and %


def matrix(rows: Sequence[Row]) -> bytes:
    """Return a PNG: a line per ground and load, a column per recipe, coloured by the share of the bound."""
    everywhere = {row.system for row in rows if row.id == "be.tokens_per_s"}  # a search is for some cells only
    shares = [row for row in rows if row.id == "share_of_bound" and row.system in everywhere]
    kept = {(row.setting, row.system): row.ours for row in rows if row.id == "attainment.promised"}
    settings = list(dict.fromkeys(row.setting for row in shares))
    systems = list(dict.fromkeys(row.system for row in shares))
    values = np.full((len(settings), len(systems)), np.nan)
    for row in shares:
        values[settings.index(row.setting), systems.index(row.system)] = row.ours
    figure, (axes,) = sheet(1, 1, 2.2 + 0.62 * len(systems), 1.2 + 0.2 * len(settings))
    shown = axes.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0, vmax=100)
    axes.grid(visible=False)  # its lines would go through the figures
    axes.set_xticks(range(len(systems)), systems, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(settings)), settings, fontsize=7)
    for y, setting in enumerate(settings):
        for x, system in enumerate(systems):
            if (setting, system) in kept:
                axes.text(x, y, f"{kept[setting, system]:.0f}", ha="center", va="center", fontsize=6.5)
    figure.colorbar(shown, ax=axes, shrink=0.5, label="share of the bound, %")
    axes.set_title("promises kept, % (colour: as a share of the bound)", fontsize=9)
    return png(figure, SIMULATED)


def errors(rows: Sequence[Row]) -> bytes | None:
    """Return a PNG of attainment against the error of forecasts; None when none was simulated."""
    found = [(match, row) for row in rows if (match := _WRONG_COLOURS.match(row.setting))]
    found = [(match, row) for match, row in found if row.id == "attainment.promised"]
    if not found:
        return None
    figure, panels = sheet(1, 2, 11, 4)
    right = {(row.setting, row.system): row.ours for row in rows if row.id == "attainment.promised"}
    for axes, kind in zip(panels, ("lengths off by", "latency learned x"), strict=True):
        mine = [(match, row) for match, row in found if match[2] == kind]
        for number, ground in enumerate(dict.fromkeys(match[1] for match, _ in mine)):
            for system, line in (("headway", "-"), ("slack", ":")):
                points = [(float(m[3]), r.ours) for m, r in mine if (m[1], r.system) == (ground, system)]
                if kind == "latency learned x":
                    points.append((1.0, right[ground, system]))
                x, y = zip(*sorted(points), strict=True)
                axes.plot(x, y, line, color=colour(number), marker="o", ms=3, label=f"{ground}: {system}")
        axes.set(xlabel=kind, ylabel="promises kept, %", ylim=(0, 103))
        axes.legend(fontsize=6.5)
    return png(figure, SIMULATED)


def measures(rows: Sequence[Row]) -> bytes | None:
    """Return a PNG of how the default recipe serves all: a line per ground and load, a column per measure.

    Green is better than stock or as short as can be, red is worse; tokens/s are beside their bound.
    """
    at = {(row.id, row.system, row.setting): row.ours for row in rows}
    settings = [row.setting for row in rows if row.id == "bound.tokens_per_s"]
    if not settings:
        return None
    found = [[at.get((id, system, name)) for _, id, system in MEASURES] for name in settings]
    values = np.array(found, float)  # None becomes NaN
    bound = np.array([at["bound.tokens_per_s", BOUND, name] for name in settings], float)
    shades = np.column_stack([_shades(id, values[:, x], bound) for x, (_, id, _) in enumerate(MEASURES)])
    figure, (axes,) = sheet(1, 1, 2.6 + 0.72 * len(MEASURES), 1.6 + 0.2 * len(settings))
    axes.imshow(shades, aspect="auto", cmap="RdYlGn", vmin=-1.4, vmax=1.4)
    axes.grid(visible=False)
    axes.set_xticks(range(len(MEASURES)), [heading for heading, _, _ in MEASURES], rotation=40, ha="right")
    axes.set_yticks(range(len(settings)), settings, fontsize=7)
    axes.tick_params(axis="x", labelsize=8)
    for y, x in zip(*np.nonzero(~np.isnan(values)), strict=True):
        axes.text(x, y, show(float(values[y, x])), ha="center", va="center", fontsize=6.5)
    axes.set_title("headway: how all are served (ratios to stock vLLM's)", fontsize=9)
    return png(figure, SIMULATED)


def _shades(id: str, values: Floats, bound: Floats) -> Floats:
    """Return the figures of a measure as -1 (worst) to 1 (best), on a logarithmic scale."""
    least = np.maximum(values, 0.01)
    if id == "bound.tokens_per_s":
        shades = np.zeros_like(values)
    elif id == "tokens_per_s":
        shades = 3 * np.log2(least / bound)
    elif id in _RATIOS:
        shades = -np.log2(least) / 2
    else:  # 0.1, 1 and 10 seconds or %
        shades = -np.log10(least)
    return np.asarray(np.clip(shades, -1, 1), float)


def spread(rows: Sequence[Row]) -> bytes | None:
    """Return a PNG with a panel per measure: a dot per ground and load for each recipe, and their mean."""
    settings = {row.setting for row in rows if row.id == "bound.tokens_per_s"}
    seen = [row for row in rows if row.setting in settings]
    systems = list(dict.fromkeys(row.system for row in seen if row.id == "tokens_per_s"))
    if not systems:
        return None
    figure, panels = sheet(2, 3, max(4.0 + 0.75 * len(systems), 11.0), 7.5)
    for axes, (id, title) in zip(panels, _PANELS.items(), strict=True):
        for x, system in enumerate(systems):
            column = [row.ours for row in seen if (row.id, row.system) == (id, system)]
            values = [value for value in column if value is not None]
            axes.plot([x] * len(values), values, "o", color=colour(0), ms=2.5, alpha=0.4)
            if values:
                axes.plot([x], [np.mean(values)], "_", color="black", ms=14, mew=2)
        _scale(axes, _RATIO_TICKS if title.endswith("stock") else _TICKS)
        axes.set_xticks(range(len(systems)), systems, rotation=40, ha="right", fontsize=7)
        axes.set_title(title, fontsize=9)
    return png(figure, SIMULATED)


def _scale(axes: Axes, ticks: Sequence[float]) -> None:
    """Give the axes a logarithmic scale, linear below 1 where 0 is a tick."""
    low, high = axes.get_ylim()
    if 0 in ticks:
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_ylim(-0.1, max(high, 1.5))
    else:
        axes.set_yscale("log")
        axes.set_ylim(max(low, 0.15), high)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
    bottom, top = axes.get_ylim()
    shown = [tick for tick in ticks if bottom <= tick <= top]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)
