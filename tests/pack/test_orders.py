"""Chunked prefill, shortest first, MultiRes and round robin: the property that defines each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.baselines.arrival_order import Chunked, MultiRes, RoundRobin
from headway.policy.pack.baselines.srtf import Srtf
from headway.policy.pack.ranked import Fcfs
from headway.policy.recipes.registry import find
from headway.types import Jobs
from tests.pack.driven import CHAT, SIZE, Ask, Driven, Iteration, Limits, ample, limits, loads

EXAMPLES = settings(max_examples=20)
PACE = OnlineLatency()  # nobody teaches it here


# ---- chunked prefill


@given(loads(), ample)
@EXAMPLES
def test_chunked_fills_the_budget_and_no_answer_waits(asks: list[Ask], limits: Limits) -> None:
    for seen in Driven(Chunked(limits.running, limits.budget), limits).go(asks):
        assert set(seen.inside) <= set(seen.tokens) | _in_prompt(seen, asks)
        used, idle = sum(seen.tokens.values()), set(seen.waiting) - set(seen.tokens)
        whole = all(
            seen.computed[name] + n >= asks[int(name[1:])].prompt + seen.output_tokens[name]
            for name, n in seen.tokens.items()
        )
        assert used == limits.budget or (whole and (not idle or len(seen.tokens) == limits.running))


def _in_prompt(seen: Iteration, asks: list[Ask]) -> set[str]:
    return {name for name in seen.inside if seen.computed[name] < asks[int(name[1:])].prompt}


@given(loads(), ample)
@EXAMPLES
def test_chunked_has_one_prompt_cut_at_a_time(asks: list[Ask], limits: Limits) -> None:
    """Prompts are finished in order of coming: the next begins only when the budget reaches it."""
    for seen in Driven(Chunked(limits.running, limits.budget), limits).go(asks):
        assert len(_in_prompt(seen, asks)) <= 1


def test_sarathi_has_a_smaller_budget_than_fastgen() -> None:
    prompts = {name: find(name).packer(EngineSpec(8, 2048, latency=PACE)) for name in ("fastgen", "sarathi")}
    room = Limits(budget=2048)
    used = {
        name: sum(next(Driven(packer, room).go([Ask(5000, 2)])).tokens.values()) for name, packer in prompts.items()
    }
    assert used == {"fastgen": 2048, "sarathi": 512}


# ---- shortest first


def mean_end(run: Driven, asks: list[Ask]) -> float:
    list(run.go(asks))
    return float(np.mean([run.ends[f"r{i}"] - ask.after for i, ask in enumerate(asks)]))


same_prompts = st.lists(st.builds(Ask, st.just(10), st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=14)


@given(same_prompts)
@EXAMPLES
def test_shortest_remaining_first_beats_first_come_on_one_server(asks: list[Ask]) -> None:
    """With exact lengths it is optimal there (Schrage); an iteration is the unit of work."""
    asks = [Ask(a.prompt, a.output, 0 if i == 0 else a.after) for i, a in enumerate(asks)]
    one = Limits(running=1, budget=100, slots=32)
    ours = mean_end(Driven(Srtf(1, 100, PACE), one), asks)
    assert ours <= mean_end(Driven(Fcfs(1), one), asks) + 1e-9
    assert ours <= mean_end(Driven(Srtf(1, 100, PACE, preempts=False), one), asks) + 1e-9


@given(loads(), ample)
@EXAMPLES
def test_shortest_job_first_never_displaces(asks: list[Ask], limits: Limits) -> None:
    for seen in Driven(Srtf(limits.running, limits.budget, PACE, preempts=False), limits).go(asks):
        assert not seen.paused - _in_prompt(seen, asks)
        assert not seen.evicted


def test_a_shorter_one_displaces_only_with_preemption() -> None:
    asks = [Ask(10, 40), Ask(10, 3, after=5)]
    ends = {}
    for preempts in (True, False):
        run = Driven(Srtf(1, 100, PACE, preempts), Limits(running=1, budget=100, slots=4))
        list(run.go(asks))
        ends[preempts] = run.ends["r1"]
    assert ends == {True: 8, False: 43}


def test_a_prompt_counts_towards_what_remains() -> None:
    run = Driven(Srtf(1, 500, PACE), Limits(running=1, budget=500, slots=4))
    assert list(next(run.go([Ask(400, 5), Ask(10, 5)])).tokens) == ["r1"]


# ---- MultiRes


@given(loads(), ample)
@EXAMPLES
def test_multires_lets_in_only_what_fits_beside_the_others(asks: list[Ask], limits: Limits) -> None:
    """Their demands are taken from what is free one by one, so no prompt is cut for another's sake.

    Unless it does not fit beside a full batch at all.
    """
    for seen in Driven(MultiRes(limits.running, limits.budget), limits).go(asks):
        for name in set(seen.waiting) & set(seen.tokens):
            prompt = asks[int(name[1:])].prompt
            assert seen.tokens[name] == prompt or prompt > limits.budget - limits.running


@given(loads(), limits)
@EXAMPLES
def test_multires_with_exact_forecasts_never_runs_out_of_kv(asks: list[Ask], limits: Limits) -> None:
    for seen in Driven(MultiRes(limits.running, limits.budget), limits).go(asks):
        assert not seen.evicted
        assert seen.copied == 0


@pytest.mark.parametrize(
    ("free", "first"),
    # of 100 blocks and 200 tokens: "long" asks for 80 tokens and 20 blocks, "broad" for 40 and 50
    [(100, "broad"), (60, "long"), (45, "long")],
)
def test_multires_takes_the_demand_nearest_to_what_is_free(free: int, first: str) -> None:
    jobs = Jobs()
    jobs.add("long", prompt=80, tokens_left=240.0, serial=1)
    jobs.add("broad", prompt=40, tokens_left=760.0, serial=2)
    if free < 100:
        row = jobs.add("old", prompt=5, tokens_left=1.0, output_tokens=1, computed=5, serial=0, blocks=100 - free)
        jobs.running[row] = True
    step = MultiRes(8, 200).pack(jobs, KvBudget(100, free, SIZE, 16), 0.0)
    assert next(name for name in jobs.names(step.order) if name != "old") == first


def test_multires_swaps_the_last_come_when_answers_outgrow_their_allocation() -> None:
    room = Limits(running=6, budget=200, blocks=20, slots=8)
    run = Driven(MultiRes(6, 200), room)
    copied = 0
    for seen in run.go([Ask(40, 60, after=i) for i in range(9)]):
        run.engine.jobs.tokens_left[:] = 1.0  # every forecast is far too short
        copied += seen.copied
        new = set(seen.waiting) & set(seen.tokens) - seen.saved
        assert not new or seen.saved <= set(seen.tokens), "who was swapped out comes back first"
    assert copied > 0


def test_multires_cuts_a_prompt_that_never_fits_beside_answers() -> None:
    run = Driven(MultiRes(4, 100), Limits(running=4, budget=100, blocks=100, slots=8))
    steps = run.go([Ask(20, 30), Ask(300, 5, after=2)])
    first = [next(steps).tokens for _ in range(4)]
    assert first[2] == {"r0": 1, "r1": 99}
    assert first[3] == {"r0": 1, "r1": 99}


# ---- round robin


@given(loads(), ample)
@EXAMPLES
def test_round_robin_gives_iterations_in_turn(asks: list[Ask], limits: Limits) -> None:
    """No iteration mixes the two; one queue has two in a row only when the other has nothing."""
    wide = Limits(limits.running, 2000, 1000, 64)
    before: bool | None = None
    for seen in Driven(RoundRobin(limits.running, 2000), wide).go(asks):
        kinds = {asks[int(name[1:])].slo == CHAT for name in seen.tokens}
        there = {asks[int(name[1:])].slo == CHAT for name in seen.inside + seen.waiting}
        if not kinds:
            continue
        assert len(kinds) == 1
        assert len(there) == 1 or kinds != {before}
        before = kinds.pop()


def test_round_robin_begins_with_a_promise_and_keeps_the_order_of_each_queue() -> None:
    asks = [Ask(10, 5), Ask(10, 5), Ask(10, 5, slo=CHAT), Ask(10, 5), Ask(10, 5, slo=CHAT), Ask(10, 5)]
    turns = Driven(RoundRobin(3, 200), Limits(running=3, budget=200)).go(asks)
    assert list(next(turns).tokens) == ["r2", "r4"]
    assert list(next(turns).tokens) == ["r0", "r1", "r3"]


def test_multires_names_who_comes_back_once() -> None:
    jobs = Jobs()
    jobs.add("back", prompt=40, output_tokens=3, computed=42, saved=42, tokens_left=9.0, serial=1)
    jobs.add("new", prompt=40, tokens_left=9.0, serial=2)
    step = MultiRes(8, 200).pack(jobs, KvBudget(100, 100, SIZE, 16), 0.0)
    assert jobs.names(step.order) == ["back", "new"]
