"""`headway bench catalog` in small: its workloads, its systems and its margins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.catalog import simulated
from benchmarks.catalog.conversations import Spread
from benchmarks.catalog.grid import Cell, Grid
from benchmarks.catalog.grounds import ALONE, GROUNDS, LONGEST
from benchmarks.catalog.margins import Case, margin_rows, margins
from headway.errors import ConfigError
from headway.whatif.output.results import Ask

NAMES = {ground.name for ground in ALONE}


@pytest.mark.parametrize("name", GROUNDS)
def test_every_ground_is_generated_and_fits_its_engines(name: str) -> None:
    ground = GROUNDS[name]
    work = ground.workload(2, 1.0, 60.0, 0)
    assert not ground.recorded
    assert (work.arrival > ground.warm).any()
    assert (work.prompt + work.output).max() < LONGEST
    assert {spec.instance.max_model_len for spec in ground.fleet(2)} == {LONGEST}
    assert ground.several == (len(work.tiers) > 1)
    again = ground.workload(2, 1.0, 60.0, 0)
    np.testing.assert_array_equal(work.prompt, again.prompt)


def test_all_workloads_are_mixed_and_each_has_its_own_promise() -> None:
    work = GROUNDS["mixed"].workload(4, 1.0, 60.0, 0)
    assert set(work.tiers) == NAMES
    promised = {work.tiers[code] for code in np.unique(work.tier[work.promised])}
    assert promised == NAMES - {"agentic-trace-replay"}
    assert np.isfinite(work.e2e[work.tier == work.tiers.index("batch-summarization-rag")]).all()


def test_an_engine_with_long_prompts_holds_two_of_them() -> None:
    work = GROUNDS["long-prompts-512"].workload(4, 1.0, 600.0, 0)
    longest = work.prompt[work.tier == work.tiers.index("long-prompts")]
    for chunk in (512, 2048, 8192):
        (engine,) = GROUNDS[f"long-prompts-{chunk}"].fleet(1)
        held = engine.instance.blocks_total * engine.instance.block_size
        assert engine.budget == chunk
        assert 2 * longest.max() < held < 3 * longest.min()


def test_bimodal_lengths_have_the_published_mean_and_spread() -> None:
    spread = Spread(1000, 80_000, 15_000, 22_000, "bimodal")
    drawn = spread.draw(100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(15_000, rel=0.02)
    assert drawn.std() == pytest.approx(22_000, rel=0.02)
    assert Spread(500, 8000, 0, 0, "uniform").draw(10_000, np.random.default_rng(0)).mean() == pytest.approx(
        4250, rel=0.02
    )


@pytest.mark.parametrize("name", ["headway", "vllm-fcfs"])
def test_a_ground_of_two_workloads_has_the_figures_of_both(name: str) -> None:
    found = simulated.figures_of(Cell("long-prompts-2048", 1, 0.3, name, 60.0, 0))
    kinds = "", "interactive-chat", "long-prompts"
    assert set(found) == {(id, kind) for id in simulated._UNITS for kind in kinds}
    assert 0 <= (found["attainment.promised", ""] or 0) <= 100


def test_nothing_is_promised_to_a_replay() -> None:
    found = simulated.figures_of(Cell("agentic-trace-replay", 2, 0.7, "vllm-fcfs", 120.0, 0))
    assert found["attainment.promised", ""] is None
    assert (found["e2e.mean", ""] or 0) > 0


def test_margins_are_to_the_best_of_the_others() -> None:
    kept = {
        Case(1.0, "a", "headway"): 90.0,
        Case(1.0, "a", "edf"): 80.0,
        Case(1.0, "a", "slack"): 92.5,
        Case(1.0, "b", "headway"): 50.0,
        Case(1.0, "b", "edf"): 50.5,
        Case(1.0, "c", "headway"): 50.0,
    }
    others = {"edf", "slack"}
    assert margins(kept, others) == {(1.0, "a"): (-2.5, "slack"), (1.0, "b"): (-0.5, "edf")}
    rows = {row.id: row.ours for row in margin_rows(kept, others)}
    assert rows == {"margin.mean": -1.5, "margin.least": -2.5, "margin.within": 50.0}
    assert [*simulated._behind(kept, ["headway", *others])] == ["a: slack keeps 92.5 %, 2.5 points more than headway."]


@pytest.mark.parametrize("wrong", [{"systems": ("x",)}, {"grounds": ("x",)}, {"engines": (0,)}, {"loads": (math.nan,)}])
def test_what_cannot_be_simulated_is_refused_before_anything_is(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"There is no|A fleet needs"):
        simulated.main(Ask(quick=True), Grid(**wrong))
