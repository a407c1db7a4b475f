"""BROS as recipes. Requests queue inside the engine: Algorithm 1 chooses among them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.ranks import DUE
from headway.policy.pack.bros.packer import Bros
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe


def variant(name: str, about: str, packer: Callable[[EngineSpec], Bros]) -> Recipe:
    """Return BROS with other options of its packer."""
    return Recipe(name, about, lambda: Ordered(DUE, pull=False), packer)


BROS = {
    recipe.name: recipe
    for recipe in (
        variant("bros", "BROS: real-time by time left, best effort by swap cost, blocks shared from both ends", Bros),
        variant(
            "bros-plain-blocks",
            "BROS without two-ended blocks: whole requests are swapped to the host",
            partial(Bros, two_ended=False),
        ),
    )
}
