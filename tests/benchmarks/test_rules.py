"""The rivals' rules, each on tables made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rivals.admission import Candidates, CurrentAnswers, edf, edf_sim
from benchmarks.rivals.base import Memory, next_due, targets
from benchmarks.rivals.composite import Composite
from benchmarks.rivals.fairbatching import FairBatching
from benchmarks.rivals.jitserve import JitServe
from benchmarks.rivals.qoserve import QoServe
from benchmarks.rivals.scorpio import Scorpio
from benchmarks.rivals.slai import Slai
from benchmarks.rivals.slos_serve import SlosServe
from headway.policy.forecast.latency.online import OnlineLatency
from headway.types import Jobs
from tests.benchmarks.table import NOW, SPEC, Table

# ---- deadlines and seconds


@pytest.mark.parametrize("before", [0.0, 3000.0])
def test_a_chunk_is_the_largest_that_fits(before: float) -> None:
    packer = QoServe(SPEC)
    for limit in (0.03, 0.1, 0.3):
        chunk = packer.chunk(5, 1000, limit, before)
        assert packer.seconds(5, 1000, chunk, before) <= limit
        assert packer.seconds(5, 1000, chunk + 1, before) > limit
    assert packer.chunk(5, 1000, 0.01) == 0
    assert packer.chunk(5, 1000, 9.0) == 2043


def test_an_e2e_promise_gets_a_pace_and_a_first_deadline_before_its_end() -> None:
    jobs = Jobs()
    row = jobs.add("a", arrival=10.0, ttft=np.inf, tpot=np.inf, e2e=100.0)
    assert targets(jobs.data, row, 100.0, 0.02, 0.5) == pytest.approx((10 + 100 - 40, 0.4))
    assert targets(jobs.data, row, 500.0, 0.02, 0.5) == pytest.approx((10 + 100 - 50, 0.1))
    assert targets(jobs.data, row, 4000.0, 0.02, 0.5) == pytest.approx((10 + 100 - 80, 0.02)), "an iteration"
    chat = jobs.add("b", arrival=10.0, ttft=1.0, tpot=0.1, e2e=np.inf)
    assert targets(jobs.data, chat, 500.0, 0.02, 0.5) == pytest.approx((11.0, 0.1))


def test_an_early_first_token_is_time_for_the_others_only_on_the_papers_line() -> None:
    jobs = Jobs()
    row = jobs.add("a", arrival=10.0, ttft=5.0, tpot=0.1, e2e=np.inf, first=11.0, output_tokens=3)
    assert next_due(jobs.data, row, 15.0, 0.1, True) == pytest.approx(11.3)
    assert next_due(jobs.data, row, 15.0, 0.1, False) == pytest.approx(15.3)
    jobs.first[row] = 16.0
    assert next_due(jobs.data, row, 15.0, 0.1, False) == pytest.approx(16.3), "a late one moves the line"


def test_memory_forgets_when_another_request_takes_the_row() -> None:
    jobs, memory = Jobs(), Memory(0.0)
    row = jobs.add("a", serial=1)
    memory.of(jobs)[row] = 7.0
    assert memory.of(jobs)[row] == 7.0
    jobs.remove("a")
    assert jobs.add("b", serial=2) == row
    assert memory.of(jobs)[row] == 0.0


# ---- QoServe


def test_qoserve_prices_work_by_alpha() -> None:
    table = Table()
    table.waits("long", 1500, ttft=5.0)
    table.waits("short", 100, ttft=5.2)
    assert next(iter(table.step(QoServe(SPEC, alpha=0.0)))) == "long"
    assert next(iter(table.step(QoServe(SPEC, alpha=68.0)))) == "short"


def test_qoserve_relegates_what_cannot_start_in_time_once() -> None:
    table, packer = Table(), QoServe(SPEC, alpha=0.0)
    table.waits("lost", 2000, arrival=NOW - 1.0, ttft=1.1)
    table.waits("fine", 2000, ttft=5.0)
    table.waits("best effort", 2000)
    assert list(table.step(packer)) == ["fine", "best effort"]
    table.jobs.ttft[table.jobs.row_of["lost"]] = 60.0
    table.jobs.remove("fine")
    assert next(iter(table.step(packer))) == "best effort", "it stays relegated"
    assert next(iter(table.step(QoServe(SPEC, alpha=0.0)))) == "lost"


def test_qoserve_sizes_an_iteration_by_the_tightest_slack() -> None:
    sizes = []
    for lead in (0.05, 0.3, 5.0):
        table = Table()
        table.answers("a", tpot=0.1, made=20, first=NOW - 2.0 + lead)
        table.waits("b", 4000, ttft=9.0)
        sizes.append(sum(table.step(QoServe(SPEC)).values()))
    assert sizes == [128, 512, 2048]


def test_qoserve_without_answers_fills_the_budget_and_keeps_all_answers() -> None:
    table = Table()
    table.waits("b", 4000, ttft=9.0)
    assert table.step(QoServe(SPEC)) == {"b": 2048}
    for i in range(5):
        table.answers(f"a{i}", tpot=0.05, made=20, first=NOW - 3.0)  # late
    step = table.step(QoServe(SPEC))
    assert {f"a{i}" for i in range(5)} <= set(step)
    assert sum(step.values()) == 128


# ---- SLOs-Serve


def candidates(*rows: tuple[float, float, float, float, bool]) -> Candidates:
    """Candidates of (due, work, pace, left, new)."""
    due, work, pace, left, new = (np.array(column) for column in zip(*rows, strict=True))
    return Candidates(due, work, pace, np.full(due.size, 100.0), left, np.full(due.size, 200.0), new)


NOBODY = CurrentAnswers(*(np.empty(0) for _ in range(4)))
THETA = OnlineLatency().theta
ROOM = 1e6


@pytest.mark.parametrize("plan", [edf, edf_sim])
def test_a_plan_admits_what_fits_before_the_deadlines_of_those_before(plan: object) -> None:
    assert callable(plan)
    three = candidates((1.0, 0.5, 0.1, 20.0, False), (1.2, 0.3, 0.1, 20.0, True), (1.3, 0.9, 0.1, 20.0, True))
    assert plan(three, NOBODY, ROOM, 0.0, THETA, 1.0).tolist() == [True, True, False]
    assert plan(three, NOBODY, 250.0, 0.0, THETA, 1.0).tolist() == [True, False, False], "no KV for two"


def test_where_the_admitted_do_not_fit_every_new_one_is_declined() -> None:
    two = candidates((1.0, 1.5, 0.1, 20.0, False), (9.0, 0.1, 0.1, 20.0, True))
    assert edf(two, NOBODY, ROOM, 0.0, THETA, 1.0).tolist() == [True, False]


def test_answers_take_of_the_time_for_prompts() -> None:
    one = candidates((1.0, 0.6, 0.05, 20.0, True))
    many = CurrentAnswers(np.full(60, 0.01), np.full(60, 0.05), np.full(60, 100.0), np.full(60, 500.0))
    assert edf(one, NOBODY, ROOM, 0.0, THETA, 1.0).all()
    assert not edf(one, many, ROOM, 0.0, THETA, 1.0).any()


def test_only_the_replay_knows_when_answers_end() -> None:
    one = candidates((3.0, 2.0, 0.05, 20.0, True))
    brief = CurrentAnswers(np.full(60, 0.01), np.full(60, 0.05), np.full(60, 100.0), np.full(60, 4.0))
    assert not edf(one, brief, ROOM, 0.0, THETA, 1.0).any()
    assert edf_sim(one, brief, ROOM, 0.0, THETA, 1.0).all()


def test_slos_serve_leaves_answers_out_that_do_not_fall_due() -> None:
    table, packer = Table(), SlosServe(SPEC)
    table.answers("due", tpot=0.05, made=20, first=NOW - 1.0 + 0.03)
    table.answers("ahead", tpot=0.2, made=20, first=NOW - 3.0)
    for name in ("due", "ahead"):
        packer.tiers.of(table.jobs)[table.jobs.row_of[name]] = 1.0
    assert set(table.step(packer)) == {"due", "ahead"}, "no prompt waits"
    table.waits("prompt", 400, ttft=2.0, tpot=0.2)
    assert set(table.step(packer)) == {"due", "prompt"}


def test_slos_serve_puts_the_declined_behind_the_admitted_for_good() -> None:
    table, packer = Table(), SlosServe(SPEC)
    table.waits("lost", 2000, ttft=0.2, tpot=0.1)
    assert table.step(packer) == {"lost": 2000}, "best effort while nothing else is there"
    table.waits("fine", 2048, ttft=3.0, tpot=0.1)
    assert next(iter(table.step(packer))) == "fine"
    assert packer.tiers.of(table.jobs)[table.jobs.row_of["lost"]] == 2.0


# ---- FairBatching


def test_fairbatching_skips_answers_that_are_ahead_for_prompts() -> None:
    table = Table()
    table.answers("tight", tpot=0.05, made=20, first=NOW - 0.97)
    table.answers("ahead", tpot=0.05, made=80, first=NOW - 1.0)
    table.waits("prompt", 4000, ttft=2.0, tpot=0.05)
    step = table.step(FairBatching(SPEC))
    assert set(step) == {"tight", "prompt"}
    table.jobs.remove("prompt")
    assert set(table.step(FairBatching(SPEC))) == {"tight", "ahead"}


def test_fairbatching_serves_the_latest_prompt_first() -> None:
    table = Table()
    table.waits("fine", 800, ttft=2.0, tpot=0.1)
    table.waits("late", 800, arrival=NOW - 50.0, ttft=2.0, tpot=0.1)
    assert next(iter(table.step(FairBatching(SPEC)))) == "late"


# ---- Scorpio


def test_scorpio_computes_prompts_alone_and_answers_by_credit() -> None:
    table, packer = Table(), Scorpio(SPEC)
    table.answers("tight", tpot=0.1, made=1)
    table.answers("loose", tpot=0.2, made=1)
    seen = [set(table.step(packer)) for _ in range(4)]
    assert [("loose" in step) for step in seen] == [False, True, False, True]
    assert all("tight" in step for step in seen)
    table.waits("prompt", 300, ttft=2.0, tpot=0.1)
    assert table.step(packer) == {"prompt": 300}


def test_scorpio_guards_the_tightest_tpot_at_the_door() -> None:
    table, packer = Table(), Scorpio(SPEC, factor=1.0)
    for i in range(8):
        table.answers(f"a{i}", tpot=0.018, made=1, left=10)
    table.waits("prompt", 300, ttft=2.0, tpot=0.1)
    assert "prompt" in table.step(packer), "the tightest have time for a loose one"
    for i in range(8, 12):
        table.answers(f"a{i}", tpot=0.018, made=1, left=10)
    assert "prompt" not in table.step(packer)


def test_scorpio_puts_behind_what_would_be_late() -> None:
    table, packer = Table(), Scorpio(SPEC)
    table.waits("first", 1000, ttft=0.5, tpot=0.2)
    table.waits("second", 1000, ttft=0.51, tpot=0.2)
    table.waits("later", 1000, ttft=5.0, tpot=0.2)
    assert list(table.step(packer)) == ["first"]
    table.jobs.remove("first")
    assert list(table.step(packer)) == ["later"], "not the second, which was behind from the start"


# ---- JITServe


def test_jitserve_prefers_what_can_be_on_time() -> None:
    table, packer = Table(), JitServe(SPEC, batch=1)
    table.waits("late", 100, arrival=NOW - 9.0, e2e=8.0)
    table.waits("fine", 100, e2e=8.0)
    table.waits("best effort", 100)
    assert list(table.step(packer)) == ["fine"]


def test_jitserve_changes_three_places_at_a_refresh() -> None:
    table, packer = Table(), JitServe(SPEC, batch=6)
    for i in range(6):
        table.waits(f"old{i}", 10, arrival=NOW - 9.0, e2e=8.0)
    assert len(table.step(packer)) == 6
    for i in range(6):
        table.waits(f"new{i}", 10, e2e=8.0)
    assert not any(name.startswith("new") for name in table.step(packer, NOW + 0.1))
    step = table.step(packer, NOW + 0.4)
    assert sum(name.startswith("new") for name in step) == 3


# ---- SLAI


def test_slai_takes_the_shortest_prompt_and_leaves_answers_that_can_wait() -> None:
    table, packer = Table(), Slai(SPEC, factor=1.0)
    table.answers("patient", tpot=9.0, made=5)
    table.answers("urgent", tpot=0.011, made=5)
    table.waits("long", 900, ttft=1.0)
    table.waits("short", 300, ttft=1.0)
    packer.mean = 0.02
    step = table.step(packer)
    assert list(step)[:2] == ["urgent", "short"]
    assert "patient" not in step
    assert sum(step.values()) == 512


def test_slai_counts_from_the_last_token() -> None:
    table, packer = Table(), Slai(SPEC, factor=0.0)
    table.answers("a", tpot=0.1, made=5)
    table.waits("prompt", 9000)
    assert "a" not in table.step(packer, NOW), "its last token is new"
    assert "a" in table.step(packer, NOW + 0.15)
    table.out("a")
    assert "a" not in table.step(packer, NOW + 0.2), "the next is due 0.1 s after that one"


# ---- the composite


def test_the_composite_serves_the_admitted_before_the_declined() -> None:
    table, packer = Table(), Composite(SPEC)
    table.waits("lost", 100, ttft=0.001, tpot=0.1)
    table.waits("fine", 4000, ttft=5.0, tpot=0.1)
    assert next(iter(table.step(packer))) == "fine"
