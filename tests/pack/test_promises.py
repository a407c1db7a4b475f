"""Promises that every recipe's packer keeps: urgency comes first, and at most `max_running` rows compute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.papers.recipes import PATHS
from headway.engines.simulated.engine import SimulatedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.recipes.registry import find, names
from headway.simulate.instance import InstanceSpec, engine
from headway.types import Instance, Slo

SIZE, BLOCKS, LONGEST = 16, 24, 256
PROMISES = (Slo(), Slo(0.4, 0.2), Slo(e2e=3.0))
every = pytest.mark.parametrize("recipe", [*names(), *PATHS])

# Prompt, answer, iterations until it comes, index of its promise.
Ask = tuple[int, int, int, int]
ask = st.tuples(st.integers(1, 90), st.integers(1, 24), st.integers(0, 20), st.integers(0, 2))
asks = st.lists(ask, max_size=12)
running = st.integers(1, 6)


def build(recipe: str, max_running: int, host_tokens: int | None) -> SimulatedEngine:
    """An engine with so little KV that rows lose it, and three times as many slots as may run."""
    instance = Instance("e0", "default", max_running, BLOCKS, SIZE, LONGEST)
    node = InstanceSpec(instance, OnlineLatency(), 3 * max_running, 96, 1e-5, host_tokens=host_tokens)
    return engine(find(recipe).packer(node.engine_spec(OnlineLatency())), node)


def run(
    machine: SimulatedEngine, todo: list[tuple[str, Ask, float]], rng: np.random.Generator | None = None
) -> Iterator[list[str]]:
    """Yield the ids that compute, iteration by iteration; rng: control holds and releases rows by chance."""
    todo = sorted(todo, key=lambda item: item[1][2])
    jobs, now = machine.jobs, 100.0
    for iteration in range(4000):
        until = iteration if machine.busy or not todo else max(iteration, todo[0][1][2])
        while todo and todo[0][1][2] <= until:
            id, (prompt, output, _, promise), urgency = todo.pop(0)
            row = machine.add(id, prompt, output, arrival=now, slo=PROMISES[promise])
            machine.jobs.urgency[row] = urgency
        if not machine.busy:
            return
        if rng is not None:
            rows = jobs.rows()
            jobs.held[rows] = (rng.random(rows.size) < 0.3) & (iteration < 200)
        ran = machine.schedule(now)
        yield jobs.names(ran.rows[ran.tokens > 0])
        now += 0.05
        machine.complete(ran, now)
    raise AssertionError("some request is never served")


@every
@given(
    others=asks,
    twin=ask,
    late=st.booleans(),
    max_running=running,
    urgency=st.sampled_from([-1.0, 0.0, 3.0]),
    host=st.sampled_from([None, 400]),
)
@example(others=[(1, 3, 0, 0), (1, 9, 0, 1)], twin=(1, 3, 4, 1), late=False, max_running=1, urgency=-1.0, host=None)
@settings(max_examples=5, deadline=None)
def test_the_more_urgent_of_two_that_are_alike_never_starts_later(
    recipe: str, others: list[Ask], twin: Ask, late: bool, max_running: int, urgency: float, host: int | None
) -> None:
    todo = [(f"r{i}", other, float(i % 3)) for i, other in enumerate(others)]
    pair = [("urgent", twin, urgency), ("calm", twin, urgency + 1.0)]
    begins: dict[str, int] = {}
    machine = build(recipe, max_running, host)
    for iteration, ran in enumerate(run(machine, todo + (pair[::-1] if late else pair))):
        for id in ran:
            begins.setdefault(id, iteration)
    assert begins["urgent"] <= begins["calm"]


@every
@given(asks=asks, max_running=running, host=st.sampled_from([None, 400]), seed=st.integers(0, 99), holds=st.booleans())
@settings(max_examples=5, deadline=None)
def test_never_more_than_max_running_rows_compute(
    recipe: str, asks: list[Ask], max_running: int, host: int | None, seed: int, holds: bool
) -> None:
    machine = build(recipe, max_running, host)
    todo = [(f"r{i}", asked, 0.0) for i, asked in enumerate(asks)]
    for ran in run(machine, todo, np.random.default_rng(seed) if holds else None):
        assert len(ran) <= max_running


def test_ecoserve_would_run_more_where_it_may() -> None:
    """The promise above binds it: with room for more rows more of them run."""
    most = {}
    for max_running in (4, 12):
        todo = [(f"r{i}", (4, 8, 0, 0), 0.0) for i in range(12)]
        most[max_running] = max(len(ran) for ran in run(build("ecoserve", max_running, None), todo))
    assert most == {4: 4, 12: 12}


def test_a_spec_says_what_its_engine_lacks() -> None:
    spec = EngineSpec(8, 512)
    assert not find("bros").packer(spec).kv.saves
    assert find("bros").wants.two_ended
    assert not find("bros-plain-blocks").wants.two_ended
