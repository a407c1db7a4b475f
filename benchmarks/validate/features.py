"""Conformance with vLLM's features on: recipe `vllm` takes stock's own steps, whatever its requests need.

Asynchronous scheduling, priorities, drafts, adapters, KV from elsewhere, grammars, streaming sessions,
aborts, pauses: none of them is modelled by the simulated engine, so here stock runs beside the hook
(`featured.py`), with prefix caching, too, which is modelled (`prefixes.py`), but not beside these.
`tests/engine/test_stock_features.py` lets every other recipe answer the same workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.validate import slow_loads
from benchmarks.validate.conformance import StepTally
from benchmarks.validate.featured import Driver, FeatureAsk, make

_SLOS: tuple[dict[str, float], ...] = ({}, {"ttft": 0.3, "tpot": 0.1}, {"ttft": 2.0}, {"e2e": 6.0})
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True, slots=True)
class FeatureMix:
    """Options of an engine (`EngineArgs`), and the features that its requests use."""

    options: Mapping[str, Any] = field(default_factory=dict)
    uses: frozenset[str] = frozenset()


MIXES = {
    "prefix caching": FeatureMix({"enable_prefix_caching": True}, frozenset({"shared"})),
    "asynchronous": FeatureMix({"async_scheduling": True}),
    "priorities": FeatureMix({"policy": "priority"}),
    "drafts": FeatureMix({"speculative_config": DRAFTS}),
    "adapters": FeatureMix({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, frozenset({"adapter"})),
    "KV from elsewhere": FeatureMix({"pool": slow_loads.CONFIG}, frozenset({"load"})),
    "images": FeatureMix({"encoder": 128}, frozenset({"image"})),
    "whole images": FeatureMix({"encoder": 128, "disable_chunked_mm_input": True}, frozenset({"image"})),
    "sessions and grammars": FeatureMix({}, frozenset({"turns", "grammar"})),
    "together": FeatureMix(
        {
            "enable_prefix_caching": True,
            "policy": "priority",
            "pool": slow_loads.CONFIG,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 8,
            "speculative_config": DRAFTS,
            "long_prefill_token_threshold": 100,
        },
        # No sessions: with drafts stock itself fails on some of them (assert num_new_tokens > 0).
        frozenset({"shared", "adapter", "load", "grammar"}),
    ),
}


@dataclass(frozen=True, slots=True)
class FeatureWorkload:
    """A workload: requests, and the options of their engine."""

    asks: list[FeatureAsk]
    options: dict[str, Any]

    def run(self, recipe: str | None, **more: Any) -> Driver:
        """Let a recipe, or stock (None), answer the requests. Raise AssertionError if a request is lost."""
        depth = 2 if self.options.get("async_scheduling") else 1
        driver = Driver(make(recipe, **self.options, **more), self.asks, depth)
        driver.run()
        return driver


def draw(mix: FeatureMix, rng: np.random.Generator) -> FeatureWorkload:
    """Return a random workload of a mix; some of its clients leave before their answer is complete."""
    count, running = int(rng.integers(6, 20)), int(rng.choice((2, 4, 8)))
    steps = np.cumsum(rng.integers(0, 4, count)).tolist()
    asks = [_ask(f"r{i}", step, mix.uses, rng) for i, step in enumerate(steps)]
    options = {
        "max_running": running,
        "slots": running,
        "blocks": int(rng.integers(60, 160)),
        "max_batched_tokens": int(rng.choice((64, 200, 512))),
    }
    return FeatureWorkload(asks, options | dict(mix.options))


def _ask(id: str, step: int, uses: frozenset[str], rng: np.random.Generator) -> FeatureAsk:
    def maybe(feature: str, value: Any, share: float = 0.5) -> Any:
        return value if feature in uses and rng.random() < share else type(value)()

    prompt, output = int(rng.integers(1, 200)), int(rng.integers(1, 40))
    place = int(rng.integers(0, prompt))
    return FeatureAsk(
        id,
        step,
        prompt,
        output,
        int(rng.integers(3)),
        adapter=maybe("adapter", int(rng.integers(1, 4)), 0.7),
        load=maybe("load", 16 * int(rng.integers(1, 8))),
        grammar=maybe("grammar", int(rng.integers(1, 12))),
        turns=maybe("turns", tuple(rng.integers(1, 60, int(rng.integers(1, 3))).tolist())),
        abort=step + int(rng.integers(1, 30)) if rng.random() < 0.1 else None,
        image=maybe("image", (place, int(rng.integers(1, min(60, prompt - place) + 1)))),
        fails=maybe("load", True, 0.2),
        shared=maybe("shared", 16 * int(rng.integers(1, 6)), 0.7),
        slo=_SLOS[rng.integers(len(_SLOS))],
    )


def compare(workload: FeatureWorkload) -> StepTally:
    """Run stock and the hook with recipe `vllm`; steps after the first difference are not identical."""
    stock, ours = workload.run(None).steps, workload.run("vllm").steps
    at = next((i for i, pair in enumerate(zip(stock, ours, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(stock), len(ours)) if at is None else at
    difference = None
    if same < max(len(stock), len(ours)):
        difference = f"at step {same}: vLLM runs {stock[same:][:1]}, the hook {ours[same:][:1]}"
    return StepTally(1, len(stock), same if difference else len(stock), difference)


def run(
    rng: np.random.Generator, *, steps: int, progress: Callable[[int], None] | None = None
) -> dict[tuple[str, str], StepTally]:
    """Compare at least this number of steps of every mix; keys and progress are as in `conformance.run`."""
    found = {}
    for name, mix in MIXES.items():
        tally = found["vllm", f"stock, {name}"] = StepTally()
        while tally.steps < steps:
            one = compare(draw(mix, rng))
            tally.add(one)
            if progress is not None:
                progress(one.steps)
    return found
