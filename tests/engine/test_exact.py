"""Whatever the packer does to a request, its tokens are those it makes alone (greedy, float32)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.recipes import TEXT
from headway.engines.vllm.plugin.setup import kv_policy_of
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate
from headway.policy.pack.ecoserve.packer import EcoServe
from headway.policy.pack.ecoserve.step_buffer import Options
from headway.policy.recipes.registry import find
from headway.ports import Packer
from headway.types import Jobs, Step
from tests.engine.conftest import BLOCKS, Engine, prompts

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
TOKENS = [5, 12, 20, 31, 9, 17, 24, 6, 15, 28, 14, 8]


def each_alone(engine: Engine) -> list[list[int]]:
    """Return each request's tokens when it has the engine to itself."""
    engine.scheduler.packer = find("vllm").packer(replace(engine.scheduler.spec, max_running=8))
    out = []
    for prompt, tokens in zip(prompts(len(TOKENS)), TOKENS, strict=True):
        engine.add("alone", prompt, tokens)
        out.append(engine.run()["alone"])
    return out


@pytest.fixture(scope="module", autouse=True)
def same_packer(engine: Engine) -> Iterator[None]:
    """Give the engine back as it was: other modules use it, too."""
    before = engine.scheduler.packer
    yield
    engine.scheduler.packer = before


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    return each_alone(engine)


class Chaos(Packer):
    """Random order, pauses, evictions, swaps, batch limits, budgets and chunk sizes: the worst packer."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        rng, rows = self.rng, self.rng.permutation(jobs.rows())
        step = allocate(jobs, rows, kv_budget, int(rng.integers(1, 9)), int(rng.integers(16, 256)))
        running = step.order[jobs.running[step.order]]
        struck = running[rng.random(running.size) < 0.04]
        keep, saved = ~np.isin(step.order, struck), rng.random(struck.size) < 0.5
        assert step.tokens is not None
        evict = np.concatenate([step.evict, struck[~saved]])
        return replace(step, order=step.order[keep], tokens=step.tokens[keep], evict=evict, save=struck[saved])


def add_all(engine: Engine) -> None:
    for i, (prompt, tokens) in enumerate(zip(prompts(len(TOKENS)), TOKENS, strict=True)):
        engine.add(f"r{i}", prompt, tokens, ttft=0.2 * i, tpot=0.01)


def run_all(engine: Engine) -> dict[str, list[int]]:
    add_all(engine)
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
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    assert not len(engine.scheduler.requests)


@pytest.mark.parametrize("recipe", ["headway", "vllm", "priority", "edf", "slack"])
def test_recipes_change_no_token(engine: Engine, alone: list[list[int]], recipe: str) -> None:
    engine.scheduler.packer = find(recipe).packer(replace(engine.scheduler.spec, max_running=4, token_budget=128))
    done = run_all(engine)
    assert [done[f"r{i}"] for i in range(len(TOKENS))] == alone
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_a_seed_gives_the_same_tokens_however_its_prompt_is_cut(engine: Engine) -> None:
    asked = list(zip(prompts(len(TOKENS)), TOKENS, range(len(TOKENS)), strict=True))
    engine.scheduler.packer = find("vllm").packer(replace(engine.scheduler.spec, max_running=8))
    whole = []
    for prompt, tokens, seed in asked:
        engine.add("alone", prompt, tokens, seed)
        whole.append(engine.run()["alone"])
    engine.scheduler.packer = Chaos(4)
    for prompt, tokens, seed in asked:
        engine.add(f"r{seed}", prompt, tokens, seed)
    done = engine.run()
    assert [done[f"r{seed}"] for _, _, seed in asked] == whole
    assert len({answer[0] for answer in whole}) > 1


def test_reranks_change_no_token(engine: Engine, alone: list[list[int]]) -> None:
    rng, before = np.random.default_rng(1), engine.counters()
    engine.scheduler.packer = find("slack").packer(replace(engine.scheduler.spec, max_running=3, token_budget=128))
    add_all(engine)
    done: dict[str, list[int]] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        values = {f"r{i}": float(rng.normal()) for i in rng.choice(len(TOKENS), 4)}
        assert "error" not in engine.scheduler.control({"op": "urgency", "values": values})
        done |= engine.step()
    assert [done[f"r{i}"] for i in range(len(TOKENS))] == alone
    assert engine.counters()["pauses"] > before["pauses"]


# ---- reservations and loans (EcoServe 3.2, 3.4)

LONG = [130, 24, 12, 90, 18, 100, 10, 30, 20, 110, 14, 26, 8, 16]
WRONG = [1.0, 0.5, 1.6, 1.0, 0.4, 0.7, 1.0, 0.3, 1.0, 1.4, 0.6, 0.5, 1.0, 2.0]  # predicted over true length
SMALL = 30  # blocks


@pytest.fixture
def small(engine: Engine) -> Iterator[Engine]:
    """The engine with most of its KV taken away; afterwards it is as it was."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    total = pool.num_gpu_blocks - 1
    kept = pool.get_new_blocks(total - SMALL)
    scheduler._total = SMALL
    yield engine
    assert pool.get_num_free_blocks() == SMALL
    pool.free_blocks(kept)
    scheduler._total = total


def test_the_default_recipe_swaps_and_changes_no_token(plain: list[list[int]], small: Engine) -> None:
    """Answers that were promised nothing give way to promised ones that come while they run."""
    before, done = small.counters(), dict[str, list[int]]()
    spec = replace(small.scheduler.spec, max_running=8, copy_seconds=1e-6)
    small.scheduler.packer = find("headway").packer(spec)
    asked = zip(prompts(len(LONG), 5), LONG, strict=True)
    for i, (prompt, tokens) in enumerate(asked):
        promised = {"ttft": 60.0, "tpot": 5.0} if i % 2 else {}
        small.add(f"r{i}", prompt[:150], tokens, **promised)
        for _ in range(6):
            done |= small.step()
    done |= small.run()
    assert [done[f"r{i}"] for i in range(len(LONG))] == plain
    assert small.counters()["saves"] > before["saves"]
    assert not small.scheduler.connector.saved


@pytest.fixture
def reserving(small: Engine) -> Iterator[Engine]:
    """The same with EcoServe inside."""
    scheduler = small.scheduler
    manager = scheduler.kv_cache_manager
    before = scheduler.recipe, scheduler.kv_policy, manager.allocate_slots, scheduler._counts
    # As where EcoServe is inside from the beginning: every allocation is watched.
    manager.allocate_slots, scheduler._counts = scheduler._counting, True
    scheduler.recipe = find("ecoserve")
    scheduler.packer = scheduler.recipe.packer(replace(scheduler.spec, max_running=8))
    scheduler.kv_policy = kv_policy_of(scheduler)
    yield small
    scheduler.recipe, scheduler.kv_policy, manager.allocate_slots, scheduler._counts = before


def run_long(engine: Engine) -> list[list[int]]:
    for i, (prompt, tokens, factor) in enumerate(zip(prompts(len(LONG), 5), LONG, WRONG, strict=True)):
        engine.add(f"r{i}", prompt[:150], tokens, tokens_left=float(np.ceil(tokens * factor)))
    done = engine.run()
    return [done[f"r{i}"] for i in range(len(LONG))]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    """What vLLM answers in its own order, with memory for everybody."""
    engine.scheduler.packer = find("vllm").packer(replace(engine.scheduler.spec, max_running=16))
    return run_long(engine)


@pytest.mark.parametrize(("copy_seconds", "options"), [(1e-6, Options(reserve=0.03)), (np.inf, Options(reserve=0.25))])
def test_reserved_and_lent_kv_changes_no_token(
    plain: list[list[int]], reserving: Engine, copy_seconds: float, options: Options
) -> None:
    scheduler = reserving.scheduler
    before = reserving.counters()
    assert 0 < scheduler.spec.copy_seconds < 1e-3, "the host pool says what a copy costs"
    spec = replace(scheduler.spec, max_running=8, copy_seconds=copy_seconds)
    scheduler.packer = EcoServe(spec, options)
    assert run_long(reserving) == plain
    after, counts = reserving.counters(), scheduler.packer.counters
    seen = {name: after[name] - before.get(name, 0) for name in after}
    assert seen["loans"] == counts["lent"] > 0
    assert counts["extended"] > 0, "some answers were predicted too short"
    assert counts["late"] > 0
    assert seen["alloc_failures"] == 0
    assert seen["preempted"] == seen["evictions"]
    assert (seen["swapped_tokens"] > 0) == (copy_seconds < 1)
    assert (seen["recomputed"] > 0) == (copy_seconds > 1)
    assert not scheduler.connector.saved
    assert not len(scheduler.requests)


def test_ecoserve_by_the_papers_text_changes_no_token(plain: list[list[int]], reserving: Engine) -> None:
    scheduler = reserving.scheduler
    before = reserving.counters()
    scheduler.packer = EcoServe(replace(scheduler.spec, max_running=8), TEXT._replace(reserve=0.03))
    assert run_long(reserving) == plain
    after, counts = reserving.counters(), scheduler.packer.counters
    assert after["loans"] - before.get("loans", 0) == counts["lent"] > 0
    assert counts["extended"] > 0, "some answers were predicted too short"
    assert after["alloc_failures"] == before.get("alloc_failures", 0)
    assert not len(scheduler.requests)
