"""Which policies go together? Named recipes: one planner for the slow loop, one packer for the fast loop.

`ecoserve.py` has EcoServe's, `baselines.py` those of the papers' comparisons. `"package.module:attribute"`
names a `Recipe` that lives outside Headway.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal

from headway.baselines import BASELINES, ROUTERS
from headway.ecoserve import ECOSERVE
from headway.errors import ConfigError
from headway.forecast.pace import OnlinePace
from headway.pack import bros
from headway.pack import classic as packers
from headway.pack.slack import Slack
from headway.plan import classic as planners
from headway.ports import Packer, Planner, Recipe

__all__ = ["ABLATIONS", "RECIPES", "Recipe", "find", "names"]


def _recipe(
    name: str, about: str, planner: Planner, packer: Callable[[int, int, OnlinePace], Packer]
) -> Recipe:
    return Recipe(name, about, lambda: planner, packer)


def _inside(name: str) -> Recipe:
    """Return BROS or an ablation of it. Its queue is the engine's own: it chooses among all that wait."""
    about, packer = bros.VARIANTS[name]
    kv: Literal["beside", "two-ended"] = "beside" if name == "bros-plain-blocks" else "two-ended"
    return Recipe(name, about, lambda: planners.Ordered(planners.by_due), packer, pull=False, kv=kv)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        _recipe(
            "vllm",
            "vLLM's own order: first come, first served",
            planners.Ordered(planners.by_arrival, displaces=False),
            lambda running, budget, pace: packers.Fcfs(running),
        ),
        _recipe(
            "priority",
            "vLLM's priorities, which also displace running work when the batch is full",
            planners.Ordered(planners.by_priority),
            lambda running, budget, pace: packers.Ranked(packers.by_priority, running, budget),
        ),
        _recipe(
            "edf",
            "earliest deadline first, in the queue and in the engine",
            planners.Ordered(planners.by_due),
            lambda running, budget, pace: packers.Ranked(packers.by_due, running, budget),
        ),
        _recipe(
            "slack",
            "least slack first, prompt chunks sized so that running answers keep their pace (BROS 4.2)",
            planners.Ordered(planners.by_hope),
            lambda running, budget, pace: Slack(running, budget, pace),
        ),
        _inside("bros"),
    )
}
ABLATIONS = {name: _inside(name) for name in bros.VARIANTS if name != "bros"}


def names() -> list[str]:
    """Return the names of all built-in recipes, the papers' baselines last."""
    return [*RECIPES, *ABLATIONS, *ECOSERVE, *BASELINES, *ROUTERS]


def find(name: str) -> Recipe:
    """Return the recipe called `name`, or the one at "module:attribute". ConfigError when there is none."""
    known = RECIPES | ABLATIONS | ECOSERVE | BASELINES | ROUTERS
    if name in known:
        return known[name]
    if ":" in name:
        return _outside(name)
    near = get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(known)}, or module:attribute."
    raise ConfigError(f"There is no recipe {name!r}.", hint, param="recipe")


def _outside(name: str) -> Recipe:
    module, _, attribute = name.partition(":")
    try:
        recipe = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The recipe {name!r} cannot be loaded: {error}.",
            "Check that the module is on PYTHONPATH of this process and that it has that attribute.",
            param="recipe",
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{name!r} is a {type(recipe).__name__}.", "It must be a headway.recipes.Recipe.")
    return recipe
