"""Blocks and slots are conserved in every iteration of the simulated engine, whatever the packer does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.simulated.engine import SimulatedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.recipes.registry import find
from headway.types import Slo

SIZE, LONGEST = 16, 368
loads = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 60), st.sampled_from([None, 0.3, 2.0])), min_size=1, max_size=30
)


def check(engine: SimulatedEngine) -> None:
    jobs = engine.jobs
    rows = jobs.rows()
    running = rows[jobs.running[rows]]
    assert engine.free + jobs.blocks[rows].sum() == engine.blocks
    assert engine.free >= 0
    assert engine.usage["held_slots"] == running.size <= engine.limits.slots
    assert not jobs.blocks[rows[~jobs.running[rows]]].any(), "who waits holds nothing"
    assert (jobs.blocks[running] * SIZE >= jobs.computed[running]).all()


@pytest.mark.parametrize("recipe", ["headway", "vllm", "priority", "edf", "slack"])
@given(loads, st.integers(1, 8), st.integers(23, 80), st.sampled_from([16, 100, 512]), st.integers(1, 9))
@settings(max_examples=16)
def test_blocks_and_slots_are_conserved(
    recipe: str, load: list[tuple[int, int, float | None]], running: int, blocks: int, budget: int, every: int
) -> None:
    packer = find(recipe).packer(EngineSpec(running, budget, SIZE))
    engine = SimulatedEngine(packer, blocks=blocks, size=SIZE, slots=2 * running, budget=budget, max_model_len=LONGEST)
    todo, now, output_tokens = list(enumerate(load)), 0.0, 0
    for step in range(100_000):
        if todo and step % every == 0:
            i, (prompt, output, ttft) = todo.pop()
            engine.add(f"r{i}", prompt, output, arrival=now, slo=Slo(ttft=ttft), priority=i % 3)
        if not (todo or engine.busy):
            break
        ran = engine.schedule(now)
        check(engine)
        assert ran.rows.size or not engine.busy, "work waits and nothing is computed"
        assert ran.tokens.sum() <= budget
        assert np.unique(ran.rows).size == ran.rows.size
        now += 0.05
        output_tokens += len(engine.complete(ran, now).ids)
        check(engine)
    assert output_tokens == len(load)
    assert engine.free == blocks
