"""The papers' ablations, and recipes to the letter of a paper, which only benchmarks run.

Anything else that takes a recipe takes them as `benchmarks.papers.recipes:NAME`, where this checkout is importable.

EcoServe's, each with a predictor's padded lengths and, `-oracle`, with the true ones: `-d`: decoupled queues. `-sd`:
and time-synced groups. `-sdo`: and the order by deadline, held KV and length. `ecoserve` has KVC pipelining, too.
Preempted requests are swapped where an engine has a host pool and copying is cheaper (`-paper`: always), else computed
again.
"""

from __future__ import annotations

import itertools
from functools import partial

from headway.policy.pack.bros.packer import BatchSize, Bros
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.policy.plan.group_placement import QlmOptions
from headway.policy.recipes import bros, ecoserve, qlm, registry
from headway.policy.recipes.recipe import Recipe

# EcoServe to the letter (3.2 to 3.4, 4); the other variants differ where that has measured better.
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
ECOSERVE = {
    "ecoserve-d": (Options(synced=False, ordered=False, lends=False), "decoupled prompts and generations"),
    "ecoserve-sd": (Options(ordered=False, lends=False), "decoupled, in time-synced groups"),
    "ecoserve-sdo": (Options(lends=False), "decoupled, time-synced, ordered by deadline, KV and length"),
    "ecoserve": (Options(), "EcoServe: decoupled, time-synced, ordered, with KVC pipelining"),
    "ecoserve-paper": (TEXT, "EcoServe to the letter: every choice as in the paper's text"),
}
_BROS_TEXT = partial(
    Bros,
    spare=0.0,
    crowded=1.0,
    parts_below=-1.0,
    from_last=True,
    fixed_bound=True,
    returns_early=True,
    replaces_long=True,
    most_empty=True,
)
STUDIED = {
    recipe.name: recipe
    for recipe in (
        bros.variant(
            "bros-recompute",
            "BROS without two-ended blocks: what finds no blocks is computed again (the paper's ablation)",
            partial(Bros, two_ended=False, saves=False),
        ),
        bros.variant("bros-no-parts", "BROS with whole best-effort prompts only", partial(Bros, parts_below=-1.0)),
        bros.variant("bros-paper", "Algorithm 1, FindBlock and FindPreemptBlock of BROS by their text", _BROS_TEXT),
        bros.variant(
            "bros-no-replacement",
            "BROS without putting best effort in the place of real-time requests that can wait",
            partial(Bros, replaces=False),
        ),
        bros.variant(
            "bros-no-sizing",
            "BROS with a batch of 128 at any time",
            lambda spec: Bros(spec, batch_size=BatchSize(adapts=False)),
        ),
        bros.variant(
            "bros-lost-last",
            "BROS, but first tokens that are late already go behind those that can still be in time",
            partial(Bros, lost_last=True),
        ),
        *itertools.chain.from_iterable(
            (
                ecoserve.variant(name, about, options),
                ecoserve.variant(f"{name}-oracle", f"{about}; true lengths", options, "oracle"),
            )
            for name, (options, about) in ECOSERVE.items()
        ),
        qlm.variant("qlm-no-evict", "QLM without request eviction", QlmOptions(evicts=False)),
        qlm.variant("qlm-no-kv-swap", "QLM that recomputes what it evicts", QlmOptions(), kv_swap=False),
        qlm.variant("qlm-no-warm", "QLM without model warm start", QlmOptions(warms=False)),
        qlm.variant("qlm-round-robin", "QLM with groups dealt to instances in turn", QlmOptions(places="in turn")),
        qlm.variant("qlm-random", "QLM with groups dealt to instances at random", QlmOptions(places="random")),
        qlm.variant(
            "qlm-by-deadline",
            "QLM with groups by deadline, swapping models as that order has them",
            QlmOptions(orders="deadline"),
        ),
    )
    if recipe.name != "ecoserve"
}
PATHS = [f"{__name__}:{name}" for name in STUDIED]


def find(name: str) -> Recipe:
    """Return the recipe called `name`, of these or of the product's. ConfigError when there is none."""
    return STUDIED[name] if name in STUDIED else registry.find(name)


def __getattr__(name: str) -> Recipe:
    """Return a recipe as an attribute of this module."""
    if name not in STUDIED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return STUDIED[name]
