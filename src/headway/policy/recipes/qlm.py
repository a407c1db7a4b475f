"""QLM and the ablations of its paper as recipes (QLM 8, figures 10, 13, 14 and 18).

Inside an engine requests run by the rank of their group; a running request that has to yield is recomputed
or, where the engine has a host pool and copying is cheaper, its KV is swapped (QLM 2.4, insight 2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.ranked import ByRank
from headway.policy.plan.group_placement import QlmOptions
from headway.policy.plan.qlm import Qlm
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer

_VARIANTS: dict[str, tuple[str, QlmOptions, bool]] = {
    "qlm": ("QLM: request groups on virtual queues, ordered by a plan generator, model swaps", QlmOptions(), True),
    "qlm-no-evict": ("QLM without request eviction", QlmOptions(evicts=False), True),
    "qlm-no-kv-swap": ("QLM that recomputes what it evicts", QlmOptions(), False),
    "qlm-no-warm": ("QLM without model warm start", QlmOptions(warms=False), True),
    "qlm-round-robin": ("QLM with groups dealt to instances in turn", QlmOptions(places="in turn"), True),
    "qlm-random": ("QLM with groups dealt to instances at random", QlmOptions(places="random"), True),
    "qlm-by-deadline": (
        "QLM with groups by deadline, swapping models as that order has them",
        QlmOptions(orders="deadline"),
        True,
    ),
}


def _packer(kv_swap: bool, spec: EngineSpec) -> Packer:
    return ByRank(spec, swaps=kv_swap)


def variant(name: str, about: str, options: QlmOptions, kv_swap: bool = True) -> Recipe:
    """Return QLM with other options, for studies."""
    planner: Callable[[], Qlm] = partial(Qlm, options)
    return Recipe(name, about, planner, partial(_packer, kv_swap))


QLM = {name: variant(name, about, options, kv_swap) for name, (about, options, kv_swap) in _VARIANTS.items()}
