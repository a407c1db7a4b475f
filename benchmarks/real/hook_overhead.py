"""Cost of the scheduler hook per iteration, compared with stock vLLM's `schedule()` and `update_from_output()`.

vLLM's scheduler class is stepped without a model, alternately with and without Headway's hook, at a steady
batch of decoding requests, with and without a queue of waiting requests. The figures are median wall times of
the calls.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from headway.engines.vllm.kv_transfer import two_ended_pool
from headway.engines.vllm.oracle import SchedulerOracle, config, scheduler
from headway.policy.recipes.registry import find
from headway.types import Floats
from headway.whatif.output.results import Row

RUNNING, QUEUED, WAITING = (16, 64, 256), (16, 64), 1000
RECIPES = ("vllm", "edf", "slack", "headway", "bros", "ecoserve")
_BLOCK, _PROMPT, _STEP_S = 32, 64, 0.02


def hook_rows(quick: bool, seed: int) -> list[Row]:
    """Return the times of both calls in microseconds, and the hook's added time over stock vLLM's.

    hook.ratio covers `schedule()`, hook.iteration_ratio both calls. setting: requests running and waiting, half
    of them with a promise. Needs vLLM, but no GPU and no weights.
    """
    steps = 150 if quick else 1000
    rows = [row for running in RUNNING for row in cost(running, 0, RECIPES, steps, seed)]
    return rows + [row for running in QUEUED for row in cost(running, WAITING, RECIPES[:4], steps, seed)]


def cost(running: int, waiting: int, names: tuple[str, ...], steps: int, seed: int) -> list[Row]:
    """Return the rows of these recipes at one batch size."""
    clocks = {name: steady(running, name, steps, seed, waiting) for name in ("stock", *names)}
    times = {name: np.median(seen, axis=1) for name, seen in _measure(clocks, steps).items()}
    setting = f"{running} running" + (f", {waiting:,} waiting" if waiting else "")
    rows, stock = list[Row](), times["stock"]
    for name, ours in times.items():
        for call, seconds in zip(("schedule", "update"), ours, strict=True):
            rows.append(Row(f"hook.{call}_us", name, setting, seconds * 1e6, "us"))
        if name != "stock":
            rows.append(Row("hook.ratio", name, setting, (ours[0] - stock[0]) / stock[0], "x"))
            added = ours.sum() / stock.sum() - 1.0
            rows.append(Row("hook.iteration_ratio", name, setting, float(added), "x"))
    return rows


def steady(running: int, name: str, steps: int, seed: int, waiting: int = 0) -> SchedulerOracle:
    """Return a scheduler with `running` decoding requests that continue for at least `steps` more steps.

    Waiting requests arrived later, spread over the time that the steps take. Promises fall due one after
    another, too, from half of that time on.
    """
    from headway.engines.vllm.plugin.hook import HeadwayScheduler

    length = _PROMPT + steps + 64
    blocks = running * (length // _BLOCK + 2) + 2
    ends = name != "stock" and find(name).wants.two_ended
    setup = config(
        max_running=running,
        max_batched_tokens=8192,
        max_model_len=2048,
        block_size=_BLOCK,
        recipe=None if name == "stock" else name,
        pool=two_ended_pool(1.0) if ends else None,
    )
    clock = SchedulerOracle(scheduler(setup, blocks, _BLOCK, None if name == "stock" else HeadwayScheduler))
    rng, span = np.random.default_rng(seed), steps * _STEP_S if waiting else 0.0
    for i in range(running):
        clock.add(f"r{i}", _PROMPT, steps + 32, metadata=_metadata(i, rng.uniform(-1, 0) - span, 1.0 + span))
    for _ in range(24):  # computes prompts and warms up caches
        clock.step(_STEP_S)
    for i, arrival in enumerate(np.sort(rng.uniform(-span, 0, waiting))):
        clock.add(f"w{i}", _PROMPT, steps + 32, metadata=_metadata(i, arrival, 1.5 * span))
    for _ in range(8 if waiting else 0):  # more urgent requests preempt others
        clock.step(_STEP_S)
    return clock


def _metadata(i: int, arrival: float, ttft: float) -> dict[str, Any]:
    """Return the metadata of a request; every second request has a promise."""
    promise = {"headway_ttft": ttft, "headway_tpot": 0.1} if i % 2 else {}
    return {"headway_arrival": arrival, **promise}


def _measure(clocks: dict[str, SchedulerOracle], steps: int) -> dict[str, Floats]:
    """Step all clocks in turn; return the seconds of each call of `schedule` and `update_from_output`."""
    times = {name: np.zeros((2, steps)) for name in clocks}
    for step in range(steps):
        for name, clock in clocks.items():
            began = time.perf_counter()
            output = clock.schedule()
            times[name][0, step] = time.perf_counter() - began
            times[name][1, step] = clock.complete(output, _STEP_S)
    return times
