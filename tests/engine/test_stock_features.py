"""With the hook inside, vLLM keeps its features: stock and every recipe side by side in virtual time.

Recipe `vllm` takes stock's own steps; the others answer every request and give all blocks back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.validate import features, slow_loads
from benchmarks.validate.featured import Driver, FeatureAsk, make
from headway.engines.vllm.plugin.hook import HeadwayScheduler
from headway.errors import ConfigError
from headway.types import Step

pytestmark = pytest.mark.filterwarnings("default")
OTHERS = ["headway", "priority", "edf", "slack", "bros-plain-blocks", "ecoserve"]
ALL = ["vllm", *OTHERS]
URGENT = {"ttft": 0.3, "tpot": 0.1}


def run(recipe: str | None, asks: list[FeatureAsk], **options: Any) -> Driver:
    at, depth = options.pop("at", {}), 2 if options.get("async_scheduling") else 1
    driver = Driver(make_or_skip(recipe, **options), asks, depth, at)
    driver.run()
    return driver


def make_or_skip(recipe: str | None, **options: Any) -> Any:
    """Return a scheduler; what a recipe refuses to run with is no feature that it could break."""
    if recipe is not None and recipe.startswith("bros"):
        options.setdefault("host_gib", 0.01)
        if "pool" in options:
            pytest.skip("the recipe needs the host pool as connector")
    try:
        return make(recipe, **options)
    except ConfigError as refusal:
        pytest.skip(str(refusal))


@contextmanager
def nothing_can_be_freed(scheduler: Any) -> Iterator[None]:
    """As while a connector may still write the blocks."""
    scheduler._request_blocks_can_be_freed = lambda request: False
    yield
    del scheduler._request_blocks_can_be_freed


def check(recipe: str, asks: list[FeatureAsk], **options: Any) -> tuple[Driver, Driver]:
    """Run stock and a recipe; the recipe answers as stock does, `vllm` in stock's own steps."""
    stock, ours = run(None, asks, **dict(options)), run(recipe, asks, **dict(options))
    if recipe == "vllm":
        assert ours.steps == stock.steps
        assert ours.ended == stock.ended
    assert sorted(ours.ended) == sorted(stock.ended) == sorted(ask.id for ask in asks)
    left = {ask.id for ask in asks if ask.abort is not None}
    assert {id: n for id, n in ours.made.items() if id not in left} == {
        id: n for id, n in stock.made.items() if id not in left
    }
    return stock, ours


def crowd(n: int = 12, **more: Any) -> list[FeatureAsk]:
    """Return requests of several lengths and priorities, a third of them with an SLO."""
    return [
        FeatureAsk(
            f"r{i}",
            i // 2,
            20 + 37 * i % 190,
            3 + 11 * i % 40,
            priority=i % 3,
            slo=URGENT if i % 3 == 0 else {},
            **{name: value(i) for name, value in more.items()},
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("recipe", ALL)
def test_priority_policy(recipe: str) -> None:
    check(recipe, crowd(), policy="priority", blocks=40)


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_kv_that_comes_from_elsewhere(recipe: str, policy: str) -> None:
    asks = crowd(load=lambda i: 16 * (i % 4))
    check(recipe, asks, pool=slow_loads.CONFIG, policy=policy, blocks=60)


@pytest.mark.parametrize("recipe", ALL)
def test_a_connector_that_cannot_tell_yet_holds_up_one_request_only(recipe: str) -> None:
    at = {
        0: lambda scheduler: scheduler.connector.unsure.add("r0"),
        15: lambda scheduler: scheduler.connector.unsure.clear(),
    }
    _, ours = check(recipe, crowd(load=lambda i: 16), pool=slow_loads.CONFIG, at=at)
    assert not any("r0" in step for step in ours.steps[:15])
    assert all(ours.steps[3:15]), "the others run meanwhile"


@pytest.mark.parametrize("recipe", ALL)
def test_sessions_whose_input_streams(recipe: str) -> None:
    asks = crowd(turns=lambda i: (30, 50)[: i % 3])
    check(recipe, asks, blocks=80)


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("seed", [1, 8, 12, 16])
def test_sessions_whose_last_token_is_on_its_way(recipe: str, seed: int) -> None:
    """vLLM takes a session that is preempted then out of the queue that it has just joined: it is lost."""
    rng = np.random.default_rng(seed)
    asks = [
        FeatureAsk(
            f"r{i}",
            int(rng.integers(12)),
            int(rng.integers(5, 200)),
            int(rng.integers(1, 30)),
            priority=i % 3,
            slo=URGENT if i % 2 else {},
            turns=tuple(rng.integers(5, 60, rng.integers(3)).tolist()),
        )
        for i in range(14)
    ]
    driver = run(recipe, asks, async_scheduling=True, blocks=60)
    assert sorted(driver.ended) == sorted(ask.id for ask in asks)


@pytest.mark.parametrize("recipe", ALL)
def test_a_session_that_is_closed_while_a_connector_delays_its_freeing(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_loads.SlowLoads, "request_finished", lambda *args: (True, None))
    scheduler = make_or_skip(recipe, pool=slow_loads.CONFIG)
    driver = Driver(scheduler, [FeatureAsk("s", 0, 20, 2, turns=(20,))])
    while not driver.ended:
        driver.step()
    assert "s" in scheduler.requests
    assert "s" not in scheduler.jobs
    driver.step()


@pytest.mark.parametrize("recipe", ALL)
def test_requests_that_have_ended_are_not_remembered(recipe: str) -> None:
    """Of those preempted with output on its way, only the ones for which that still holds."""
    driver = run(recipe, crowd(24), async_scheduling=True, blocks=30)
    assert driver.scheduler.counters["evictions"] or recipe == "vllm"
    assert len(driver.scheduler._blocked._stale) <= 1


@pytest.mark.parametrize("recipe", ALL)
def test_a_running_request_makes_room_for_sessions_that_wait_with_their_kv(recipe: str) -> None:
    """It needs another block, and so do they: paused, it would wait for them, and they for it."""
    asks = [FeatureAsk("r", 0, 40, 60), *(FeatureAsk(f"s{i}", 0, 100, 3, turns=(60,)) for i in range(2))]
    check(recipe, asks, blocks=20)


@pytest.mark.parametrize("recipe", [None, "vllm", "slack"])
def test_sessions_that_all_wait_with_their_kv_block_each_other_as_in_stock(recipe: str | None) -> None:
    """Nothing runs whose KV vLLM could take (docs/truth.md); it goes on when a client ends its session."""
    asks = [FeatureAsk(f"s{i}", 0, 100, 3, turns=(100,), abort=60 if i == 0 else None) for i in range(4)]
    driver = Driver(make_or_skip(recipe, blocks=30), asks)
    driver.run()
    assert not any(driver.steps[10:60])
    assert sorted(driver.ended) == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("most", [1, 2])
def test_no_more_adapters_than_fit(recipe: str, most: int) -> None:
    asks = crowd(adapter=lambda i: i % 4)
    check(recipe, asks, enable_lora=True, max_loras=most, max_lora_rank=8, blocks=60)


@pytest.mark.parametrize("recipe", ALL)
def test_paused_requests_come_back_beside_adapters_that_fit(recipe: str) -> None:
    def pause(scheduler: Any) -> None:
        scheduler.control({"op": "pause", "ids": ["r1", "r2"]})

    def resume(scheduler: Any) -> None:
        scheduler.control({"op": "resume", "ids": ["r1", "r2"]})

    asks = crowd(adapter=lambda i: i % 3)
    run(recipe, asks, enable_lora=True, max_loras=1, max_lora_rank=8, at={5: pause, 25: resume})


@pytest.mark.parametrize("recipe", ALL)
def test_speculation(recipe: str) -> None:
    stock, ours = check(recipe, crowd(), speculative_config=features.DRAFTS, blocks=120, max_batched_tokens=512)
    assert stock.drafts > 50
    lost = 3 * ours.scheduler.counters["evictions"]
    assert stock.drafts - lost <= ours.drafts <= stock.drafts, "only an eviction loses drafts"


@pytest.mark.parametrize("recipe", OTHERS)
def test_speculation_with_little_room(recipe: str) -> None:
    check(recipe, crowd(), speculative_config=features.DRAFTS, blocks=30, max_batched_tokens=64)


@pytest.mark.parametrize("recipe", ["headway", "edf", "slack", "bros-plain-blocks"])
@given(st.integers(0, 2**32))
@settings(max_examples=5)
@example(158)  # an answer comes back where its blocks fit, but not those of its padding
def test_packers_count_drafts(recipe: str, seed: int) -> None:
    """What a packer gives to prompts beside drafts, stock has tokens for, and all of it has blocks."""
    workload = features.draw(features.MIXES["drafts"], np.random.default_rng(seed))
    scheduler = make_or_skip(recipe, **workload.options | {"max_batched_tokens": 40, "blocks": 30})
    driver = Driver(scheduler, [replace(ask, abort=None) for ask in workload.asks])
    planned: dict[str, int] = {}

    def plan(step: Step) -> Step:
        assert step.tokens is not None
        planned.clear()
        planned.update(zip(scheduler.jobs.names(step.order.tolist()), step.tokens.tolist(), strict=True))
        return step

    scheduler.kv_policy.plan = plan
    while len(driver.steps) <= workload.asks[-1].step or scheduler.has_requests():
        ran = driver.step()
        assert {id: tokens for id, tokens in planned.items() if ran.get(id, 0) < tokens} == {}
    assert scheduler.stats.counters["alloc_failures"] == 0
    driver.check_empty()


@pytest.mark.parametrize("recipe", ALL)
def test_grammars_that_compile_hold_up_nobody(recipe: str) -> None:
    asks = [
        FeatureAsk("late", 0, 40, 10, grammar=20, slo=URGENT),
        *(FeatureAsk(f"r{i}", 0, 40, 30) for i in range(4)),
        FeatureAsk("more", 1, 40, 5),
    ]
    _, ours = check(recipe, asks)
    began = next(i for i, step in enumerate(ours.steps) if "late" in step)
    waits = ("vllm", "bros-plain-blocks", "ecoserve", "headway")  # headway: its promise is lost by then
    assert began == 20 or recipe in waits, "displaced for it"
    assert all(len(step) == 4 for step in ours.steps[:20]), "it takes no place while it waits"


def test_a_grammar_that_fails_fails_its_request_only() -> None:
    def fail(scheduler: Any) -> None:
        scheduler.requests["bad"].structured_output_request._grammar = ValueError("no grammar")

    for recipe in (None, *ALL):
        driver = run(recipe, [FeatureAsk("bad", 0, 20, 5, grammar=99), FeatureAsk("good", 0, 20, 5)], at={4: fail})
        assert sorted(driver.ended) == ["bad", "good"]


@pytest.mark.parametrize("recipe", ALL)
def test_asynchronous_scheduling(recipe: str) -> None:
    check(recipe, crowd(), async_scheduling=True, blocks=40)


@pytest.mark.parametrize("recipe", ALL)
def test_prompts_stay_whole_where_chunks_are_off(recipe: str) -> None:
    asks = crowd()
    options = {"enable_chunked_prefill": False, "max_batched_tokens": 1024}
    _, ours = check(recipe, asks, **options)
    prompts = {ask.id: ask.prompt for ask in asks}
    for step in ours.steps:
        assert all(tokens == 1 or tokens >= prompts[id] for id, tokens in step.items())


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("threshold", [0, 40])
def test_prefix_caching_and_chunk_thresholds(recipe: str, threshold: int) -> None:
    asks = crowd(shared=lambda i: 64 * (i % 2))
    options = {"long_prefill_token_threshold": threshold} if threshold else {}
    check(recipe, asks, enable_prefix_caching=True, blocks=60, **options)


@pytest.mark.parametrize("recipe", ALL)
def test_an_id_may_be_used_again_at_once(recipe: str) -> None:
    again = FeatureAsk("r", 3, 30, 4)

    def abort(scheduler: Any) -> None:
        from vllm.v1.request import RequestStatus

        scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)

    scheduler = make_or_skip(recipe)
    driver = Driver(scheduler, [FeatureAsk("r", 0, 50, 40)])
    for _ in range(3):
        driver.step()
    abort(scheduler)
    driver.asks = [again]
    driver.run()
    assert driver.ended == ["r"]


@pytest.mark.parametrize("recipe", ALL)
def test_a_paused_engine(recipe: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    def state(value: Any) -> Any:
        return lambda scheduler: scheduler.set_pause_state(value)

    at = {
        6: state(PauseState.PAUSED_NEW),
        30: state(PauseState.UNPAUSED),
        40: state(PauseState.PAUSED_ALL),
        44: state(PauseState.UNPAUSED),
    }
    _, ours = check(recipe, crowd(), at=at, blocks=50)
    assert not any(ours.steps[40:44])
    before = set().union(*ours.steps[:6])
    assert set().union(*ours.steps[6:30]) <= before, "nothing new begins"


@pytest.mark.parametrize("recipe", ALL)
def test_a_drain_finishes_what_runs(recipe: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler = make_or_skip(recipe)
    driver = Driver(scheduler, crowd())
    for _ in range(8):
        driver.step()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(200):
        driver.step()
    assert not scheduler.running
    assert scheduler.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("recipe", ALL)
def test_new_weights(recipe: str) -> None:
    def reset(scheduler: Any) -> None:
        assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    check(recipe, crowd(), at={7: reset, 20: reset}, enable_prefix_caching=True, blocks=50)


def test_kv_of_old_weights_does_not_come_back_from_the_host() -> None:
    scheduler = make("slack", host_gib=0.01)
    driver = Driver(scheduler, [FeatureAsk("r", 0, 60, 20)])
    for _ in range(4):
        driver.step()
    scheduler._save(scheduler.requests["r"])
    assert scheduler.connector.saved
    assert scheduler.reset_prefix_cache(reset_connector=True)
    assert driver.step() == {"r": 64}, "all of it is computed again"
    driver.run()


@pytest.mark.parametrize("recipe", ALL)
def test_aborts_in_any_state(recipe: str) -> None:
    asks = crowd(16, abort=lambda i: i + 3 if i % 3 == 1 else None, load=lambda i: 16 * (i % 3))
    check(recipe, asks, pool=slow_loads.CONFIG, blocks=60)


def test_blocks_that_a_connector_may_still_write_are_not_taken() -> None:
    scheduler = make("edf", blocks=12, max_running=2)
    driver = Driver(scheduler, [FeatureAsk("a", 0, 80, 20), FeatureAsk("urgent", 1, 100, 5, slo=URGENT)])
    driver.step()
    with nothing_can_be_freed(scheduler):
        driver.step()
    assert scheduler.counters["evictions"] == 0
    driver.run()


def test_kv_is_not_saved_while_a_connector_may_still_write_it() -> None:
    scheduler = make("slack", host_gib=0.01)
    driver = Driver(scheduler, [FeatureAsk("r", 0, 60, 20)])
    driver.step()
    with nothing_can_be_freed(scheduler):
        scheduler._save(scheduler.requests["r"])
    assert not scheduler.connector.saved
    assert scheduler.requests["r"] in scheduler.running
    driver.run()


def test_evicted_requests_drop_output_whose_kv_would_be_delivered() -> None:
    scheduler, seen = make("edf", blocks=12, max_running=2), list[bool]()
    preempt = scheduler._preempt_request

    def noted(request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        seen.append(drop_stale_output)
        preempt(request, timestamp, drop_stale_output)

    scheduler._preempt_request, scheduler.requires_kv_delivery = noted, True
    Driver(scheduler, [FeatureAsk("a", 0, 80, 20), FeatureAsk("urgent", 1, 100, 5, slo=URGENT)]).run()
    assert seen == [True]


@pytest.mark.parametrize("mix", features.MIXES)
@given(st.integers(0, 2**32))
@settings(max_examples=8)
def test_stock_takes_the_same_steps_with_any_mix(mix: str, seed: int) -> None:
    tally = features.compare(features.draw(features.MIXES[mix], np.random.default_rng(seed)))
    assert tally.difference is None
    assert tally.identical == tally.steps


@pytest.mark.parametrize("mix", features.MIXES)
@pytest.mark.parametrize("recipe", OTHERS)
@given(st.integers(0, 2**32))
@settings(max_examples=5)
def test_every_recipe_answers_any_mix(recipe: str, mix: str, seed: int) -> None:
    workload = features.draw(features.MIXES[mix], np.random.default_rng(seed))
    ours = run(recipe, workload.asks, **workload.options)
    left = {ask.id for ask in workload.asks if ask.abort is not None}
    assert set(ours.ended) == {ask.id for ask in workload.asks}
    for ask in workload.asks:
        if ask.id not in left:
            assert ours.made[ask.id] == ask.output * (1 + len(ask.turns))


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadwayScheduler, "_is_own_order", lambda self: False)
    monkeypatch.setattr(HeadwayScheduler, "_by_stock_priority", lambda self: list(self.waiting)[::-1])
    workload = features.draw(features.MIXES["priorities"], np.random.default_rng(1))
    tally = features.compare(workload)
    assert tally.difference is not None
    assert tally.identical < tally.steps


# ---- the prefix cache, as packers see it


@pytest.mark.parametrize("recipe", [name for name in OTHERS if name != "ecoserve"])
def test_cached_prompts_enter_as_early_as_with_stock(recipe: str) -> None:
    """Eleven prompts of 400 tokens, 384 of them cached, fit into a budget of 512 tokens and 120 blocks."""
    asks = [FeatureAsk(f"r{i}", 3 * (i > 0), 400, 20, shared=384, slo={"ttft": 5.0}) for i in range(12)]
    options = {"blocks": 120, "max_running": 12, "slots": 12, "max_batched_tokens": 512}
    stock, ours = check(recipe, asks, enable_prefix_caching=True, **options)
    assert ours.steps == stock.steps
    assert ours.steps[3] == {"r0": 1, **{f"r{i}": 16 for i in range(1, 12)}}


@pytest.mark.parametrize("recipe", ["edf", "slack", "priority"])
def test_prompts_that_wait_for_the_same_prefix_enter_together(recipe: str) -> None:
    """Twelve of 400 tokens come at once: once the first is computed, 384 of all the others are cached."""
    asks = [FeatureAsk(f"r{i}", 0, 400, 20, shared=384, slo={"ttft": 5.0}) for i in range(12)]
    options = {"blocks": 120, "max_running": 12, "slots": 12, "max_batched_tokens": 416}
    ours = run(recipe, asks, enable_prefix_caching=True, **options)
    assert ours.steps[0]["r0"] == 400
    assert set(ours.steps[2]) == {ask.id for ask in asks}


@pytest.mark.parametrize("recipe", ["edf", "slack"])
@given(st.integers(0, 2**32))
@settings(max_examples=5)
def test_shared_blocks_are_counted_once(recipe: str, seed: int) -> None:
    mix = features.MIXES["prefix caching"]
    workload = features.draw(mix, np.random.default_rng(seed))
    driver = Driver(make(recipe, **workload.options), workload.asks)
    scheduler = driver.scheduler
    lists = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks

    while len(driver.steps) <= workload.asks[-1].step or scheduler.has_requests():
        driver.step()
        scheduler._refresh(driver.now)
        jobs = scheduler.jobs
        for request in scheduler.running:
            shared = sum(block.ref_cnt > 1 for block in lists[request.request_id])
            assert jobs.shared[jobs.row_of[request.request_id]] == shared
        assert (jobs.shared <= jobs.blocks)[jobs.live].all()
    driver.run()


def test_a_request_that_lost_its_kv_finds_it_again() -> None:
    asks = [FeatureAsk("a", 0, 300, 20), FeatureAsk("urgent", 2, 200, 5, slo=URGENT)]
    scheduler = make("edf", blocks=26, max_running=2, enable_prefix_caching=True)
    driver = Driver(scheduler, asks)
    for _ in range(3):
        driver.step()
    row = scheduler.jobs.row_of["a"]
    assert not scheduler.jobs.running[row]
    driver.step()
    assert scheduler.jobs.computed[row] >= 16
    driver.run()


# ---- found by vLLM's own tests


@pytest.mark.parametrize("recipe", ["edf", "slack", "priority"])
def test_a_long_prompt_leaves_the_rest_of_the_budget_to_others(recipe: str) -> None:
    asks = [FeatureAsk(f"r{i}", 0, 200, 5, slo=URGENT) for i in range(4)]
    options = {"long_prefill_token_threshold": 40, "max_batched_tokens": 100}
    ours = run(recipe, asks, **options)
    assert ours.steps[0] == {"r0": 40, "r1": 40, "r2": 20}


@pytest.mark.parametrize("recipe", OTHERS)
def test_loads_begin_at_once(recipe: str) -> None:
    """Eight prompts of 400 tokens whose KV is elsewhere but for one: no budget of tokens is in the way."""
    asks = [FeatureAsk(f"r{i}", 0, 401, 5, load=400) for i in range(8)]
    stock, ours = check(recipe, asks, pool=slow_loads.CONFIG, blocks=300, max_running=8, slots=8)
    assert len(ours.steps) <= len(stock.steps) + 1


@pytest.mark.parametrize("recipe", ALL)
def test_a_load_that_failed_is_computed(recipe: str) -> None:
    """The request waits with blocks, as one whose KV has come, and has nothing computed."""
    asks = [FeatureAsk("a", 0, 100, 5, load=64, fails=True), FeatureAsk("b", 1, 50, 5)]
    check(recipe, asks, pool=slow_loads.CONFIG)


def test_a_resumed_request_comes_back_beside_the_adapters_that_run() -> None:
    """Its own order would show stock one adapter more than fit."""
    asks = [FeatureAsk("r0", 0, 20, 30, adapter=1), *(FeatureAsk(f"r{i}", 2, 20, 20, adapter=i + 1) for i in (1, 2, 3))]
    control = {
        1: lambda scheduler: scheduler.control({"op": "pause", "ids": ["r0"]}),
        5: lambda scheduler: scheduler.control({"op": "resume", "ids": ["r0"]}),
    }
    ours = run("vllm", asks, enable_lora=True, max_loras=2, max_lora_rank=8, at=control)
    assert sorted(ours.ended) == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("whole", [False, True])
def test_images_are_encoded_and_cut_as_with_stock(recipe: str, whole: bool) -> None:
    """Tokens 50 to 110 of each prompt are an image: a cap of 64 tokens ends within it."""
    asks = [FeatureAsk(f"r{i}", i, 150, 8, image=(50, 60)) for i in range(6)]
    check(recipe, asks, encoder=128, disable_chunked_mm_input=whole, max_batched_tokens=64)


def test_no_cap_cuts_an_image_that_must_stay_whole() -> None:
    """A chunk of 40 tokens would; stock 0.32 itself sees it only where the chunk begins before the image."""
    asks = [FeatureAsk(f"r{i}", 0, 150, 8, image=(20 * i, 60), slo=URGENT) for i in range(4)]
    scheduler = make("slack", encoder=128, disable_chunked_mm_input=True, max_batched_tokens=256)
    scheduler.packer = replace(scheduler.packer, min_chunk=40, max_step=1e-6)
    driver, computed = Driver(scheduler, asks), {ask.id: 0 for ask in asks}
    driver.run()
    for step in driver.steps:
        for id, tokens in step.items():
            computed[id] += tokens
            begin = 20 * int(id[1:])
            assert not begin < computed[id] < begin + 60, f"the image of {id} is cut at {computed[id]}"


def test_a_pause_leaves_vllms_priorities_in_force() -> None:
    asks = [FeatureAsk("held", 0, 20, 30), *(FeatureAsk(f"r{i}", 2, 20, 5, priority=5 - i) for i in range(5))]
    control = {
        1: lambda scheduler: scheduler.control({"op": "pause", "ids": ["held"]}),
        60: lambda scheduler: scheduler.control({"op": "resume", "ids": ["held"]}),
    }
    ours = run("vllm", asks, policy="priority", max_running=1, slots=2, at=control)
    assert ours.ended == ["r4", "r3", "r2", "r1", "r0", "held"]


def feed(recipe: str | None, *prompts: int, **options: Any) -> list[dict[str, int]]:
    """Return the steps of these prompts, where one of more than 400 tokens is long."""
    asks = [FeatureAsk(f"r{i}", 0, prompt, 3) for i, prompt in enumerate(prompts)]
    limits = {"long_prefill_token_threshold": 400, "max_batched_tokens": 1024, "max_model_len": 4096}
    return run(recipe, asks, blocks=400, **(limits | options)).steps


@pytest.mark.parametrize("recipe", ALL)
def test_a_long_prompt_that_is_alone_is_not_cut(recipe: str) -> None:
    steps = feed(recipe, 2000)
    assert steps == feed(recipe, 2000, long_prefill_token_threshold=0)
    if recipe not in ("headway", "ecoserve"):  # which have bounds of their own
        assert [step["r0"] for step in steps[:2]] == [1024, 976]


@pytest.mark.parametrize("recipe", [None, *ALL])
@pytest.mark.parametrize(("adaptive", "chunk"), [(False, 400), (True, 450)])
def test_short_prompts_run_beside_a_part_of_a_long_one(recipe: str | None, adaptive: bool, chunk: int) -> None:
    options = {"long_prefill_token_threshold_adaptive": adaptive, "max_batched_tokens": 900}
    assert feed(recipe, 2000, 10, **options)[0] == {"r0": chunk, "r1": 10}
