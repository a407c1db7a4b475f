"""Best-effort runs: no more are admitted than the KV holds, and none waits for ever."""

from __future__ import annotations

import math
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Arrived, Failed, InstanceDown, InstanceUp, Returned, RunEnded
from headway.policy.apps.demand import Knowledge
from headway.policy.core.ranks import ATTAINABLE
from headway.policy.plan.run_admission import RunAdmission
from headway.policy.plan.run_order import RunOrder
from headway.policy.plan.service_costs import costs_of
from headway.prefix import GRAIN
from headway.stages import Stage
from headway.types import Command, Send, Slo
from tests.helpers.held import held
from tests.plan.place import Place, ask, instance

ANSWER, STRETCH = 16, 10.0


class Agents(Place):
    """Runs whose prompts continue each other, on engines with `kv` tokens each."""

    def __init__(self, kv: int, engines: int = 1) -> None:
        self.sent: dict[str, str] = {}
        self.planner = RunOrder(ATTAINABLE, ahead=1024, stretch=STRETCH, knowledge=Knowledge())
        super().__init__(self.planner, *(instance(f"e{i}", 64, blocks=kv // GRAIN) for i in range(engines)))
        self.turns: dict[str, int] = {}
        self.turn_s = STRETCH * kv * costs_of(instance("e0", 64, blocks=kv // GRAIN)).prompt

    @property
    def admission(self) -> RunAdmission:
        return self.planner._admission

    def turn(self, run: str, now: float, prompt: int, *, other: bool = False, final: bool = False, **more: Any) -> str:
        """Let the next request of a run come; return its id. other: its prompt does not continue the one before."""
        number = self.turns[run] = self.turns.get(run, 0) + 1
        first = 1_000_000 * crc32(f"{run} {more.get('model')}".encode()) + (500_000 + 1000 * number if other else 0)
        keys = np.arange(first, first + prompt // GRAIN, dtype=np.int64).tobytes()
        id, stage = f"{run}{number}", Stage("app", run, "u", final=final)
        request = self.requests[id] = ask(id, now, prompt=prompt, answer=ANSWER, stage=stage, **more)
        self.notify(Arrived(request, keys), now)
        return id

    def note(self, commands: list[Command]) -> list[Command]:
        self.sent |= {command.id: command.instance for command in commands if isinstance(command, Send)}
        return super().note(commands)

    def begin(self, run: str, now: float, prompt: int, **more: Any) -> None:
        """Let a run have two requests, which show that its prompts continue each other."""
        for _ in range(2):
            self.end(self.turn(run, now, prompt, **more), now)

    def wake(self, now: float) -> None:
        self.note(self.core.decide(now))

    def stop(self, run: str, now: float) -> None:
        """End a run."""
        self.notify(RunEnded("default", "app", run), now)


def test_a_run_waits_until_one_that_fills_the_kv_has_ended() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1200)
    waits = place.turn("b", 0.0, 800)
    assert waits in place.queued
    goes_on = place.turn("a", 0.0, 1300)
    assert goes_on in place.inside, "it is admitted"
    place.end(goes_on, 0.0)
    assert waits in place.queued
    place.stop("a", 0.0)
    assert waits in place.inside


def test_the_kv_of_all_engines_counts() -> None:
    place = Agents(kv=1600, engines=2)
    for run in "abc":
        place.turn(run, 0.0, 1200)
    assert place.queued == ["c1"]


def test_a_run_that_is_silent_for_as_long_as_its_kv_is_worth_makes_room() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1200)
    waits = place.turn("b", 0.0, 800)
    at = place.core.next_check
    assert at == pytest.approx(place.turn_s / STRETCH)
    place.wake(at)
    assert waits in place.inside
    back = place.turn("a", at, 1200)
    assert back in place.queued
    place.end(waits, at)
    place.stop("b", at)
    assert back in place.inside
    assert place.core.next_check == math.inf


def test_promises_and_runs_that_compute_every_prompt_anew_never_wait() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1500)
    assert place.turn("b", 0.0, 800, slo=Slo(ttft=1.0)) in place.inside
    assert place.turn("c", 0.0, 800, slo=Slo(tpot=0.1)) in place.inside
    place = Agents(kv=1600)
    place.end(place.turn("a", 0.0, 800), 0.0)
    place.end(place.turn("a", 0.0, 800, other=True), 0.0)
    place.begin("c", 0.0, 1500)
    assert place.turn("a", 0.0, 800, other=True) in place.inside
    waits, other = place.turn("b", 0.0, 800), place.turn("b", 0.0, 800, other=True)
    assert {waits, other} <= {*place.inside}, "its second prompt shows it"


def test_promises_inside_the_engines_take_room() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 700)
    place.come(ask("batch", prompt=700))
    place.come(ask("chat", prompt=700, slo=Slo(ttft=1.0)))
    assert place.turn("b", 0.0, 400) in place.queued
    place.end("chat", 0.0)
    assert "b1" in place.inside, "best effort that is not of a run takes none"


def test_the_oldest_run_never_waits() -> None:
    place = Agents(kv=1600)
    place.come(ask("chat", prompt=1500, slo=Slo(ttft=1.0)))
    for _ in range(3):
        place.end(place.turn("a", 0.0, 1500), 0.0)
    assert place.turn("b", 0.0, 100) in place.queued


def test_the_newest_run_waits_when_all_have_grown_too_large() -> None:
    place = Agents(kv=1600)
    for run in "abc":
        place.begin(run, 0.0, 400)
    place.end(place.turn("a", 0.0, 800), 0.0)
    assert place.turn("b", 0.0, 700) in place.inside
    assert place.turn("c", 0.0, 400) in place.queued


def test_runs_that_never_end_take_turns() -> None:
    """If no run has been admitted for a turn, the one that has waited longest is, and counts as the oldest."""
    place = Agents(kv=1600)
    last, began = {"a": "", "b": ""}, dict[str, list[float]](a=[], b=[])
    now, step = 0.0, place.turn_s / 20
    for _ in range(100):
        for run in last:
            if last[run] not in place.queued:
                if last[run] in place.inside:
                    place.end(last[run], now)
                    began[run].append(now)
                last[run] = place.turn(run, now, 1200)
        now += step
        place.wake(now)
    for times in began.values():
        assert len(times) > 20
        assert np.diff([0.0, *times]).max() < 1.3 * place.turn_s


# ---- regressions


def test_without_keys_nothing_is_kept_and_none_waits() -> None:
    place = Agents(kv=1600)
    for i in range(50):
        place.come(ask(f"x{i}", prompt=1000, stage=Stage("app", f"r{i}", "u")))
    assert len(place.inside) == 50
    assert place.admission._members == {}


def test_only_models_for_which_a_run_waits_wake_the_host() -> None:
    place = Agents(kv=1600)
    place.notify(InstanceUp(instance("n0", 64, model="n", blocks=100)), 0.0)
    place.begin("other", 0.0, 800, model="n")
    place.begin("a", 0.0, 1200)
    assert place.core.next_check == math.inf
    goes_on = place.turn("a", 0.0, 1200)
    assert place.turn("b", 0.0, 800) in place.queued
    assert place.core.next_check == pytest.approx(place.turn_s)
    place.end(goes_on, 1.0)
    place.stop("a", 1.0)
    assert "b1" in place.inside
    assert place.core.next_check == math.inf


def test_a_run_larger_than_all_kv_is_admitted_when_it_is_alone() -> None:
    place = Agents(kv=1600)
    assert place.turn("a", 0.0, 3000) in place.inside
    assert place.turn("b", 0.0, 100) in place.queued
    place.end("a1", 0.0)
    place.stop("a", 0.0)
    assert "b1" in place.inside


def test_an_engine_that_is_lost_blocks_nothing() -> None:
    place = Agents(kv=1600, engines=2)
    for run in "ab":
        place.begin(run, 0.0, 1200)
    waits = place.turn("c", 0.0, 1200)
    place.notify(InstanceDown("e0"), 0.0)
    place.notify(InstanceDown("e1"), 0.0)
    place.stop("a", 0.0)
    place.stop("b", 0.0)
    assert place.core.next_check == math.inf, "nothing to wake for without an engine"
    place.notify(InstanceUp(instance("e2", 64, blocks=100)), 0.0)
    assert waits in place.inside


def test_runs_at_their_first_request_do_not_flood_a_new_engine() -> None:
    place = Agents(kv=1600, engines=2)
    for run in "ab":
        place.begin(run, 0.0, 1500)
        place.turn(run, 0.0, 1500)
    for i in range(20):
        place.turn(f"new {i} ", 0.0, 700)
    place.notify(InstanceUp(instance("e9", 64, blocks=100)), 1.0)
    assert len(place.inside) == 4


def test_each_model_of_a_run_has_its_own_kv() -> None:
    place = Agents(kv=1600)
    place.notify(InstanceUp(instance("n0", 64, model="n", blocks=100)), 0.0)
    place.begin("a", 0.0, 1500, model="n")
    place.begin("b", 0.0, 400)
    assert place.inside[place.turn("a", 0.0, 500)] == "e0"


def test_requests_that_were_cancelled_take_no_room() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 800)
    goes_on = place.turn("a", 0.0, 800)
    place.turn("b", 0.0, 800)
    for _ in range(10):
        place.notify(Failed(place.turn("b", 0.0, 800), "cancelled"), 0.0)
    place.end(goes_on, 0.0)
    place.stop("a", 0.0)
    assert "b1" in place.inside


def test_tenants_have_their_turns_among_runs_that_wait() -> None:
    place = Agents(kv=1600)
    place.planner.take_turns()
    place.begin("a", 0.0, 800)
    place.turn("a", 0.0, 800)
    for i in range(6):
        place.turn(f"heavy {i} ", 0.0, 900, tenant="heavy")
    light = place.turn("light", 0.01, 900, tenant="light")
    place.end("a3", 1.0)
    place.stop("a", 1.0)
    went = [*place.inside]
    for id in went:
        place.end(id, 1.0)
        place.notify(RunEnded("heavy", "app", id[:-1]), 1.0)
    assert light in {*went, *place.inside}


def test_requests_that_cannot_come_back_never_wait() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1500)
    assert place.turn("", 0.0, 800) in place.inside
    assert place.turn("b", 0.0, 800, final=True) in place.inside
    assert place.turn("c", 0.0, 800, engines=("e0",)) in place.inside


def test_a_run_that_another_controller_has_sent_is_admitted() -> None:
    place = Agents(kv=1600)
    request = place.requests["m1"] = ask("m1", prompt=800, answer=ANSWER, stage=Stage("app", "m", "u"))
    place.core.note(Arrived(request, np.arange(50, dtype=np.int64).tobytes()), 0.0)
    place.core.place("m1", "e0", 0.0)
    place.inside["m1"] = "e0"
    assert place.turn("b", 0.0, 900) in place.queued
    place.end("m1", 0.0)
    place.stop("m", 0.0)
    assert "b1" in place.inside
    assert place.order == ["b1"]


# ---- properties

steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "end", "fail", "return", "stop", "down", "up", "chat", "wait"]),
        st.integers(0, 5),
        st.integers(1, 30),
    ),
    min_size=20,
    max_size=80,
)


def _check(place: Agents, now: float) -> None:
    """Compare what is counted with the requests in progress."""
    admission = place.admission
    members = [*admission._members.values()]
    for group in admission._groups.values():
        assert group.taken == sum(one.counted for one in group.runs)
        assert {*group.waiting} == {one for one in members if one.group is group and one.held}
        assert {*group.silent} == {one for one in group.runs if not one.asks}
    for one in members:
        assert one.asks == {id: one.asks[id] for id, member in admission._of.items() if member is one}
        if one in one.group.runs:
            sizes = [place.requests[id].prompt_tokens + ANSWER for id in one.asks]
            assert one.counted == (sum(sizes) or one.tokens)
    assert {id for one in members for id in one.held} == {*admission.held}
    assert {key for key, _ in admission._members} <= {*place.planner.runs._runs}, "runs that have ended are forgotten"
    assert not {*admission.held} & {*place.inside}
    assert place.core.next_check > now


@given(steps=steps, tenants=st.booleans())
def test_counts_match_the_requests_and_nothing_is_left(steps: list[tuple[str, int, int]], tenants: bool) -> None:
    place = Agents(1600, 2)
    place.notify(InstanceUp(instance("big", 64, blocks=200)), 0.0)
    place.notify(InstanceUp(instance("n0", 64, model="n", blocks=50)), 0.0)
    if tenants:
        place.planner.take_turns()
    now, number = 0.0, 0
    for what, which, more in steps:
        now, number = now + 0.01, number + 1
        run, inside = f"run {which} ", [*place.inside]
        match what:
            case "ask":
                place.turn(run, now, GRAIN * (10 + 4 * more), model="n" if which == 5 else "m", other=which == 4)
            case "chat":
                place.come(ask(f"chat{number}", now, prompt=GRAIN * more, slo=Slo(ttft=1.0)))
            case "stop":
                place.stop(run, now)
            case "down":
                place.notify(InstanceDown(f"e{which % 2}"), now)
                for id in [id for id, name in place.inside.items() if name == f"e{which % 2}"]:
                    del place.inside[id]
                    place.notify(Returned(id), now)
            case "up":
                place.notify(InstanceUp(instance(f"e{which % 2}", 64, blocks=100)), now)
            case "wait":
                now += more * place.turn_s / 10
                place.wake(now)
            case "end" if inside:
                place.end(inside[more % len(inside)], now)
            case "fail" if place.core.requests:
                id = [*place.core.requests][more % len(place.core.requests)]
                place.inside.pop(id, None)
                place.notify(Failed(id, "cancelled"), now)
            case "return" if inside:
                id = inside[more % len(inside)]
                del place.inside[id]
                place.notify(Returned(id), now)
        _check(place, now)
    for which in range(6):
        place.stop(f"run {which} ", now)
    while place.inside:
        for id in [*place.inside]:
            place.end(id, now)
    assert not place.queued
    assert place.admission._members == {}
    assert not set(place.requests) & held(place.planner)
    assert place.core.next_check == math.inf


@given(seed=st.integers(0, 1 << 32), tenants=st.booleans())
def test_each_request_goes_on_within_some_turns(seed: int, tenants: bool) -> None:
    """Whatever the others ask; requests inside end within half a turn, and chat takes all KV."""
    place, since, runs, random = Agents(1600, 2), dict[str, float](), [f"run {i} " for i in range(6)], Random(seed)
    if tenants:
        place.planner.take_turns()
    for i in range(2):
        place.come(ask(f"chat{i}", prompt=1500, slo=Slo(ttft=1.0)))
    now, step = 0.0, place.turn_s / 8
    for _ in range(160):
        now += step
        for id in [id for id in place.inside if not id.startswith("chat")]:
            if now - since[id] >= 4 * step or random.random() < 0.3:
                place.end(id, now)
        for run in runs:
            if random.random() < 0.8 and sum(id.startswith(run) for id in place.core.requests) < 3:
                since[place.turn(run, now, GRAIN * random.randint(10, 90))] = now
        place.wake(now)
        assert all(now - since[id] < 2 * len(runs) * place.turn_s for id in place.queued)
        since |= {id: now for id in place.order[-10:] if id in place.inside and since.get(id, 0.0) < now - 8 * step}
