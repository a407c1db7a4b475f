"""The systems of `headway bench rivals` by name, and the settings of each rival that its authors sweep."""

from __future__ import annotations

from functools import partial

from benchmarks.rivals import composite, fairbatching, jitserve, qoserve, scorpio, slai, slos_serve
from benchmarks.rivals.base import rival
from headway.policy.recipes.recipe import Recipe
from headway.policy.recipes.registry import find

DEFAULT = "headway"
LINE = "headway line"  # the default where tpots are promised with `pace = "line"`, the papers' token line
MODULES = (qoserve, slos_serve, fairbatching, scorpio, jitserve, slai, composite)
RIVALS: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in MODULES}
ESSENTIAL = ("qoserve", "slos-serve", "scorpio")  # the strongest, where a run takes minutes
STOCK = ("vllm",)

# Rival -> its settings beside that of its recipe; "line": by the papers' token line.
SWEEPS: dict[str, tuple[Recipe, ...]] = {
    "qoserve": (
        *(
            rival(f"qoserve alpha={a:g}", "another price of work", partial(qoserve.QoServe, alpha=a))
            for a in qoserve.ALPHAS
            if a != 68.0
        ),
        rival("qoserve line", "its own token line", partial(qoserve.QoServe, line="arrival")),
    ),
    "slos-serve": (
        rival("slos-serve edf_sim", "its newest planner", partial(slos_serve.SlosServe, mode="edf_sim")),
        rival("slos-serve retries", "declined are tried again", partial(slos_serve.SlosServe, retries=True)),
        rival("slos-serve line", "its own token line", partial(slos_serve.SlosServe, line="arrival")),
    ),
    "fairbatching": (
        rival("fairbatching line", "its own token line", partial(fairbatching.FairBatching, line="arrival")),
    ),
    "scorpio": tuple(
        rival(f"scorpio factor={f:g}", "another epsilon", partial(scorpio.Scorpio, factor=f)) for f in (1.0, 1.5, 1.75)
    ),
    "jitserve": tuple(
        rival(f"jitserve batch={b}", "another batch", partial(jitserve.JitServe, batch=b))
        for b in jitserve.BATCHES
        if b != 128
    ),
    "slai": tuple(
        rival(f"slai factor={f:g}", "another margin of iterations", partial(slai.Slai, factor=f))
        for f in slai.FACTORS
        if f != 2.0
    ),
}

# QoServe's own baselines and ablation, by its token line: Sarathi with 256 tokens an iteration.
_qoserve = partial(qoserve.QoServe, line="arrival")
_fixed = partial(_qoserve, alpha=0.0, relegates=False)
LADDER: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        rival(
            "fcfs, 256 tokens", "Sarathi, first come first served", partial(_fixed, chunk_tokens=256, by_arrival=True)
        ),
        rival("edf, 256 tokens", "Sarathi, earliest deadline first", partial(_fixed, chunk_tokens=256)),
        rival("edf + chunks", "with dynamic chunks", _fixed),
        rival("edf + chunks + relegation", "with eager relegation too", partial(_qoserve, alpha=0.0)),
        rival("qoserve line", "with the price of work too", _qoserve),
    )
}

_ALL = RIVALS | LADDER | {recipe.name: recipe for swept in SWEEPS.values() for recipe in swept}


def system(name: str) -> Recipe:
    """Return a rival, one of its settings, or a recipe of Headway."""
    return _ALL[name] if name in _ALL else find(DEFAULT if name == LINE else name)


def settings(name: str, *, one_tpot: bool) -> list[str]:
    """Return a rival and its settings; one_tpot: `edf_sim` is only for grounds with one tpot."""
    swept = [recipe.name for recipe in SWEEPS.get(name, ())]
    return [name, *(one for one in swept if one_tpot or not one.endswith("edf_sim"))]


def rival_of(name: str) -> str:
    """Return the rival of which a system is a setting."""
    return next((rival for rival, swept in SWEEPS.items() if name in {r.name for r in swept}), name)
