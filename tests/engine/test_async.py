"""A real engine with asynchronous scheduling, as on a GPU: the packer's decisions change no token.

vLLM's CPU platform turns asynchronous scheduling off; the fixture leaves it on, so AsyncScheduler schedules each
iteration before the previous one has finished.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headway.engines.vllm.kv_transfer import host_pool
from headway.policy.recipes.registry import find
from tests.engine.conftest import BLOCKS, ENV, HOST_GIB, Engine, prompts
from tests.engine.test_exact import TOKENS, Chaos, run_all

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def overlapped(few_layers: str) -> Iterator[Engine]:
    os.environ.update(ENV)
    from vllm import LLM
    from vllm.distributed.kv_transfer import kv_transfer_state as one_per_process
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def left_on(platform: Any, config: Any) -> None:
        stock(config)
        config.scheduler_config.async_scheduling = True

    # vLLM holds one connector per process; an engine of another test file may have set it, so it is put aside.
    other, one_per_process._KV_CONNECTOR_AGENT = one_per_process._KV_CONNECTOR_AGENT, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(left_on))
        llm = LLM(
            few_layers,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=16,
            enforce_eager=True,
            enable_prefix_caching=False,
            block_size=32,
            num_gpu_blocks_override=BLOCKS,
            max_num_batched_tokens=512,
            async_scheduling=True,
            scheduler_cls="headway.engines.vllm.plugin.hook.scheduler",
            additional_config={"headway": {"recipe": "slack", "max_running": 8}},
            kv_transfer_config=host_pool(HOST_GIB),
        )
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()
    one_per_process._KV_CONNECTOR_AGENT = other


@pytest.fixture(scope="module")
def alone(overlapped: Engine) -> list[list[int]]:
    """Each request's tokens when it has the engine to itself."""
    overlapped.scheduler.packer = find("vllm").packer(replace(overlapped.scheduler.spec, max_running=8))
    out = []
    for prompt, tokens in zip(prompts(len(TOKENS)), TOKENS, strict=True):
        overlapped.add("alone", prompt, tokens)
        out.append(overlapped.run()["alone"])
    return out


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
