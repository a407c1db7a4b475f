"""Best-effort runs take turns on the KV: no more are in than it holds, and none waits for ever."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.events import Arrived, InstanceDown, RunEnded
from headway.policy.apps.knowledge import Knowledge
from headway.policy.core.ranks import ATTAINABLE
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

    def turn(self, run: str, now: float, prompt: int, *, other: bool = False, slo: Slo | None = None) -> str:
        """Let the next request of a run come; return its id. other: its prompt does not continue the one before."""
        number = self.turns[run] = self.turns.get(run, 0) + 1
        first = 1_000_000 * (hash(run) % 1_000_000) + (500_000 + 1000 * number if other else 0)
        keys = np.arange(first, first + prompt // GRAIN, dtype=np.int64).tobytes()
        id, stage = f"{run}{number}", Stage("app", run, "u")
        request = self.requests[id] = ask(id, now, prompt=prompt, answer=ANSWER, stage=stage, slo=slo or Slo())
        self.notify(Arrived(request, keys), now)
        return id

    def note(self, commands: list[Command]) -> list[Command]:
        self.sent |= {command.id: command.instance for command in commands if isinstance(command, Send)}
        return super().note(commands)

    def begin(self, run: str, now: float, prompt: int) -> None:
        """Let a run have two requests, which show that its prompts continue each other."""
        for _ in range(2):
            self.end(self.turn(run, now, prompt), now)

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
    place.turn("b", 0.0, 800)
    place.turn("c", 0.0, 800)
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
    place.core.cluster.placement.started(place.core.cluster.backlog, "chat", 0.0)
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


RUNS = ["run a ", "run b ", "run c ", "run d "]
runs = st.lists(st.tuples(st.sampled_from(RUNS), st.integers(1, 20), st.booleans()), max_size=60)


@given(runs=runs, engines=st.integers(1, 2))
def test_no_run_goes_in_beside_more_than_the_kv_holds(runs: list[tuple[str, int, bool]], engines: int) -> None:
    """Also: all that came is served once the others end, and nothing is kept of it."""
    place, kv = Agents(1600, engines), 1600 * engines
    size, now = dict[str, int](), 0.0
    for run, more, stops in runs:
        now += 0.01
        if any(place.requests[id].stage.run == run for id in [*place.inside, *place.queued]):  # type: ignore[union-attr]
            continue
        before = set(place.inside)
        size[run] = size.get(run, 0) + GRAIN * more if size.get(run, 0) < 1000 else GRAIN
        id = place.turn(run, now, size[run])
        went = set(place.inside) - before
        taken = sum(place.requests[one].prompt_tokens + ANSWER for one in place.inside)
        assert taken <= kv or went <= {id}
        if id in place.inside:
            place.end(id, now)
        if stops:
            place.stop(run, now)
    for run in RUNS:
        place.stop(run, now)
    while place.inside or place.queued:
        assert place.inside, "something goes on"
        for id in list(place.inside):
            place.end(id, now)
            stage = place.requests[id].stage
            assert stage is not None
            place.stop(stage.run, now)
        for run in RUNS:
            place.stop(run, now)
    assert sorted(place.order) == sorted(place.requests)
    assert not set(place.requests) & held(place.planner)
    assert place.core.next_check == math.inf
