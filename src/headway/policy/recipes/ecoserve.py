"""EcoServe as a recipe. Requests queue inside the engine (`pull=False`): the packer orders all that waits."""

from __future__ import annotations

from functools import partial
from typing import Literal

from headway.policy.core.ranks import ARRIVAL
from headway.policy.pack.ecoserve.packer import EcoServe
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe


def variant(name: str, about: str, options: Options, lengths: Literal["padded", "oracle"] = "padded") -> Recipe:
    """Return EcoServe with other options of its packer, or with the true lengths of answers."""
    planner = partial(Ordered, ARRIVAL, displaces=False, pull=False)
    return Recipe(name, about, planner, lambda spec: EcoServe(spec, options), lengths)


ECOSERVE = {
    "ecoserve": variant("ecoserve", "EcoServe: decoupled, time-synced, ordered, with KVC pipelining", Options())
}
