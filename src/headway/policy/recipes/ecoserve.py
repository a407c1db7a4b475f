"""EcoServe and the ablation of its paper as recipes.

`-d`: decoupled queues. `-sd`: and time-synced groups. `-sdo`: and the order by deadline, held KV and length.
Without a suffix: and KVC pipelining. `-paper`: the same to the letter of the paper. Each with a predictor's
padded lengths and, `-oracle`, with the true ones. Requests queue inside the engine (`pull=False`): the packer
orders all that waits. Preempted requests are swapped where an engine has a host pool and copying is cheaper
(`-paper`: always), else computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.ranks import ARRIVAL
from headway.policy.pack.ecoserve.packer import EcoServe
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer

# The paper to the letter (3.2 to 3.4, 4); the other variants differ where that has measured better.
TEXT = Options(
    buffer=0,
    buffer_share=0.15,
    idle=1.0,
    grain=1,
    loose=True,
    fixed_ranges=True,
    hosts_first=True,
    lends_to_prompts=False,
    whole=False,
    by_cost=False,
)
VARIANTS = {
    "ecoserve-d": (Options(synced=False, ordered=False, lends=False), "decoupled prompts and generations"),
    "ecoserve-sd": (Options(ordered=False, lends=False), "decoupled, in time-synced groups"),
    "ecoserve-sdo": (Options(lends=False), "decoupled, time-synced, ordered by deadline, KV and length"),
    "ecoserve": (Options(), "EcoServe: decoupled, time-synced, ordered, with KVC pipelining"),
    "ecoserve-paper": (TEXT, "EcoServe to the letter: every choice as in the paper's text"),
}


def _packer(options: Options) -> Callable[[EngineSpec], Packer]:
    return lambda spec: EcoServe(spec, options)


def _recipe(name: str, about: str, options: Options, lengths: Literal["padded", "oracle"]) -> Recipe:
    planner = partial(Ordered, ARRIVAL, displaces=False, pull=False)
    return Recipe(name, about, planner, _packer(options), lengths)


def _recipes() -> Iterator[Recipe]:
    for name, (options, about) in VARIANTS.items():
        yield _recipe(name, about, options, "padded")
        yield _recipe(f"{name}-oracle", f"{about}; true lengths", options, "oracle")


ECOSERVE = {recipe.name: recipe for recipe in _recipes()}
