"""What do the papers compare with? Their baselines as recipes.

All of them plan first come, first served, and their queue is the engine's own (`pull=False`): what waits is
inside, so that the packer sees all of it. The simulated engine runs every one; real vLLM those that do not
swap.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.forecast.latency.online import OnlineLatency
from headway.pack import ranked as packers
from headway.pack.baselines.chunked import Chunked
from headway.pack.baselines.fastserve import FastServe
from headway.pack.baselines.multires import MultiRes
from headway.pack.baselines.round_robin import RoundRobin
from headway.pack.baselines.srtf import Srtf
from headway.pack.baselines.vllm_v0 import Orca, VllmV0
from headway.plan.baselines import load_balancing
from headway.plan.baselines.flow_control import FlowControl
from headway.plan.baselines.parrot import Parrot
from headway.plan.baselines.shepherd import Shepherd
from headway.plan.baselines.vtc import VirtualTokenCounter
from headway.plan.ordered import Ordered, by_arrival
from headway.ports import Packer
from headway.recipes.recipe import Recipe

_SARATHI_BUDGET = 512


def _baseline(
    name: str, about: str, packer: Callable[[int, int, OnlineLatency], Packer], *, saves: bool = False
) -> Recipe:
    return Recipe(name, about, lambda: Ordered(by_arrival, displaces=False), packer, pull=False, saves=saves)


BASELINES = {
    recipe.name: recipe
    for recipe in (
        _baseline(
            "vllm-priority",
            "vLLM V1 with its own priority policy, which displaces nobody",
            lambda running, budget, latency: packers.StockPriority(running),
        ),
        _baseline(
            "vllm-v0",
            "vLLM as the papers knew it: prompts first, in iterations of their own; recompute on overflow",
            lambda running, budget, latency: VllmV0(running, budget),
        ),
        _baseline(
            "vllm-v0-swap",
            "the same, with swapping to the host on overflow",
            lambda running, budget, latency: VllmV0(running, budget, swap=True),
            saves=True,
        ),
        _baseline(
            "orca",
            "Orca: iteration-level first come, first served with memory reserved for the longest answer",
            lambda running, budget, latency: Orca(running, budget),
        ),
        _baseline(
            "fastserve",
            "FastServe: skip-join multi-level feedback queue with proactive swapping",
            FastServe,
            saves=True,
        ),
        _baseline(
            "srtf",
            "shortest remaining time first, by forecast length, preemptive",
            Srtf,
        ),
        _baseline(
            "sjf",
            "shortest job first, by forecast length, not preemptive",
            lambda running, budget, latency: Srtf(running, budget, latency, preempts=False),
        ),
        _baseline(
            "fastgen",
            "DeepSpeed-FastGen's Dynamic SplitFuse: every iteration filled to the token budget",
            lambda running, budget, latency: Chunked(running, budget),
        ),
        _baseline(
            "sarathi",
            "Sarathi-Serve: stall-free batches of answers and prompt chunks, 512 tokens an iteration",
            lambda running, budget, latency: Chunked(running, max(min(_SARATHI_BUDGET, budget), running)),
        ),
        _baseline(
            "multires",
            "EcoServe's MultiRes: requests whose demand is nearest to the free tokens and KV",
            lambda running, budget, latency: MultiRes(running, budget),
            saves=True,
        ),
        _baseline(
            "rr",
            "round robin between real-time and best-effort requests (BROS's baseline)",
            lambda running, budget, latency: RoundRobin(running, budget),
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
            load_balancing.round_robin,
            lambda running, budget, latency: packers.Fcfs(running),
        ),
        Recipe(
            "least-loaded",
            "each request to the instance with the fewest, first come first served inside",
            load_balancing.least_loaded,
            lambda running, budget, latency: packers.Fcfs(running),
        ),
        Recipe(
            "shepherd",
            "models assigned to instances by mean rates, fixed batches by deadline (as in QLM 8)",
            Shepherd,
            lambda running, budget, latency: packers.Ranked(packers.by_due, running, budget),
            swaps=True,
        ),
        Recipe(
            "parrot",
            "application runs first come, first served, each as a whole (Parrot)",
            Parrot,
            lambda running, budget, latency: packers.Fcfs(running),
        ),
        Recipe(
            "vtc",
            "equal service per tenant by the Virtual Token Counter",
            VirtualTokenCounter,
            lambda running, budget, latency: packers.Fcfs(running),
        ),
        Recipe(
            "llm-d-like",
            "bands by objective, EDF inside, a saturation gate, sheddable work refused behind it",
            FlowControl,
            lambda running, budget, latency: packers.Ranked(packers.by_priority, running, budget),
        ),
    )
}
