"""The packer of SLO-aware scheduling: all that every packer owes, the order, and when it is searched anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import headway.policy.pack.annealed as module
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.pack.annealed import Annealed
from headway.types import Slo
from tests.core.test_packers import NOW, Table
from tests.pack.driven import SIZE, Ask, Driven, Limits, limits, loads


def packer(running: int = 1, **more: bool) -> Annealed:
    return Annealed(EngineSpec(running, 2048), **more)


@pytest.mark.parametrize("preempts", [True, False])
@given(loads(), limits)
@settings(max_examples=13)
def test_every_request_is_served_and_no_iteration_is_wasted(preempts: bool, asks: list[Ask], limits: Limits) -> None:
    """`Driven` checks each iteration: blocks, slots, budget, and that something is computed."""
    run = Driven(Annealed(EngineSpec(limits.running, limits.budget, SIZE), preempts=preempts), limits)
    for _ in run.go(asks):
        pass
    assert len(run.ends) == len(asks)


def test_the_order_meets_as_many_slos_as_it_can() -> None:
    """Each takes about 2 s by the prior latency: one can be met, the other is late already."""
    table = Table().waiting("late", 16, e2e=0.5, tokens_left=200.0)
    table.waiting("tight", 16, e2e=3.0, tokens_left=200.0).waiting("loose", 16, e2e=9.0, tokens_left=200.0)
    assert table.pack(packer()).order == ["tight"]


def test_what_runs_pauses_for_what_would_be_late() -> None:
    table = Table().running("long", 160, e2e=60.0, tokens_left=900.0)
    table.waiting("short", 16, e2e=2.0, tokens_left=50.0)
    assert table.pack(packer()).order == ["short"]
    assert table.pack(packer()).evict == []
    assert table.pack(packer(preempts=False)).order == ["long"]


def test_what_was_promised_nothing_runs_behind_by_arrival() -> None:
    table = Table().waiting("b1", tokens_left=1.0, serial=1).waiting("b2", tokens_left=1.0, serial=2)
    table.waiting("chat", ttft=9.0, tokens_left=900.0, serial=3)
    assert table.pack(packer(3)).order == ["chat", "b1", "b2"]


def test_an_answer_whose_first_token_was_late_has_nothing_to_lose() -> None:
    lost = {"output_tokens": 5, "arrival": NOW - 9, "first": NOW - 1.0, "ttft": 1.0, "tokens_left": 300.0}
    table = Table().running("lost", **lost)  # type: ignore[arg-type]
    table.waiting("new", ttft=1.0, tokens_left=300.0)
    assert table.pack(packer()).order == ["new"]


def test_a_pause_is_bounded_by_the_tpot_of_the_answer_in_progress() -> None:
    """By its tpot the answer is due in 0.5 s; the other request has 30 s."""
    answer = {"output_tokens": 5, "first": NOW - 0.1, "ttft": 5.0, "tpot": 0.05, "tokens_left": 9.0}
    table = Table().running("answer", **answer)  # type: ignore[arg-type]
    table.waiting("other", e2e=30.0, tokens_left=100.0)
    assert table.pack(packer()).order == ["answer"]


def test_urgency_set_from_outside_goes_before_everything_else() -> None:
    table = Table().waiting("due", e2e=1.0).waiting("told", urgency=-1.0)
    assert table.pack(packer()).order == ["told"]


def test_the_order_is_searched_anew_only_when_the_set_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    real = module.sequence

    def counted(costs, *rest):  # type: ignore[no-untyped-def]
        searched.append(costs.size)
        return real(costs, *rest)

    monkeypatch.setattr(module, "sequence", counted)
    run = Driven(Annealed(EngineSpec(2, 256, SIZE)), Limits(2))
    asks = [Ask(20, 30, slo=Slo(e2e=9.0)), Ask(20, 10, slo=Slo(e2e=9.0)), Ask(20, 10, 5, Slo(e2e=9.0))]
    iterations = len(list(run.go(asks)))
    assert iterations > 20
    assert sorted(searched) == [1, 2, 2, 3], "three come in two groups, and two end before the last"


def test_a_row_used_again_is_another_request() -> None:
    one, two = Table().waiting("a", tokens_left=500.0, e2e=9.0, serial=1), packer()
    one.waiting("b", tokens_left=5.0, e2e=9.0, serial=2)
    assert one.pack(two).order == ["b"]
    one.jobs.remove("a")
    one.waiting("c", tokens_left=1.0, e2e=9.0, serial=3)
    assert one.pack(two).order == ["c"]


def test_control_s_pauses_are_kept() -> None:
    table = Table().waiting("held", e2e=1.0, held=True).waiting("free", e2e=9.0)
    assert table.pack(packer(2)).order == ["free"]
    assert np.count_nonzero(table.jobs.held) == 1
