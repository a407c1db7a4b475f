"""Reservations and loans in vLLM's own block manager: nothing owned twice unseen, nothing lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from headway.config import Config, Engine
from headway.engines.vllm import oracle
from headway.engines.vllm.oracle import SchedulerOracle
from headway.engines.vllm.plugin import hook, scheduler_stats
from headway.engines.vllm.plugin.hook import HeadwayScheduler
from headway.engines.vllm.process.launch import command
from headway.errors import ConfigError
from headway.gateway.preflight import preflight
from tests.engine.test_ends_hook import skip

pytestmark = pytest.mark.filterwarnings("default")
SIZE, LONGEST = 16, 512


def engine_of(recipe: str, blocks: int, host_gib: float = 0.0) -> SchedulerOracle:
    setup = oracle.config(
        max_running=16, max_batched_tokens=256, max_model_len=LONGEST, block_size=SIZE, recipe=recipe, host_gib=host_gib
    )
    engine = SchedulerOracle(oracle.scheduler(setup, blocks + 1, SIZE, HeadwayScheduler))
    audited(engine.scheduler)
    return engine


def audited(scheduler: Any) -> None:
    """Look at every block after each step that stock has scheduled, before it is computed."""
    check = scheduler.kv_policy.check

    def look(ran: dict[str, int]) -> None:
        check(ran)
        audit(scheduler, ran)

    scheduler.kv_policy.check = look


def coming(scheduler: Any) -> Any:
    """Return the loans that are not in their borrowers' block lists yet."""
    return scheduler.kv_policy._pending


def lists_of(scheduler: Any) -> Any:
    """Return vLLM's block lists, by request."""
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks


def audit(scheduler: Any, ran: dict[str, int]) -> None:
    """vLLM counts each block as often as it is in a list; no two requests write one; none is lost."""
    pool, lists = scheduler.kv_cache_manager.block_pool, lists_of(scheduler)
    held = [*lists.values(), *coming(scheduler).values()]
    counted = Counter(block.block_id for blocks in held for block in blocks)
    assert counted == {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null}
    assert pool.get_num_free_blocks() + len(counted) == pool.num_gpu_blocks - 1
    written = Counter(
        block.block_id
        for request in scheduler.running
        for block in lists[request.request_id][: -(-request.num_computed_tokens // SIZE)]
    )
    assert all(times == 1 for times in written.values()), "two requests have written one block"
    assert all(
        -(-request.num_computed_tokens // SIZE) <= len(lists[request.request_id]) for request in scheduler.running
    )


def crowd(engine: SchedulerOracle, seed: int, count: int = 24, noise: float = 0.7) -> None:
    """Add requests with long answers and short, predicted badly."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        output = int(rng.choice((8, 20, 60, 150)))
        left = float(np.ceil(output * np.exp(noise * rng.standard_normal())))
        metadata = {"headway_id": f"r{i}", "headway_arrival": 0.0, "headway_tokens_left": left}
        engine.add(f"r{i}", int(rng.integers(1, 120)), output, metadata=metadata)


def counters(engine: SchedulerOracle) -> dict[str, Any]:
    state: dict[str, Any] = engine.scheduler.control({"op": "state"})["counters"]
    return state


def all_back(engine: SchedulerOracle) -> bool:
    """Tell whether nobody holds anything; the last to leave does so in the next step."""
    engine.step()
    nobody, pool = not len(engine.scheduler.jobs), engine.scheduler.kv_cache_manager.block_pool
    return nobody and not coming(engine.scheduler) and bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)


@pytest.mark.parametrize("host_gib", [0.0, 0.1])
def test_lending_and_its_emergencies_lose_nothing(host_gib: float) -> None:
    """Guests that are late leave for the host or are computed again; answers outgrow their predictions."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        engine = engine_of("ecoserve", 40, host_gib)
        crowd(engine, seed)
        while engine.busy:
            engine.step()
        assert len(engine.finished) == 24
        assert all_back(engine)
        seen.update({name: int(value) for name, value in counters(engine).items()})
        seen["extended"] += engine.scheduler.packer.counters["extended"]
        seen["late"] += engine.scheduler.packer.counters["late"]
    assert seen["loans"] > 10
    assert seen["late"] > 0
    assert seen["extended"] > 0
    assert seen["alloc_failures"] == 0, "an exact allocation never fails"
    assert seen["preempted"] == seen["evictions"] > 0, "only the packer takes KV"
    assert (seen["swapped_tokens"] > 0) == (host_gib > 0)
    assert (seen["recomputed"] > 0) == (host_gib == 0)


class Tables:
    """The block tables that a worker makes of what the scheduler tells it, as vLLM's model runner does."""

    def __init__(self) -> None:
        self.of: dict[str, list[int]] = {}
        self.extended_by_loans = 0

    def follow(self, output: Any, scheduler: Any) -> None:
        for new in output.scheduled_new_reqs:
            self.of[new.req_id] = list(new.block_ids[0])
        told = output.scheduled_cached_reqs
        for id, more in zip(told.req_ids, told.new_block_ids, strict=True):
            if id in told.resumed_req_ids:
                self.of[id] = list(more[0])
            elif more is not None:
                self.of[id] += more[0]
                self.extended_by_loans += any(
                    scheduler.kv_cache_manager.block_pool.blocks[b].ref_cnt > 1 for b in more[0]
                )
        for id in output.num_scheduled_tokens:
            assert self.of[id] == [block.block_id for block in lists_of(scheduler)[id]]


def test_a_worker_s_block_tables_are_the_scheduler_s() -> None:
    """Also when one that runs becomes a guest: its own new blocks come before its loan."""
    seen = 0
    for seed in range(6):
        engine, tables = engine_of("ecoserve", 40), Tables()
        packer = engine.scheduler.packer
        packer.options = packer.options._replace(reserve=0.3)  # many prompts run first and wait for KV then
        crowd(engine, seed)
        while engine.busy:
            output = engine.schedule()
            tables.follow(output, engine.scheduler)
            engine.complete(output, 0.05)
        seen += tables.extended_by_loans
    assert seen > 3


def test_aborted_hosts_and_guests_leave_nothing_behind() -> None:
    from vllm.v1.request import RequestStatus

    rng, loans = np.random.default_rng(0), 0
    for seed in range(4):
        engine = engine_of("ecoserve", 40)
        crowd(engine, seed)
        while engine.busy:
            engine.step()
            jobs = engine.scheduler.jobs
            lending = [
                str(jobs.keys[row]) for row in jobs.rows() if jobs.first_lent_block[row] or jobs.loan_blocks[row]
            ]
            if lending and rng.random() < 0.2:
                gone = str(rng.choice(lending))
                if gone in engine.scheduler.requests:
                    engine.scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
        assert all_back(engine)
        loans += counters(engine)["loans"]
    assert loans > 10


def test_a_guest_that_stock_does_not_let_in_gives_its_loan_back() -> None:
    """Stock may skip anybody who waits, for reasons of its own (a grammar, an adapter): here at random."""
    rng, skipped = np.random.default_rng(1), list[bool]()
    engine = engine_of("ecoserve", 40)
    crowd(engine, 2)

    def skips(request: Any) -> bool:
        skipped.append(request.request_id in coming(engine.scheduler) and rng.random() < 0.7)
        return skipped[-1]

    skip(engine, skips)
    while engine.busy:
        engine.step()
    assert any(skipped)
    assert len(engine.finished) == 24
    assert all_back(engine)


def test_a_reset_of_the_engine_s_caches_ends_all_loans() -> None:
    engine = engine_of("ecoserve", 40)
    crowd(engine, 0)
    jobs, resets = engine.scheduler.jobs, 0
    while engine.busy:
        engine.step()
        if resets < 3 and jobs.first_lent_block[jobs.rows()].any() and not coming(engine.scheduler):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            resets += 1
    assert resets == 3
    assert len(engine.finished) == 24
    assert all_back(engine)


def test_an_answer_is_held_for_before_it_is_made() -> None:
    engine = engine_of("ecoserve", 40)
    engine.add("a", 20, 60)
    engine.step()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 35


def test_no_more_is_held_than_a_request_can_have() -> None:
    engine = engine_of("ecoserve", 100)
    engine.add("a", 20, 60, metadata={"headway_tokens_left": 5000.0})
    engine.step()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 100 - LONGEST // SIZE


@pytest.mark.parametrize(
    ("setting", "what"), [("enable_prefix_caching", "shares prefixes"), ("async_scheduling", "runs overlapped")]
)
def test_an_engine_that_cannot_says_so_when_it_starts(setting: str, what: str) -> None:
    setup = oracle.config(max_running=2, max_batched_tokens=64, max_model_len=64, block_size=SIZE, recipe="ecoserve")
    part = setup.cache_config if setting == "enable_prefix_caching" else setup.scheduler_config
    setattr(part, setting, True)
    with pytest.raises(ConfigError, match=what):
        oracle.scheduler(setup, 20, SIZE, HeadwayScheduler)


# ---- serving


def test_ecoserve_is_served_without_prefix_caching() -> None:
    preflight(Config(recipe="ecoserve"))
    assert "--no-enable-prefix-caching" in command(Engine(), 1, "ecoserve")
    assert "--no-enable-prefix-caching" not in command(Engine(), 1, "slack")


@pytest.mark.parametrize(
    ("recipe", "set_to", "flags"),
    [
        ("slack", None, set()),
        (None, None, set()),
        ("slack", True, {"--async-scheduling"}),
        ("slack", False, {"--no-async-scheduling"}),
        ("ecoserve", None, {"--no-async-scheduling"}),
        ("bros", None, {"--no-async-scheduling"}),
    ],
)
def test_scheduling_is_asynchronous_where_vllm_makes_it_so(
    recipe: str | None, set_to: bool | None, flags: set[str]
) -> None:
    """But for recipes that cannot overlap batches."""
    line = command(Engine(async_scheduling=set_to, host_kv_gib=1.0), 1, recipe)
    assert {word for word in line if word.endswith("async-scheduling")} == flags


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("module", [hook, scheduler_stats])
def test_the_scheduler_is_that_of_the_engines_choice(module: Any, overlapped: bool) -> None:
    setup = oracle.config(max_running=2, max_batched_tokens=64, max_model_len=64, block_size=SIZE, recipe="slack")
    setup.scheduler_config.async_scheduling = overlapped
    assert isinstance(oracle.scheduler(setup, 20, SIZE, module.scheduler), AsyncScheduler) == overlapped


@pytest.mark.parametrize(
    ("recipe", "engine", "mend"),
    [
        ("ecoserve", Engine(args=("--enable-prefix-caching",)), "Take --enable-prefix-caching out of args"),
        ("ecoserve", Engine(async_scheduling=True), "Set async_scheduling = false"),
        ("benchmarks.papers.recipes:ecoserve-sd-oracle", Engine(), "Serve with a recipe that forecasts them"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_mend(recipe: str, engine: Engine, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(Config(recipe=recipe, engines=(engine,)))
    assert mend in str(caught.value)
