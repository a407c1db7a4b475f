"""vLLM as it was, and Orca."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.baselines.arrival_order import Orca, VllmV0
from tests.pack.driven import SIZE, Ask, Driven, Iteration, Limits, ample, limits, loads
from tests.pack.v0 import Reference

EXAMPLES = settings(max_examples=20)
both = pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])


def v0(limits: Limits, swap: bool = False) -> Driven:
    return Driven(VllmV0(limits.running, limits.budget, swap), limits)


@both
@given(loads(), limits)
@EXAMPLES
def test_v0_prompts_and_answers_never_share_an_iteration(swap: bool, asks: list[Ask], limits: Limits) -> None:
    for seen in v0(limits, swap).go(asks):
        assert not (seen.prompts and seen.answers)
        assert not (seen.answers and seen.paused), "answers wait for prompts and for nothing else"


def _taken(seen: Iteration) -> set[str]:
    """The last come, who lost their places in this iteration."""
    return set(seen.inside) - set(seen.tokens) - seen.paused


@both
@given(loads(), st.integers(1, 6), st.integers(160, 300), st.integers(12, 30), st.sampled_from([0.0, 0.1]))
@settings(max_examples=66)
def test_v0_takes_the_steps_of_that_code(
    swap: bool, asks: list[Ask], running: int, budget: int, blocks: int, watermark: float
) -> None:
    """Step by step as `v0.Reference`, where that code refuses nobody: all fit the budget and the blocks."""
    limits = Limits(running, budget, blocks + 2, running)
    asks = sorted((Ask(a.prompt, a.output, a.after) for a in asks), key=lambda a: a.after)
    run = Driven(VllmV0(running, budget, swap, watermark), limits)
    code, steps, todo = Reference(limits, swap, int(watermark * limits.blocks)), run.go(asks), 0
    while len(run.ends) < len(asks):
        idle = not run.engine.busy
        while todo < len(asks) and (asks[todo].after <= run.count or idle):
            code.add(f"r{todo}", asks[todo])
            todo, idle = todo + 1, False
        assert next(steps).tokens == code.step()
        assert run.engine.free == code.free


@both
@given(loads(), limits)
@EXAMPLES
def test_v0_takes_blocks_from_the_last_come(swap: bool, asks: list[Ask], limits: Limits) -> None:
    for seen in v0(limits, swap).go(asks):
        gone = _taken(seen)
        if gone:
            at = [name in gone for name in seen.inside]
            assert at == sorted(at), "those before the last come keep theirs"
            assert not seen.prompts
            assert swap or sorted(seen.evicted) == sorted(gone)


@both
@given(loads(), limits)
@EXAMPLES
def test_v0_lets_nobody_in_out_of_turn_and_the_swapped_first(swap: bool, asks: list[Ask], limits: Limits) -> None:
    for seen in v0(limits, swap).go(asks):
        came = [name for name in seen.waiting if name in seen.tokens]
        line = [name for name in seen.waiting if name in seen.saved] or seen.waiting
        assert came == line[: len(came)]
        if seen.prompts:
            assert not seen.saved, "no new prompt while somebody is swapped out"


@given(loads(), limits)
@EXAMPLES
def test_v0_whoever_is_swapped_computes_nothing_twice(asks: list[Ask], limits: Limits) -> None:
    total = sum(sum(seen.tokens.values()) for seen in v0(limits, swap=True).go(asks))
    assert total == sum(ask.prompt + ask.output - 1 for ask in asks)


def test_v0_keeps_a_watermark_free_of_new_prompts() -> None:
    wide = Limits(running=8, budget=10_000, blocks=200, slots=8)
    assert set(next(v0(wide).go([Ask(99 * SIZE, 2), Ask(99 * SIZE, 2)])).tokens) == {"r0", "r1"}
    assert set(next(v0(wide).go([Ask(100 * SIZE, 2), Ask(99 * SIZE, 2)])).tokens) == {"r0"}


def test_v0_a_waiting_prompt_stops_every_answer() -> None:
    """What Sarathi-Serve calls a generation stall."""
    run = v0(Limits(budget=100))
    steps = run.go([Ask(50, 10), Ask(80, 5, after=2), Ask(80, 5, after=2)])
    seen = [next(steps) for _ in range(5)]
    assert [set(step.tokens) for step in seen] == [{"r0"}, {"r0"}, {"r1"}, {"r2"}, {"r0", "r1", "r2"}]
    assert seen[3].paused == {"r0", "r1"}


def orca(limits: Limits, **options: int) -> Driven:
    return Driven(Orca(limits.running, limits.budget, **{"longest": 170, **options}), limits)


@given(loads(), limits)
@EXAMPLES
def test_orca_never_reserves_more_than_there_is_and_never_preempts(asks: list[Ask], limits: Limits) -> None:
    run = orca(limits)
    assert isinstance(run.packer, Orca)
    for seen in run.go(asks):
        jobs = run.engine.jobs
        rows = jobs.rows()[jobs.running[jobs.rows()]]
        kv_budget = KvBudget(limits.blocks, run.engine.free, SIZE, limits.slots)
        assert int(run.packer.reserved(jobs, rows, kv_budget).sum()) <= limits.blocks
        assert not seen.evicted
        assert seen.copied == 0
        assert not seen.paused


@given(loads(), ample)
@EXAMPLES
def test_orca_lets_in_as_they_came_and_computes_prompts_whole(asks: list[Ask], limits: Limits) -> None:
    for seen in orca(limits).go(asks):
        came = [name for name in seen.waiting if name in seen.tokens]
        assert came == seen.waiting[: len(came)]
        for name in seen.prompts:
            prompt = asks[int(name[1:])].prompt
            assert seen.tokens[name] == prompt or prompt > limits.budget - limits.running


def test_orca_admits_what_the_longest_answers_leave_room_for() -> None:
    room = Limits(running=8, budget=1000, blocks=40, slots=8)
    asks = [Ask(32, 4) for _ in range(6)]
    assert len(next(orca(room, longest=160).go(asks)).tokens) == 4
    assert len(next(orca(room, longest=160, max_answer=48).go(asks)).tokens) == 6
    assert len(next(orca(room, longest=10_000).go(asks)).tokens) == 1
