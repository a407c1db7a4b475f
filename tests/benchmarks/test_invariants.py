"""What every packer owes, of every rival: nobody is lost, nothing stands still, no block leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rivals.systems import LADDER, RIVALS, SWEEPS, rival_of, system
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.recipes.registry import find
from headway.ports import Packer
from headway.types import Slo
from tests.pack.driven import SIZE, Ask, Driven, Limits, limits, loads

VARIANTS = ("slos-serve edf_sim", "slos-serve retries", "fairbatching line", "qoserve line", "edf, 256 tokens")
every = pytest.mark.parametrize("name", [*RIVALS, *VARIANTS])
WHOLE = Slo(e2e=3.0)  # seconds; some of these are lost from the start, as CHAT's are


def packer(name: str, limits: Limits) -> Packer:
    return system(name).packer(EngineSpec(limits.running, limits.budget, SIZE, 2048))


@every
@given(loads(), limits)
@settings(max_examples=8)
def test_every_request_is_served_and_no_iteration_is_wasted(name: str, asks: list[Ask], limits: Limits) -> None:
    """`Driven` checks each iteration: blocks, slots, budget, and that something is computed."""
    asks = [Ask(a.prompt, a.output, a.after, WHOLE if i % 3 == 2 else a.slo) for i, a in enumerate(asks)]
    made = Driven(packer(name, limits), limits).served(asks)
    assert made == {f"r{i}": ask.output for i, ask in enumerate(asks)}


@every
@given(loads(), limits, st.data())
@settings(max_examples=5)
def test_held_rows_are_left_alone(name: str, asks: list[Ask], limits: Limits, data: st.DataObject) -> None:
    run = Driven(packer(name, limits), Limits(limits.running, limits.budget, 1000, 40))
    steps = run.go([*asks, Ask(5, 30)])
    next(steps)
    jobs = run.engine.jobs
    held = int(data.draw(st.sampled_from(jobs.rows().tolist())))
    if not jobs.running[held] or jobs.rows().size == 1:
        return
    jobs.held[held] = True
    id, computed = str(jobs.keys[held]), int(jobs.computed[held])
    for _ in range(3):
        if not any(row != held for row in jobs.rows().tolist()):
            break
        seen = next(steps)
        assert id not in {*seen.tokens, *seen.evicted}
        assert jobs.computed[held] == computed


def test_systems_have_names_and_rivals() -> None:
    for name, recipe in RIVALS.items():
        assert recipe.name == name
        assert recipe.about
        for swept in SWEEPS.get(name, ()):
            assert rival_of(swept.name) == name
            assert system(swept.name) is swept
    assert system("headway") is find("headway")
    assert len({system(name) for name in LADDER}) == len(LADDER)


@pytest.mark.parametrize(
    "module", ["qoserve", "slos_serve", "fairbatching", "scorpio", "jitserve", "slai", "composite"]
)
def test_a_rival_is_found_as_a_recipe_from_outside(module: str) -> None:
    assert find(f"benchmarks.rivals.{module}:RECIPE") in RIVALS.values()
