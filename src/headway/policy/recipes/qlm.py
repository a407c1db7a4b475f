"""QLM as a recipe.

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


def _packer(kv_swap: bool, spec: EngineSpec) -> Packer:
    return ByRank(spec, swaps=kv_swap)


def variant(name: str, about: str, options: QlmOptions, kv_swap: bool = True) -> Recipe:
    """Return QLM with other options. kv_swap: whether the KV of what yields may be swapped."""
    planner: Callable[[], Qlm] = partial(Qlm, options)
    return Recipe(name, about, planner, partial(_packer, kv_swap))


QLM = {
    "qlm": variant(
        "qlm", "QLM: request groups on virtual queues, ordered by a plan generator, model swaps", QlmOptions()
    )
}
