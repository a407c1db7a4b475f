"""`headway bench default`: recipe `headway` beside every other on every ground, SIMULATED.

A cell is a ground at a load. Each recipe gets the same requests and forecasts; beside its attainment stands
the share of `simulate/bound.py`'s upper bound, which no schedule can pass. Two curves show how attainment
falls when forecasts of lengths or of latency are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.experiment import Result, computed, experiment
from benchmarks.simulated import default_plots, default_rows
from benchmarks.simulated.default_figures import (
    BOUND,
    DEFAULT,
    HINDSIGHT,
    SMALLEST,
    STOCK,
    TRUE,
    Cell,
    Figures,
    figures,
)
from benchmarks.simulated.default_rows import HIGH, grid, notes, places_of
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
from headway.whatif.output.results import SIMULATED, Ask, Row


def _with(**options: Any) -> Callable[[EngineSpec], Packer]:
    """Return a packer with other numbers of `PromisesConfig`."""
    return partial(Promises, keep=PromisesConfig(**options))


_LOST, _CALM = PromisesConfig().lost, PromisesConfig().calm
_HASTY = _CALM._replace(answer_safety=_LOST.answer_safety, lost_below_stds=_LOST.lost_below_stds)
ABLATIONS: dict[str, Callable[[EngineSpec], Packer]] = {
    "headway without selection": _with(selects_largest_set=False),
    "headway without a limit of size": _with(limits_size=False),
    "headway without prompts that yield": _with(prompts_yield=False),
    "headway without a margin of tpot": _with(tpot_margin=0.0),
    "headway without answers that fall behind": _with(short_answer_stds=math.inf),
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
_FILES = ("default", "default_figures", "grounds", "held_grounds")
_SOURCES = (*(f"simulated/{name}.py" for name in _FILES), "papers/ecoserve_setup.py")


@experiment("default", "sim", f"The default recipe beside all others ({SIMULATED})")
def main(ask: Ask, seeds: int = 3, hindsight: int = 0, some: Sequence[Cell] = ()) -> Result:
    """Run all cells with that many seeds; `quick`: 1.3x only, one seed, four recipes, fewer requests.

    hindsight: simulations of a search in each cell where the default recipe is far below the bound; then no other
        recipe but stock, no held ground and no wrong forecast is run. 0 = no search. some: cells to run instead of all.
    """
    cells = some or (quick_cells(ask.seed) if ask.quick else all_cells(range(ask.seed, ask.seed + seeds)))
    if hindsight:
        cells = [cell for cell in cells if _is_beside_hindsight(cell)]
    found = computed(cells, compute, sources=_SOURCES)
    if hindsight:
        found |= computed(hindsight_cells(found, hindsight), compute, sources=_SOURCES)
    rows = rows_of(found)
    if hindsight:  # no best other recipe to be behind
        rows = [row for row in rows if not row.id.startswith(("cells", "margin"))]
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


def _is_beside_hindsight(cell: Cell) -> bool:
    wrong = cell.length_error or cell.latency_error != 1.0
    return cell.system in (BOUND, DEFAULT, TRUE, STOCK) and not (cell.ground.held or wrong)


def hindsight_cells(found: dict[Cell, Figures], trials: int) -> list[Cell]:
    """Return cells of `HINDSIGHT` and `SMALLEST` where the default recipe is far below a bound that says something."""
    rows = {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows_of(found)}
    return [
        replace(cell, system=system, trials=trials if system == HINDSIGHT else 0)
        for cell, system in product(found, (HINDSIGHT, SMALLEST))
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
    if cell.system == SMALLEST:
        return Figures(smallest(find(DEFAULT), spec, workload, lambda: _lengths(cell, workload)), promised, 0.0)
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
        "matrix": default_plots.matrix,
        "measures": default_plots.measures,
        "spread": default_plots.spread,
        "errors": default_plots.errors,
    }
    return {name: png for name, make in made.items() if (png := make(rows)) is not None}


_ADDED = (0.01, 0.03, 0.1, 0.3)  # shares of the requests left out that a trial brings in
_SWAPS = 0.3  # share of the trials that also drop `_DROPPED` of the kept ones
_DROPPED = 0.01
_CUTS = (0.95, 0.9, 0.85, 0.8)  # the first trials are of this share of the promised requests, the smallest


def search(recipe: Recipe, spec: InstanceSpec, workload: Workload, until: float, trials: int, seed: int) -> int:
    """Return how many promises `recipe` keeps on the best subset of `workload` that `trials` runs find.

    until: simulated seconds; what has not ended by then is late.

    The first run is of all promised requests, the next are without the largest of them (KV times answer). Each later
    trial brings in some of those that the best subset so far leaves out, short ones more likely, at times drops some
    of its own, long ones more likely. What is no worse is kept, so the result only grows with `trials`.
    """
    rng = np.random.default_rng([seed, 3])
    best = _met(recipe, spec, workload, until, workload.promised)
    tokens = (workload.prompt + workload.output).astype(float)
    size = _kv_time(workload, workload.output)
    for trial in range(trials):
        if trial < len(_CUTS):
            keep = workload.promised & (size <= np.quantile(size[workload.promised], _CUTS[trial]))
        else:
            keep = best.copy()
            keep[_some(rng, workload.promised & ~best, 1 / tokens, rng.choice(_ADDED))] = True
            if rng.random() < _SWAPS:
                keep[_some(rng, best, tokens, _DROPPED)] = False
        met = _met(recipe, spec, workload, until, keep)
        if np.count_nonzero(met) >= np.count_nonzero(best):
            best = met
    return int(np.count_nonzero(best))


_LIMITS = (*_CUTS, 0.75, 0.7)  # shares of the promised requests that are kept, the smallest by forecast


def smallest(recipe: Recipe, spec: InstanceSpec, workload: Workload, lengths: Callable[[], Lengths]) -> int:
    """Return how many promises `recipe` keeps when the largest requests are promised nothing, at best.

    How many these are is known afterwards; their sizes, and the lengths in the engine, are only forecast.
    """
    size, best = _forecast_sizes(workload, lengths()), 0
    for share in _LIMITS:
        large = size > np.quantile(size[workload.promised], share)
        ttft, tpot, e2e, itl = (
            np.where(large, np.inf, slo) for slo in (workload.ttft, workload.tpot, workload.e2e, workload.itl)
        )
        part = replace(workload, ttft=ttft, tpot=tpot, e2e=e2e, itl=itl)
        met = slo_violations.met(part, Simulation(recipe, [spec], part, lengths()).run())
        best = max(best, int(np.count_nonzero(met & part.promised)))
    return best


def _forecast_sizes(workload: Workload, lengths: Lengths) -> Floats:
    """Return the KV x time of each request by its forecast; where lengths are learned, by the mean of its class."""
    answer = workload.output.astype(float)
    if isinstance(lengths, Noisy):
        answer *= lengths.factors
    else:
        for tier in np.unique(workload.tier):
            answer[workload.tier == tier] = workload.output[workload.tier == tier].mean()
    return _kv_time(workload, answer)


def _kv_time(workload: Workload, answer: Floats | Ints) -> Floats:
    """Return the KV x time of each request with answers of that many tokens, in tokens x tokens."""
    return answer * (workload.prompt + answer / 2)


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
