"""SHEPHERD as a baseline: exact assignment of models, fixed batches by deadline."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.events import Arrived, Finished, Swapped, Tick
from headway.policy.plan.baselines.shepherd import Shepherd, assign
from headway.types import Instance, Loadable, Slo, Swap
from tests.plan.place import Place, ask, instance

RATES = st.floats(0.0, 20.0)


@given(st.data())
def test_the_assignment_is_optimal(data: st.DataObject) -> None:
    """Compared with every possible assignment: models served, then requests served."""
    models = ["a", "b", "c"][: data.draw(st.integers(1, 3))]
    speeds = st.sampled_from([1.0, 2.5, 7.0])
    kinds = [
        {model: data.draw(speeds) for model in models if model == "a" or data.draw(st.booleans())} for _ in range(2)
    ]
    options = {f"e{i}": data.draw(st.sampled_from(kinds)) for i in range(data.draw(st.integers(1, 4)))}
    now = {name: data.draw(st.sampled_from(sorted(can))) for name, can in options.items()}
    rates = {model: data.draw(st.sampled_from([0.0, 1.0, 3.0, 9.0])) for model in models}

    def worth(chosen: dict[str, str]) -> tuple[int, float, int]:
        served = {model: sum(options[n][m] for n, m in chosen.items() if m == model) for model in models}
        asked = [model for model in models if rates[model] > 0]
        total = sum(min(served[model], rates[model]) for model in asked)
        stay = sum(now[name] == model for name, model in chosen.items())
        return sum(served[model] > 0 for model in asked), round(total, 6), stay

    every = (dict(zip(options, pick, strict=True)) for pick in itertools.product(*options.values()))
    chosen = assign(now, options, rates)
    assert all(model in options[name] for name, model in chosen.items())
    assert worth(chosen) == max(worth(other) for other in every)


def test_an_assignment_too_large_to_enumerate_is_refused() -> None:
    options = {f"e{i}": {f"m{j}": 1.0 + i for j in range(6)} for i in range(12)}
    with pytest.raises(ConfigError, match="smaller or more uniform fleet"):
        assign(dict.fromkeys(options, "m0"), options, {"m0": 1.0})


def test_the_next_batch_waits_for_the_end_of_the_last() -> None:
    place = Place(Shepherd(flex=100.0), instance("e0", 2, lead=2))
    for i in range(5):
        place.come(ask(f"r{i}", float(i), slo=Slo(e2e=100.0 - 10 * i)))
    assert set(place.inside) == {"r0"}
    place.end("r0", 10.0)
    assert set(place.inside) == {"r4", "r3"}, "the two most urgent"
    place.end("r4", 11.0)
    assert set(place.inside) == {"r3"}
    place.end("r3", 12.0)
    assert set(place.inside) == {"r2", "r1"}


def test_a_much_larger_batch_does_not_wait() -> None:
    place = Place(Shepherd(flex=3.0), instance("e0", 4, lead=4))
    for i in range(4):
        place.come(ask(f"r{i}", float(i)))
    assert set(place.inside) == {"r0"}
    place.come(ask("r4", 4.0))
    assert set(place.inside) == {"r0", "r1", "r2", "r3", "r4"}


def two_models(id: str) -> Instance:
    return instance(id, loadable=(Loadable("n", 10.0, 1.0, 4096),))


def test_models_follow_the_demand_when_the_period_is_over() -> None:
    place = Place(Shepherd(period=30.0), two_models("e0"), two_models("e1"))
    place.come(ask("m0", 0.0))
    for i in range(9):
        assert not any(isinstance(c, Swap) for c in place.come(ask(f"n{i}", 1.0 + i, model="n")))
    commands = place.notify(Tick(), 31.0)
    assert commands == [Swap("e1", "n")], "e0 has work for m, e1 none"
    assert place.core.cluster.loading["e1"][1] == "n"
    place.notify(Swapped(instance("e1", model="n")), 41.0)
    assert {id for id, name in place.inside.items() if name == "e1"} == {f"n{i}" for i in range(4)}


def test_models_without_an_instance_come_before_rates() -> None:
    chosen = assign(
        {"e0": "a", "e1": "a"}, {name: {"a": 1.0, "b": 1.0} for name in ("e0", "e1")}, {"a": 90.0, "b": 0.01}
    )
    assert sorted(chosen.values()) == ["a", "b"]


def test_old_demand_is_forgotten() -> None:
    planner = Shepherd(period=10.0)
    place = Place(planner, two_models("e0"))
    place.notify(Arrived(ask("m0", 0.0)), 0.0)
    place.notify(Finished("m0", 10), 1.0)
    place.notify(Arrived(ask("n0", 20.0, model="n")), 20.0)
    assert place.core.cluster.loading["e0"][1] == "n"
