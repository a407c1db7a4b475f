"""The papers' baselines as recipes.

Those of `BASELINES` plan first come, first served, and queue inside the engine (`pull=False`), so that the
packer sees all that waits. The simulated engine runs every one; vLLM needs a host pool for those that swap.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.core.ranks import ARRIVAL, DUE
from headway.policy.pack import ranked as packers
from headway.policy.pack.baselines.arrival_order import Chunked, MultiRes, Orca, RoundRobin, Tgi, VllmV0
from headway.policy.pack.baselines.fastserve import FastServe
from headway.policy.pack.baselines.srtf import Srtf
from headway.policy.plan.baselines import load_balancing
from headway.policy.plan.baselines.flow_control import FlowControl
from headway.policy.plan.baselines.model_swap import ModelSwap
from headway.policy.plan.baselines.parrot import Parrot
from headway.policy.plan.baselines.shepherd import Shepherd
from headway.policy.plan.baselines.vtc import VirtualTokenCounter
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.recipe import Recipe
from headway.ports import Packer

_SARATHI_BUDGET = 512


def _baseline(name: str, about: str, packer: Callable[[EngineSpec], Packer]) -> Recipe:
    return Recipe(name, about, lambda: Ordered(ARRIVAL, displaces=False, pull=False), packer)


BASELINES = {
    recipe.name: recipe
    for recipe in (
        _baseline(
            "vllm-priority",
            "vLLM V1 with its own priority policy, which displaces no running request",
            lambda spec: packers.StockPriority(spec.max_running),
        ),
        _baseline(
            "vllm-v0",
            "vLLM as the papers knew it: prompts first, in iterations of their own; recompute on overflow",
            lambda spec: VllmV0(spec.max_running, spec.token_budget),
        ),
        _baseline(
            "vllm-v0-swap",
            "the same, with swapping to the host on overflow",
            lambda spec: VllmV0(spec.max_running, spec.token_budget, swap=True),
        ),
        _baseline(
            "orca",
            "Orca: iteration-level first come, first served with memory reserved for the longest answer",
            lambda spec: Orca(spec.max_running, spec.token_budget, spec.max_model_len),
        ),
        _baseline(
            "fastserve",
            "FastServe: skip-join multi-level feedback queue with proactive swapping",
            lambda spec: FastServe(spec.max_running, spec.token_budget, spec.latency),
        ),
        _baseline(
            "srtf",
            "shortest remaining time first, by forecast length, preemptive",
            lambda spec: Srtf(spec.max_running, spec.token_budget, spec.latency),
        ),
        _baseline(
            "sjf",
            "shortest job first, by forecast length, not preemptive",
            lambda spec: Srtf(spec.max_running, spec.token_budget, spec.latency, preempts=False),
        ),
        _baseline(
            "fastgen",
            "DeepSpeed-FastGen's Dynamic SplitFuse: every iteration filled to the token budget",
            lambda spec: Chunked(spec.max_running, spec.token_budget),
        ),
        _baseline(
            "sarathi",
            "Sarathi-Serve: stall-free batches of answers and prompt chunks, 512 tokens an iteration",
            lambda spec: Chunked(spec.max_running, max(min(_SARATHI_BUDGET, spec.token_budget), spec.max_running)),
        ),
        _baseline(
            "multires",
            "EcoServe's MultiRes: requests whose demand is nearest to the free tokens and KV",
            lambda spec: MultiRes(spec.max_running, spec.token_budget),
        ),
        _baseline(
            "rr",
            "round robin between real-time and best-effort requests (BROS's baseline)",
            lambda spec: RoundRobin(spec.max_running, spec.token_budget),
        ),
        _baseline(
            "tgi",
            "Text Generation Inference: prompts in iterations of their own, KV for the whole answer",
            lambda spec: Tgi(spec.max_running, spec.token_budget),
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
            lambda spec: packers.Fcfs(spec.max_running),
        ),
        Recipe(
            "least-loaded",
            "each request to the instance with the fewest, first come first served inside",
            load_balancing.least_loaded,
            lambda spec: packers.Fcfs(spec.max_running),
        ),
        Recipe(
            "random",
            "each request to an instance drawn at random, first come first served inside",
            lambda: load_balancing.at_random(seed=0),
            lambda spec: packers.Fcfs(spec.max_running),
        ),
        Recipe(
            "vllm-model-swap",
            "first come, first served over all models, swapped as requests ask for them (as in QLM 8)",
            lambda: ModelSwap(ARRIVAL),
            lambda spec: packers.Fcfs(spec.max_running),
        ),
        Recipe(
            "edf-model-swap",
            "earliest deadline first over all models, swapped as requests ask for them (as in QLM 2.4, 8)",
            lambda: ModelSwap(DUE),
            lambda spec: packers.Ranked(packers.by_due, spec.max_running, spec.token_budget),
        ),
        Recipe(
            "shepherd",
            "models assigned to instances by mean rates, fixed batches by deadline (as in QLM 8)",
            Shepherd,
            lambda spec: packers.Ranked(packers.by_due, spec.max_running, spec.token_budget),
        ),
        Recipe(
            "parrot",
            "application runs first come, first served, each as a whole (Parrot)",
            Parrot,
            lambda spec: packers.Fcfs(spec.max_running),
        ),
        Recipe(
            "vtc",
            "equal service per tenant by the Virtual Token Counter",
            VirtualTokenCounter,
            lambda spec: packers.Fcfs(spec.max_running),
        ),
        Recipe(
            "llm-d-like",
            "bands by objective, EDF inside, a saturation gate, sheddable work refused behind it",
            FlowControl,
            lambda spec: packers.Ranked(packers.by_priority, spec.max_running, spec.token_budget),
        ),
    )
}
