"""One order over several models: who is swapped for whom, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.events import Swapped
from headway.policy.core.ranks import ARRIVAL, DUE
from headway.policy.plan.baselines.model_swap import ModelSwap
from headway.policy.recipes.registry import find
from headway.simulate.outcome import Observer
from headway.simulate.run import Failure, Outcome, Simulation
from headway.simulate.workload.traffic import Workload
from headway.types import Command, Instance, Loadable, Slo, Swap
from tests.plan.place import Place, ask, instance
from tests.simulate.machines import at, machine, random_traffic, together


def both(id: str, serves: str = "a", loads: str = "b", *, running: int = 2, **more: Any) -> Instance:
    others = tuple(Loadable(model, 10.0, 1.0, 4096) for model in loads)
    return instance(id, running, model=serves, lead=0, loadable=others, **more)


def loaded(place: Place, name: str, model: str, now: float) -> list[Command]:
    """Let a swap end."""
    before, _ = place.core.cluster.loading[name]
    other = Loadable(before.model, 10.0, 1.0, 4096)
    return place.notify(Swapped(replace(before, model=model, loadable=(other,))), now)


def swaps(commands: Sequence[Command]) -> list[tuple[str, str]]:
    return [(command.instance, command.model) for command in commands if isinstance(command, Swap)]


def test_an_instance_runs_empty_before_it_swaps_and_takes_nothing_more() -> None:
    place = Place(ModelSwap(ARRIVAL), both("e0"))
    place.come(ask("r0", 0.0, model="a"))
    assert swaps(place.come(ask("r1", 1.0, model="b"))) == [], "r0 is still running"
    place.come(ask("r2", 2.0, model="a"))
    assert place.inside == {"r0": "e0"}, "r2 comes after r1"
    assert swaps(place.end("r0", 3.0)) == [("e0", "b")]
    loaded(place, "e0", "b", 13.0)
    assert place.inside == {"r1": "e0"}
    assert swaps(place.end("r1", 14.0)) == [("e0", "a")]


def test_edf_takes_the_request_that_is_due_first() -> None:
    place = Place(ModelSwap(DUE), both("e0", running=1))
    place.come(ask("r0", 0.0, model="a"))
    place.come(ask("r1", 1.0, model="a", slo=Slo(e2e=100.0)))
    place.come(ask("r2", 2.0, model="b", slo=Slo(e2e=10.0)))
    assert swaps(place.end("r0", 3.0)) == [("e0", "b")]


def test_the_idle_instance_swaps_rather_than_the_busy_one() -> None:
    place = Place(ModelSwap(ARRIVAL), both("e0"), both("e1"))
    place.come(ask("r0", 0.0, model="a"))
    assert swaps(place.come(ask("r1", 1.0, model="b"))) == [("e1", "b")]
    assert swaps(place.come(ask("r2", 2.0, model="b"))) == [], "it waits for e1"
    place.come(ask("r3", 3.0, model="a"))
    assert place.inside == {"r0": "e0", "r3": "e0"}
    loaded(place, "e1", "b", 11.0)
    assert place.inside == {"r0": "e0", "r3": "e0", "r1": "e1", "r2": "e1"}


def test_full_instances_are_held_up_by_the_head_and_others_are_not() -> None:
    """e0 could load b, e1 could not: the request for b holds up e0 alone."""
    place = Place(ModelSwap(ARRIVAL), both("e0", running=1), instance("e1", 1, model="c", lead=0))
    place.come(ask("r0", 0.0, model="a"))
    place.come(ask("r1", 1.0, model="b"))
    place.come(ask("r2", 2.0, model="a"))
    place.come(ask("r3", 3.0, model="c"))
    assert place.inside == {"r0": "e0", "r3": "e1"}
    assert swaps(place.end("r0", 4.0)) == [("e0", "b")]


def test_an_instance_serves_on_when_the_request_it_ran_empty_for_has_gone_elsewhere() -> None:
    place = Place(ModelSwap(ARRIVAL), both("e0"), both("e1", "b", "", running=1))
    place.come(ask("r0", 0.0, model="b"))
    place.come(ask("r1", 1.0, model="a"))
    place.come(ask("r2", 2.0, model="b"))
    assert place.end("r0", 3.0), "e1 takes r2, for which e0 was running empty"
    place.come(ask("r3", 4.0, model="a"))
    assert place.inside == {"r1": "e0", "r2": "e1", "r3": "e0"}


def test_what_was_loaded_is_used_before_the_next_swap() -> None:
    """While b is loaded a more urgent request for a comes; b's is served first all the same."""
    place = Place(ModelSwap(DUE), both("e0", running=1))
    assert swaps(place.come(ask("r0", 0.0, model="b", slo=Slo(e2e=100.0)))) == [("e0", "b")]
    place.come(ask("r1", 1.0, model="a", slo=Slo(e2e=5.0)))
    loaded(place, "e0", "b", 10.0)
    assert place.inside == {"r0": "e0"}
    assert swaps(place.end("r0", 11.0)) == [("e0", "a")]


class Watch(Observer):
    """Notes where requests go and that none comes back."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.back: list[int] = []

    def sent(self, request: int, instance: int, now: float, found: int) -> None:
        self.at[request] = instance

    def returned(self, request: int, now: float) -> None:
        self.back.append(request)


def run(kind: str, fleet: list[Any], load: Workload, **more: Any) -> tuple[Outcome, Watch]:
    watch = Watch()
    outcome = Simulation(find(f"{kind}-model-swap"), fleet, load, **more).run(observer=watch)
    assert np.isfinite(outcome.end).all()
    assert outcome.failed == outcome.shed == 0
    return outcome, watch


@settings(max_examples=20)
@given(
    st.sampled_from(["vllm", "edf"]),
    st.integers(0, 999),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.floats(0.1, 20),
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 20)), max_size=2),
)
def test_every_request_ends_where_its_model_is_served_and_swaps_wait_for_the_batch(
    kind: str, seed: int, count: int, instances: int, running: int, span: float, fails: list[Any]
) -> None:
    """The first instance loads every model, so all can be served; without failures nothing comes back."""
    models = ("a", "b", "c")
    mine = [models, *(models[i % 3 : i % 3 + 2] for i in range(1, instances))]
    fleet = [machine(f"e{i}", *some, running=running, host=1, blocks=60) for i, some in enumerate(mine)]
    load = random_traffic(seed, models, count, span)
    slo = np.random.default_rng(seed).uniform(1.0, 200.0, count)
    failures = [Failure(f"e{instances - 1}", begin, seconds) for begin, seconds in fails]
    outcome, watch = run(kind, fleet, replace(load, e2e=slo), failures=failures)
    for row, number in watch.at.items():
        assert load.models[load.model[row]] in fleet[number].variants()
    if not failures:
        assert not watch.back
        assert outcome.swaps <= count


@pytest.mark.parametrize("kind", ["vllm", "edf"])
def test_alternating_models_thrash(kind: str) -> None:
    """QLM 2.4, Insight 3: as many swaps as requests, one after the other."""
    load = together(*(at(float(i), model="ab"[i % 2], slo=Slo(e2e=100.0)) for i in range(10)))
    outcome, _ = run(kind, [machine("e0", "b", "a", host=2, cold=5.0, warm=5.0)], load)
    assert outcome.swaps == 10
