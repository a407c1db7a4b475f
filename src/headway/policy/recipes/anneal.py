"""SLO-aware scheduling by simulated annealing as recipes.

`anneal` finds the order inside each engine, where what runs can pause; `anneal-queue` in front of it, as the
paper has it. `anneal` is the better of the two in every setting of `headway bench papers anneal`.
"""

from __future__ import annotations

from functools import partial

from headway.policy.pack import annealed as inside
from headway.policy.pack.ranked import Fcfs
from headway.policy.plan.annealed import Annealed
from headway.policy.recipes.recipe import Recipe

ANNEAL = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "anneal",
            "SLO-aware scheduling: the order of all that is inside an engine, annealed for goodput",
            partial(Annealed, pull=False),
            inside.Annealed,
        ),
        Recipe(
            "anneal-queue",
            "SLO-aware scheduling as published: only the order of the queue, annealed for goodput",
            Annealed,
            lambda spec: Fcfs(spec.max_running),
        ),
    )
}
