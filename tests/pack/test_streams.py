"""A stream that has begun goes on: its longest silence is bounded under every recipe of ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.recipes.registry import find
from headway.sim.run import InstanceSpec, Simulation
from headway.sim.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Batch, Instance, Slo


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
@settings(max_examples=6)
def test_a_stream_that_holds_its_kv_is_never_silent_for_long(recipe: str, seed: int, rate: float) -> None:
    """Of 24 requests that may hold KV 8 run in one iteration, so the others pause, and some are evicted."""
    engine = InstanceSpec(Instance("e0", "default", 8, 5000, 16, 1024), Quick(), 24, 512)
    outcome = Simulation(find(recipe), [engine], crowd(seed, rate)).run()
    assert np.isfinite(outcome.end).all()
    assert outcome.gap[outcome.evictions == 0].max() <= 1.0
