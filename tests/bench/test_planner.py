"""The planner benchmark: a queue that keeps its length, and one row per figure."""

from __future__ import annotations

import pytest

from benchmarks.simulated.planner import measure, rows_of
from headway.policy.recipes.default import DEFAULT


@pytest.mark.parametrize("recipe", DEFAULT)
def test_events_and_plans_are_timed_at_a_queue_that_keeps_its_length(recipe: str) -> None:
    point = measure(recipe, 200, 2, 30, 0, memory=True)
    assert (point.arrivals.size, point.ends.size) == (30, 30)
    rows = {row.id: row for row in rows_of(point)}
    assert set(rows) == {"event.us", "event.p99_us", "arrival.us", "end.us", "plan.us", "bytes_per_request"}
    assert {row.setting for row in rows.values()} == {"200 queued, 2 instances"}
    assert (rows["plan.us"].ours or 0) > 0
