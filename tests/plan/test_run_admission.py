"""Best-effort runs take turns on the KV: no more are in than it holds, and none waits for ever."""

from __future__ import annotations

import math
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Arrived, Failed, InstanceDown, InstanceUp, Returned, RunEnded, Started
from headway.policy.apps.knowledge import Knowledge
from headway.policy.apps.run import Key
from headway.policy.core.least import Least
from headway.policy.core.ranks import ATTAINABLE
from headway.policy.plan.run_admission import _Member
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

    def __init__(self, kv: int, engines: int = 1, ahead: int = 1024) -> None:
        self.sent: dict[str, str] = {}
        self.planner = RunOrder(ATTAINABLE, ahead=ahead, stretch=STRETCH, knowledge=Knowledge())
        super().__init__(self.planner, *(instance(f"e{i}", 64, blocks=kv // GRAIN) for i in range(engines)))
        self.turns: dict[str, int] = {}
        self.turn_s = STRETCH * kv * costs_of(instance("e0", 64, blocks=kv // GRAIN)).prompt

    def turn(self, run: str, now: float, prompt: int, *, other: bool = False, final: bool = False, **more: Any) -> str:
        """Let the next request of a run come; return its id. other: its prompt does not continue the one before."""
        number = self.turns[run] = self.turns.get(run, 0) + 1
        first = 1_000_000 * crc32(f"{run} {more.get('model')}".encode()) + (500_000 + 1000 * number if other else 0)
        keys = np.arange(first, first + prompt // GRAIN, dtype=np.int64).tobytes()
        id, stage = f"{run}{number}", Stage("app", run, "u", final=final)
        request = self.requests[id] = ask(id, now, prompt=prompt, answer=ANSWER, stage=stage, **more)
        self.notify(Arrived(request, keys), now)
        return id

    @property
    def members(self) -> dict[Key, dict[str, _Member]]:
        return self.planner._admission._members

    def note(self, commands: list[Command]) -> list[Command]:
        self.sent |= {command.id: command.instance for command in commands if isinstance(command, Send)}
        return super().note(commands)

    def begin(self, run: str, now: float, prompt: int, **more: Any) -> None:
        """Let a run have two requests, which show that its prompts continue each other."""
        for _ in range(2):
            self.end(self.turn(run, now, prompt, **more), now)

    def home(self, run: str) -> str:
        """Return the engine that got the latest request of a run."""
        return self.sent[f"{run}{self.turns[run]}"]

    def stop(self, run: str, now: float) -> None:
        """End a run."""
        self.notify(RunEnded("default", "app", run), now)


def test_a_run_waits_until_one_that_fills_the_kv_has_ended() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1200)
    waits = place.turn("b", 0.0, 800)
    assert waits in place.queued
    goes_on = place.turn("a", 0.0, 1300)
    assert goes_on in place.inside, "it is in"
    place.end(goes_on, 0.0)
    assert waits in place.queued
    place.stop("a", 0.0)
    assert waits in place.inside


def test_a_run_goes_in_where_the_kv_has_room_for_it() -> None:
    place = Agents(kv=1600, engines=2)
    place.begin("a", 0.0, 1200)
    home = place.home("a")
    place.turn("b", 0.0, 700)
    place.turn("c", 0.0, 700)
    assert home not in (place.inside["b1"], place.inside["c1"])


def test_a_run_stays_on_its_engine_while_others_have_no_room() -> None:
    place = Agents(kv=1600, engines=2)
    for run in "ab":
        place.begin(run, 0.0, 1200)
    assert {place.home("a"), place.home("b")} == {"e0", "e1"}
    for i in range(20):
        busy = ask(f"busy{i}", prompt=20, answer=1, engines=(place.home("a"),))
        place.come(busy)
    id = place.turn("a", 0.0, 1300)
    assert place.inside[id] == place.home("a")


def test_a_run_that_is_silent_for_as_long_as_its_kv_is_worth_makes_room() -> None:
    place = Agents(kv=1600)
    place.begin("long", 0.0, 1200)
    place.begin("a", 0.0, 100)
    place.end(place.turn("a", 0.0, 800), 0.0)
    waits = place.turn("long", 0.0, 1200)
    at = place.core.next_check
    assert waits in place.queued
    assert at == pytest.approx(place.turn_s / STRETCH)
    place.note(place.core.decide(at))
    assert waits in place.inside
    back = place.turn("a", at, 800)
    assert back in place.queued
    place.end(waits, at)
    place.stop("long", at)
    assert back in place.inside
    assert place.core.next_check == math.inf


def test_promises_and_runs_that_compute_every_prompt_anew_never_wait() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1500)
    assert place.turn("b", 0.0, 800, slo=Slo(ttft=1.0)) in place.inside
    assert place.turn("c", 0.0, 800, slo=Slo(tpot=0.1)) in place.inside
    place = Agents(kv=1600)
    for run in "ab":
        place.end(place.turn(run, 0.0, 800), 0.0)
        place.end(place.turn(run, 0.0, 800, other=True), 0.0)
    place.begin("c", 0.0, 1500)
    assert place.turn("a", 0.0, 800, other=True) in place.inside
    assert place.turn("b", 0.0, 800, other=True) in place.inside


def test_requests_of_others_that_have_begun_take_room() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 700)
    place.come(ask("chat", prompt=700))
    place.notify(Started("chat"), 0.0)
    place.note(place.core.decide(0.0))
    assert place.turn("b", 0.0, 400) in place.queued
    place.end("chat", 0.0)
    assert "b1" in place.inside


def test_runs_that_never_end_take_turns() -> None:
    """A turn is `STRETCH` times what it takes to compute all the KV; the run that waited has one, too."""
    place = Agents(kv=1600)
    last, began = {"a": "", "b": ""}, dict[str, list[float]](a=[], b=[])
    place.begin("a", 0.0, 1200)
    place.begin("b", 0.0, 100)
    now, step = 0.0, place.turn_s / 20
    for _ in range(100):
        for run in last:
            if last[run] not in place.queued:
                if last[run] in place.inside:
                    place.end(last[run], now)
                    began[run].append(now)
                last[run] = place.turn(run, now, 1200)
        now += step
    for times in began.values():
        assert len(times) > 20
        assert np.diff([0.0, *times]).max() < 1.3 * place.turn_s


def test_the_last_run_waits_when_all_have_grown_too_large() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 400)
    place.begin("b", 1.0, 400)
    place.end(place.turn("a", 1.0, 1000), 1.0)
    assert place.turn("b", 1.0, 700) in place.queued
    assert place.turn("a", 1.0, 1100) in place.inside


def test_an_engine_that_is_lost_blocks_nothing() -> None:
    place = Agents(kv=1600, engines=2)
    for run in "ab":
        place.begin(run, 0.0, 1200)
    waits = place.turn("c", 0.0, 1200)
    assert waits in place.queued
    place.notify(InstanceDown("e0"), 0.0)
    place.stop("a", 0.0)
    place.stop("b", 0.0)
    assert waits in place.inside


# ---- of what was once wrong


def test_without_keys_nothing_is_kept_and_none_waits() -> None:
    place = Agents(kv=1600)
    for i in range(50):
        place.come(ask(f"x{i}", prompt=1000, stage=Stage("app", f"r{i}", "u")))
    assert len(place.inside) == 50
    assert place.members == {}


def test_only_models_for_which_a_run_waits_wake_the_host() -> None:
    place = Agents(kv=1600)
    place.notify(InstanceUp(instance("n0", 64, model="n", blocks=100)), 0.0)
    place.begin("other", 0.0, 800, model="n")
    place.begin("a", 0.0, 1200)
    goes_on = place.turn("a", 0.0, 1200)
    assert place.turn("b", 0.0, 800) in place.queued
    for _ in range(5):
        if (now := place.core.next_check) < math.inf:
            place.note(place.core.decide(now))
            assert place.core.next_check > now
    assert place.core.next_check == math.inf, "until a request ends"
    place.end(goes_on, 1e6)
    place.stop("a", 1e6)
    assert "b1" in place.inside


def test_a_run_goes_only_where_its_length_fits_and_waits_again_when_that_engine_is_lost() -> None:
    place = Agents(kv=1600)
    place.notify(InstanceUp(instance("big", 64, blocks=200)), 0.0)
    place.begin("l", 0.0, 2200)
    waits, small = place.turn("x", 0.0, 1700), place.turn("s", 0.0, 160)
    assert (waits in place.queued, place.inside[small]) == (True, "e0")
    place.stop("l", 1.0)
    assert place.inside[waits] == "big"


def test_what_was_bound_to_a_lost_engine_waits_for_another() -> None:
    place = Agents(kv=1600, engines=2, ahead=0)
    for run in "ab":
        place.begin(run, 0.0, 1500)
    busy = [ask(f"busy{i}", prompt=20, answer=1, engines=(place.home("a"),), priority=-1) for i in range(80)]
    for one in busy:
        place.come(one)
    home, id = place.home("a"), place.turn("a", 0.0, 1560)
    assert id in place.queued
    assert place.planner._admission.bound == {id: frozenset({home})}
    place.notify(InstanceDown(home), 0.0)
    assert id in place.queued
    place.stop("b", 0.0)
    assert place.inside[id] != home


def test_each_model_of_a_run_has_its_own_kv() -> None:
    place = Agents(kv=1600)
    place.notify(InstanceUp(instance("n0", 64, model="n", blocks=100)), 0.0)
    place.begin("a", 0.0, 160, model="n")
    place.begin("a", 0.0, 400)
    assert place.inside[place.turn("a", 0.0, 500)] == "e0"


def test_a_run_that_always_has_a_request_in_progress_makes_room_for_others() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 800)
    last, now = place.turn("a", 0.0, 800), 0.0
    waits = place.turn("b", 0.0, 900)
    while waits in place.queued and now < 3 * place.turn_s:
        now += place.turn_s / 20
        newest = place.turn("a", now, 800)
        if last in place.inside:
            place.end(last, now)
        last = newest
    assert waits in place.inside


def test_requests_that_were_cancelled_take_no_room() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 800)
    goes_on = place.turn("a", 0.0, 800)
    place.turn("b", 0.0, 700)
    for _ in range(10):
        place.notify(Failed(place.turn("b", 0.0, 700), "cancelled"), 0.0)
    place.end(goes_on, 0.0)
    place.stop("a", 0.0)
    assert "b1" in place.inside


def test_runs_at_their_first_request_do_not_flood_a_new_engine() -> None:
    place = Agents(kv=1600, engines=2)
    for run in "ab":
        place.begin(run, 0.0, 1500)
        place.turn(run, 0.0, 1500)
    for i in range(20):
        place.turn(f"new {i} ", 0.0, 700)
    place.notify(InstanceUp(instance("e9", 64, blocks=100)), 1.0)
    assert place.load("e9") == 2


def test_tenants_have_their_turns_among_runs_that_have_waited_for_one() -> None:
    place = Agents(kv=1600)
    place.planner.take_turns()
    place.begin("a", 0.0, 800)
    place.turn("a", 0.0, 800)
    for i in range(6):
        place.turn(f"heavy {i} ", 0.0, 900, tenant="heavy")
    light = place.turn("light", 0.01, 900, tenant="light")
    place.end("a3", 1.01 * place.turn_s)
    place.stop("a", 1.01 * place.turn_s)
    went, now = list(place.inside), 1.01 * place.turn_s
    for id in went:
        place.end(id, now)
        place.notify(RunEnded("heavy", "app", id[:-1]), now)
    assert light in {*went, *place.inside}


def test_requests_that_cannot_come_back_never_wait() -> None:
    place = Agents(kv=1600)
    place.begin("a", 0.0, 1500)
    assert place.turn("", 0.0, 800) in place.inside
    assert place.turn("b", 0.0, 800, final=True) in place.inside
    assert place.turn("c", 0.0, 800, engines=("e0",)) in place.inside
    goes_on = place.turn("a", 0.0, 800, engines=("e0",))
    assert place.turn("a", 0.0, 1500) in place.inside, "it is still in"
    assert goes_on in place.inside


def test_what_another_controller_has_sent_is_in() -> None:
    place = Agents(kv=1600)
    request = ask("m1", prompt=800, answer=ANSWER, stage=Stage("app", "m", "u"))
    place.requests["m1"] = request
    place.core.note(Arrived(request, np.arange(50, dtype=np.int64).tobytes()), 0.0)
    place.core.place("m1", "e0", 0.0)
    place.inside["m1"] = "e0"
    assert place.turn("b", 0.0, 900) in place.queued
    assert [*place.planner._admission.held] == ["b1"]
    place.end("m1", 0.0)
    place.stop("m", 0.0)
    assert "b1" in place.inside


# ---- what always holds

steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "end", "fail", "return", "stop", "down", "up", "chat", "wait"]),
        st.integers(0, 5),
        st.integers(1, 30),
    ),
    min_size=20,
    max_size=80,
)


def _check(place: Agents, before: dict[_Member, object], now: float) -> None:
    """P1, P3 and P5; what is counted is compared with what was sent."""
    admission = place.planner._admission
    for engine in admission._engines.values():
        members = [one for models in place.members.values() for one in models.values() if one.home is engine]
        for one in members:
            inside = [place.requests[id] for id in place.core.requests if admission._inside.get(id) is one]
            tokens = sum(request.prompt_tokens + ANSWER for request in inside) or one.tokens
            assert one.counted == min(tokens, engine.kv)
        assert engine.taken == sum(one.counted for one in members)
        if any(before.get(one) is None for one in members):
            assert engine.taken <= engine.kv, "one more was let in"
    assert {*place.members} <= {*place.planner.runs._runs}, "runs that have ended are forgotten"
    assert {id for id in admission.held if id in place.inside} == set()
    assert place.core.next_check > now


@given(steps=steps, tenants=st.booleans())
def test_what_is_in_fits_and_nothing_is_left(steps: list[tuple[str, int, int]], tenants: bool) -> None:
    place = Agents(1600, 2)
    place.notify(InstanceUp(instance("big", 64, blocks=200)), 0.0)
    place.notify(InstanceUp(instance("n0", 64, model="n", blocks=50)), 0.0)
    if tenants:
        place.planner.take_turns()
    now, number = 0.0, 0
    for what, which, more in steps:
        now, number = now + 0.01, number + 1
        before = {one: one.home for models in place.members.values() for one in models.values()}
        run, inside = f"run {which} ", [*place.inside]
        match what:
            case "ask":
                place.turn(run, now, GRAIN * (10 + 4 * more), model="n" if which == 5 else "m", other=which == 4)
            case "chat":
                place.come(ask(f"chat{number}", now, prompt=GRAIN * more))
                place.notify(Started(f"chat{number}"), now)
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
                place.note(place.core.decide(now))
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
        _check(place, before, now)
    for which in range(6):
        place.stop(f"run {which} ", now)
    while place.inside:
        for id in [*place.inside]:
            place.end(id, now)
    assert not place.queued
    assert place.members == {}
    assert not set(place.requests) & held(place.planner)
    assert place.core.next_check == math.inf


@given(seed=st.integers(0, 1 << 32), tenants=st.booleans())
def test_each_request_goes_on_within_some_turns(seed: int, tenants: bool) -> None:
    """Whatever the others ask; requests inside end within half a turn, and chat takes all KV."""
    place, since, runs, random = Agents(1600, 2), dict[str, float](), [f"run {i} " for i in range(6)], Random(seed)
    if tenants:
        place.planner.take_turns()
    chats = [ask(f"chat{i}", prompt=1500) for i in range(2)]
    for chat in chats:
        place.come(chat)
        place.notify(Started(chat.id), 0.0)
    now, step = 0.0, place.turn_s / 8
    for _ in range(160):
        now += step
        for id in [id for id in place.inside if not id.startswith("chat")]:
            if now - since[id] >= 4 * step or random.random() < 0.3:
                place.end(id, now)
        for run in runs:
            if random.random() < 0.8 and sum(id.startswith(run) for id in place.core.requests) < 3:
                since[place.turn(run, now, GRAIN * random.randint(10, 90))] = now
        place.note(place.core.decide(now))
        assert all(now - since[id] < 2 * len(runs) * place.turn_s for id in place.queued)
        since |= {id: now for id in place.order[-10:] if id in place.inside and since.get(id, 0.0) < now - 8 * step}


@pytest.mark.parametrize("runs", [100, 1000])
def test_heaps_keep_no_more_than_twice_what_holds(runs: int) -> None:
    order = Least[int]()
    for turn in range(10):
        for run in range(runs):
            order.put(run, (run * 7919 + turn) % 1000)
    assert len(order._heap) <= 2 * runs + 64
    assert order.first()[0] == order.at == min(at for at, *_ in order._entries.values())
