"""The licence: the simulated engine takes, step by step, the decisions of vLLM's own scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.baselines import BASELINES
from headway.engines import clockwork
from headway.engines.clockwork import Clockwork
from headway.engines.simulated import SimulatedEngine
from headway.engines.vllm.hook import HeadwayScheduler
from headway.forecast.pace import OnlinePace
from headway.recipes import RECIPES, find
from headway.types import Jobs, Slo

pytestmark = pytest.mark.filterwarnings("default")
BLOCK, LONGEST = 16, 368
Promise = tuple[float | None, float | None, float | None]
Load = list[tuple[float, int, int, Promise, int]]
promises = st.sampled_from(
    [(None, None, None), (0.4, 0.1, None), (1.5, 0.05, None), (None, None, 6.0), (0.1, None, None)]
)
loads = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 60), promises, st.integers(0, 3)),
    min_size=1, max_size=24,
)  # fmt: skip


def oracle(setup: dict[str, Any], blocks: int, recipe: str) -> Clockwork:
    config = clockwork.config(**setup, recipe=recipe)
    return Clockwork(clockwork.scheduler(config, blocks, BLOCK, HeadwayScheduler))


def simulated(setup: dict[str, Any], blocks: int, recipe: str) -> tuple[SimulatedEngine, OnlinePace]:
    pace = OnlinePace()
    packer = find(recipe).packer(setup["max_running"], setup["max_batched_tokens"], pace)
    engine = SimulatedEngine(
        packer, blocks=blocks - 1, size=BLOCK, slots=setup["slots"], budget=setup["max_batched_tokens"],
        max_model_len=LONGEST,
    )  # fmt: skip
    return engine, pace


def facts(id: str, at: float, promise: Promise, output: int) -> dict[str, Any]:
    named = dict(zip(("ttft", "tpot", "e2e"), promise, strict=True))
    kept = {f"headway_{k}": v for k, v in named.items() if v is not None}
    return {"headway_id": id, "headway_arrival": at, "headway_left": float(output), **kept}


def evictions(jobs: Jobs, known: Jobs) -> dict[str, int]:
    """How often each request lost its KV; the hook forgets ended requests one step later."""
    return {id: int(jobs.evictions[row]) for id, row in jobs.row_of.items() if id in known}


def steps_of_both(load: Load, setup: dict[str, Any], blocks: int, recipe: str, seed: int) -> int:
    """Drive both hosts with the same arrivals and durations; compare every step. Return their number."""
    real, (lean, pace) = oracle(setup, blocks, recipe), simulated(setup, blocks, recipe)
    rng, todo = np.random.default_rng(seed), sorted(enumerate(load), key=lambda item: item[1][0])
    count = 0
    while todo or real.busy:
        while todo and todo[0][1][0] <= real.now:
            i, (at, prompt, output, promise, priority) = todo.pop(0)
            real.add(f"r{i}", prompt, output, priority=priority, facts=facts(f"r{i}", at, promise, output))
            lean.add(f"r{i}", prompt, output, arrival=at, slo=Slo(*promise), priority=priority)
        seconds, now = float(rng.uniform(0.01, 0.09)), real.now
        output = real.schedule()
        ran = lean.schedule(now)
        decided = dict(zip(lean.jobs.names(ran.rows), ran.tokens.tolist(), strict=True))
        assert list(decided.items()) == list(output.num_scheduled_tokens.items())
        assert real.scheduler._blocks.get_num_free_blocks() == lean.free
        assert evictions(real.scheduler.jobs, lean.jobs) == evictions(lean.jobs, lean.jobs)
        if ran.rows.size:
            pace.learn(lean.jobs.batch(ran.rows, ran.tokens), seconds)
        before = len(real.finished)
        real.complete(output, seconds)
        assert lean.complete(ran, real.now).ids == real.finished[before:]
        count += 1
        if not output.num_scheduled_tokens and todo:
            real.now = max(real.now, todo[0][1][0])
    assert not lean.busy
    assert len(real.finished) == len(load)
    return count


@pytest.mark.parametrize("recipe", [r.name for r in (RECIPES | BASELINES).values() if not r.saves])
@given(loads, st.integers(1, 8), st.sampled_from([64, 200, 512]), st.integers(24, 90), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_same_steps(recipe: str, load: Load, running: int, budget: int, blocks: int, seed: int) -> None:
    setup = {
        "max_running": running, "max_batched_tokens": budget, "max_model_len": LONGEST, "block_size": BLOCK,
        "slots": 2 * running,
    }  # fmt: skip
    assert steps_of_both(load, setup, blocks, recipe, seed) >= max(output for _, _, output, _, _ in load)
