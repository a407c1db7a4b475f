"""The counters change no decision of vLLM and are right: beside stock, and by sums that must agree."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.validate import features
from benchmarks.validate.conformance import BLOCK, ConformanceCase, _config, _metadata, draw
from benchmarks.validate.featured import Driver, make
from headway.engines.vllm import oracle
from headway.engines.vllm.oracle import SchedulerOracle
from headway.engines.vllm.plugin.control import _control
from headway.engines.vllm.plugin.hook import HeadwayScheduler
from headway.engines.vllm.plugin.scheduler_stats import SchedulerStats, StatsScheduler

pytestmark = pytest.mark.filterwarnings("default")


def build(
    case: ConformanceCase, cls: type[Any] | None, *, policy: str = "fcfs", recipe: str | None = None
) -> SchedulerOracle:
    budget, slots = max(case.budget, case.max_running), case.max_running * (1 if recipe is None else 2)
    setup = _config(case.max_running, budget, case.max_model_len, slots, recipe, policy)
    return SchedulerOracle(oracle.scheduler(setup, case.blocks + 1, BLOCK, cls))


def decisions(case: ConformanceCase, engine: SchedulerOracle) -> list[tuple[Any, ...]]:
    """Run a workload to its end; return every step: order and tokens, preemptions, free blocks."""
    steps, todo = [], sorted(enumerate(case.tasks), key=lambda item: item[1].at)
    pool = engine.scheduler.kv_cache_manager.block_pool
    while todo or engine.busy:
        while todo and todo[0][1].at <= engine.now:
            i, task = todo.pop(0)
            metadata = _metadata(f"r{i}", task)
            engine.add(f"r{i}", task.prompt, task.output, priority=task.priority, metadata=metadata, arrival=task.at)
        ran = engine.step(0.05)
        lost = {id: request.num_preemptions for id, request in engine.scheduler.requests.items()}
        steps.append((list(ran.items()), lost, pool.get_num_free_blocks(), list(engine.finished)))
    return steps


def tight(seed: int) -> ConformanceCase:
    """A workload that overflows its KV."""
    rng = np.random.default_rng(seed)
    return next(case for case in iter(lambda: draw(rng), None) if case.blocks < 8 * case.max_running)


@given(st.integers(0, 10_000), st.sampled_from(["fcfs", "priority"]))
@settings(max_examples=6)
def test_it_takes_exactly_stocks_steps(seed: int, policy: str) -> None:
    case = tight(seed)
    assert decisions(case, build(case, StatsScheduler, policy=policy)) == decisions(
        case, build(case, None, policy=policy)
    )


SYSTEMS = [
    (StatsScheduler, None, "fcfs"),
    (StatsScheduler, None, "priority"),
    (HeadwayScheduler, "vllm", "fcfs"),
    (HeadwayScheduler, "slack", "fcfs"),
    (HeadwayScheduler, "bros", "fcfs"),
]


@pytest.mark.parametrize(("cls", "recipe", "policy"), SYSTEMS)
def test_what_was_computed_adds_up(cls: type[Any], recipe: str | None, policy: str) -> None:
    """Each token of a prompt and of an answer but the last is computed once; the rest is computed again."""
    lost = 0
    for seed in range(12):
        case = tight(seed)
        engine = build(case, cls, policy=policy, recipe=recipe)
        found = decisions(case, engine)
        counters = engine.scheduler.stats.counters
        computed = sum(tokens for ran, *_ in found for _, tokens in ran)
        assert computed == sum(task.prompt + task.output - 1 for task in case.tasks) + counters["recomputed"]
        assert 0 < counters["kv_seconds"] <= counters["busy_seconds"]
        assert counters["busy_seconds"] == pytest.approx(0.05 * sum(bool(ran) for ran, *_ in found))
        assert counters["alloc_failures"] <= counters["preempted"]
        if cls is StatsScheduler:
            assert bool(counters["alloc_failures"]) == bool(counters["preempted"])
        lost += counters["preempted"]
    assert lost > 0, "nobody ran out of KV: the workloads show nothing"


def test_preempted_is_what_vllm_counts() -> None:
    case = tight(1)
    engine = build(case, StatsScheduler)
    most: dict[str, int] = {}
    for _, lost, *_ in decisions(case, engine):
        most |= {id: max(count, most.get(id, 0)) for id, count in lost.items()}
    assert engine.scheduler.stats.counters["preempted"] == sum(most.values())


def test_by_hand() -> None:
    """Two of 48 tokens in 7 blocks of 16: at 64 the second wants a block too many, and computes all again."""
    engine = build(ConformanceCase((), 2, 512, 7, 112, 0), StatsScheduler)
    engine.add("a", 48, 40)
    engine.add("b", 48, 40)
    while engine.busy:
        engine.step(0.05)
    counters = engine.scheduler.stats.counters
    assert (counters["alloc_failures"], counters["preempted"], counters["recomputed"]) == (1, 1, 48)


@pytest.mark.parametrize("mix", ["asynchronous", "drafts", "prefix caching"])
@pytest.mark.parametrize("recipe", ["vllm", "slack"])
def test_no_allocation_fails_in_a_step_in_which_none_is_counted(recipe: str, mix: str) -> None:
    """Failures are counted only in steps in which blocks may run out, for the time that it takes."""
    from vllm.v1.request import RequestStatus

    plain, failures = 0, 0.0
    for seed in range(6):
        workload = features.draw(features.MIXES[mix], np.random.default_rng(seed))
        scheduler = make(recipe, **workload.options | {"blocks": 30})
        allocate = scheduler._allocate

        def checked(request: Any, *args: Any, allocate: Any = allocate, **more: Any) -> Any:
            nonlocal plain
            plain += 1
            found = allocate(request, *args, **more)
            assert found is not None or request.status != RequestStatus.RUNNING
            return found

        scheduler._allocate = checked
        Driver(scheduler, workload.asks, 2 if mix == "asynchronous" else 1).run()
        failures += scheduler.stats.counters["alloc_failures"]
    assert plain > 100
    assert recipe == "slack" or failures > 0


def test_a_prefix_that_is_still_there_is_not_computed_again() -> None:
    stats = SchedulerStats()
    stats.preempted("a", 100)
    stats.ran({"a": 30}, lambda _: 94)  # 64 were found in the cache
    stats.ran({"a": 30}, lambda _: 124)
    assert stats.counters["recomputed"] == 36
    stats.ran({"a": 1}, lambda _: 125)
    assert stats.counters["recomputed"] == 36


def test_who_left_owes_nothing() -> None:
    stats = SchedulerStats()
    stats.preempted("a", 100)
    stats.begin(["a"])
    stats.ran({"a": 100}, lambda _: 100)  # another request of that name
    assert stats.counters["recomputed"] == 0


def test_one_shortage_counts_once_in_an_iteration() -> None:
    stats = SchedulerStats()
    for ended in range(2):
        stats.begin([])
        for _ in range(3):
            stats.short("a")
        assert stats.counters["alloc_failures"] == ended + 1


def test_it_answers_on_the_control_route_and_obeys_nothing() -> None:
    engine = build(tight(1), StatsScheduler)

    class Core:
        scheduler = engine.scheduler

    state = _control(Core, {"op": "state"})
    assert state["counters"] == engine.scheduler.stats.counters
    assert state["blocks_free"] == state["blocks_total"]
    assert (state["running"], state["waiting"]) == engine.scheduler.get_request_counts()
    assert state["max_running"] == engine.scheduler.max_num_active_reqs
    assert "error" in _control(Core, {"op": "pause", "ids": []})


def test_what_it_relies_on_in_vllm() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    assert list(inspect.signature(KVCacheManager.allocate_slots).parameters)[:3] == [
        "self",
        "request",
        "num_new_tokens",
    ]
    source = inspect.getsource(Scheduler)
    assert source.count("self.kv_cache_manager.allocate_slots(") == 2, "asked for running and for waiting"
    assert not any(hasattr(Scheduler, name) for name in ("stats", "_scheduled", "_slots_total"))


def test_a_wrapper_of_another_plugin_stays() -> None:
    case, asked = tight(1), list[str]()
    engine = build(case, StatsScheduler)
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def wrapped(request: Any, *args: Any, **named: Any) -> Any:
        asked.append(request.request_id)
        return allocate(request, *args, **named)

    manager.allocate_slots = wrapped
    decisions(case, engine)
    assert len(asked) > len(case.tasks)
    assert manager.allocate_slots is wrapped
