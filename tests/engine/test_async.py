"""A real engine with asynchronous scheduling, as on a GPU: the packer's decisions change no token.

vLLM's CPU platform turns asynchronous scheduling off; the fixture leaves it on, so AsyncScheduler schedules each
iteration before the previous one has finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headway.policy.recipes.registry import find
from tests.engine.conftest import BLOCKS, Engine, started
from tests.engine.test_exact import TOKENS, Chaos, each_alone, run_all

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def overlapped(few_layers: str) -> Iterator[Engine]:
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def left_on(platform: Any, config: Any) -> None:
        stock(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(left_on))
        yield from started(few_layers, async_scheduling=True)


@pytest.fixture(scope="module")
def alone(overlapped: Engine) -> list[list[int]]:
    return each_alone(overlapped)


def test_the_engine_keeps_two_batches_in_flight(overlapped: Engine) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(overlapped.scheduler, AsyncScheduler)
    assert overlapped.llm.llm_engine.engine_core.engine_core.batch_queue_size == 2


@pytest.mark.parametrize("seed", range(3))
def test_chaos_changes_no_token(overlapped: Engine, alone: list[list[int]], seed: int) -> None:
    scheduler = overlapped.scheduler
    before = dict(scheduler.counters)
    scheduler.packer = Chaos(seed)
    done = run_all(overlapped)
    assert [done[f"r{i}"] for i in range(len(TOKENS))] == alone
    assert all(scheduler.counters[name] > before[name] for name in ("evictions", "pauses", "saves"))
    assert not scheduler.connector.saved
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


@pytest.mark.parametrize("recipe", ["headway", "vllm", "priority", "edf", "slack", "bros-plain-blocks", "anneal"])
def test_recipes_change_no_token(overlapped: Engine, alone: list[list[int]], recipe: str) -> None:
    scheduler = overlapped.scheduler
    scheduler.packer = find(recipe).packer(replace(scheduler.spec, max_running=4, token_budget=128))
    done = run_all(overlapped)
    assert [done[f"r{i}"] for i in range(len(TOKENS))] == alone
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
