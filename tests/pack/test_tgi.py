"""TGI: prompts apart from answers, KV for whole answers, and when the next prompts come."""

from __future__ import annotations

from hypothesis import given, settings

from headway.policy.memory.budget import KvBudget
from headway.policy.pack.baselines.arrival_order import Tgi
from headway.types import Jobs
from tests.pack.driven import SIZE, Ask, Driven, Limits, limits, loads

EXAMPLES = settings(max_examples=20)


def tgi(limits: Limits) -> Driven:
    return Driven(Tgi(limits.running, limits.budget), limits)


@given(loads(), limits)
@EXAMPLES
def test_prompts_and_answers_never_share_an_iteration(asks: list[Ask], limits: Limits) -> None:
    for seen in tgi(limits).go(asks):
        assert not (seen.prompts and seen.answers)
        assert not (seen.answers and seen.paused), "answers wait for prompts and for nothing else"


@given(loads(), limits)
@EXAMPLES
def test_with_true_lengths_no_request_loses_its_kv(asks: list[Ask], limits: Limits) -> None:
    for seen in tgi(limits).go(asks):
        assert not seen.evicted


@given(loads(), limits)
@EXAMPLES
def test_requests_are_taken_by_arrival(asks: list[Ask], limits: Limits) -> None:
    for seen in tgi(limits).go(asks):
        came = [name for name in seen.waiting if name in seen.tokens]
        assert came == seen.waiting[: len(came)]


def test_kv_is_held_for_prompt_and_whole_answer() -> None:
    """Each needs 2 blocks for its prompt and 5 with its answer: two at a time fit into 12."""
    room = Limits(running=8, budget=256, blocks=12, slots=16)
    steps = tgi(room).go([Ask(30, 50) for _ in range(3)])
    assert list(next(steps).tokens) == ["r0", "r1"]
    assert max(len(seen.tokens) for seen in steps) == 2


def test_a_few_new_prompts_wait_for_twenty_iterations_and_enough_of_them_for_one() -> None:
    room = Limits(running=32, budget=2000, blocks=1000, slots=32)
    few = [Ask(10, 60) for _ in range(10)] + [Ask(10, 5, after=3) for _ in range(2)]
    enough = [Ask(10, 60) for _ in range(10)] + [Ask(10, 5, after=3) for _ in range(3)]
    begins = {}
    for name, asks in (("few", few), ("enough", enough)):
        steps = [bool(seen.prompts) for seen in tgi(room).go(asks)]
        begins[name] = [i for i, prompts in enumerate(steps) if prompts]
    assert begins == {"few": [0, 20], "enough": [0, 3]}


def test_a_prompt_beyond_the_budget_comes_in_parts() -> None:
    steps = tgi(Limits(running=4, budget=100, blocks=100, slots=8)).go([Ask(250, 3), Ask(10, 3)])
    assert [next(steps).tokens for _ in range(4)] == [{"r0": 100}, {"r0": 100}, {"r0": 50}, {"r0": 1}]
    assert next(steps).tokens == {"r1": 10}


def test_an_answer_that_outgrows_its_forecast_takes_from_the_last_to_arrive() -> None:
    jobs = Jobs()
    for i, blocks in enumerate((3, 2)):
        row = jobs.add(f"r{i}", prompt=20, arrival=float(i), tokens_left=1.0)
        jobs.running[row], jobs.output_tokens[row] = True, blocks * SIZE - 19
        jobs.computed[row], jobs.blocks[row] = blocks * SIZE, blocks
    step = Tgi(4, 100, since=1).pack(jobs, KvBudget(5, 0, SIZE, 8), 0.0)
    assert step.order.tolist() == [0]
    assert step.evict.tolist() == [1]
