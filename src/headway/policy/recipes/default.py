"""The general recipes: the default one, vLLM's own order, priorities, earliest deadline, least slack."""

from __future__ import annotations

from headway.policy.apps.demand import Knowledge
from headway.policy.core import ranks
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.promises.packer import Promises
from headway.policy.pack.ranked import Fcfs, Rank, Ranked, Slack, by_due, by_priority
from headway.policy.plan import ordered
from headway.policy.plan.by_fleet import ByFleet
from headway.policy.plan.group_placement import QlmOptions
from headway.policy.plan.qlm import Qlm
from headway.policy.plan.run_order import RunOrder
from headway.policy.recipes.recipe import Recipe

_AHEAD = 1024  # as many as the packer should choose among in an iteration


def _swapping() -> Qlm:
    """Return the planner of a fleet that swaps models; what runs inside an engine is the packer's choice."""
    return Qlm(QlmOptions(ranks=False))


def _ranked(rank: Rank, spec: EngineSpec) -> Ranked:
    return Ranked(rank, spec.max_running, spec.token_budget, spec.max_gap_s)


def headway(knowledge: Knowledge | None = None) -> Recipe:
    """Return the default recipe; knowledge: demand graphs of applications to begin with."""
    return Recipe(
        "headway",
        "as many promises as can be kept, then all other requests, earliest due first; the default",
        lambda: ByFleet(RunOrder(ranks.ATTAINABLE, ahead=_AHEAD, knowledge=knowledge), _swapping),
        Promises,
    )


DEFAULT = {
    recipe.name: recipe
    for recipe in (
        headway(),
        Recipe(
            "vllm",
            "vLLM's own order: first come, first served",
            lambda: ordered.Ordered(ranks.ARRIVAL, displaces=False),
            lambda spec: Fcfs(spec.max_running),
        ),
        Recipe(
            "priority",
            "vLLM's priorities, which also displace running work when the batch is full",
            lambda: ordered.Ordered(ranks.PRIORITY),
            lambda spec: _ranked(by_priority, spec),
        ),
        Recipe(
            "edf",
            "earliest deadline first, in the queue and in the engine",
            lambda: ordered.Ordered(ranks.DUE),
            lambda spec: _ranked(by_due, spec),
        ),
        Recipe(
            "slack",
            "least slack first, prompt chunks sized so that running answers keep their promises (BROS 4.2)",
            lambda: ordered.Ordered(ranks.ATTAINABLE),
            lambda spec: Slack(spec.max_running, spec.token_budget, spec.latency, max_gap=spec.max_gap_s),
        ),
    )
}
