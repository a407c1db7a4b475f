"""Completion times against queues that are simulated request by request."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from headway.policy.forecast.completion import Inefficiency, Pace, Tokens, pace_of
from headway.policy.forecast.latency import profiles
from headway.types import Batch, Floats


def pace(mean: float = 100.0, std: float = 30.0, batch: float = 8.0, token: float = 0.02) -> Pace:
    return Pace(batch, 0.1, token, Tokens(50.0, mean, std))


def drained(pace: Pace, answers: Floats) -> Floats:
    """Return when each of these requests ends that wait for `batch` slots in turn."""
    slots = [0.0] * int(pace.batch)
    ends = []
    for tokens in answers:
        start = heapq.heappop(slots)
        heapq.heappush(slots, start + tokens * pace.token)
        ends.append(start + pace.prefill + tokens * pace.token)
    return np.array(ends)


def test_waiting_is_the_tokens_ahead_over_the_throughput() -> None:
    """Equation 2: on average a request starts when what is ahead, less what the batch holds, has drained."""
    rng, one = np.random.default_rng(0), pace()
    starts = []
    for _ in range(200):
        answers = np.clip(rng.normal(100.0, 30.0, 200), 1, None)
        starts.append(drained(one, answers) - one.prefill - answers * one.token)
    expected = np.maximum(np.arange(200) * one.share - one.decode, 0.0)
    mean = np.mean(starts, axis=0)
    residual = float(((mean - expected) ** 2).sum() / ((mean - mean.mean()) ** 2).sum())
    assert 1 - residual > 0.99
    assert one.share == pytest.approx(100.0 / one.throughput)


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("probability", [0.5, 0.9])
def test_a_group_is_complete_within_the_time_given_as_often_as_said(requests: int, probability: float) -> None:
    """Equation 5: the last of a group's requests to end is not always the last to start."""
    rng, one = np.random.default_rng(1), pace()
    within = 0
    for _ in range(1000):
        answers = np.clip(rng.normal(100.0, 30.0, 100 + requests), 1, None)  # 100 of others come before it
        ends = drained(one, answers)
        start = ends[-1] - one.prefill - answers[-1] * one.token
        within += bool(ends[100:].max() <= start + one.finish(probability, requests))
    assert within / 1000 == pytest.approx(probability, abs=0.12)


def test_the_pace_follows_from_the_latency_profile() -> None:
    latency = profiles.load("llama-2-7b-a100").latency().seconds
    tokens = Tokens(200.0, 300.0, 100.0)
    few, many = pace_of(latency, tokens, 4, 100_000), pace_of(latency, tokens, 64, 100_000)
    assert few.batch == 4
    assert few.token < many.token
    assert few.throughput < many.throughput
    short_of_memory = pace_of(latency, tokens, 64, 3_500)
    assert short_of_memory.batch == 10, "prompts and half of the answers fill the KV"
    step = latency(Batch(64, 64 * 350, 0))
    assert many.token > step, "prompts of others come in between"
    assert pace_of(latency, tokens, 64, 100_000, 2.0).token == pytest.approx(2 * many.token)


def test_a_slower_machine_is_noticed() -> None:
    factor = Inefficiency(weight=0.1)
    assert factor.factor("a", "m") == 1.0
    for _ in range(100):
        factor.learn("a", "m", 3.0, 2.0)
    assert factor.factor("a", "m") == pytest.approx(1.5, abs=0.01)
    assert factor.factor("b", "m") == 1.0
    factor.learn("a", "m", 0.0, 2.0)
    assert factor.factor("a", "m") == pytest.approx(1.5, abs=0.01), "nothing was measured"
