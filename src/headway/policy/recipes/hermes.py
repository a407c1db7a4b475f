"""Hermes: LLM applications by the work that their runs have left."""

from __future__ import annotations

from headway.policy.apps.demand import Knowledge
from headway.policy.apps.prewarming import PrewarmOptions
from headway.policy.apps.runs import Futures, RankOptions
from headway.policy.pack.ranked import Fcfs
from headway.policy.plan.hermes import Hermes
from headway.policy.recipes.recipe import Recipe

AGED = RankOptions(aging=0.3)


def variant(
    name: str,
    about: str,
    options: RankOptions,
    knowledge: Knowledge | None = None,
    futures: Futures | None = None,
    prewarm: PrewarmOptions | None = None,
) -> Recipe:
    """Return a recipe with these ranks.

    knowledge: graphs to begin with, shared by all runs of the recipe; None = every planner starts without.
    futures: as in `Runs`. prewarm: which resources are warmed, and how early.
    """
    return Recipe(
        name, about, lambda: Hermes(options, knowledge, futures, prewarm), lambda spec: Fcfs(spec.max_running)
    )


HERMES = {
    recipe.name: recipe
    for recipe in (
        variant("hermes", "application runs by the Gittins index of their remaining demand", RankOptions()),
        variant("hermes-aged", "the same as hermes, but runs gain rank as they wait", AGED),
        variant("hermes-ddl", "application runs by worst-case slack to their deadline", RankOptions("slack")),
    )
}
