"""BROS and its ablations as recipes. The queue is the engine's own: Algorithm 1 chooses among all waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from headway.forecast.latency.online import OnlineLatency
from headway.pack.bros.batch_size import BatchSize
from headway.pack.bros.packer import Bros
from headway.plan.ordered import Ordered, by_due
from headway.recipes.recipe import Recipe


def _without_sizing(running: int, budget: int, latency: OnlineLatency) -> Bros:
    return Bros(running, budget, latency, sizing=BatchSize(adapts=False))


# Recipes: what each is, and its packer(max_running, token budget, pace).
VARIANTS: dict[str, tuple[str, Callable[[int, int, OnlineLatency], Bros]]] = {
    "bros": ("BROS: real-time by time left, best effort by swap cost, blocks shared from both ends", Bros),
    "bros-plain-blocks": (
        "BROS without two-ended blocks: whole requests are swapped to the host",
        partial(Bros, two_ended=False),
    ),
    "bros-no-replacement": (
        "BROS without putting best effort in the place of real-time requests that can wait",
        partial(Bros, replaces=False),
    ),
    "bros-no-sizing": ("BROS with a batch of 128 at any time", _without_sizing),
    "bros-lost-last": (
        "BROS, but first tokens that are late already go behind those that can still be in time",
        partial(Bros, lost_last=True),
    ),
}


def _recipe(name: str) -> Recipe:
    about, packer = VARIANTS[name]
    kv: Literal["beside", "two-ended"] = "beside" if name == "bros-plain-blocks" else "two-ended"
    return Recipe(name, about, lambda: Ordered(by_due), packer, pull=False, kv=kv)


BROS = {name: _recipe(name) for name in VARIANTS}
