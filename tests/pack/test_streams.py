"""A stream that has begun goes on: its longest silence is bounded under every recipe of ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.core.engine_spec import EngineSpec
from headway.policy.memory.budget import KvBudget
from headway.policy.recipes.registry import find
from headway.simulate.run import InstanceSpec, Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, concat, make, poisson, single
from headway.types import Batch, Instance, Jobs, Slo, Step


@dataclass(frozen=True)
class Quick:
    """An engine whose iterations take at most 50 ms with 512 tokens."""

    def seconds(self, batch: Batch) -> float:
        return 0.02 + 1e-3 * batch.decodes + 4e-5 * batch.prefill

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


def crowd(seed: int, rate: float) -> Workload:
    """Return urgent chats, chats without a promise, and a batch: all of them more than the engine can do."""
    rng = np.random.default_rng(seed)
    classes = (
        TrafficClass("urgent", 0.4, Slo(ttft=1.0, tpot=0.1), 0, "sharegpt", max_tokens=200),
        TrafficClass("plain", 0.3, Slo(), 5, "sharegpt", max_tokens=200),
        TrafficClass("batch", 0.3, Slo(e2e=40.0), 10, "bros-best-effort", max_tokens=200),
    )
    work = make(classes, poisson(rate, 10.0, rng), rng)
    return work.take(np.flatnonzero(work.prompt + work.output <= 1024))


@pytest.mark.parametrize("recipe", ["headway", "slack", "edf", "priority", "qlm", "hermes"])
@given(st.integers(0, 2**32), st.sampled_from([6.0, 12.0, 24.0]))
@settings(max_examples=5)
def test_a_stream_that_holds_its_kv_is_never_silent_for_long(recipe: str, seed: int, rate: float) -> None:
    """Of 24 requests that may hold KV 8 run in one iteration, so the others pause, and some are evicted."""
    engine = InstanceSpec(Instance("e0", "default", 8, 5000, 16, 1024), Quick(), 24, 512)
    outcome = Simulation(find(recipe), [engine], crowd(seed, rate)).run()
    assert np.isfinite(outcome.end).all()
    assert outcome.gap[outcome.evictions == 0].max() <= 1.0


PACKERS = ["headway", "slack", "edf", "priority", "qlm"]


def step(recipe: str, free: int, *rows: dict[str, float], running: int = 2) -> tuple[list[int], list[int]]:
    """Return the rows that run, and those that are evicted, at 10 s."""
    table = Jobs()
    for i, values in enumerate(rows):
        given: dict[str, float] = {"prompt": 100, "tokens_left": 10.0, "serial": i, "running": True, "first": 1.0}
        given |= dict.fromkeys(("ttft", "tpot", "e2e"), np.inf)
        table.add(f"r{i}", **(given | values))
    packer = find(recipe).packer(EngineSpec(running, 256))
    made: Step = packer.pack(table, KvBudget(40, free, 16, 8), 10.0)
    return made.order[: made.max_running].tolist(), made.evict.tolist()


STREAM = {"output_tokens": 5, "computed": 104, "blocks": 7}
URGENT = STREAM | {"ttft": 99.0, "tpot": 1.0, "priority": -1, "urgency": -1.0, "last": 9.9}


@pytest.mark.parametrize("recipe", PACKERS)
def test_of_silent_streams_the_one_that_was_silent_longest_goes_first(recipe: str) -> None:
    runs, _ = step(recipe, 20, *(STREAM | {"last": 9.3 - i / 10} for i in range(4)))
    assert sorted(runs) == [2, 3]


@pytest.mark.parametrize("recipe", PACKERS)
def test_a_silent_stream_takes_no_block_from_another(recipe: str) -> None:
    """Its last block is full and none is free: it goes on when one is, after what is more urgent."""
    full = STREAM | {"computed": 112, "output_tokens": 13, "last": 9.0}
    assert step(recipe, 0, URGENT, full)[1] in ([], [1])
    assert 0 in step(recipe, 0, URGENT, full)[0]


@pytest.mark.parametrize("recipe", PACKERS)
def test_an_answer_that_is_computed_again_is_no_stream(recipe: str) -> None:
    """It has lost its KV, so it would take the tokens of a whole prompt before what is more urgent."""
    again = {"prompt": 600, "output_tokens": 40, "computed": 256, "blocks": 16, "last": 0.5}
    runs, evicted = step(recipe, 2, URGENT | {"computed": 112, "output_tokens": 13}, again)
    assert 0 in runs
    assert 0 not in evicted


class Slow:
    """An engine whose iterations take 0.11 s with eight answers."""

    def seconds(self, batch: Batch) -> float:
        return 0.03 + 0.01 * batch.decodes + 1e-5 * batch.prefill

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


def test_streams_without_a_promise_do_not_fill_the_batch_of_a_slow_engine() -> None:
    """Twelve of them and four chats, in batches of eight: all chats keep a tpot of 0.15 s."""
    plain = single(np.zeros(12), 8, 100, tier="plain")
    chats = single(np.full(4, 2.0), 8, 60, slo=Slo(ttft=2.0, tpot=0.15), tier="chat")
    engine = InstanceSpec(Instance("e0", "default", 8, 5000, 16, 1024), Slow(), 24, 512)
    outcome = Simulation(find("headway"), [engine], concat(plain, chats)).run()
    tpot = (outcome.end - outcome.first)[12:] / 59
    assert (tpot <= 0.15).all()
    assert outcome.gap[outcome.evictions == 0].max() <= 1.0
