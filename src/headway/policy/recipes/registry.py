"""Recipes by name: the general ones, the papers' (BROS, EcoServe, SLO-aware scheduling), and their baselines.

`"package.module:attribute"` names a `Recipe` that lives outside Headway.
"""

from __future__ import annotations

from difflib import get_close_matches

from headway.errors import ConfigError
from headway.plugins import attribute
from headway.policy.recipes.anneal import ANNEAL
from headway.policy.recipes.baselines import BASELINES, ROUTERS
from headway.policy.recipes.bros import BROS
from headway.policy.recipes.default import DEFAULT
from headway.policy.recipes.ecoserve import ECOSERVE
from headway.policy.recipes.hermes import HERMES
from headway.policy.recipes.qlm import QLM
from headway.policy.recipes.recipe import Recipe

__all__ = ["RECIPES", "Recipe", "find", "names"]

RECIPES = DEFAULT | {"bros": BROS["bros"]}
_KNOWN = RECIPES | BROS | ECOSERVE | QLM | ANNEAL | HERMES | BASELINES | ROUTERS


def names() -> list[str]:
    """Return the names of all built-in recipes, the papers' baselines last."""
    return [*_KNOWN]


def find(name: str) -> Recipe:
    """Return the recipe called `name`, or the one at "module:attribute". ConfigError when there is none."""
    if name in _KNOWN:
        return _KNOWN[name]
    if ":" in name:
        return _outside(name)
    near = get_close_matches(name, _KNOWN, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(_KNOWN)}, or module:attribute."
    raise ConfigError(f"There is no recipe {name!r}.", hint, param="recipe")


def _outside(name: str) -> Recipe:
    try:
        recipe = attribute(name)
    except ImportError as error:
        raise ConfigError(
            f"The recipe {name!r} cannot be loaded: {error}.",
            "Check that the module is on PYTHONPATH of this process and that it has that attribute.",
            param="recipe",
        ) from error
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"{name!r} is a {type(recipe).__name__}.", "It must be a headway.policy.recipes.recipe.Recipe."
        )
    return recipe
