"""What do the papers compare with? Their baselines as recipes.

All of them plan first come, first served, and their queue is the engine's own (`pull=False`): what waits is
inside, so that the packer sees all of it. The simulated engine runs every one; real vLLM those that do not
swap.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.forecast.pace import OnlinePace
from headway.pack import classic as packers
from headway.pack.chunked import Chunked
from headway.pack.legacy import Orca, VllmV0
from headway.pack.mlfq import SkipJoin
from headway.pack.multires import MultiRes
from headway.pack.rotate import Alternate
from headway.pack.srtf import Shortest
from headway.plan import routing
from headway.plan.classic import Ordered, by_arrival
from headway.plan.fair import FairShare
from headway.plan.gate import Gate
from headway.plan.parrot import Parrot
from headway.plan.shepherd import Shepherd
from headway.ports import Packer, Recipe

_SARATHI_BUDGET = 512


def _baseline(
    name: str, about: str, packer: Callable[[int, int, OnlinePace], Packer], *, saves: bool = False
) -> Recipe:
    return Recipe(name, about, lambda: Ordered(by_arrival, displaces=False), packer, pull=False, saves=saves)


BASELINES = {
    recipe.name: recipe
    for recipe in (
        _baseline(
            "vllm-priority",
            "vLLM V1 with its own priority policy, which displaces nobody",
            lambda running, budget, pace: packers.StockPriority(running),
        ),
        _baseline(
            "vllm-v0",
            "vLLM as the papers knew it: prompts first, in iterations of their own; recompute on overflow",
            lambda running, budget, pace: VllmV0(running, budget),
        ),
        _baseline(
            "vllm-v0-swap",
            "the same, with swapping to the host on overflow",
            lambda running, budget, pace: VllmV0(running, budget, swap=True),
            saves=True,
        ),
        _baseline(
            "orca",
            "Orca: iteration-level first come, first served with memory reserved for the longest answer",
            lambda running, budget, pace: Orca(running, budget),
        ),
        _baseline(
            "fastserve",
            "FastServe: skip-join multi-level feedback queue with proactive swapping",
            SkipJoin,
            saves=True,
        ),
        _baseline(
            "srtf",
            "shortest remaining time first, by forecast length, preemptive",
            Shortest,
        ),
        _baseline(
            "sjf",
            "shortest job first, by forecast length, not preemptive",
            lambda running, budget, pace: Shortest(running, budget, pace, preempts=False),
        ),
        _baseline(
            "fastgen",
            "DeepSpeed-FastGen's Dynamic SplitFuse: every iteration filled to the token budget",
            lambda running, budget, pace: Chunked(running, budget),
        ),
        _baseline(
            "sarathi",
            "Sarathi-Serve: stall-free batches of answers and prompt chunks, 512 tokens an iteration",
            lambda running, budget, pace: Chunked(running, max(min(_SARATHI_BUDGET, budget), running)),
        ),
        _baseline(
            "multires",
            "EcoServe's MultiRes: requests whose demand is nearest to the free tokens and KV",
            lambda running, budget, pace: MultiRes(running, budget),
            saves=True,
        ),
        _baseline(
            "rr",
            "round robin between real-time and best-effort requests (BROS's baseline)",
            lambda running, budget, pace: Alternate(running, budget),
        ),
    )
}

# Baselines of the papers and of today's routers: how requests are spread over a fleet.
ROUTERS = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "round-robin",
            "each request to the next instance in turn, first come first served inside",
            routing.round_robin,
            lambda running, budget, pace: packers.Fcfs(running),
        ),
        Recipe(
            "least-loaded",
            "each request to the instance with the fewest, first come first served inside",
            routing.least_loaded,
            lambda running, budget, pace: packers.Fcfs(running),
        ),
        Recipe(
            "shepherd",
            "models assigned to instances by mean rates, fixed batches by deadline (as in QLM 8)",
            Shepherd,
            lambda running, budget, pace: packers.Ranked(packers.by_due, running, budget),
            swaps=True,
        ),
        Recipe(
            "parrot",
            "application runs first come, first served, each as a whole (Parrot)",
            Parrot,
            lambda running, budget, pace: packers.Fcfs(running),
        ),
        Recipe(
            "vtc",
            "equal service per tenant by the Virtual Token Counter",
            FairShare,
            lambda running, budget, pace: packers.Fcfs(running),
        ),
        Recipe(
            "llm-d-like",
            "bands by objective, EDF inside, a saturation gate, sheddable work refused behind it",
            Gate,
            lambda running, budget, pace: packers.Ranked(packers.by_priority, running, budget),
        ),
    )
}
