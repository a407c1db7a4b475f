"""Classes that promise a share: by choice no more requests are given up than that leaves."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Arrived, Failed, Finished, InstanceUp, Started
from headway.policy.core.attainment import WINDOW, Account, Attainment
from headway.policy.core.controller import Controller
from headway.policy.core.ranks import BEYOND
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.registry import find
from headway.types import Instance, Request, Send, Slo
from tests.helpers.held import held


def ask(id: str, arrival: float = 0.0, share: float | None = 0.99, **slo: float) -> Request:
    return Request(id, "m", 100, 50, arrival, Slo(**({"ttft": 1.0} | slo), share=share), tier="gold")  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.5, 0.9, 0.99, 0.9985]),
    lost=st.floats(0.0, 1.0), others=st.floats(0.0, 0.3), inside=st.integers(1, 300),
)  # fmt: skip
def test_of_any_1000_requests_no_more_are_given_up_by_choice_than_the_share_leaves(
    seed: int, share: float, lost: float, others: float, inside: int
) -> None:
    """Each expendable request is given up with chance `lost`, any other misses with chance `others`."""
    rng, known = np.random.default_rng(seed), Attainment()
    inflight, chosen = list[tuple[str, bool]](), deque[bool](maxlen=WINDOW)
    for i in range(3000):
        request = ask(f"r{i}", float(i), share)
        inflight.append((request.id, known.came(request, float(rng.exponential()), float(i))))
        while len(inflight) > inside:
            id, expendable = inflight.pop(int(rng.integers(len(inflight))))
            missed = bool(rng.random() < (lost if expendable else others))
            known.ended(id, not missed)
            chosen.append(expendable and missed)
            assert sum(chosen) <= (1 - share) * WINDOW + 1e-9
    account = known.accounts["gold"]
    assert len(account.expendable) == sum(expendable for _, expendable in inflight)


def test_the_fewer_misses_are_left_the_larger_a_request_must_be() -> None:
    account, rng = Account(0.9), np.random.default_rng(0)
    least = []
    for missed in 0, 50, 90, 98, 100:
        account.missed = missed
        sizes = rng.uniform(0, 1, 2000)
        spared = sizes[[account.spares(float(size)) for size in sizes]]
        least.append(spared.min(initial=1.0))
    assert least == sorted(least)
    assert least[0] < 0.01, "while all are left, any request is"
    assert 0.95 < least[3] < 1.0
    assert least[4] == 1.0, "and none when none is left"


def test_what_is_late_in_flight_counts_before_it_ends() -> None:
    known = Attainment()
    expendable = [known.came(ask(f"r{i}"), 1.0, 0.0) for i in range(12)]
    assert expendable == [True] * 10 + [False] * 2
    account = known.accounts["gold"]
    for i in range(10):
        known.ended(f"r{i}", kept=True)
    assert account.left == 10
    known.started(ask("r10"), 0.5)
    assert not known.came(ask("tiny", 1.5), 0.5, 1.5), "it is smaller than most"
    assert account.late == {"r11"}, "r10 had its first token in time"
    assert account.left == 9
    known.ended("r11", kept=False)
    assert (account.left, account.missed, account.late) == (9, 1, set())


def test_a_whole_answer_is_late_after_its_first_token_too() -> None:
    known = Attainment()
    for i in range(11):
        known.came(ask(f"r{i}", e2e=5.0), 1.0, 0.0)
    known.started(ask("r10", e2e=5.0), 0.5)
    known.came(ask("next", 6.0), 0.1, 6.0)
    assert known.accounts["gold"].late == {"r10"}


def test_ends_that_are_nobody_s_fault_count_in_no_share_and_nothing_is_kept_of_them() -> None:
    known = Attainment()
    for i in range(3000):
        known.came(ask(f"r{i}"), 1.0, 0.0)
        known.ended(f"r{i}", None)
    account = known.accounts["gold"]
    assert (account.kept, account.left) == (1.0, 10)
    assert not {f"r{i}" for i in range(3000)} & held(known)
    assert not known.came(ask("plain", share=None), 1.0, 0.0)
    assert not known.accounts, "the class promises no share any more"


def sent(core: Controller, request: Request, now: float) -> Send:
    (send,) = core.on(Arrived(request), now)
    assert isinstance(send, Send)
    return send


def test_engines_are_told_what_may_be_given_up_and_the_account_is_kept() -> None:
    core = Controller(find("headway").planner(), TaskLengths())
    core.on(InstanceUp(Instance("e0", "m", 8, 1000, 16, 4096)), 0.0)
    ranks = [sent(core, ask(f"r{i}"), 0.0).rank for i in range(12)]
    assert ranks == [BEYOND] * 10 + [0.0] * 2
    assert sent(core, replace(ask("all", share=None), tier="other"), 0.0).rank == 0.0
    core.on(Started("r0"), 0.5)
    core.on(Finished("r0", 5, met=True), 1.0)
    core.on(Finished("r1", 5, met=False), 1.0)
    core.on(Failed("r2", "engine_gone", missed=True), 1.0)
    core.on(Failed("r3", "client_gone"), 1.0)
    account = core.attainment.accounts.get("gold")
    assert account is not None
    assert (account.missed, round(account.kept, 3), len(account.expendable)) == (2, 0.333, 6)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.1])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0 and below 1"):
        Slo(ttft=1.0, share=share)
