"""The default recipe's packer: which promises it keeps, and from when a request is lost."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.core.engine_spec import Caution, PromisesConfig
from headway.policy.core.feasibility import Pace
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.pack.promises.iteration import seconds_allowed, usual_seconds
from headway.policy.pack.promises.outlook import (
    ANSWER,
    DISTANT,
    FAR,
    HOPE,
    LOST,
    OTHER,
    PROMPT,
    can_wait,
    in_pace,
    in_progress,
    made_up_for,
    outlook_of,
    pace_of,
    pressure_of,
    reserved_of,
    size_of,
    under_pressure,
)
from headway.policy.pack.promises.packer import kept_of, outlooks_of
from headway.policy.pack.promises.selection import select
from tests.pack.keep import NONE, ROOM, answer, jobs, level, pace_among, packer, ran


def test_levels() -> None:
    assert level({}) == OTHER
    assert level({"ttft": 1.0}) == PROMPT
    assert level({"ttft": 1.0}, now=0.99) == LOST, "its prompt takes longer than that"
    assert level({"e2e": 1.0}) == PROMPT
    assert level({"e2e": 1.0}, now=0.9) == LOST
    assert (level({"e2e": 300.0}), level({"e2e": 86400.0})) == (FAR, DISTANT)
    assert level({"e2e": 1.0, "spread": 1.0}, now=0.9) == HOPE, "the answer may be short"
    assert level(answer(ttft=1.0, tpot=0.1), now=0.5) == ANSWER
    assert level(answer(ttft=0.05, tpot=0.1), now=0.5) == LOST, "the first token came late"
    assert level(answer(ttft=1.0, tpot=0.02), now=5.0) == LOST, "it cannot catch up"
    assert level(answer(ttft=1.0, tpot=0.02, tokens_left=500.0), now=0.5) == ANSWER, "it can"


@pytest.mark.parametrize("spread", [0.0, 1e-4])
def test_of_a_batch_that_is_too_slow_some_answers_are_given_up_and_the_others_kept(spread: float) -> None:
    """An iteration of 60 takes 43 ms, of 30 26 ms. All are behind; alone, each could catch up."""
    rows = [answer(ttft=1.0, tpot=0.03, tokens_left=100.0, first=0.1 - i * spread) for i in range(60)]
    loose = [answer(ttft=1.0, tpot=0.2, tokens_left=100.0, first=-1.0) for _ in range(5)]
    late = [answer(e2e=0.2, tokens_left=100.0) for _ in range(40)]
    for table in (jobs(*rows), jobs(*rows, *loose, *late)):
        theta = OnlineLatency().theta
        answers = in_progress(PromisesConfig(), table.data, table.rows(), 0.3)
        pace = pace_of(table.data, answers, theta)
        chosen = in_pace(packer().params, table.data, answers, 0.3, theta, pace)
        kept = pace_of(table.data, chosen.pace, theta)
        levels = outlooks_of(packer().params, table.data, table.rows(), 0.3, theta, kept, chosen.lost).level
        count = (levels[:60] == ANSWER).sum()
        assert kept.token <= 0.03 < 0.04 < pace.token
        assert 25 < count == chosen.pace.size < 50
        assert (levels[:count] == ANSWER).all(), "those least behind"
        assert (levels[60:65] == ANSWER).all(), "those whose tpot is longer than all take"


@pytest.mark.parametrize(("behind", "most"), [(0.0, 0.03), (0.2, 0.028)])
def test_answers_with_time_before_their_deadline_wait_for_the_tpot_of_others(behind: float, most: float) -> None:
    """An iteration of 60 takes 43 ms. One answer that is behind asks for shorter ones than its tpot."""
    now = 0.1 + 5 * 0.0297
    rows = [answer(ttft=1.0, tpot=0.03, tokens_left=50.0, first=0.1 - behind * (i == 0)) for i in range(20)]
    rows += [answer(e2e=20.0 + i, tokens_left=50.0) for i in range(40)]
    table, theta = jobs(*rows), OnlineLatency().theta
    step = packer(running=64).pack(table, ROOM, now)
    deadlines = sorted(ran(step)[20:])
    assert set(ran(step)[:20]) == set(range(20)), "whatever has a tpot runs"
    assert 0 < len(deadlines) < 25
    assert deadlines == list(range(20, 20 + len(deadlines))), "then those with the least time"
    assert pace_of(table.data, ran(step), theta).token <= most
    assert step.evict.size == 0


def test_a_gap_above_its_itl_is_lost_and_before_that_it_limits_the_iteration() -> None:
    smooth = answer(ttft=1.0, tpot=0.1, itl=0.1, last=0.5, tokens_left=20.0)
    assert level(smooth, now=0.55) == ANSWER
    assert level(smooth | {"gap": 0.11}, now=0.55) == LOST, "what it makes good later counts for its mean alone"
    assert level(smooth, now=0.7) == LOST
    now, theta, keep = 0.2, OnlineLatency().theta, PromisesConfig(itl_margin=0.1)
    for itl, slow, most in (np.inf, 2.0, 0.2), (0.1, 1.05, 0.09), (0.1, 1.25, 0.08):
        params = under_pressure(packer(keep).params, 1.0, all_promised=True, slow=slow)
        table = jobs(answer(ttft=1.0, tpot=0.1, itl=itl, last=now, tokens_left=10.0), {"ttft": 5.0})
        pace = pace_among(table)
        outlooks = outlooks_of(params, table.data, table.rows(), now, theta, pace, NONE)
        outlook = kept_of(table.data, outlooks, theta, pace)
        limits = seconds_allowed(params, table.data, outlook, now, theta, 0.2, pace)
        assert limits.first >= limits.plain >= limits.spare
        assert limits.first == pytest.approx(most) if itl < np.inf else limits.first > most - 1e-9


def test_answers_with_an_itl_compute_in_each_iteration_and_their_kv_is_kept_free() -> None:
    """The batch is too small for all: those with a mean alone take turns, far ahead as they are."""
    ahead = {"ttft": 1.0, "tpot": 0.1, "first": -0.5, "tokens_left": 50.0, "last": 0.1}
    rows = [answer(**ahead, itl=0.1 if i % 2 else np.inf) for i in range(12)]
    step = packer(running=8).pack(jobs(*rows), ROOM, 0.11)
    assert set(range(1, 12, 2)) <= set(ran(step)[:8].tolist())
    assert can_wait(jobs(rows[0]).data, 0)
    assert not can_wait(jobs(rows[1]).data, 0)
    held = [reserved_of(jobs(row).data, 0, 16, 0.0) for row in rows[:2]]
    assert held[1] - held[0] == pytest.approx(50 / 16)


def test_prompts_leave_an_answer_behind_its_tpot_the_time_to_catch_up() -> None:
    table, theta = jobs(answer(ttft=1.0, tpot=0.1, tokens_left=10.0), {"ttft": 5.0}), OnlineLatency().theta
    params, pace = packer(PromisesConfig(tpot_margin=0.0)).params, pace_among(table)

    def longest(lead: float) -> float:
        now = 0.1 + 5 * 0.1 - lead
        outlooks = outlooks_of(params, table.data, table.rows(), now, theta, pace, NONE)
        outlook = kept_of(table.data, outlooks, theta, pace)
        return seconds_allowed(params, table.data, outlook, now, theta, 0.2, pace).first

    assert longest(0.0) == pytest.approx(0.1)
    assert longest(-0.4) == pytest.approx(0.1 - 0.4 / 20.0), "should it be twice as long as expected"
    assert longest(-1.5) == pytest.approx(0.06), "and prompts go on, too"


def test_a_prompt_with_a_deadline_starts_early_enough_for_a_long_answer() -> None:
    """An answer of 100 tokens takes about 1 s."""
    theta = OnlineLatency().theta

    def start(e2e: float, **more: float) -> float:
        table = jobs({"e2e": e2e, "tokens_left": 100.0} | more)
        params = under_pressure(packer().params, 1.0, all_promised=True, slow=1.0)
        return outlook_of(params, table.data, 0, 0.0, theta, pace_among(table))[1]

    alone = 100.0 * pace_among(jobs({})).token
    assert 20.0 - start(20.0) == pytest.approx(3.5 * alone, rel=0.1)
    assert start(4.0 * alone) == pytest.approx(2.0 * alone, rel=0.1), "unless half of the time is left"
    assert 20.0 - start(20.0, **answer()) == pytest.approx(1.5 * alone, rel=0.1), "once it has begun"


@pytest.mark.parametrize(
    ("row", "until"),
    [({"ttft": 1.0}, 181.0), ({"e2e": 600.0}, 1200.0), (answer(ttft=0.05, tpot=2.0, tokens_left=45.0), 280.05)],
)
def test_a_lost_promise_counts_for_a_while_after_it_was_due(row: dict[str, float], until: float) -> None:
    """For three minutes, or as long as it had, at most half an hour."""
    table, theta, params = jobs(row), OnlineLatency().theta, packer().params
    for now, expected in ((until - 0.01, 1.0), (until + 0.01, 0.0)):
        outlook = outlooks_of(params, table.data, table.rows(), now, theta, pace_among(table), NONE)
        assert outlook.level[0] == LOST
        assert pressure_of(params.keep, table.data, outlook, now, theta) == expected


@given(st.lists(st.tuples(st.integers(2, 400), st.integers(1, 60)), min_size=1, max_size=7))
def test_under_overload_as_many_prompts_as_possible_are_kept(prompts: list[tuple[int, int]]) -> None:
    """Moore and Hodgson's rule: on one machine no other choice has more on time."""
    rows = [{"prompt": tokens, "ttft": due / 100, "tokens_left": 1.0} for tokens, due in prompts]
    table, theta = jobs(*rows), OnlineLatency().theta
    params, pace = packer(running=64).params, pace_among(table)
    outlooks = outlooks_of(params, table.data, table.rows(), 0.0, theta, pace, NONE)
    outlook = kept_of(table.data, outlooks, theta, pace)
    select(params, table.data, outlook, ROOM, 0.0, theta, pace, np.inf, np.inf, 0.5)
    assert np.count_nonzero(outlook.level < OTHER) == _most_on_time(_prompts(rows))


def test_prompts_pay_the_base_of_each_of_their_iterations() -> None:
    table, theta = jobs(*[{"ttft": 1.0, "tokens_left": 1.0}] * 40), OnlineLatency().theta
    params, pace = packer(running=64).params, pace_among(table)
    kept = []
    for longest in (np.inf, 3 * pace.base, 1.5 * pace.base):
        outlooks = outlooks_of(params, table.data, table.rows(), 0.0, theta, pace, NONE)
        outlook = kept_of(table.data, outlooks, theta, pace)
        select(params, table.data, outlook, ROOM, 0.0, theta, pace, np.inf, longest, 0.5)
        kept.append(np.count_nonzero(outlook.level < OTHER))
    assert 40 >= kept[0] > kept[1] > kept[2] > 1


@given(st.floats(-0.5, 0.5), st.floats(1.0, 50.0), st.floats(0.0, 1.0))
def test_no_iteration_is_shorter_because_answers_may_fall_behind(lead: float, left: float, spread: float) -> None:
    table = jobs(answer(ttft=1.0, tpot=0.05, tokens_left=left, spread=spread), {"ttft": 0.2, "tpot": 0.05})
    now, theta, params, pace = 0.1 + 5 * 0.05 - lead, OnlineLatency().theta, packer().params, pace_among(table)
    outlook = kept_of(table.data, outlooks_of(params, table.data, table.rows(), now, theta, pace, NONE), theta, pace)
    limits = seconds_allowed(params, table.data, outlook, now, theta, 0.2, pace)
    assert limits.first >= min(limits.plain, limits.tpot)


@pytest.mark.parametrize("made", [1, 100, 220, 300])
def test_what_an_answer_makes_up_for_follows_from_how_short_its_rest_can_be(made: int) -> None:
    """Of 400 tokens with a deviation of 120: near the 7th percentile of those that have come so far."""
    row = answer(output_tokens=made, tokens_left=400.0 - made, spread=0.3, tpot=1.0)
    keep = PromisesConfig(short_answer_stds=1.5, tpot_margin=0.0)
    tokens = made_up_for(keep, jobs(row).data, 0, Pace(1, 0.0, 0.0, 0.0))
    lengths = np.random.default_rng(0).normal(400.0, 120.0, 100_000)
    assert tokens == pytest.approx(np.quantile(lengths[lengths > made], 0.067) - made, abs=20.0)


@pytest.mark.parametrize(("ttft", "first"), [(0.3, 0.2), (0.75, 0.3), (8.0, 0.4), (np.inf, 0.2)])
def test_an_iteration_with_prompts_takes_longer_where_they_have_the_time(ttft: float, first: float) -> None:
    table, theta = jobs({"ttft": ttft, "e2e": 20.0}, {}), OnlineLatency().theta
    params, pace = packer().params, pace_among(table)
    outlook = kept_of(table.data, outlooks_of(params, table.data, table.rows(), 0.0, theta, pace, NONE), theta, pace)
    usual = usual_seconds(params, table.data, table.rows(), theta)
    may = seconds_allowed(params, table.data, outlook, 0.0, theta, usual, pace)
    assert may.first == pytest.approx(first)
    assert may.spare == pytest.approx(0.2), "others fill it no further than usual"


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 500)), min_size=1, max_size=7))
def test_with_one_slot_as_many_answers_as_possible_are_kept(answers: list[tuple[int, int]]) -> None:
    """The slot is the machine then, and a request occupies it until its answer is complete."""
    keep = PromisesConfig(lost=Caution(1.0, 0.0, 0.0, 1.0, True), defer_beyond_s=np.inf)
    rows = [{"tokens_left": float(tokens), "e2e": due / 100} for tokens, due in answers]
    table, theta = jobs(*rows), OnlineLatency().theta
    params, pace = (packer(keep, running=1).params, pace_among(table))
    outlook = kept_of(table.data, outlooks_of(params, table.data, table.rows(), 0.0, theta, pace, NONE), theta, pace)
    select(params, table.data, outlook, ROOM, 0.0, theta, pace, np.inf, np.inf, 0.0)
    timed = [(row["e2e"], size_of(table.data, i, theta, pace)) for i, row in enumerate(rows)]
    assert np.count_nonzero(outlook.level < OTHER) == _most_on_time(timed)


def _prompts(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    """Return due instants and seconds of rows that were promised a first token."""
    latency = OnlineLatency()
    return [(row["ttft"], float(latency.prefill_seconds(np.array(row["prompt"], float)))) for row in rows]


def _on_time(timed: list[tuple[float, float]]) -> bool:
    """Tell whether all are in time one after another, by latest start; due instants and seconds."""
    now = 0.0
    for due, seconds in sorted(timed, key=lambda both: both[0] - both[1]):
        if now > due - seconds + 1e-12:
            return False
        now += seconds
    return True


def _most_on_time(timed: list[tuple[float, float]]) -> int:
    sizes = range(len(timed), 0, -1)
    return next((n for n in sizes if any(_on_time(list(some)) for some in combinations(timed, n))), 0)
