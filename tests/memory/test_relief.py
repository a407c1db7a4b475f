"""Recompute, swap or pause: the cheaper for this job."""

from __future__ import annotations

import math

import pytest

from headway.forecast.latency.online import OnlineLatency
from headway.memory.preemption_cost import PAUSE, RECOMPUTE, SWAP, cheapest, costs_of

THETA = OnlineLatency().theta


@pytest.mark.parametrize(
    ("tokens", "wait", "copy", "best"),
    [
        (1000, math.inf, 1e-5, SWAP),  # a long prompt takes longer to compute than to copy twice
        (1000, math.inf, math.inf, RECOMPUTE),  # an engine that does not swap
        (1000, math.inf, 1.0, RECOMPUTE),  # a slow link
        (1000, 2.0, 1e-5, PAUSE),  # it is nearly done
        (1000, 1e6, 1e-5, SWAP),
    ],
)
def test_the_cheapest_way_depends_on_the_job(tokens: int, wait: float, copy: float, best: int) -> None:
    assert cheapest(costs_of(THETA, tokens, wait, 8, copy)) == best


def test_costs_are_seconds_of_the_pace() -> None:
    costs = costs_of(THETA, 512, 4.0, 2, 1e-3)
    assert costs.swap == pytest.approx(1.024)
    assert costs.recompute == pytest.approx(OnlineLatency().prefill_seconds(512.0))
    assert costs.pause == pytest.approx(2 * OnlineLatency().prefill_seconds(1.0))
