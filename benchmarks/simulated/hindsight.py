"""How much of the bound can be reached: a search with hindsight for promises that one engine can keep.

The bound (`simulate/bound.py`) says what no schedule can pass; this search finds schedules, SIMULATED, so the
best possible lies between the two. It knows all arrivals and lengths, drops best effort, and drops requests
before they arrive that it will not keep. That is more than any recipe may know.
"""

from __future__ import annotations

import numpy as np

from headway.policy.recipes.recipe import Recipe
from headway.simulate.forecasts import Oracle
from headway.simulate.instance import InstanceSpec
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Bools, Floats, Ints
from headway.whatif import slo_violations

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
