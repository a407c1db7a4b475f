"""With the recipe `vllm` the hook changes nothing: vLLM's own scheduler takes the same steps without it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.vllm import oracle
from headway.engines.vllm.plugin.hook import HeadwayScheduler

pytestmark = pytest.mark.filterwarnings("default")
BLOCK = 16
requests = st.lists(st.tuples(st.floats(0, 4), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=24)


@given(requests, st.integers(1, 8), st.sampled_from([64, 200, 512]), st.integers(24, 90))
@settings(max_examples=66)
def test_same_steps_as_stock(load: list[tuple[float, int, int]], running: int, budget: int, blocks: int) -> None:
    arrivals = [(at, f"r{i}", prompt, output) for i, (at, prompt, output) in enumerate(load)]
    setup = {
        "max_running": running,
        "max_batched_tokens": max(budget, running),
        "max_model_len": 368,
        "block_size": BLOCK,
    }
    stock = oracle.SchedulerOracle(oracle.scheduler(oracle.config(**setup), blocks, BLOCK))
    ours = oracle.SchedulerOracle(
        oracle.scheduler(oracle.config(**setup, recipe="vllm"), blocks, BLOCK, HeadwayScheduler)
    )
    expected = [list(step.items()) for step in oracle.run(stock, arrivals)]
    assert [list(step.items()) for step in oracle.run(ours, arrivals)] == expected
    assert ours.finished == stock.finished
    assert len(ours.finished) == len(load)
