"""The cheapest way to preempt a request: pause, swap or recompute."""

from __future__ import annotations

import math

import pytest

from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.memory.preemption_cost import PAUSE, RECOMPUTE, SWAP, cheapest, preemption_costs

THETA = OnlineLatency().theta


@pytest.mark.parametrize(
    ("tokens", "wait", "copy", "best"),
    [
        (1000, math.inf, 1e-5, SWAP),  # a long prompt takes longer to compute than to copy twice
        (1000, math.inf, math.inf, RECOMPUTE),  # an engine that does not swap
        (1000, math.inf, 1.0, RECOMPUTE),  # a slow link
        (1000, 2.0, 1e-5, PAUSE),  # the waiting request comes in after two iterations
        (1000, 1e6, 1e-5, SWAP),
    ],
)
def test_the_cheapest_way_depends_on_the_job(tokens: int, wait: float, copy: float, best: int) -> None:
    assert cheapest(preemption_costs(THETA, tokens, wait, 8, copy)) == best


def test_costs_follow_from_the_learned_latency() -> None:
    costs = preemption_costs(THETA, 512, 4.0, 2, 1e-3)
    assert costs.swap == pytest.approx(1.024)
    assert costs.recompute == pytest.approx(OnlineLatency().prefill_seconds(512.0))
    assert costs.pause == pytest.approx(2 * OnlineLatency().prefill_seconds(1.0))
