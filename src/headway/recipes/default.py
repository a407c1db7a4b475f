"""The general recipes: vLLM's own order, priorities, earliest deadline, least slack (the default)."""

from __future__ import annotations

from headway.core import ranks
from headway.pack.ranked import Fcfs, Ranked, by_due, by_priority
from headway.pack.slack import Slack
from headway.plan import ordered
from headway.recipes.recipe import Recipe

DEFAULT = {
    recipe.name: recipe
    for recipe in (
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
            lambda spec: Ranked(by_priority, spec.max_running, spec.token_budget, spec.row_chunk),
        ),
        Recipe(
            "edf",
            "earliest deadline first, in the queue and in the engine",
            lambda: ordered.Ordered(ranks.DUE),
            lambda spec: Ranked(by_due, spec.max_running, spec.token_budget, spec.row_chunk),
        ),
        Recipe(
            "slack",
            "least slack first, prompt chunks sized so that running answers keep their promises (BROS 4.2)",
            lambda: ordered.Ordered(ranks.ATTAINABLE),
            lambda spec: Slack(spec.max_running, spec.token_budget, spec.latency, row_chunk=spec.row_chunk),
        ),
    )
}
