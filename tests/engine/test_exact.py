"""Whatever the packer does to a request, its tokens are those it makes alone (greedy, float32)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.memory.ledger import Ledger
from headway.pack.room import arrange
from headway.recipes import find
from headway.types import Jobs, Step
from tests.engine.conftest import BLOCKS, Engine, prompts

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
TOKENS = [5, 24, 40, 61, 17, 33, 48, 9, 30, 55, 28, 12]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    """Each request's tokens when it has the engine to itself."""
    engine.scheduler.packer = find("vllm").packer(8, 512, engine.scheduler.pace)
    out = []
    for prompt, tokens in zip(prompts(len(TOKENS)), TOKENS, strict=True):
        engine.add("alone", prompt, tokens)
        out.append(engine.run()["alone"])
    return out


class Chaos:
    """Random order, pauses, evictions, swaps, batch limits, budgets and chunk sizes: the worst packer."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pack(self, jobs: Jobs, ledger: Ledger, now: float) -> Step:
        rng, rows = self.rng, self.rng.permutation(jobs.rows())
        step = arrange(jobs, rows, ledger, int(rng.integers(1, 9)), int(rng.integers(16, 256)))
        running = step.order[jobs.running[step.order]]
        struck = running[rng.random(running.size) < 0.04]
        keep, saved = ~np.isin(step.order, struck), rng.random(struck.size) < 0.5
        assert step.tokens is not None
        evict = np.concatenate([step.evict, struck[~saved]])
        return replace(
            step, order=step.order[keep], tokens=step.tokens[keep], evict=evict, save=struck[saved]
        )


def run_all(engine: Engine) -> dict[str, list[int]]:
    for i, (prompt, tokens) in enumerate(zip(prompts(len(TOKENS)), TOKENS, strict=True)):
        engine.add(f"r{i}", prompt, tokens, ttft=0.2 * i, tpot=0.01)
    return engine.run()


@pytest.mark.parametrize("seed", range(3))
def test_chaos_changes_no_token(engine: Engine, alone: list[list[int]], seed: int) -> None:
    before = dict(engine.scheduler.counters)
    engine.scheduler.packer = Chaos(seed)
    done = run_all(engine)
    after = engine.scheduler.counters
    assert [done[f"r{i}"] for i in range(len(TOKENS))] == alone
    assert after["evictions"] > before["evictions"]
    assert after["pauses"] > before["pauses"]
    assert after["saves"] > before["saves"]
    assert not engine.scheduler.connector.saved
    assert engine.scheduler._blocks.get_num_free_blocks() == BLOCKS - 1
    assert not len(engine.scheduler.requests)


@pytest.mark.parametrize("recipe", ["vllm", "priority", "edf", "slack"])
def test_recipes_change_no_token(engine: Engine, alone: list[list[int]], recipe: str) -> None:
    engine.scheduler.packer = find(recipe).packer(4, 128, engine.scheduler.pace)
    done = run_all(engine)
    assert [done[f"r{i}"] for i in range(len(TOKENS))] == alone
    assert engine.scheduler._blocks.get_num_free_blocks() == BLOCKS - 1
