"""The speed benchmark measures what it says, on runs small enough for a test."""

from __future__ import annotations

import pytest

from benchmarks.simulated import speed


def test_every_recipe_is_simulated_and_timed() -> None:
    points = speed.simulate((3.0,), 20.0, 1, bar=False)
    assert [point.recipe for point in points] == list(speed.RECIPES)
    for point in points:
        rows = {row.id: row for row in speed.rows_of(point)}
        assert rows["sim.x_realtime"].ours == pytest.approx(20.0 / point.core_s)
        assert rows["sim.requests"].ours == point.requests > 20
        assert point.simulated >= point.traced - 5
        assert all(row.system == point.recipe and row.setting == "3 req/s" for row in rows.values())


@pytest.mark.filterwarnings("default")
def test_a_decision_is_compared_with_vllms_own() -> None:
    rows = speed.decisions(5, 1)
    seen = {(row.id, row.system): row.ours for row in rows}
    stock = seen["packer.us", "stock"]
    for name in speed.RECIPES:
        ours, ratio = seen["packer.us", name], seen["packer.ratio", name]
        assert ours is not None
        assert stock is not None
        assert ratio == pytest.approx(ours / stock)


def test_the_crowd_is_as_large_as_stated() -> None:
    jobs, kv_budget = speed.crowd(0)
    assert len(jobs) == speed.RUNNING + speed.WAITING
    assert jobs.running.sum() == speed.RUNNING
    assert kv_budget.free + jobs.blocks.sum() == kv_budget.total
