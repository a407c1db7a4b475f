"""BROS and its ablations as recipes. Requests queue inside the engine: Algorithm 1 chooses among them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headway.core.engine_spec import EngineSpec
from headway.pack.bros.packer import BatchSize, Bros
from headway.plan.ordered import Ordered, by_due
from headway.recipes.recipe import Recipe


def _without_batch_size(spec: EngineSpec) -> Bros:
    return Bros(spec, batch_size=BatchSize(adapts=False))


# Recipes: what each is, and its packer.
VARIANTS: dict[str, tuple[str, Callable[[EngineSpec], Bros]]] = {
    "bros": ("BROS: real-time by time left, best effort by swap cost, blocks shared from both ends", Bros),
    "bros-plain-blocks": (
        "BROS without two-ended blocks: whole requests are swapped to the host",
        partial(Bros, two_ended=False),
    ),
    "bros-no-replacement": (
        "BROS without putting best effort in the place of real-time requests that can wait",
        partial(Bros, replaces=False),
    ),
    "bros-no-sizing": ("BROS with a batch of 128 at any time", _without_batch_size),
    "bros-lost-last": (
        "BROS, but first tokens that are late already go behind those that can still be in time",
        partial(Bros, lost_last=True),
    ),
}


def _recipe(name: str) -> Recipe:
    about, packer = VARIANTS[name]
    return Recipe(name, about, lambda: Ordered(by_due, pull=False), packer)


BROS = {name: _recipe(name) for name in VARIANTS}
