"""The general recipes: vLLM's own order, priorities, earliest deadline, least slack (the default)."""

from __future__ import annotations

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
            lambda: ordered.Ordered(ordered.by_arrival, displaces=False),
            lambda spec: Fcfs(spec.max_running),
        ),
        Recipe(
            "priority",
            "vLLM's priorities, which also displace running work when the batch is full",
            lambda: ordered.Ordered(ordered.by_priority),
            lambda spec: Ranked(by_priority, spec.max_running, spec.token_budget),
        ),
        Recipe(
            "edf",
            "earliest deadline first, in the queue and in the engine",
            lambda: ordered.Ordered(ordered.by_due),
            lambda spec: Ranked(by_due, spec.max_running, spec.token_budget),
        ),
        Recipe(
            "slack",
            "least slack first, prompt chunks sized so that running answers keep their promises (BROS 4.2)",
            lambda: ordered.Ordered(ordered.by_attainable_deadline),
            lambda spec: Slack(spec.max_running, spec.token_budget, spec.latency),
        ),
    )
}
