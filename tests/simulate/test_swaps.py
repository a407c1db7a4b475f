"""Models come and go, instances die, planners think: nothing is lost and nothing is answered twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError, HeadwayError
from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import ARRIVAL, DUE
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.registry import RECIPES, Recipe, find
from headway.ports import Planner
from headway.simulate.instance import HostMemory
from headway.simulate.record.recorder import Recorder
from headway.simulate.run import Failure, Outcome, Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Plan
from tests.simulate.machines import at, machine, random_traffic, together


@dataclass
class Whim(Planner):
    """Swaps and warms by chance as long as it has some left; and whenever it must, so that all get served."""

    rng: np.random.Generator
    most: int
    swaps = True

    def plan(self, cluster: Cluster, now: float) -> Plan:
        swap, warm = self._needed(cluster), {}
        for name, instance in cluster.instances.items():
            if instance.loadable and self.most and self.rng.random() < 0.2:
                self.most -= 1
                model = instance.loadable[int(self.rng.integers(len(instance.loadable)))].model
                (swap if self.rng.random() < 0.6 else warm).setdefault(name, model)
        send = Ordered(DUE).plan(cluster, now).send
        return Plan(send, swap=swap, warm=warm)

    def _needed(self, cluster: Cluster) -> dict[str, str]:
        """An instance that has nothing to do loads a model that is asked for and that nobody has."""
        backlog, known = cluster.backlog, set()
        known |= {one.model for one in cluster.instances.values()} | {m for _, m in cluster.loading.values()}
        queued = backlog.live & ~backlog.sent
        for name, instance in cluster.instances.items():
            if (queued & (backlog.model == cluster.code(instance.model))).any():
                continue
            for other in instance.loadable:
                asked = (queued & (backlog.model == cluster.code(other.model))).any()
                if asked and other.model not in known:
                    return {name: other.model}
        return {}


def whimsical(seed: int, swaps: int, packer: str) -> Recipe:
    return replace(RECIPES[packer], planner=lambda: Whim(np.random.default_rng(seed), swaps))


def everything_ended_once(workload: Workload, outcome: Outcome) -> None:
    """That nothing ends twice the loop itself asserts."""
    assert np.isfinite(outcome.end).all()
    assert (outcome.first > workload.arrival).all()
    assert (outcome.end >= outcome.first).all()
    assert (outcome.instance >= 0).all()
    assert outcome.shed == outcome.failed == 0


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    models = ("a", "b", "c")[: draw(st.integers(1, 3))]
    nodes = []
    for i in range(draw(st.integers(1, 3))):
        mine = draw(st.permutations(models)) if i == 0 else [draw(st.sampled_from(models))]
        nodes.append(
            machine(
                f"e{i}",
                *mine,
                running=draw(st.integers(1, 4)),
                blocks=draw(st.integers(20, 60)),
                host=draw(st.integers(0, 2)),
                each=draw(st.sampled_from([0.02, 0.1])),
                longest=160,
            )
        )
    failures = [
        Failure(f"e{draw(st.integers(0, len(nodes) - 1))}", draw(st.floats(0, 30)), draw(st.floats(0, 20)))
        for _ in range(draw(st.integers(0, 3)))
    ]
    workload = random_traffic(draw(st.integers(0, 999)), models, draw(st.integers(1, 25)), draw(st.floats(0.1, 20)))
    recipe = whimsical(
        draw(st.integers(0, 999)), draw(st.integers(0, 6)), draw(st.sampled_from(["vllm", "edf", "slack"]))
    )
    think: Callable[[int], float] = draw(st.sampled_from([lambda n: 0.0, lambda n: 0.05, lambda n: 0.01 * n]))
    return {"recipe": recipe, "instances": nodes, "workload": workload, "failures": failures, "plan_seconds": think}


@given(cases())
def test_nothing_is_lost_or_answered_twice(case: dict[str, Any]) -> None:
    one, two = (Simulation(**case).run() for _ in range(2))
    everything_ended_once(case["workload"], one)
    np.testing.assert_array_equal(one.end, two.end)
    np.testing.assert_array_equal(one.first, two.first)
    assert (one.swaps, one.iterations, one.planning) == (two.swaps, two.iterations, two.planning)


def test_any_ids_will_do() -> None:
    """Ids are names: with others a run is the same, swaps, a failure and the recording included."""
    nodes = [machine("e0", "a", "b", running=2, host=1), machine("e1", "a", running=1)]
    workload = random_traffic(3, ("a", "b"), 25, 5.0)
    named = replace(workload, ids=tuple(f"{chr(97 + i)}-{i * 7919 % 25}" for i in range(25)))
    runs = []
    for load in (workload, named):
        recorder, recipe = Recorder(), whimsical(1, 4, "slack")
        outcome = Simulation(replace(recipe, lengths="oracle"), nodes, load, failures=[Failure("e1", 3.0, 2.0)]).run(
            observer=recorder
        )
        everything_ended_once(load, outcome)
        runs.append((outcome, recorder.recording()))
    (one, record), (two, other) = runs
    assert one.swaps == two.swaps > 0
    np.testing.assert_array_equal(one.end, two.end)
    for name in ("iterations", "changes", "moves"):
        np.testing.assert_array_equal(getattr(record, name), getattr(other, name))


def swapping(*targets: tuple[float, str]) -> Recipe:
    """A planner that has e0 load a model from an instant on."""

    class Timetable(Planner):
        swaps = True

        def plan(self, cluster: Cluster, now: float) -> Plan:
            due = [model for when, model in targets if when <= now]
            send = Ordered(ARRIVAL, displaces=False).plan(cluster, now).send
            return Plan(send, swap={"e0": due[-1]} if due else {})

    return replace(RECIPES["vllm"], planner=Timetable)


def test_a_cold_load_takes_its_time_and_a_warm_one_less() -> None:
    """a is loaded at first, b cold at 1 s; both stay in host memory, so a comes back warm at 20 s."""
    node = machine("e0", "a", "b", host=2, cold=10.0, warm=1.0, each=0.5)
    workload = together(at(1.0, model="b", output=1), at(20.0, model="a", output=1))
    outcome = Simulation(swapping((1.0, "b"), (20.0, "a")), [node], workload).run()
    np.testing.assert_allclose(outcome.end, [1.0 + 10.0 + 0.5, 20.0 + 1.0 + 0.5])
    assert outcome.swaps == 2


def test_what_does_not_fit_into_host_memory_is_cold_again() -> None:
    node = machine("e0", "a", "b", host=1, cold=10.0, warm=1.0, each=0.5)
    workload = together(at(1.0, model="b", output=1), at(20.0, model="a", output=1))
    outcome = Simulation(swapping((1.0, "b"), (20.0, "a")), [node], workload).run()
    np.testing.assert_allclose(outcome.end, [11.5, 30.5])


def test_what_was_warmed_while_serving_loads_warm() -> None:
    """From 0 s on b comes into host memory, which takes cold - warm = 9 s; the swap at 12 s takes 1 s."""

    class Prewarmer(Planner):
        swaps = True

        def plan(self, cluster: Cluster, now: float) -> Plan:
            send = Ordered(ARRIVAL, displaces=False).plan(cluster, now).send
            return Plan(send, swap={"e0": "b"} if now >= 12 else {}, warm={"e0": "b"})

    node = machine("e0", "a", "b", host=2, cold=10.0, warm=1.0, each=0.5)
    workload = together(at(0.0, model="a", output=1), at(12.0, model="b", output=1))
    recipe = replace(RECIPES["vllm"], planner=Prewarmer)
    outcome = Simulation(recipe, [node], workload).run()
    np.testing.assert_allclose(outcome.end, [0.5, 12.0 + 1.0 + 0.5])


def test_the_swap_waits_for_the_iteration_and_takes_the_rest_back() -> None:
    """r0 makes a token per second; at 2.5 s a swap is decided, at 3 s it begins, 3 of 6 tokens being out."""
    node = machine("e0", "a", "b", each=1.0, cold=4.0)
    other = machine("e1", "a", each=1.0)
    workload = together(at(0.0, model="a", output=6), at(2.5, model="b", output=1))
    outcome = Simulation(swapping((2.5, "b")), [node, other], workload).run()
    assert outcome.first[0] == 1.0, "its first token was out before the swap"
    assert outcome.end[0] == 3.0 + 3.0, "it goes on elsewhere, its context recomputed with the next token"
    assert outcome.instance[0] == 1
    assert outcome.evictions[0] == 1
    assert outcome.end[1] == 3.0 + 4.0 + 1.0


def test_what_dies_begins_anew() -> None:
    workload = at(0.0, output=6)
    outcome = Simulation(find("vllm"), [machine("e0", each=1.0)], workload, failures=[Failure("e0", 3.5, 10.0)]).run()
    assert outcome.first[0] == 13.5 + 1.0
    assert outcome.end[0] == 13.5 + 6.0
    assert outcome.evictions[0] == 1


def test_an_iteration_that_died_does_not_end() -> None:
    """The one that began at 3 s would have ended at 4 s, when the machine is back and in another."""
    failures = [Failure("e0", 3.5, 0.25)]
    outcome = Simulation(find("vllm"), [machine("e0", each=1.0)], at(0.0, output=6), failures=failures).run()
    assert outcome.end[0] == 3.75 + 6.0


def test_a_swap_that_was_decided_for_the_dead_is_decided_again() -> None:
    """Decided at 1 s to be heard at 3 s, dead from 1.5 s to 2 s: decided anew at 3 s, heard at 5 s."""
    outcome = Simulation(
        swapping((1.0, "b")),
        [machine("e0", "a", "b", each=0.5, cold=10.0)],
        at(1.0, model="b", output=1),
        failures=[Failure("e0", 1.5, 0.5)],
        plan_seconds=lambda queued: 2.0,
    ).run()
    assert outcome.swaps == 1
    assert outcome.end[0] == 5.0 + 10.0 + 2.0 + 0.5


def test_what_a_swap_gave_back_is_not_given_back_again_by_the_death_in_the_load() -> None:
    nodes = [machine("e0", "a", "b", each=1.0), machine("e1", "a", each=1.0)]
    workload = together(at(0.0, model="a", output=6), at(2.5, model="b", output=1))
    failures = [Failure("e0", 5.0, 1.0)]
    outcome = Simulation(swapping((2.5, "b")), nodes, workload, failures=failures).run()
    assert outcome.end[0] == 6.0, "it has gone on in e1 since 3 s"
    assert outcome.evictions[0] == 1


def test_a_failure_ends_a_load() -> None:
    """The swap at 1 s would end at 11 s; the machine dies at 5 s, is back at 6 s with its first model."""
    node = machine("e0", "a", "b", cold=10.0, each=0.5)
    workload = together(at(1.0, model="b", output=1), at(6.5, model="a", output=1))
    recipe = swapping((1.0, "b"), (6.0, "a"), (8.0, "b"))
    outcome = Simulation(recipe, [node], workload, failures=[Failure("e0", 5.0, 1.0)]).run()
    assert outcome.end[1] == 7.0
    assert outcome.end[0] >= 8.0 + 10.0


def test_a_fleet_that_never_comes_back_is_told() -> None:
    simulation = Simulation(find("vllm"), [machine("e0")], at(5.0), failures=[Failure("e0", 1.0)])
    with pytest.raises(HeadwayError, match="1 requests wait"):
        simulation.run()


@pytest.mark.parametrize(
    "failure", [Failure("e9", 1.0), Failure("e0", -1.0), Failure("e0", math.nan), Failure("e0", 1.0, -1.0)]
)
def test_impossible_failures_are_refused(failure: Failure) -> None:
    with pytest.raises(ConfigError):
        Simulation(find("vllm"), [machine("e0")], at(0.0), failures=[failure]).run()


@given(st.integers(0, 10), st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 6)), max_size=30))
def test_host_memory_holds_the_latest_that_fit(size: int, uses: list[tuple[str, int]]) -> None:
    memory, bytes_of = HostMemory(size), dict(uses)
    for name, _ in uses:
        memory.keep(name, bytes_of[name])
        assert sum(memory.held.values()) <= size
        assert (name in memory.held) == (bytes_of[name] <= size)
        assert not memory.held or bytes_of[name] > size or next(reversed(memory.held)) == name


def test_the_least_recently_used_model_leaves_host_memory_first() -> None:
    memory = HostMemory(2)
    for name in ("a", "b", "a", "c"):
        memory.keep(name, 1)
    assert list(memory.held) == ["a", "c"]


def test_shepherd_serves_two_models_on_one_machine() -> None:
    node = machine("e0", "a", "b", host=2, cold=5.0, warm=1.0)
    workload = random_traffic(3, ("a", "b"), 60, 200.0)
    outcome = Simulation(find("shepherd"), [node], workload).run()
    everything_ended_once(workload, outcome)
    assert outcome.swaps >= 2
