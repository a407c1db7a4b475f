"""Allocation: slots, KV blocks and tokens go to the most urgent first, and never exceed what there is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.pack.allocation import allocate, grant, missing
from headway.policy.pack.ranked import Fcfs, Ranked, Slack, by_due, by_priority
from headway.ports import Packer
from headway.types import Ints, Step
from tests.core.tables import SIZE, Moment, moments

EXAMPLES = settings(max_examples=100)


def arranged(moment: Moment) -> Step:
    return allocate(moment.jobs, moment.ranked, moment.kv_budget, moment.max_running, moment.budget)


def granted(step: Step) -> Ints:
    assert step.tokens is not None
    assert step.tokens.shape == step.order.shape
    return step.tokens


def displaced(moment: Moment, step: Step) -> list[int]:
    """Rows that hold KV, are not held by control and do not run."""
    running = moment.ranked[moment.jobs.running[moment.ranked]]
    return [int(row) for row in running if row not in step.order]


def behind(moment: Moment, row: int) -> list[int]:
    """Rows less urgent than `row`."""
    ranked: list[int] = moment.ranked.tolist()
    return ranked[ranked.index(row) + 1 :]


def after(moment: Moment, step: Step) -> Ints:
    """Blocks that each row of the step's order holds once its tokens are computed."""
    jobs = moment.jobs
    return moment.kv_budget.blocks_for(jobs.computed[step.order] + granted(step))


@EXAMPLES
@given(moments())
def test_a_step_names_rows_once_and_no_more_than_the_batch_holds(moment: Moment) -> None:
    step = arranged(moment)
    assert step.order.size <= moment.max_running
    assert len({*step.order.tolist()}) == step.order.size
    assert len({*step.evict.tolist()}) == step.evict.size
    assert not set(step.order.tolist()) & set(step.evict.tolist())
    assert set(step.order.tolist()) | set(step.evict.tolist()) <= set(moment.ranked.tolist())


@EXAMPLES
@given(moments())
def test_only_rows_that_hold_kv_are_evicted(moment: Moment) -> None:
    assert moment.jobs.running[arranged(moment).evict].all()


@EXAMPLES
@given(moments())
def test_order_is_by_urgency(moment: Moment) -> None:
    place = {row: i for i, row in enumerate(moment.ranked.tolist())}
    order = [place[row] for row in arranged(moment).order.tolist()]
    assert order == sorted(order)


@EXAMPLES
@given(moments())
def test_tokens_stay_within_the_budget_and_within_what_is_missing(moment: Moment) -> None:
    step = arranged(moment)
    tokens = granted(step)
    assert tokens.sum() <= moment.budget
    assert (tokens <= missing(moment.jobs, step.order)).all()
    assert (tokens >= ~moment.jobs.running[step.order]).all(), "a row is admitted without tokens"


@EXAMPLES
@given(moments())
def test_what_runs_fits_into_free_and_evicted_blocks(moment: Moment) -> None:
    step, jobs = arranged(moment), moment.jobs
    grows = np.maximum(after(moment, step) - jobs.blocks[step.order], 0)
    assert grows.sum() <= moment.kv_budget.free + jobs.blocks[step.evict].sum()


@EXAMPLES
@given(moments())
def test_an_admitted_row_has_blocks_for_its_whole_prompt(moment: Moment) -> None:
    step, jobs = arranged(moment), moment.jobs
    tokens = granted(step)
    free = moment.kv_budget.free + int(jobs.blocks[step.evict].sum())
    for row, n in zip(step.order.tolist(), tokens.tolist(), strict=True):
        whole = -(-int(jobs.prompt[row] + jobs.output_tokens[row]) // SIZE)
        assert jobs.running[row] or whole <= free
        free -= max(-(-int(jobs.computed[row] + n) // SIZE) - int(jobs.blocks[row]), 0)


@EXAMPLES
@given(moments())
def test_slots_suffice_for_running_paused_held_and_admitted(moment: Moment) -> None:
    step, jobs = arranged(moment), moment.jobs
    admitted = int(np.count_nonzero(~jobs.running[step.order]))
    assert int(jobs.running.sum()) - step.evict.size + admitted <= moment.kv_budget.slots


@EXAMPLES
@given(moments())
def test_no_row_is_displaced_by_a_less_urgent_newcomer(moment: Moment) -> None:
    """Not even when memory is short: running rows that need no more blocks continue, newcomers wait."""
    step, jobs = arranged(moment), moment.jobs
    newcomers = set(step.order[~jobs.running[step.order]].tolist())
    if not jobs.running[step.order].any() and len(newcomers) == 1:
        return  # no running row could free blocks: the alternative is an idle engine
    for row in displaced(moment, step):
        assert not newcomers & set(behind(moment, row))


@EXAMPLES
@given(moments())
def test_only_lack_of_memory_lets_a_less_urgent_row_run_on_while_another_pauses(moment: Moment) -> None:
    step, jobs = arranged(moment), moment.jobs
    for row in displaced(moment, step):
        want = int(missing(jobs, np.array([row]))[0])
        grows = -(-int(jobs.computed[row] + min(want, moment.budget)) // SIZE) > jobs.blocks[row]
        less_urgent = set(behind(moment, row)) & set(step.order.tolist())
        assert row in step.evict or grows or not less_urgent


@EXAMPLES
@given(moments())
def test_an_evicted_row_could_not_have_been_kept_by_evicting_less_urgent_ones(moment: Moment) -> None:
    step, jobs = arranged(moment), moment.jobs
    gone, runs = set(step.evict.tolist()), set(step.order.tolist())
    blocks, slots = jobs.blocks.copy(), 0
    for row in step.order:
        whole = jobs.prompt[row] + jobs.output_tokens[row] + 1
        extra = 0 if jobs.running[row] else 1
        step_end = jobs.computed[row] + (min(missing(jobs, np.array([row]))[0], moment.budget))
        needs = max(blocks[row], -(-int(whole if extra else step_end) // SIZE)) + extra
        blocks[row] = min(needs, moment.kv_budget.total)
    room = moment.kv_budget.free + int(jobs.blocks[moment.ranked].sum())
    slots = moment.kv_budget.slots - int((jobs.running & jobs.held).sum())
    for row in moment.ranked.tolist():
        if row in gone:
            assert blocks[row] > room or slots < 1
        elif row in runs or jobs.running[row]:
            room, slots = room - int(blocks[row]), slots - 1


@EXAMPLES
@given(moments())
def test_something_runs_if_any_row_fits_in_free_memory(moment: Moment) -> None:
    """Held rows may have taken so much that no row fits; any row that fits the rest runs."""
    step, jobs, kv_budget = arranged(moment), moment.jobs, moment.kv_budget
    want = np.minimum(missing(jobs, moment.ranked), moment.budget)
    grows = kv_budget.blocks_for(jobs.computed[moment.ranked] + want) - jobs.blocks[moment.ranked]
    whole = kv_budget.blocks_for(jobs.prompt[moment.ranked] + jobs.output_tokens[moment.ranked] + 1) + 1
    seats = kv_budget.slots - int(jobs.running.sum())
    could = np.where(jobs.running[moment.ranked], grows <= kv_budget.free, (whole <= kv_budget.free) & (seats > 0))
    assert granted(step).sum() > 0 or not could.any()


@EXAMPLES
@given(moments())
def test_a_decode_pauses_only_for_lack_of_slots_tokens_or_memory(moment: Moment) -> None:
    """No slot is kept free for a prompt that gets no tokens in this step."""
    step, jobs = arranged(moment), moment.jobs
    tokens = granted(step)
    for row in displaced(moment, step):
        grows = moment.kv_budget.blocks_for(np.array([jobs.computed[row] + 1]))[0] > jobs.blocks[row]
        decode = missing(jobs, np.array([row]))[0] == 1
        full = step.order.size == moment.max_running or tokens.sum() == moment.budget
        assert row in step.evict or not decode or grows or full


@EXAMPLES
@given(moments(held=False))
def test_the_most_urgent_row_always_runs(moment: Moment) -> None:
    assume(moment.ranked.size and moment.budget >= moment.max_running)
    step = arranged(moment)
    assert step.order[0] == moment.ranked[0]
    assert granted(step)[0] > 0


@EXAMPLES
@given(moments(), st.integers(1, 40))
def test_decodes_get_one_token_each_before_prompts_get_the_rest(moment: Moment, budget: int) -> None:
    jobs, order = moment.jobs, moment.ranked
    tokens, want = grant(jobs, order, budget), missing(jobs, order)
    decodes = jobs.running[order] & (want == 1)
    assert tokens[decodes].sum() == min(decodes.sum(), budget)
    assert tokens.sum() == min(want.sum(), budget)
    prompts, wants = tokens[~decodes], want[~decodes]
    for i in np.flatnonzero(prompts < wants):
        assert not prompts[i + 1 :].any(), "a later prompt got tokens before an earlier one had all of its"


PACKERS: dict[str, Callable[[Moment], Packer]] = {
    "fcfs": lambda m: Fcfs(m.max_running),
    "priority": lambda m: Ranked(by_priority, m.max_running, m.budget),
    "edf": lambda m: Ranked(by_due, m.max_running, m.budget),
    "slack": lambda m: Slack(m.max_running, m.budget, OnlineLatency(), min_chunk=8),
}


@pytest.mark.parametrize("name", PACKERS)
@settings(max_examples=50)
@given(moment=moments())
def test_packers_leave_held_rows_alone(name: str, moment: Moment) -> None:
    step = PACKERS[name](moment).pack(moment.jobs, moment.kv_budget, 50.0)
    assert not moment.jobs.held[step.order].any()
    assert not moment.jobs.held[step.evict].any()
    assert len({*step.order.tolist()}) == step.order.size
    assert step.tokens is None or step.tokens.sum() <= moment.budget
