"""Cost of the scheduler hook per iteration, beside stock vLLM's `schedule()`.

vLLM's own scheduler class is stepped without a model, with and without Headway's hook, alternating within one
run, at a steady batch of decoding requests. Figures are medians of the wall time of `schedule()`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from headway.bench.output.results import Row
from headway.engines.vllm.kv_transfer import two_ended_pool
from headway.engines.vllm.oracle import SchedulerOracle, config, scheduler
from headway.recipes.registry import find
from headway.types import Floats

RUNNING = (16, 64, 256)
RECIPES = ("vllm", "edf", "slack", "headway", "bros", "ecoserve")
_BLOCK, _PROMPT = 32, 64


def hook_rows(quick: bool, seed: int) -> list[Row]:
    """Return hook.ratio (hook's own time over stock's schedule()) and both times in microseconds.

    setting = requests running; half of Headway's have a promise. Needs vLLM, no GPU, no weights.
    """
    return [row for running in RUNNING for row in _rows(running, 150 if quick else 1000, seed)]


def _rows(running: int, steps: int, seed: int) -> list[Row]:
    clocks = {name: steady(running, name, steps, seed) for name in ("stock", *RECIPES)}
    times = _measure(clocks, steps)
    stock = float(np.median(times["stock"]))
    rows = [Row("hook.schedule_us", "stock", f"{running} running", stock * 1e6, "us")]
    for name in RECIPES:
        ours = float(np.median(times[name]))
        rows.append(Row("hook.schedule_us", name, f"{running} running", ours * 1e6, "us"))
        rows.append(Row("hook.ratio", name, f"{running} running", (ours - stock) / stock, "x"))
    return rows


def steady(running: int, name: str, steps: int, seed: int) -> SchedulerOracle:
    """Return a scheduler with `running` requests decoding, which go on for at least `steps` more."""
    from headway.engines.vllm.plugin.hook import HeadwayScheduler

    length = _PROMPT + steps + 64
    blocks = running * (length // _BLOCK + 2) + 2
    ends = name != "stock" and find(name).wants.two_ended
    setup = config(
        max_running=running, max_batched_tokens=8192, max_model_len=2048, block_size=_BLOCK,
        recipe=None if name == "stock" else name, pool=two_ended_pool(1.0) if ends else None,
    )  # fmt: skip
    clock = SchedulerOracle(scheduler(setup, blocks, _BLOCK, None if name == "stock" else HeadwayScheduler))
    rng = np.random.default_rng(seed)
    for i in range(running):
        metadata: dict[str, Any] = {"headway_id": str(i), "headway_arrival": float(rng.uniform(-1, 0))}
        if i % 2:
            metadata |= {"headway_ttft": 1.0, "headway_tpot": 0.1}
        clock.add(f"r{i}", _PROMPT, steps + 32, metadata=metadata)
    for _ in range(24):  # prompts are computed, caches are warm
        clock.step(0.02)
    return clock


def _measure(clocks: dict[str, SchedulerOracle], steps: int) -> dict[str, Floats]:
    """Step all clocks in turn; return seconds of each schedule() call per name."""
    times = {name: np.zeros(steps) for name in clocks}
    for step in range(steps):
        for name, clock in clocks.items():
            began = time.perf_counter()
            output = clock.schedule()
            times[name][step] = time.perf_counter() - began
            clock.complete(output, 0.02)
    return times
