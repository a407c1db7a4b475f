"""Are tokens judged one by one as a client would, and gauges as a sum by hand?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.observers import Gauges, TokenDeadlines, inside
from benchmarks.papers.trial import instance
from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.two_ended import HostPoolEngine, TwoEndedEngine
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.memory.budget import KvBudget
from headway.policy.recipes.registry import find
from headway.simulate.forecasts import Oracle
from headway.simulate.instance import InstanceSpec, SimulatedInstance, describe
from headway.simulate.outcome import Outcome
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import Workload, concat, single
from headway.types import Batch, Instance, Jobs, Slo


class Second:
    """A pace of 1 s per iteration, and another second with a prompt in it."""

    def seconds(self, batch: Batch) -> float:
        return 2.0 if batch.prefill > 1 else 1.0

    def learn(self, batch: Batch, seconds: float) -> None:
        """Know it already."""


def run(load: Workload, observer: TokenDeadlines | Gauges, clock: list[float], until: float = np.inf) -> Outcome:
    place = InstanceSpec(Instance("e0", "default", 8, 64, 16, 512), Second(), 16, 512)
    simulation = Simulation(inside(find("vllm"), clock), [place], load, Oracle(load), until=until)
    return simulation.run(observer=observer)


@pytest.mark.parametrize(("tpot", "steady", "ahead"), [(1.0, 1, 0), (1.25, 1, 1), (1.5, 1, 2), (2.0, 2, 2)])
def test_tokens_are_judged_one_by_one(tpot: float, steady: int, ahead: int) -> None:
    """First token at 2 s, promised by 2.5; the second, beside another's prompt, at 4; the third at 5."""
    chat = single(np.array([0.0]), 10, 3, slo=Slo(ttft=2.5, tpot=tpot))
    load = concat(chat, single(np.array([0.5]), 10, 1))
    tokens = TokenDeadlines(load)
    outcome = run(load, tokens, [])
    assert (outcome.first[0], outcome.end[0]) == (2.0, 5.0)
    assert (tokens.steady[0], tokens.ahead[0]) == (steady, ahead)


def test_gauges_are_sums_over_iterations() -> None:
    """10 tokens for 2 s, then 11 and 12 for 1 s each; forward 10, 1, 1."""
    load, clock = single(np.zeros(1), 10, 3), list[float]()
    gauges = Gauges(100, 5, np.inf, clock)
    run(load, gauges, clock)
    assert (gauges.busy, gauges.written, gauges.forward) == (4.0, 20.0 + 11 + 12, 10.0 + 1 + 1)
    assert len(clock) == 3
    assert gauges.thinking == pytest.approx(sum(clock))
    assert gauges.kv_utilization == pytest.approx(43 / 400)


def test_a_run_ends_when_it_is_told_to() -> None:
    load, clock = single(np.zeros(1), 10, 9), list[float]()
    assert np.isnan(run(load, Gauges(100, 5, 1.0, clock), clock, until=5.0).end[0])
    assert len(clock) < 9


@pytest.mark.parametrize(
    ("recipe", "tokens", "kind", "overlap", "told"),
    [
        ("bros", 1000, TwoEndedEngine, True, "two-ended KV blocks, 1,000 tokens of host room"),
        ("bros-plain-blocks", 1000, HostPoolEngine, True, "plain KV blocks, 1,000 tokens of host room"),
        ("vllm-v0-swap", 1000, HostPoolEngine, False, "plain KV blocks, 1,000 tokens of host room"),
        ("bros", 0, None, None, "plain KV blocks, no host room"),
        ("bros", None, None, None, "plain KV blocks, no host room"),
        ("ecoserve", 1000, None, None, "plain KV blocks, unbounded host room, learned lengths, padded"),
        ("anneal-paper", 1000, None, None, "learned lengths, drawn"),
        ("slack", 1000, None, None, ""),
    ],
)
def test_an_engine_has_the_memory_that_its_recipe_uses(
    recipe: str, tokens: int | None, kind: type | None, overlap: bool | None, told: str
) -> None:
    place = replace(instance(), host_tokens=tokens)
    engine = SimulatedInstance(place, find(recipe)).engine
    assert isinstance(engine, HostPoolEngine) == (kind is not None)
    if kind is not None and isinstance(engine, HostPoolEngine):
        assert type(engine) is kind
        assert (engine.overlap, engine.host) == (overlap, tokens)
        assert engine.copy_seconds == place.copy_seconds > 0
    assert describe(find(recipe), place) == told


def test_an_engine_with_a_prefix_cache_has_plain_blocks_and_a_host_pool() -> None:
    place = replace(instance(), host_tokens=1000, prefix_caching=True)
    for recipe in ("bros", "headway"):
        engine = SimulatedInstance(place, find(recipe)).engine
        assert isinstance(engine, CachingEngine)
        assert (engine.overlap, engine.host_room) == (True, 1000 // engine.size)
        assert describe(find(recipe), place) == "plain KV blocks, 1,000 tokens of host room, prefix caching"


def test_a_timed_recipe_decides_as_the_recipe_itself() -> None:
    clock: list[float] = []
    packer = inside(find("slack"), clock).packer(EngineSpec(8, 512))
    assert not inside(find("slack"), clock).planner().pull
    assert packer.pack(Jobs(4), KvBudget(8, 8, 16, 8), 0.0).order.size == 0
    assert len(clock) == 1
