"""Controller: every accepted request is in exactly one place and is sent in its turn, whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Arrived, Failed, Finished, InstanceUp, Returned, Started, Tick
from headway.policy.core.ranks import ATTAINABLE, DUE, PRIORITY
from headway.policy.recipes.baselines import ROUTERS
from headway.policy.recipes.registry import RECIPES, find
from headway.types import Request, Send, Slo
from tests.core.world import FLEET, World, controller
from tests.plan.reference import Reference

PROGRAMS = st.lists(st.integers(0, 2**34 - 1), min_size=5, max_size=80)
EXAMPLES = settings(max_examples=33)
# The queue of bros is the engine's own: nothing waits outside.
PULLING = [name for name in [*RECIPES, *ROUTERS] if find(name).planner().pull]
every_recipe = pytest.mark.parametrize("recipe", PULLING)
# A router binds requests to one instance, shepherd waits for whole batches: others may idle meanwhile.
BINDING = ("round-robin", "least-loaded", "random", "shepherd")
# Recipes whose queue overtakes what is inside, and by which rank. Shepherd breaks off whole batches.
DISPLACES = {"priority": PRIORITY, "edf": DUE, "slack": ATTAINABLE, "headway": ATTAINABLE}
pulling_recipes = pytest.mark.parametrize("recipe", [name for name in PULLING if name not in BINDING])
# Its packer chooses among many more requests than fit: they wait inside the engine.
WINDOWED = [name for name in PULLING if name not in BINDING and name != "headway"]
windowed_recipes = pytest.mark.parametrize("recipe", WINDOWED)


def request(id: str, *, model: str = "m0", prompt: int = 10, arrival: float = 0.0, **more: object) -> Request:
    return Request(id, model, prompt, 100, arrival, **more)  # type: ignore[arg-type]


def world(recipe: str, *up: str) -> World:
    output_tokens = World(controller(recipe))
    for name in up:
        output_tokens.start(name)
    return output_tokens


@every_recipe
@EXAMPLES
@given(program=PROGRAMS)
def test_every_accepted_request_is_queued_or_inside_exactly_one_instance(recipe: str, program: list[int]) -> None:
    """`World.notify` fails on a second send, one to a dead or wrong instance, and one of an ended request."""
    around = world(recipe)
    for choice in program:
        around.act(choice)
        core = around.core
        assert core.queued == len(around.queued)
        assert set(core.requests) == set(around.requests) == {*around.queued, *around.inside}
        backlog = core.cluster.backlog
        assert len(backlog) == len(around.requests)
        for id, row in backlog.row_of.items():
            assert backlog.sent[row] == (id in around.inside)


@every_recipe
@EXAMPLES
@given(program=PROGRAMS)
def test_every_request_gets_its_turn(recipe: str, program: list[int]) -> None:
    around = world(recipe)
    for choice in program:
        around.act(choice)
    for name in set(FLEET) - set(around.up):
        around.start(name)
    for _ in range(len(around.requests)):
        assert around.inside, "requests wait although every engine is empty"
        id = next(iter(around.inside))
        around.end(id, Finished(id, 10))
    assert not around.requests


@pulling_recipes
@EXAMPLES
@given(program=PROGRAMS)
def test_no_instance_idles_while_requests_for_it_wait(recipe: str, program: list[int]) -> None:
    around = world(recipe)
    for choice in program:
        around.act(choice)
        waiting = {waits.model for waits in around.queued.values()}
        for name, instance in around.up.items():
            assert around.load(name) or instance.model not in waiting


@pytest.mark.parametrize("recipe", ["vllm", *DISPLACES])
@EXAMPLES
@given(program=PROGRAMS)
def test_requests_for_one_instance_keep_no_other_instance_idle(recipe: str, program: list[int]) -> None:
    """`World.notify` fails when one goes elsewhere."""
    around = world(recipe)
    around.bound = True
    assert around.core.planner.restricts
    for choice in program:
        around.act(choice)
        for name, instance in around.up.items():
            waits = [one for one in around.queued.values() if one.model == instance.model and one.may(name)]
            assert around.load(name) or not waits
    for name in set(FLEET) - set(around.up):
        around.start(name)
    for _ in range(len(around.requests)):
        id = next(iter(around.inside))
        around.end(id, Finished(id, 10))
    assert not around.requests
    assert not around.core.cluster.only


@pytest.mark.parametrize("recipe", ["vllm", *DISPLACES])
def test_a_request_that_comes_back_may_be_for_other_instances(recipe: str) -> None:
    core = controller(recipe)
    for name in ("e0", "e1"):
        core.on(InstanceUp(FLEET[name]), 0.0)
    sends = core.on(Arrived(request("r", engines=("e0",))), 0.0)
    for engines in (("e1",), ("e0",), None):
        sends += core.on(Returned("r", engines=engines), 1.0)
    assert [one.instance for one in sends if isinstance(one, Send)] == ["e0", "e1", "e0", "e0"]
    core.on(Returned("r", engines=()), 1.0)
    assert not core.cluster.only


@pytest.mark.parametrize("recipe", [name for name in PULLING if not find(name).planner().restricts])
def test_other_planners_send_what_is_for_one_instance_anywhere(recipe: str) -> None:
    core = controller(recipe)
    core.on(InstanceUp(FLEET["e1"]), 0.0)
    commands = [*core.on(Arrived(request("r", engines=("e0",))), 0.0), *core.on(Tick(), 30.0)]
    assert [(one.id, one.instance) for one in commands if isinstance(one, Send)] == [("r", "e1")]


@EXAMPLES
@given(program=PROGRAMS)
def test_without_displacing_no_instance_holds_more_than_its_window(program: list[int]) -> None:
    around = world("vllm")
    for choice in program:
        around.act(choice)
        for name in around.up:
            assert around.load(name) <= FLEET[name].window


@EXAMPLES
@given(program=PROGRAMS)
def test_first_come_first_served_never_overtakes(program: list[int]) -> None:
    """By arrival; equal arrivals in the order in which the controller saw them."""
    around = world("vllm")

    def nobody_is_overtaken(sends: list[Send]) -> None:
        for first in (around.core.requests[send.id] for send in sends):
            for other in around.queued.values():
                ahead = (first.arrival, int(first.id[1:])) < (other.arrival, int(other.id[1:]))
                assert ahead or other.model != first.model

    around.watch = nobody_is_overtaken
    for choice in program:
        around.act(choice)


@pytest.mark.parametrize("recipe", [name for name in PULLING if name not in ("shepherd", "headway")])
@EXAMPLES
@given(program=PROGRAMS)
def test_a_request_is_sent_beyond_the_window_only_to_displace(recipe: str, program: list[int]) -> None:
    """More than a window inside means that the one sent ranks among the first of those."""
    around = world(recipe)

    def room_or_rank(sends: list[Send]) -> None:
        core = around.core
        for send in sends:
            window = FLEET[send.instance].window
            if recipe not in DISPLACES:
                assert around.load(send.instance) <= window
                continue
            queue = Reference(DISPLACES[recipe]).queues(core.cluster, around.now)[send.instance]
            head = core.cluster.backlog.names(queue[:window].tolist())
            assert around.load(send.instance) <= window or send.id in head

    around.watch = room_or_rank
    for choice in program:
        around.act(choice)


@every_recipe
@EXAMPLES
@given(program=PROGRAMS)
def test_the_same_events_give_the_same_commands(recipe: str, program: list[int]) -> None:
    one, two = world(recipe), world(recipe)
    for choice in program:
        assert one.act(choice) == two.act(choice)


@pytest.mark.parametrize("recipe", [name for name in PULLING if name != "headway"])
def test_a_returned_request_is_sent_again_before_those_that_came_after_it(recipe: str) -> None:
    around = world(recipe, "e2")
    for i in range(3):
        around.arrive(request(f"r{i}", model="m1", arrival=float(i)))
    assert around.inside == {"r0": "e2"}
    assert around.give_back("r0") == [Send("r0", "e2")]


def test_a_returned_request_goes_to_an_instance_that_lives() -> None:
    around = world("vllm", "e0", "e1")
    around.arrive(request("r"))
    first = around.inside["r"]
    around.stop(first)
    assert around.inside["r"] == ({"e0", "e1"} - {first}).pop()


def test_requests_wait_for_an_instance_of_their_model() -> None:
    around = world("vllm", "e0")
    assert around.arrive(request("r", model="m1")) == []
    assert around.start("e2") == [Send("r", "e2")]


@windowed_recipes
def test_instances_share_the_load_by_their_size(recipe: str) -> None:
    around = world(recipe, "e0", "e1")
    for i in range(9):
        around.arrive(request(f"r{i}", arrival=float(i)))
    assert (around.load("e0"), around.load("e1")) == (3, 6)
    assert around.load("e0") + around.load("e1") == FLEET["e0"].window + FLEET["e1"].window


def test_many_wait_inside_for_a_packer_that_chooses_among_them() -> None:
    """KV does not count; beyond 1,024 requests in an engine the rest waits outside."""
    around = world("headway", "e0")
    ahead = FLEET["e0"].window + 1024
    for i in range(ahead + 5):
        around.arrive(request(f"r{i}", prompt=300, arrival=i / 1e4))
    assert around.load("e0") == ahead
    around.end("r0", Finished("r0", 100))
    assert around.load("e0") == ahead


def test_requests_that_are_late_keep_none_outside_that_can_be_on_time() -> None:
    around = world("headway", "e0")
    ahead = FLEET["e0"].window + 1024
    for i in range(ahead + 5):
        around.arrive(request(f"r{i}", prompt=300, arrival=around.now, slo=Slo(ttft=1.0)))
    assert around.load("e0") == ahead
    around.now += 2.0
    around.arrive(request("new", prompt=300, arrival=around.now, slo=Slo(ttft=1.0)))
    assert "new" in around.inside
    assert around.load("e0") == ahead + 1


def test_a_batch_that_is_due_tomorrow_does_not_pass_what_is_overdue() -> None:
    around = world("headway", "e0")
    ahead, day = FLEET["e0"].window + 1024, Slo(e2e=86_400.0)
    for i in range(ahead + 5):
        around.arrive(request(f"line{i}", prompt=300, arrival=around.now, slo=day))
    for i in range(ahead + 5):
        around.arrive(request(f"plain{i}", prompt=300, arrival=around.now))
    around.now += 20.0
    around.end("line0", Finished("line0", 100))
    for i in range(5):
        around.end(f"plain{i}", Finished(f"plain{i}", 100))
    assert all(f"plain{i}" in around.inside for i in range(5, ahead + 5))
    assert f"line{ahead}" not in around.inside
    around.now += 86_000.0
    around.end("plain5", Finished("plain5", 100))
    assert f"line{ahead}" in around.inside, "its deadline is no longer far"


@pulling_recipes
def test_half_a_load_is_spread_over_the_instances(recipe: str) -> None:
    around = world(recipe, "e0", "e1")
    for i in range(3):
        around.arrive(request(f"r{i}", arrival=float(i)))
    assert (around.load("e0"), around.load("e1")) == (1, 2)


@windowed_recipes
def test_no_more_is_sent_than_the_kv_memory_holds(recipe: str) -> None:
    """A queued prompt can still go to another instance; one inside an engine cannot."""
    around = world(recipe, "e0")  # 60 blocks of 16 tokens
    for i in range(3):
        around.arrive(request(f"r{i}", prompt=300, arrival=float(i)))  # and 100 expected: 25 blocks each
    assert set(around.inside) == {"r0", "r1"}
    around.end("r0", Finished("r0", 100))
    assert set(around.inside) == {"r1", "r2"}


@every_recipe
def test_a_request_that_seems_too_large_is_still_sent_alone(recipe: str) -> None:
    around = world(recipe, "e0")
    around.arrive(request("huge", prompt=5000))
    assert around.inside == {"huge": "e0"}


@pytest.mark.parametrize("recipe", ["priority", "edf", "slack"])
def test_a_more_urgent_arrival_is_sent_to_a_full_engine(recipe: str) -> None:
    around = world(recipe, "e2")
    around.arrive(request("bulk", model="m1", priority=5))
    urgent = request("alarm", model="m1", arrival=1.0, priority=-1, slo=Slo(ttft=1e6))
    assert around.arrive(urgent) == [Send("alarm", "e2")]


def test_first_come_first_served_sends_nothing_to_a_full_engine() -> None:
    around = world("vllm", "e2")
    around.arrive(request("bulk", model="m1", priority=5))
    assert around.arrive(request("alarm", model="m1", arrival=1.0, priority=-1)) == []


def test_events_about_unknown_and_ended_requests_change_nothing() -> None:
    around = world("vllm", "e0")
    around.arrive(request("r"))
    around.end("r", Finished("r", 10))
    for event in (Finished("r", 10), Failed("r", "x"), Returned("r"), Started("r"), Tick()):
        assert around.notify(event) == []
    assert around.core.queued == 0
    assert not around.core.requests


def test_a_request_returned_while_it_is_queued_is_counted_once() -> None:
    around = world("vllm")
    around.arrive(request("r"))
    around.notify(Returned("r"))
    assert around.core.queued == 1


def test_a_finished_request_updates_the_length_forecast_of_its_task() -> None:
    around = world("vllm", "e0")
    around.arrive(request("r", task="sum"))
    around.end("r", Finished("r", 7))
    assert around.core.lengths.forecast(request("q", task="sum")).mean == 7
    around.arrive(request("f", task="sum"))
    around.end("f", Failed("f", "x"))
    assert around.core.lengths.forecast(request("q", task="sum")).mean == 7


# ---- admission


def full(max_queued: int) -> World:
    around = World(controller("vllm", max_queued))
    for i in range(max_queued):
        assert around.core.admit(request(f"r{i}"), around.now) is None
        around.arrive(request(f"r{i}"))
    return around


def test_a_full_queue_rejects_with_retry_after() -> None:
    refusal = full(3).core.admit(request("r"), 1000.0)
    assert refusal is not None
    assert (refusal.id, refusal.reason) == ("r", "queue_full")
    assert refusal.retry_after == 1.0


def test_room_in_the_queue_admits_again() -> None:
    around = full(3)
    around.end("r1", Failed("r1", "client_gone"))
    assert around.core.admit(request("r"), around.now) is None


def test_requests_inside_engines_do_not_fill_the_queue() -> None:
    around = World(controller("vllm", 1))
    around.start("e0")
    for i in range(FLEET["e0"].window):
        assert around.core.admit(request(f"r{i}"), around.now) is None
        around.arrive(request(f"r{i}"))
    assert around.core.admit(request("r"), around.now) is None


@given(gaps=st.lists(st.floats(0, 1e4), max_size=8), wait=st.floats(-10, 1e5), queued=st.integers(1, 4))
def test_retry_after_is_within_a_second_and_a_minute(gaps: list[float], wait: float, queued: int) -> None:
    around = full(queued)
    for i, gap in enumerate(gaps):
        around.now += gap
        around.arrive(request(f"x{i}"))
        around.end(f"x{i}", Finished(f"x{i}", 1))
    refusal = around.core.admit(request("r"), around.now + wait)
    assert refusal is not None
    assert refusal.retry_after is not None
    assert 1.0 <= refusal.retry_after <= 60.0


def test_retry_after_follows_the_rate_at_which_answers_end() -> None:
    around = full(1)
    for i in range(6):
        around.now += 10.0
        around.arrive(request(f"x{i}"))
        around.end(f"x{i}", Finished(f"x{i}", 1))
    refusal = around.core.admit(request("r"), around.now)
    assert refusal is not None
    assert refusal.retry_after == pytest.approx(10.0, rel=0.2)


def test_an_instance_that_comes_up_again_replaces_the_old_one() -> None:
    around = world("vllm", "e1")
    larger = replace(FLEET["e1"], max_running=9)
    around.notify(InstanceUp(larger))
    for i in range(20):
        around.arrive(request(f"r{i}", arrival=float(i)))
    assert around.load("e1") == larger.window


def test_what_waits_inside_an_engine_counts_as_queued() -> None:
    """A packer that chooses among many would else let the gateway accept without end."""
    around = world("headway", "e2")  # a window of 1
    around.core.max_queued = 5
    for i in range(6):
        assert around.core.admit(request(f"r{i}", model="m1"), 0.0) is None
        around.arrive(request(f"r{i}", model="m1", arrival=float(i)))
    assert around.load("e2") == 6
    refused = around.core.admit(request("r6", model="m1"), 6.0)
    assert refused is not None
    assert refused.reason == "queue_full"
