"""A fleet whose iterations are compiled has the outcome of the readable loop, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from headway.config.tables import Scale
from headway.policy.recipes.registry import find
from headway.prefix import Prefix
from headway.simulate.compiled_fleet import CompiledFleet
from headway.simulate.fleet import build, spec
from headway.simulate.instance import InstanceSpec, SimulatedInstance
from headway.simulate.outcome import Failure
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Slo

MODEL = "opt-13b"
SMALL = "opt-13b-a100:3,max_running=16,kv_tokens=6000"  # a few requests per second are an overload


def fleet(*texts: str, **fields: Any) -> list[InstanceSpec]:
    return [replace(one, **fields) for one in build([spec(text) for text in texts])]


def traffic(
    rate: float, seconds: float = 20.0, seed: int = 0, models: tuple[str, ...] = (MODEL,), **chat: Any
) -> Workload:
    rng = np.random.default_rng(seed)
    classes = [
        one
        for model in models
        for one in (
            TrafficClass("chat", 0.6, Slo(ttft=0.4, tpot=0.2), 0, "sharegpt", model, **chat),
            TrafficClass("report", 0.1, Slo(e2e=20.0), 3, "alpaca", model),
            TrafficClass("batch", 0.3, Slo(), 10, "bros-best-effort", model),
        )
    ]
    workload = make(classes, poisson(rate, seconds, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= 2048))


def talks(rate: float, **chat: Any) -> Workload:
    """Return traffic in which most requests begin as one of four others do, with half of their prompts."""
    workload = traffic(rate, **chat)
    pieces = tuple(Prefix(f"{i % 4}", int(tokens) // 2) if i % 3 else None for i, tokens in enumerate(workload.prompt))
    return replace(workload, prefix=np.arange(len(workload)), prefixes=pieces)


def in_runs(workload: Workload) -> Workload:
    """Return the same requests, most of which belong to one of a few runs of an application."""
    runs = np.arange(len(workload)) * 7 % 23
    named = {"runs": ("", *(f"run {i}" for i in range(1, 23))), "apps": ("", "agent"), "units": ("call",)}
    return replace(workload, run=runs, app=np.minimum(runs, 1), **named)


def same(recipe: str, instances: list[InstanceSpec], workload: Workload, **options: Any) -> None:
    """Check that both ways agree in all that they tell."""
    assert CompiledFleet.of([SimulatedInstance(one, find(recipe)) for one in instances]) is not None
    ways = [Simulation(find(recipe), instances, workload, fast=fast, **options).run() for fast in (True, False)]
    for name in (one.name for one in fields(ways[0])):
        np.testing.assert_array_equal(getattr(ways[0], name), getattr(ways[1], name), err_msg=name)
    assert ways[0].iterations > len(workload)


@pytest.mark.parametrize("recipe", ["headway", "vllm", "slack", "priority", "edf", "round-robin", "least-loaded"])
@pytest.mark.parametrize("rate", [3.0, 12.0])
def test_same_outcome(recipe: str, rate: float) -> None:
    same(recipe, fleet(SMALL), traffic(rate))


@pytest.mark.parametrize("recipe", ["headway", "vllm", "slack"])
@pytest.mark.parametrize("kind", [SMALL, f"{SMALL},host_kv_gib=4", "opt-13b-a100:3"])
def test_with_prefix_caches(recipe: str, kind: str) -> None:
    same(recipe, fleet(f"{kind},prefix_caching=true"), talks(10.0))


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "one engine with a cache": lambda: {
        "instances": fleet("opt-13b-a100,prefix_caching=true,kv_tokens=9000"), "workload": talks(4.0)
    },
    "some with a cache": lambda: {
        "instances": fleet(SMALL, "opt-13b-a100,prefix_caching=true"), "workload": talks(12.0)
    },
    "drops": lambda: {"workload": traffic(12.0, drop=True)},
    "drops with caches": lambda: {
        "instances": fleet(f"{SMALL},prefix_caching=true"), "workload": talks(12.0, drop=True)
    },
    "a promised share": lambda: {"workload": replace(load := traffic(12.0), share=np.where(load.tier == 0, 0.9, 1.0))},
    "tenants": lambda: {"workload": traffic(8.0, tenants=("a", "b"))},
    "failures": lambda: {"failures": (Failure("e1", 5.0, 4.0), Failure("e2", 8.0)), "workload": traffic(6.0)},
    "failures with caches": lambda: {
        "failures": (Failure("e0", 5.0, 4.0),),
        "instances": fleet(f"{SMALL},prefix_caching=true"),
        "workload": talks(6.0),
    },
    "overheads": lambda: {
        "instances": fleet(SMALL, request_overhead=0.013, token_overhead=0.007), "workload": traffic(8.0)
    },
    "planning takes time": lambda: {"plan_seconds": lambda queued: 0.03, "workload": traffic(8.0)},
    "an end": lambda: {"until": 11.0},
    "runs that end": lambda: {
        "instances": fleet(f"{SMALL},prefix_caching=true"), "workload": in_runs(talks(12.0, drop=True)), "ends": True
    },
    "engines that come and go": lambda: {
        "instances": fleet("opt-13b-a100:2,max_running=16,kv_tokens=6000,start_s=3,mtbf_s=9"),
        "scale": {MODEL: Scale(max=5, start_s=3.0)},
    },
    "overflow": lambda: {
        "instances": fleet(SMALL, "opt-13b-a100,overflow_classes=chat,price_prompt=1,price_answer=1,hourly_budget=1"),
        "workload": traffic(12.0),
    },
    "model swaps": lambda: {
        "instances": fleet("llama-2-7b-a100:2,loads=code@llama-2-7b-a100"),
        "workload": traffic(6.0, models=("llama-2-7b-hf", "code")),
    },
    "swaps to a model with other slots": lambda: {
        "instances": [
            replace(one, slots=16, instance=replace(one.instance, max_running=16))
            for one in fleet("llama-2-7b-a100:2,loads=code@llama-2-7b-a100")
        ],
        "workload": traffic(6.0, models=("llama-2-7b-hf", "code")),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_happens_outside_engines(name: str) -> None:
    given: dict[str, Any] = {"instances": fleet(SMALL), "workload": traffic(12.0)}
    same("headway", **given | OTHERS[name]())


def test_an_engine_that_is_interrupted_is_not_compiled() -> None:
    instances = [SimulatedInstance(one, find("headway")) for one in fleet(SMALL, interruption=0.001)]
    assert CompiledFleet.of(instances) is None
