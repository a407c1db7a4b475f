"""SLO-aware scheduling by simulated annealing as recipes.

`anneal` finds the order inside each engine, where what runs can pause; `anneal-queue` in front of it, as the
paper has it. `anneal` is the better of the two in every setting of `headway bench papers anneal`. `anneal-queue`
has variants closer to the paper's text: `anneal-draws` plans with lengths drawn from a normal distribution per task
(5.1), `anneal-batches` sends the annealed batches one after another (4.4), `anneal-paper` does both.
"""

from __future__ import annotations

from functools import partial

from headway.policy.pack import annealed as inside
from headway.policy.pack.ranked import Fcfs
from headway.policy.plan.annealed import Annealed
from headway.policy.recipes.recipe import Recipe


def variant(name: str, about: str, *, draws: bool = False, batches: bool = False) -> Recipe:
    """Return a recipe that anneals the queue in front of an engine. draws, batches: as in the module."""
    return Recipe(
        name,
        f"SLO-aware scheduling {about}, annealed for goodput",
        partial(Annealed, batches=batches),
        lambda spec: Fcfs(spec.max_running),
        "drawn" if draws else "learned",
    )


ANNEAL = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "anneal",
            "SLO-aware scheduling: the order of all that is inside an engine, annealed for goodput",
            partial(Annealed, pull=False),
            inside.Annealed,
        ),
        variant("anneal-queue", "as published: only the order of the queue"),
        variant("anneal-draws", "as published, with drawn lengths: the order of the queue", draws=True),
        variant("anneal-batches", "batch by batch: order and batches of the queue", batches=True),
        variant("anneal-paper", "to the letter: drawn lengths, order and batches", draws=True, batches=True),
    )
}
