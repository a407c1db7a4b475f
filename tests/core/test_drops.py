"""Requests of classes that drop: refused before their first token once they cannot be on time, only they."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Arrived, Cached, Failed, Finished, InstanceDown, InstanceUp, Learned, Returned, Started
from headway.policy.core.drops import Drops, Needs
from headway.policy.forecast.latency.online import OnlineLatency, prefill_of, seconds_of
from headway.prefix import GRAIN, CacheReport, Keys, prompt_seed, token_keys
from headway.types import Batch, Floats, Progress, Reject, Request, Shortfall, Slo
from tests.core.test_controller import every_recipe, world
from tests.core.world import FLEET, World

# Scaled coefficients: 10 ms per iteration and 1 ms per prompt token, whatever the context.
THETA = np.array([0.01, 0.0, 0.0, 0.512, 0.0])
NOW = 1000.0


def request(
    id: str = "r", *, prompt: int = 100, arrival: float = NOW, slo: Slo | None = None, drop: bool = True
) -> Request:
    return Request(id, "m0", prompt, 50, arrival, slo or Slo(ttft=1.0), drop=drop)


def learned(around: World, *names: str, theta: Floats = THETA, cached: int = 0) -> World:
    for name in names:
        around.notify(Learned(name, theta, cached))
    return around


def start_of(prompt: int, ttft: float = 1.0) -> float:
    """Return the last start of a request that arrives now."""
    return NOW + ttft - float(prefill_of(THETA, prompt))


# ---- at arrival


def test_a_request_that_no_idle_engine_could_serve_on_time_is_refused() -> None:
    around = learned(world("headway", "e0"), "e0")
    assert around.core.infeasible(request(prompt=980), NOW) is None
    refused = around.core.admit(request(prompt=1200), NOW)
    assert refused == Reject("r", "infeasible", None, refused.shortfall if refused else None)
    assert refused.shortfall is not None
    assert refused.shortfall.target == "ttft"
    assert refused.shortfall.needed == pytest.approx(1.21)
    assert refused.shortfall.promised == 1.0


def test_what_its_way_here_took_counts() -> None:
    around = learned(world("headway", "e0"), "e0")
    assert around.core.infeasible(request(prompt=700), NOW) is None
    assert around.core.infeasible(request(prompt=700), NOW + 0.4) is not None


def test_a_deadline_needs_the_least_answer_as_well() -> None:
    around = learned(world("headway", "e0"), "e0")
    for _ in range(8):  # answers of 50 tokens, 10 ms each
        around.core.lengths.learn(request(), 50)
    slow, loose = request(prompt=100, slo=Slo(e2e=0.6)), request(prompt=100, slo=Slo(e2e=0.7))
    refused = around.core.infeasible(slow, NOW)
    assert refused is not None
    assert refused.shortfall == Shortfall("e2e", pytest.approx(0.61), 0.6)
    assert around.core.infeasible(loose, NOW) is None


def test_a_guessed_length_refuses_nothing() -> None:
    around = learned(world("headway", "e0"), "e0")
    assert around.core.infeasible(request(prompt=100, slo=Slo(e2e=0.2)), NOW) is None


def test_only_requests_that_are_to_be_dropped_are_refused() -> None:
    around = learned(world("headway", "e0"), "e0")
    assert around.core.admit(request(prompt=2000, drop=False), NOW) is None


@pytest.mark.parametrize("up", [(), ("e0",), ("e0", "e1")])
def test_nothing_is_refused_at_arrival_until_every_engine_has_learned(up: tuple[str, ...]) -> None:
    around = world("headway", *up)
    learned(around, *up[1:])
    assert around.core.infeasible(request(prompt=2000), NOW) is None


def test_the_best_engine_of_the_model_counts() -> None:
    around = learned(world("headway", "e0", "e1", "e2"), "e0", "e2")
    learned(around, "e1", theta=THETA / 2)
    assert around.core.infeasible(request(prompt=1900), NOW) is None
    assert around.core.infeasible(request(prompt=2100), NOW) is not None


def test_a_restarted_engine_has_learned_nothing() -> None:
    around = learned(world("headway", "e0"), "e0")
    around.notify(InstanceDown("e0"))
    around.notify(InstanceUp(FLEET["e0"]))
    assert around.core.infeasible(request(prompt=1200), NOW) is None


def test_what_may_be_in_the_prefix_cache_is_not_counted() -> None:
    around = learned(world("headway", "e0"), "e0", cached=512)
    assert around.core.infeasible(request(prompt=1400), NOW) is None
    assert around.core.infeasible(request(prompt=1600), NOW) is not None


def test_once_a_minute_one_is_let_in_so_that_a_wrong_latency_is_corrected() -> None:
    around = learned(world("headway", "e0"), "e0")
    tried = [
        around.core.infeasible(replace(request(f"r{t}", prompt=1200), arrival=NOW + t), NOW + t) is None
        for t in range(200)
    ]
    assert [t for t in range(200) if tried[t]] == [60, 120, 180]


def test_a_trial_is_refused_when_its_deadline_passes() -> None:
    around = learned(world("headway", "e0"), "e0")
    assert around.core.infeasible(request("first", prompt=1200), NOW) is not None
    around.now = NOW + 60
    trial = replace(request("trial", prompt=1200), arrival=around.now)
    assert around.core.infeasible(trial, around.now) is None
    around.arrive(trial)
    assert around.core.next_check == math.nextafter(around.now + 1.0, math.inf)


# ---- while it waits


def test_a_queued_request_is_refused_when_its_last_start_passes() -> None:
    around = learned(world("vllm", "e0"), "e0")
    for i in range(FLEET["e0"].window):
        around.arrive(request(f"old{i}", drop=False))
    around.arrive(request("late", prompt=300))
    around.arrive(request("patient", prompt=300, drop=False))
    last = start_of(300)
    around.now = last
    around.check()
    assert not around.refused, "it can still start at this very instant"
    around.now = around.core.next_check
    assert 0 < around.now - last < 1e-6
    around.check()
    _, reject, _ = around.refused["late"]
    assert reject.reason == "infeasible"
    assert reject.retry_after == 1.0
    assert reject.shortfall == Shortfall("ttft", pytest.approx(1.0), 1.0)
    assert around.core.next_check == math.inf
    assert "patient" in around.queued


def test_before_anything_is_learned_only_the_deadline_itself_counts() -> None:
    around = world("vllm")
    around.arrive(request("r", prompt=2000, slo=Slo(ttft=1.0, e2e=5.0)))
    assert around.core.next_check == math.nextafter(NOW + 1.0, math.inf)
    around.now = NOW + 1.5
    around.check()
    assert around.refused["r"][1].shortfall == Shortfall("ttft", 1.5, 1.0)


def test_an_engine_that_has_computed_a_part_has_more_time() -> None:
    around = learned(world("vllm", "e0"), "e0")
    around.arrive(request("r", prompt=500))
    assert around.inside == {"r": "e0"}
    around.now = around.core.next_check
    around.check(computed=300)
    assert not around.refused
    assert around.core.next_check == pytest.approx(start_of(200))
    around.now = around.core.next_check
    around.check(computed=300)
    assert "r" in around.refused
    assert not around.core.requests


def test_an_engine_that_does_not_answer_is_asked_again() -> None:
    around = learned(world("vllm", "e0"), "e0")
    around.arrive(request("r", prompt=500))
    now = around.core.next_check
    assert around.core.overdue(now) == ([], {"e0": ["r"]})
    assert around.core.overdue(now) == ([], {})
    again = around.core.next_check
    assert again == pytest.approx(now + 1.0)
    assert around.core.overdue(again).inside == {"e0": ["r"]}


@pytest.mark.parametrize("event", [Started("r"), Finished("r", 5), Failed("r", "client_gone")])
def test_what_has_a_token_or_an_end_is_not_looked_at(event: Started | Finished | Failed) -> None:
    around = learned(world("vllm", "e0"), "e0")
    around.arrive(request("r"))
    around.core.on(event, NOW)
    assert around.core.next_check == math.inf
    assert around.core.overdue(NOW + 100) == ([], {})
    assert around.core.refuse("e0", {"r": Progress(0, 0)}, NOW + 100) == []


def test_a_token_that_only_the_engine_knows_of_counts_as_started() -> None:
    around = learned(world("vllm", "e0"), "e0")
    around.arrive(request("r"))
    around.started.add("r")
    around.now = NOW + 2.0
    around.check()
    assert not around.refused
    assert around.core.next_check == math.inf


def test_a_request_that_comes_back_without_a_token_is_looked_at_again() -> None:
    around = learned(world("vllm", "e0"), "e0")
    around.arrive(request("r", prompt=300))
    around.core.note(Started("r"), NOW)
    around.core.note(InstanceDown("e0"), NOW)
    around.core.note(Returned("r"), NOW)
    assert around.core.next_check == math.nextafter(NOW + 1.0, math.inf), "no engine is known any more"
    around.core.note(Returned("r", output_tokens=3), NOW)
    assert around.core.overdue(NOW + 2.0).rejects


def test_a_part_of_an_answer_is_not_dropped() -> None:
    around = learned(world("vllm", "e0"), "e0")
    around.arrive(request("r", prompt=300))
    around.core.note(Returned("r", output_tokens=3), NOW)
    assert around.core.next_check == math.inf


def test_an_answer_of_another_engine_says_nothing() -> None:
    around = learned(world("vllm", "e0", "e1"), "e0", "e1")
    around.arrive(request("r", prompt=300))
    other = {"e0": "e1", "e1": "e0"}[around.inside["r"]]
    around.core.overdue(NOW + 2)
    assert around.core.refuse(other, {"r": Progress(0, 0)}, NOW + 2) == []
    assert "r" in around.core.requests


def test_classes_that_do_not_drop_cost_nothing() -> None:
    around = learned(world("headway", "e0"), "e0")
    for i in range(20):
        around.arrive(request(f"r{i}", drop=False))
    assert around.core.next_check == math.inf
    assert around.core.overdue(NOW + 1e6) == ([], {})


PROGRAMS = st.lists(st.integers(0, 2**34 - 1), min_size=5, max_size=80)


@every_recipe
@settings(max_examples=20)
@given(program=PROGRAMS, knows=st.booleans())
def test_exactly_what_cannot_be_on_time_is_refused_once(recipe: str, program: list[int], knows: bool) -> None:
    """And every other accepted request stays in exactly one place."""
    around = world(recipe)
    around.drops = True
    for choice in program:
        around.act(choice)
        if knows:
            learned(around, *around.up)
        around.check()
        core = around.core
        assert core.queued == len(around.queued)
        assert set(core.requests) == set(around.requests) == {*around.queued, *around.inside}
        assert not set(around.refused) & set(core.requests)
        for id, request in around.requests.items():
            if request.drop and id not in around.started:
                assert request.slo.due(request.arrival) >= around.now, "its deadline has passed"
        assert core.next_check > around.now
    for request, reject, at in around.refused.values():
        assert reject.shortfall is not None
        assert reject.shortfall.needed > reject.shortfall.promised
        assert Needs(1e9 * knows, 1e9 * knows).last_start(request) < at


# ---- the account


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 100), st.booleans()), max_size=60))
def test_the_next_check_is_the_earliest_of_those_that_hold(steps: list[tuple[str, float, bool]]) -> None:
    drops, expected = Drops(), dict[str, float]()
    for id, at, watched in steps:
        if watched:
            drops.watch(id, at)
            expected[id] = math.nextafter(at, math.inf)
        else:
            drops.discard(id)
            expected.pop(id, None)
        assert drops.next_check == min(expected.values(), default=math.inf)
    due = drops.due(50.0)
    assert sorted(due) == sorted(id for id, at in expected.items() if at <= 50.0)
    assert due == sorted(due, key=lambda id: (expected[id], id))
    assert not any(id in drops for id in due)


def test_entries_that_no_longer_hold_are_cleared_away() -> None:
    drops = Drops()
    for i in range(10_000):
        drops.watch(f"r{i}", 1e6)
        drops.discard(f"r{i}")
    assert len(drops._heap) < 200


def test_an_engine_tells_after_some_iterations() -> None:
    latency = OnlineLatency()
    steps = 0
    while not latency.telling:
        latency.learn(Batch(1, 100, 0), 0.02)
        steps += 1
    assert 8 <= steps <= 100
    assert seconds_of(latency.theta, 1.0, 100.0, 0.0, 0.0) == pytest.approx(0.02, rel=0.05)


def test_an_arrival_that_is_late_already_is_looked_at_at_once() -> None:
    """Background work that was accepted before a restart."""
    around = world("vllm")
    around.core.on(Arrived(request("old", arrival=NOW - 100)), NOW)
    assert around.core.next_check <= NOW
    assert [reject.id for reject in around.core.overdue(NOW).rejects] == ["old"]


# ---- what an engine holds of a prompt


def cached(around: World, name: str, keys: Keys) -> None:
    around.core.note(Cached(name, CacheReport(str(keys.size), 0, 1, keys.tobytes(), whole=True)), around.now)


def history(grains: int) -> Keys:
    return token_keys([7] * (grains * GRAIN), prompt_seed(None, None))


def test_what_one_of_several_engines_holds_of_a_prompt_is_not_counted() -> None:
    around, keys = learned(world("headway", "e0", "e1"), "e0", "e1"), history(75)
    assert around.core.infeasible(request(prompt=1300), NOW, keys.tobytes()) is not None
    cached(around, "e1", keys)
    assert around.core.admit(request(prompt=1300), NOW, keys=keys.tobytes()) is None
    assert around.core.infeasible(request(prompt=1300), NOW) is not None, "a prompt without the prefix"
    refused = around.core.admit(request(prompt=2300), NOW, keys=keys.tobytes())
    assert refused is not None
    assert refused.shortfall == Shortfall("ttft", pytest.approx(1.11), 1.0)


def test_a_queued_request_follows_the_caches() -> None:
    around, keys = learned(world("vllm", "e0", "e1"), "e0", "e1"), history(50)
    for i in range(FLEET["e0"].window + FLEET["e1"].window):
        around.arrive(request(f"old{i}", drop=False))
    for id in ("r", "lost"):
        around.requests[id] = around.queued[id] = request(id, prompt=900)
        around.notify(Arrived(request(id, prompt=900), keys.tobytes()))
    assert around.core.next_check == pytest.approx(start_of(900))
    cached(around, "e0", keys)
    around.now = around.core.next_check
    around.check()
    assert not around.refused
    assert around.core.next_check == pytest.approx(start_of(100))
    around.end("r", Failed("r", "client_gone"))
    cached(around, "e0", history(0))
    around.now = around.core.next_check
    around.check()
    assert set(around.refused) == {"lost"}


def test_inside_an_engine_counts_what_was_cached_when_it_was_sent() -> None:
    """Its own prompt is in the index from then on, although nothing of it is computed."""
    around, keys = learned(world("vllm", "e0", "e1"), "e0", "e1"), history(20)
    for name in ("e0", "e1"):
        cached(around, name, keys[:5])
    around.requests["r"] = around.queued["r"] = request(prompt=320)
    around.notify(Arrived(request(prompt=320), keys.tobytes()))
    around.now = around.core.next_check
    assert around.core.overdue(around.now).inside == {around.inside["r"]: ["r"]}
    assert around.now == pytest.approx(start_of(320 - 5 * GRAIN))


@given(
    st.integers(1, 4000),
    st.integers(0, 2000),
    st.lists(st.tuples(st.integers(0, 250), st.integers(0, 250)), min_size=2, max_size=2),
)
def test_more_cached_tokens_make_no_request_infeasible(prompt: int, longest: int, held: list[tuple[int, int]]) -> None:
    keys = history(prompt // GRAIN)
    around = learned(world("headway", "e0", "e1"), "e0", "e1", cached=longest)

    def refused(more: int) -> bool:
        for name, grains in zip(("e0", "e1"), held, strict=True):
            cached(around, name, keys[: grains[0] + more * grains[1]])
        return around.core.infeasible(request(prompt=prompt), NOW, keys.tobytes()) is not None

    assert refused(0) >= refused(1)
