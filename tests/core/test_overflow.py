"""Overflow: only promises that would be lost leave, only of those who may, and never for more than the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Arrived, Failed, Finished, InstanceDown, InstanceUp, Learned, Returned, Started, Tick
from headway.policy.core.controller import Controller
from headway.policy.core.overflow import HOUR, Account
from headway.policy.recipes.registry import RECIPES
from headway.types import Command, Instance, Overflowed, OverflowTerms, Recall, Request, Send, Slo
from tests.core.world import controller

NOW = 1000.0
SLOW = np.array([0.01, 0.0, 0.0, 5.12, 0.0])  # scaled: 10 ms per iteration, 10 ms per prompt token
HERE = Instance("e0", "m0", 8, 1000, 16, 2048)
TERMS = OverflowTerms(("chat",), price_prompt=1.0, price_answer=2.0, budget=0.01)
AWAY = Instance("e9", "m0", 4, 1000, 16, 2048, overflow=TERMS)


def fleet(*instances: Instance, recipe: str = "headway") -> Controller:
    core = controller(recipe)
    for instance in instances or (HERE, AWAY):
        core.on(InstanceUp(instance), NOW)
    core.on(Learned("e0", SLOW), NOW)
    return core


def request(id: str, *, prompt: int = 100, ttft: float | None = 0.5, tier: str = "chat", **more: object) -> Request:
    fields = {"max_tokens": 10, "arrival": NOW, "slo": Slo(ttft), "tier": tier} | more
    return Request(id, "m0", prompt, **fields)  # type: ignore[arg-type]


def arrive(core: Controller, one: Request, now: float = NOW) -> list[Command]:
    return core.on(Arrived(one), now)


def place(commands: list[Command]) -> str:
    (send,) = commands
    assert isinstance(send, Send)
    return send.instance


def test_what_would_be_late_here_goes_away_and_says_why() -> None:
    """A prompt of 100 tokens takes a second here."""
    core = fleet()
    (send,) = arrive(core, request("r"))
    assert isinstance(send, Send)
    assert send.instance == "e9"
    assert send.overflow == Overflowed(pytest.approx(0.51, abs=0.02), pytest.approx(120e-6), TERMS)
    assert core.overflow.spent("e9", NOW) == pytest.approx(120e-6)


@pytest.mark.parametrize(
    "stays",
    [
        request("r", ttft=5.0),
        request("r", ttft=None),
        request("r", ttft=None, slo=Slo(tpot=0.001)),
        request("r", tier="other"),
        request("r", adapter="lora"),
        request("r", vllm_only=True),
        request("r", prompt=2000, max_tokens=100),
        replace(request("r"), model="m1"),
    ],
    ids=["on time", "no promise", "tpot alone", "class", "adapter", "vllm", "context", "model"],
)
def test_all_other_requests_stay(stays: Request) -> None:
    core = fleet()
    for command in arrive(core, stays):
        assert isinstance(command, Send)
        assert command.instance == "e0"
    assert core.overflow.spent("e9", NOW) == 0.0


def test_a_tenant_that_is_not_named_stays() -> None:
    core = fleet(HERE, replace(AWAY, overflow=replace(TERMS, tenants=("acme",))))
    assert place(arrive(core, request("a", tenant="acme"))) == "e9"
    assert place(arrive(core, request("b", tenant="other"))) == "e0"


def test_fields_of_vllm_may_go_to_a_vllm() -> None:
    core = fleet(HERE, replace(AWAY, overflow=replace(TERMS, vllm=True)))
    assert place(arrive(core, request("r", vllm_only=True))) == "e9"


def test_a_deadline_counts_the_whole_answer() -> None:
    core = fleet()
    core.lengths.learn(request("x"), 10)
    assert place(arrive(core, request("a", prompt=10, slo=Slo(e2e=1.5)))) == "e0"
    assert place(arrive(core, request("b", prompt=10, slo=Slo(e2e=0.15)))) == "e9"


def test_nothing_leaves_before_an_engine_here_has_learned_its_latency() -> None:
    core = controller("headway")
    core.on(InstanceUp(HERE), NOW)
    core.on(InstanceUp(AWAY), NOW)
    assert place(arrive(core, request("r"))) == "e0"


def test_promises_leave_while_no_engine_is_up_here() -> None:
    core = fleet(AWAY)
    (send,) = arrive(core, request("r"))
    assert isinstance(send, Send)
    assert send.overflow is not None
    assert send.overflow.late == math.inf
    assert arrive(core, request("best-effort", ttft=None)) == []


def test_what_waits_goes_when_an_overflow_engine_comes_up() -> None:
    core = controller("headway")
    assert arrive(core, request("r")) == []
    assert place(core.on(InstanceUp(AWAY), NOW + 0.1)) == "e9"


def test_the_budget_is_reserved_corrected_and_free_again_after_an_hour() -> None:
    core = fleet(HERE, replace(AWAY, overflow=replace(TERMS, budget=300e-6)))
    assert [place(arrive(core, request(id))) for id in "abc"] == ["e9", "e9", "e0"]
    core.on(Finished("a", 2, prompt_tokens=90), NOW + 1)
    assert core.overflow.spent("e9", NOW + 1) == pytest.approx(120e-6 + 94e-6)
    core.on(Failed("b", "client_gone"), NOW + 1)
    assert core.overflow.spent("e9", NOW + 1) == pytest.approx(120e-6 + 94e-6), "it may have cost all that was reserved"
    later = NOW + HOUR
    assert core.overflow.spent("e9", later) == 0.0
    assert place(arrive(core, request("d", arrival=later), later)) == "e9"


def test_an_engine_that_is_full_gets_no_more() -> None:
    core = fleet(HERE, replace(AWAY, max_running=2))
    assert [place(arrive(core, request(id))) for id in "abc"] == ["e9", "e9", "e0"]


def test_the_cheaper_of_two_engines_gets_it() -> None:
    cheap = replace(AWAY, id="e8", overflow=replace(TERMS, price_answer=1.0))
    assert place(arrive(fleet(HERE, AWAY, cheap), request("r"))) == "e8"


def test_what_an_engine_refuses_comes_back_and_the_engine_rests() -> None:
    core = fleet()
    arrive(core, request("a"))
    assert place(core.on(Returned("a", aside_s=30.0), NOW + 0.1)) == "e0"
    assert core.overflow.spent("e9", NOW + 0.1) == 0.0
    assert place(arrive(core, request("b"), NOW + 29.0)) == "e0"
    later = NOW + 31.0
    assert place(arrive(core, request("c", arrival=later), later)) == "e9"


def test_what_is_inside_an_engine_is_taken_back_at_the_last_instant() -> None:
    """Prompts that are due before it come later, and take its time."""
    core = fleet(HERE, AWAY)
    arrive(core, request("known"))
    core.on(Started("known"), NOW + 0.2)
    core.on(Finished("known", 10), NOW + 0.3)
    assert place(arrive(core, request("patient", ttft=3.0), NOW)) == "e0"
    last = core.next_check
    assert NOW + 2.0 < last < NOW + 3.0
    assert place(arrive(core, request("urgent", prompt=250, ttft=2.9, tier="other"), NOW)) == "e0"
    (recall,) = core.on(Tick(), last)
    assert recall == Recall("patient", "e0")
    assert place(core.on(Returned("patient"), last)) == "e9"


def test_once_its_pace_is_known_a_request_goes_at_the_last_instant() -> None:
    """What is late by the forecast may be on time after all."""
    core = fleet()
    arrive(core, request("known"))
    core.on(Started("known"), NOW + 0.05)
    core.on(Finished("known", 10), NOW + 0.1)
    assert place(arrive(core, request("r", ttft=0.9))) == "e0"
    last = core.next_check
    assert NOW + 0.6 < last < NOW + 0.75
    assert core.on(Tick(), last) == [Recall("r", "e0")]
    assert place(core.on(Returned("r"), last)) == "e9"


def test_what_has_its_first_token_is_not_taken_back() -> None:
    core = fleet(HERE, AWAY)
    arrive(core, request("known"))
    core.on(Finished("known", 10), NOW + 0.3)
    assert place(arrive(core, request("r", ttft=3.0), NOW)) == "e0"
    core.on(Started("r"), NOW + 1.0)
    assert core.next_check == math.inf
    assert core.on(Tick(), NOW + 2.9) == []


def test_an_engine_that_is_too_slow_gets_nothing_but_a_trial_in_a_minute() -> None:
    core = fleet()
    arrive(core, request("a"))
    core.on(Started("a"), NOW + 5.0)
    core.on(Finished("a", 10), NOW + 5.5)
    now = NOW + 6.0
    assert place(arrive(core, request("b", arrival=now), now)) == "e0"
    now += 60.0
    assert place(arrive(core, request("c", arrival=now), now)) == "e9"
    assert place(arrive(core, request("d", arrival=now), now)) == "e0"


def test_what_is_overdue_stays_though_nothing_is_known_of_the_engine() -> None:
    core = fleet()
    assert place(arrive(core, request("r", arrival=NOW - 1.0))) == "e0"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_lets_them_go_and_takes_them_back(recipe: str) -> None:
    core = fleet(recipe=recipe)
    sent = [command for command in arrive(core, request("a")) if isinstance(command, Send)]
    assert [send.instance for send in sent] == ["e9"]
    core.on(Returned("a", aside_s=1.0), NOW + 0.1)
    core.on(Started("a"), NOW + 0.2)
    core.on(Finished("a", 10), NOW + 2.0)
    assert not core.requests
    arrive(core, request("b", arrival=NOW + 90.0), NOW + 90.0)
    core.on(Finished("b", 5), NOW + 91.0)
    assert not core.requests
    assert core.queued == 0


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(0.0, HOUR), st.integers(1, 400), st.integers(1, 50), st.integers(0, 9)),
    max_size=60,
)


@settings(max_examples=100)
@given(steps=STEPS)
def test_no_hour_ever_costs_more_than_the_budget(steps: list[tuple[int, float, int, int, int]]) -> None:
    """By what answers took in the end, and by all that is reserved in the meantime."""
    core, now, budget = fleet(HERE, replace(AWAY, max_running=100)), NOW, TERMS.budget
    spent: dict[str, tuple[float, float]] = {}
    for serial, (kind, pause, prompt, tokens, which) in enumerate(steps):
        now += pause / 10
        there = [id for id in spent if id in core.requests]
        if kind == 0 or not there:
            id = f"r{serial}"
            for command in arrive(core, request(id, prompt=20 * prompt, max_tokens=tokens, arrival=now), now):
                if isinstance(command, Send) and command.instance == "e9":
                    assert command.overflow is not None
                    spent[id] = now, command.overflow.reserved
        else:
            id = there[which % len(there)]
            instant, _ = spent[id]
            if kind == 1:
                used = min(tokens, core.requests[id].max_tokens)
                spent[id] = instant, TERMS.units(core.requests[id].prompt_tokens, used)
                core.on(Finished(id, used), now)
            elif kind == 2:
                core.on(Failed(id, "client_gone"), now)
            else:
                del spent[id]
                core.on(Returned(id, aside_s=float(which)), now)
        assert _dearest(spent.values()) <= budget * (1 + 1e-9)


def _dearest(entries: Iterable[tuple[float, float]]) -> float:
    """Return the units of the dearest hour."""
    rows = list(entries)
    return max((sum(units for at, units in rows if end - HOUR < at <= end) for end, _ in rows), default=0.0)


@given(steps=st.lists(st.tuples(st.floats(0.0, 2 * HOUR), st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=40))
def test_an_account_has_the_sum_of_the_last_hour(steps: list[tuple[float, float, float]]) -> None:
    account, now, rows = Account(), 0.0, list[tuple[float, float]]()
    for serial, (pause, reserved, used) in enumerate(steps):
        now += pause
        account.expire(now)
        account.reserve(f"r{serial}", reserved, now)
        account.settle(f"r{serial}", reserved * used)
        rows.append((now, reserved * used))
        assert account.spent == pytest.approx(sum(units for at, units in rows if at > now - HOUR), abs=1e-9)


def test_an_engine_that_is_down_gets_nothing_and_keeps_its_account() -> None:
    core = fleet()
    arrive(core, request("a"))
    core.on(InstanceDown("e9"), NOW)
    assert place(core.on(Returned("a"), NOW)) == "e0"
    assert place(arrive(core, request("b"))) == "e0"
    core.on(InstanceUp(AWAY), NOW)
    assert core.overflow.spent("e9", NOW) == 0.0
    core.on(Failed("b", "client_gone"), NOW)
    assert place(arrive(core, request("c"))) == "e9"


def test_an_answer_that_has_begun_goes_on_at_a_vllm() -> None:
    core = fleet()
    arrive(core, request("a", ttft=5.0))
    core.on(Started("a"), NOW + 0.5)
    core.on(InstanceDown("e0"), NOW + 1)
    assert core.on(Returned("a", 3), NOW + 1) == []
    core.on(InstanceUp(replace(AWAY, id="e8")), NOW + 2)
    assert core.on(Tick(), NOW + 4.9) == []
    assert place(core.on(InstanceUp(HERE), NOW + 6)) == "e0"
