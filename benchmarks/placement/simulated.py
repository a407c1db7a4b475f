"""`headway bench placement`: routers of a fleet with prefix caches, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.catalog.grid import SOURCES, Cell, Grid, rows_of
from benchmarks.catalog.grounds import PROFILE, checked
from benchmarks.catalog.margins import HEADWAY, Case, bars, margin_rows
from benchmarks.experiment import Result, computed, experiment, refuse_unknown
from benchmarks.placement.grounds import GROUNDS, in_runs
from benchmarks.placement.routers import CHOICES, NAMES, recipe
from headway.engines.simulated.prefix_blocks import keys_of
from headway.errors import ConfigError
from headway.policy.recipes.registry import find
from headway.prefix import GRAIN
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid

CLAIRVOYANT, ENDS = "clairvoyant", f"{HEADWAY}+ends"
SYSTEMS = (HEADWAY, "round-robin", "session", "least-loaded", "sglang", "llm-d", "dynamo", "sglang+packer")
_QUICK = Grid((HEADWAY, "round-robin", "sglang"), ("interactive-chat", "deep-research"), (4,), (1.0,), 60.0)
_WHOLE = Grid(SYSTEMS, tuple(GROUNDS), (4, 16, 64), (0.7, 1.0, 1.3), 240.0)
_UNITS = {
    "attainment.promised": "%",
    "ttft.p99": "s",
    "prompt.hit_pct": "%",
    "tokens.computed": "tokens",
    "balance": "largest/mean",
}
_DRAWN = {"attainment.promised": "attainment.promised, %", "prompt.hit_pct": "prompt.hit_pct, %"}


@experiment("placement", "sim", f"Placement by prefix caches ({SIMULATED})")
def main(ask: Ask, asked: Grid, kv: float = 1.0) -> Result:
    """Simulate; what is not given: `quick`, two grounds on four engines at their capacity, three systems; else all."""
    grid = asked.within(_QUICK if ask.quick else _WHOLE)
    refuse_unknown("system", grid.systems, (HEADWAY, ENDS, *NAMES))
    if ENDS in grid.systems and "mooncake" in grid.grounds:
        raise ConfigError("Mooncake's trace does not say which conversation ends.", f"Leave out {ENDS} there.")
    checked(grid.grounds, GROUNDS)
    found = computed(grid.cells(ask.seed, kv), figures_of, sources=() if ask.quick else SOURCES)
    rows = [*rows_of(found, _UNITS)]
    least = {cell.setting(): figures[CLAIRVOYANT] for cell, figures in found.items()}
    rows += [Row("tokens.computed", CLAIRVOYANT, setting, tokens, "tokens") for setting, tokens in least.items()]
    rows += _margins(found)
    workload = (
        f"{SIMULATED}: engines of {PROFILE} with prefix caches; {grid.seconds:g} s of each ground once conversations "
        f"of all ages are there; routers in front of stock vLLM, +packer: with Headway's in the engines; "
        f"+ends: engines learn which conversations have ended."
    )
    return Result(rows, workload, lambda: {"placement": bars(rows, _DRAWN)}, system_grid(rows))


def figures_of(cell: Cell) -> dict[str, float]:
    """Simulate a cell and return its figures, and the least tokens that any placement must compute."""
    ground = GROUNDS[cell.ground]
    work = ground.workload(cell.engines, cell.load, cell.seconds, cell.seed)
    ends = cell.system == ENDS
    system = find(HEADWAY) if ends or cell.system == HEADWAY else recipe(cell.system)
    engines = ground.fleet(cell.engines, cell.kv)
    outcome = Simulation(system, engines, in_runs(work) if ends else work, ends=ends).run()
    return dict(_figures(work, outcome, ground.warm)) | {CLAIRVOYANT: float(least_tokens(work))}


def _figures(work: Workload, outcome: Outcome, warm: float) -> Iterator[tuple[str, float]]:
    rows = work.arrival >= warm
    ttft, e2e = outcome.first - work.arrival, outcome.end - work.arrival
    tpot = (e2e - ttft) / np.maximum(work.output - 1, 1)
    kept = (ttft <= work.ttft) & (tpot <= work.tpot)
    inside = np.bincount(outcome.instance[rows])
    yield "attainment.promised", 100 * float(kept[rows].mean())
    yield "ttft.p99", float(np.quantile(ttft[rows], 0.99))
    yield "prompt.hit_pct", 100 * outcome.hits / max(outcome.queried, 1)
    yield "tokens.computed", float(outcome.queried - outcome.hits)
    yield "balance", float(inside.max() / inside.mean())


def least_tokens(work: Workload) -> int:
    """Return the prompt tokens that must be computed if every engine found what any has computed."""
    known, least = set[int](), 0
    for row in range(len(work)):
        prompt, answer = int(work.prompt[row]), int(work.output[row])
        keys = keys_of(work.prefixes[work.prefix[row]], row, (prompt + answer - 1) // GRAIN, GRAIN).tolist()
        found = next((i for i, key in enumerate(keys[: (prompt - 1) // GRAIN]) if key not in known), prompt // GRAIN)
        known.update(keys)
        least += prompt - min(found, (prompt - 1) // GRAIN) * GRAIN
    return least


def _margins(found: dict[Cell, dict[str, float]]) -> Iterator[Row]:
    """Yield how many points more promises headway keeps than the best router of stock vLLM, per load, if both ran."""
    kept = {Case(one.load, one.setting(), one.system): figures["attainment.promised"] for one, figures in found.items()}
    return margin_rows(kept, CHOICES)
