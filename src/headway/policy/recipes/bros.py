"""BROS and its ablations as recipes. Requests queue inside the engine: Algorithm 1 chooses among them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.ranks import DUE
from headway.policy.pack.bros.packer import BatchSize, Bros
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe


def _without_batch_size(spec: EngineSpec) -> Bros:
    return Bros(spec, batch_size=BatchSize(adapts=False))


def _by_the_text(spec: EngineSpec) -> Bros:
    return Bros(
        spec,
        spare=0.0,
        crowded=1.0,
        parts_below=-1.0,
        from_last=True,
        fixed_bound=True,
        returns_early=True,
        replaces_long=True,
        most_empty=True,
    )


# Recipes: what each is, and its packer.
VARIANTS: dict[str, tuple[str, Callable[[EngineSpec], Bros]]] = {
    "bros": ("BROS: real-time by time left, best effort by swap cost, blocks shared from both ends", Bros),
    "bros-plain-blocks": (
        "BROS without two-ended blocks: whole requests are swapped to the host",
        partial(Bros, two_ended=False),
    ),
    "bros-recompute": (
        "BROS without two-ended blocks: what finds no blocks is computed again (the paper's ablation)",
        partial(Bros, two_ended=False, saves=False),
    ),
    "bros-no-parts": ("BROS with whole best-effort prompts only", partial(Bros, parts_below=-1.0)),
    "bros-paper": ("Algorithm 1, FindBlock and FindPreemptBlock of BROS by their text", _by_the_text),
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
    return Recipe(name, about, lambda: Ordered(DUE, pull=False), packer)


BROS = {name: _recipe(name) for name in VARIANTS}
