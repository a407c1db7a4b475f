"""`headway bench placement --hindsight`: small cases, against the best of all placements of their requests.

With hindsight each request goes to an engine when it arrives, too. The best placement keeps the most promises; ties go
to the fewest prompt tokens computed. Headway's scheduler is in all engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.catalog.conversations import Turn, of_turns
from benchmarks.catalog.grounds import PROFILE, fleet
from benchmarks.experiment import Result, computed, experiment
from benchmarks.placement.routers import Forward, recipe
from headway.policy.pack.promises.packer import Promises
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find
from headway.prefix import Prefix
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Slo
from headway.whatif.output.results import SIMULATED, Ask, Row, system_grid

HEADWAY, HINDSIGHT, SGLANG, ROUND_ROBIN = "headway", "hindsight", "sglang+packer", "round-robin+packer"
_ENGINES, _REQUESTS, _TALKS = 2, 7, 4
_LONGEST = 32_768
_SLO = Slo(ttft=1.5, tpot=0.1)
_UNITS = {"promises.lost": "% of requests", "tokens.computed": "of hindsight's"}


@experiment("placement-hindsight", "sim", f"Placement of small cases ({SIMULATED})")
def main(ask: Ask, cases: int = 40) -> Result:
    """Simulate; `quick`: ten cases."""
    cases = 10 if ask.quick else cases
    found = computed([ask.seed * 1000 + number for number in range(cases)], figures_of)
    kept, tokens = np.array([case[0] for case in found.values()]), np.array([case[1] for case in found.values()])
    lost, best = 100 * (1 - kept.sum(0) / (cases * _REQUESTS)), tokens[:, -1].sum()
    setting = f"{cases} cases"
    rows = [
        Row(id, system, setting, value, _UNITS[id])
        for id, values in (("promises.lost", lost), ("tokens.computed", tokens.sum(0) / best))
        for system, value in zip((HEADWAY, SGLANG, ROUND_ROBIN, HINDSIGHT), values.tolist(), strict=True)
    ]
    workload = (
        f"{SIMULATED}: {_REQUESTS} requests of {_TALKS} conversations on {_ENGINES} engines of {PROFILE}, first token "
        f"within {_SLO.ttft:g} s; hindsight: the best of all {_ENGINES**_REQUESTS} placements."
    )
    return Result(rows, workload, dict, system_grid(rows))


def figures_of(seed: int) -> tuple[list[int], list[int]]:
    """Return the promises kept and the prompt tokens computed in one case: by three rules, and with hindsight."""
    work = case(np.random.default_rng(seed))
    runs = [_run(system, work) for system in (find(HEADWAY), recipe(SGLANG), recipe(ROUND_ROBIN))]
    others = itertools.product(range(_ENGINES), repeat=_REQUESTS - 1)  # engines are alike: the first gets the first
    runs.append(max((_run(_placed((0, *rest)), work) for rest in others), key=lambda run: (run[0], -run[1])))
    return [kept for kept, _ in runs], [tokens for _, tokens in runs]


def case(rng: np.random.Generator) -> Workload:
    """Return turns of a few conversations that come too fast for one engine."""
    owner = np.sort(rng.integers(_TALKS, size=_REQUESTS))
    turns = list[Turn]()
    for talk in np.unique(owner).tolist():
        prompt = 2000 + int(min(rng.exponential(6000), 20_000))
        for at in np.sort(rng.uniform(0, 4, np.count_nonzero(owner == talk))).tolist():
            answer = int(rng.integers(10, 60))
            turns.append(Turn(at, answer, Prefix(f"talk {talk}", prompt, answer=True)))
            prompt += answer + int(rng.integers(200, 2000))
    return of_turns(turns, _SLO, "cases")


def _placed(engines: Sequence[int]) -> Recipe:
    """Return a recipe that sends the requests to these engines, in the order of their coming."""

    def planner() -> Forward:
        turns = iter(engines)
        return Forward(lambda request, seen: next(turns))

    return Recipe(HINDSIGHT, "a given placement", planner, Promises)


def _run(system: Recipe, work: Workload) -> tuple[int, int]:
    """Return how many promises are kept, and the prompt tokens computed."""
    outcome = Simulation(system, fleet(_ENGINES, _LONGEST), work).run()
    ttft = outcome.first - work.arrival
    tpot = (outcome.end - outcome.first) / np.maximum(work.output - 1, 1)
    return int(np.count_nonzero((ttft <= work.ttft) & (tpot <= work.tpot))), outcome.queried - outcome.hits
