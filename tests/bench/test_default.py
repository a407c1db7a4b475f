"""`headway bench default`: grounds, cells, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks.simulated import default, default_plots
from benchmarks.simulated.default import ABLATIONS, OTHERS, compute, rows_of
from benchmarks.simulated.default_figures import BOUND, DEFAULT, HINDSIGHT, SMALLEST, STOCK, TRUE, Cell, Figures
from benchmarks.simulated.grounds import GROUNDS, LOADS, Ground, capacity
from benchmarks.simulated.held_grounds import HELD
from headway.policy.recipes.baselines import BASELINES
from headway.policy.recipes.registry import RECIPES
from headway.types import Batch, Bools
from headway.whatif.output.results import Ask

SMALL = replace(next(ground for ground in GROUNDS if ground.name == "tiny-kv"), requests=60)


@pytest.mark.parametrize("ground", GROUNDS, ids=lambda ground: ground.name)
def test_every_ground_has_promises_that_fit_its_engine(ground: Ground) -> None:
    spec, load = ground.instance(), ground.workload(1.0, 0)
    assert load.promised.mean() > 0.5
    assert (load.prompt + load.output).max() <= spec.instance.limit
    assert len(load) == pytest.approx(capacity(ground) * ground.seconds(1.0), rel=0.35)
    again, other = ground.workload(1.0, 0), ground.workload(1.0, 1)
    np.testing.assert_array_equal(load.arrival, again.arrival)
    assert len(other) != len(load) or (other.arrival != load.arrival).any()


def test_there_are_all_cells() -> None:
    cells = default.all_cells((7, 8, 9))
    assert len({ground.name for ground in (*GROUNDS, *HELD)}) == 16 + len(HELD)
    places = {(ground, load) for ground in (*GROUNDS, *HELD) for load in ground.loads}
    assert {(cell.ground, cell.load) for cell in cells} == places
    assert all(ground.loads == LOADS and not ground.held for ground in GROUNDS)
    assert all(ground.held for ground in HELD)
    assert not {cell.system for cell in cells if cell.ground.held} & set(ABLATIONS)
    assert {cell.system for cell in cells if cell.ground.name == "tenants"} > {"vtc", STOCK}
    assert {cell.seed for cell in cells} == {7, 8, 9}
    assert len(set(cells)) == len(cells)
    assert set(RECIPES) - {DEFAULT} <= set(OTHERS)
    assert {"srtf", "sjf", "sarathi"} <= set(OTHERS) & set(BASELINES)


@pytest.mark.parametrize("ground", HELD, ids=lambda ground: ground.name)
def test_every_held_ground_fits_its_engine(ground: Ground) -> None:
    spec, few = ground.instance(), replace(ground, requests=100)
    load = few.workload(ground.loads[0], 0)
    assert (load.prompt + load.output).max() <= spec.instance.limit
    assert (np.diff(load.arrival) >= 0).all()
    assert load.arrival.max() <= few.seconds(ground.loads[0])


def held(name: str) -> Ground:
    return replace(next(ground for ground in HELD if ground.name == name), requests=60)


def test_hints_are_certain_and_off_by_three() -> None:
    ground = held("hints-both")
    load = ground.workload(0.5, 0)
    lengths = ground.lengths(load, 0)
    seen = [lengths.forecast(load.request(i)) for i in range(len(load))]
    off = np.array([one.mean for one in seen]) / load.output
    assert {round(one, 3) for one in off[load.output >= 3]} == {3.0, 0.333}
    assert all(one.spread == 0 for one in seen)


def test_an_engine_five_times_slower_takes_five_times_as_long() -> None:
    slow = held("five-times-slower")
    fast, batch = replace(slow, pace=1.0), Batch(3, 1000, 200, 20_000)
    assert slow.latency().seconds(batch) == pytest.approx(5 * fast.latency().seconds(batch))
    assert held("dear-prompts").latency().seconds(Batch(0, 0, 100)) == pytest.approx(0.25)


def test_lines_of_a_batch_come_at_once_beside_plain_requests() -> None:
    load = held("day-lines").workload(0.7, 0)
    lines = load.tier == load.tiers.index("line")
    assert (load.arrival[lines] == 0).all()
    assert (load.arrival[~lines] > 0).all()
    assert (load.e2e[lines] == 86_400).all()
    assert (load.promised == lines).all()


def test_an_overload_is_followed_by_calm() -> None:
    ground = held("surge")
    load, over = ground.workload(3.0, 0), ground.loaded_seconds(3.0)
    rates = [(load.arrival < over).sum() / over, (load.arrival >= over).sum() / (ground.seconds(3.0) - over)]
    assert rates[0] == pytest.approx(3 * capacity(ground), rel=0.2)
    assert rates[1] == pytest.approx(0.3 * capacity(ground), rel=0.3)


def test_quick_has_stock_everywhere_and_one_load_of_each_ground() -> None:
    cells = default.quick_cells(0)
    grounds = {cell.ground.name for cell in cells}
    assert grounds == {ground.name for ground in (*GROUNDS, *HELD)}
    assert {cell.ground.name for cell in cells if cell.system == STOCK} == grounds
    assert len({cell.setting for cell in cells}) == len(grounds)


def test_no_recipe_passes_the_bound_and_the_same_cell_gives_the_same() -> None:
    seen = {system: compute(Cell(SMALL, 2.0, 0, system)) for system in (BOUND, DEFAULT, "slack", "bros")}
    assert all(seen[BOUND].kept >= one.kept for one in seen.values())
    assert seen[DEFAULT] == compute(Cell(SMALL, 2.0, 0, DEFAULT))
    assert seen[DEFAULT].kept > seen["slack"].kept
    assert seen[DEFAULT].promised == seen[BOUND].promised > 0


def test_wrong_forecasts_change_the_outcome() -> None:
    right = compute(Cell(SMALL, 1.3, 0, DEFAULT, length_error=1.0))
    wrong = compute(Cell(SMALL, 1.3, 0, DEFAULT, length_error=3.0))
    assert right != wrong
    tight = next(ground for ground in GROUNDS if ground.name == "tight-tpot")
    learned = [compute(Cell(tight, 1.3, 0, DEFAULT, latency_error=error)) for error in (0.8, 1.0, 1.2)]
    assert learned[0].kept < learned[1].kept, "an engine that is thought faster than it is gets too much"
    assert learned[2] != learned[1]


def cells(*kept: tuple[str, float, float]) -> dict[Cell, Figures]:
    return {Cell(SMALL, 1.3, 0, name): Figures(on_time, 100, be) for name, on_time, be in kept}


def test_summary_counts_the_cells_where_another_recipe_is_better() -> None:
    rows = rows_of(cells((BOUND, 95, 0), (DEFAULT, 70, 9.0), ("bros", 76, 9.9), ("srtf", 60, 50.0)))
    summed = {row.id: row.ours for row in rows if row.setting == "all"}
    assert (summed["cells"], summed["cells.behind"], summed["margin.least"]) == (1, 1, -6)
    assert summed["cells.less_best_effort"] == 1, "9.0 < 95 % of 9.9"
    assert summed["share_of_bound.least"] == pytest.approx(100 * 70 / 95)
    close = rows_of(cells((BOUND, 95, 0), (DEFAULT, 75, 9.5), ("bros", 76, 9.9), ("srtf", 60, 50.0)))
    summed = {row.id: row.ours for row in close if row.setting == "all"}
    assert (summed["cells.behind"], summed["cells.less_best_effort"]) == (0, 0)


def test_with_true_lengths_it_has_a_share_of_the_bound_of_its_own_and_is_not_another_recipe() -> None:
    rows = rows_of(cells((BOUND, 95, 0), (DEFAULT, 70, 9.0), (TRUE, 90, 9.0), ("slack", 60, 1.0)))
    seen = {(row.id, row.system): row.ours for row in rows if row.setting == "all"}
    assert seen["share_of_bound.mean", DEFAULT] == pytest.approx(100 * 70 / 95)
    assert seen["share_of_bound.mean", TRUE] == pytest.approx(100 * 90 / 95)
    assert seen["margin.least", DEFAULT] == 10
    learned, true = (compute(Cell(SMALL, 2.0, 0, system)) for system in (DEFAULT, TRUE))
    assert learned != true
    assert true == compute(Cell(SMALL, 2.0, 0, DEFAULT, length_error=1.0))


@pytest.mark.parametrize("ground", GROUNDS, ids=lambda ground: ground.name)
def test_true_lengths_keep_no_fewer_promises_than_learned_ones(ground: Ground) -> None:
    for load in (1.3, 2.0):
        learned, true = (compute(Cell(ground, load, 0, system)) for system in (DEFAULT, TRUE))
        assert true.kept >= learned.kept - 0.005 * learned.promised


def test_a_search_with_hindsight_keeps_more_than_the_recipe_and_no_more_than_the_bound() -> None:
    few = {cell: compute(cell) for cell in (Cell(SMALL, 2.0, 0, system) for system in (BOUND, DEFAULT, TRUE, "slack"))}
    promised = replace(few[Cell(SMALL, 2.0, 0, DEFAULT)], kept=1)
    low = few | {Cell(SMALL, 2.0, 0, DEFAULT): promised}
    assert default.hindsight_cells(low, 5) == [Cell(SMALL, 2.0, 0, HINDSIGHT, trials=5), Cell(SMALL, 2.0, 0, SMALLEST)]
    enough = few | {Cell(SMALL, 2.0, 0, DEFAULT): few[Cell(SMALL, 2.0, 0, BOUND)]}
    assert default.hindsight_cells(enough, 5) == []
    found = [compute(Cell(SMALL, 2.0, 0, HINDSIGHT, trials=trials)).kept for trials in (0, 20, 60)]
    assert found[0] <= found[1] <= found[2] <= few[Cell(SMALL, 2.0, 0, BOUND)].kept
    assert found[2] > max(found[0], few[Cell(SMALL, 2.0, 0, TRUE)].kept)
    rows = rows_of(low | {Cell(SMALL, 2.0, 0, HINDSIGHT): replace(promised, kept=90, service=None)})
    assert [row.id for row in rows if row.system == HINDSIGHT and row.setting != "all"] == [
        "attainment.promised",
        "share_of_bound",
    ]
    assert {row.ours for row in rows if row.id == "cells.behind"} == {1}, "hindsight is not another recipe"


def test_the_best_limit_is_one_of_forecast_sizes_and_the_engine_does_not_know_the_lengths() -> None:
    workload = SMALL.workload(2.0, 0)
    sizes = default._forecast_sizes(workload, SMALL.lengths(workload, 0))
    assert np.corrcoef(sizes, workload.output * (workload.prompt + workload.output / 2))[0, 1] < 0.999
    kept = compute(Cell(SMALL, 2.0, 0, SMALLEST)).kept
    assert 0 < kept <= compute(Cell(SMALL, 2.0, 0, BOUND)).kept


def test_a_search_with_hindsight_begins_without_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, tried = SMALL.workload(2.0, 0), list[Bools]()

    def nothing_kept(*args: object) -> Bools:
        tried.append(cast(Bools, args[-1]))
        return np.zeros(len(workload), bool)

    monkeypatch.setattr(default, "_met", nothing_kept)
    compute(Cell(SMALL, 2.0, 0, HINDSIGHT, trials=4))
    size = workload.output * (workload.prompt + workload.output / 2)
    promised, *cuts = tried
    np.testing.assert_array_equal(promised, workload.promised)
    assert len(cuts) == 4
    for more, fewer in pairwise(tried):
        assert size[fewer].max() < size[more & ~fewer].min()


def test_beside_a_search_with_hindsight_there_are_no_other_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    few = [Cell(SMALL, 2.0, 0, system) for system in (BOUND, DEFAULT, TRUE, "slack", STOCK)]
    default.main(Ask(True, True), hindsight=1, some=few)
    systems = {row["system"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert systems >= {BOUND, DEFAULT, TRUE, STOCK}
    assert "slack" not in systems


def test_ablations_are_told_by_what_changes_and_are_not_another_recipe() -> None:
    name = "headway without swapping"
    rows = rows_of(cells((BOUND, 95, 0), (DEFAULT, 70, 9.0), (name, 90, 9.0), ("slack", 60, 1.0)))
    seen = {(row.id, row.system): (row.setting, row.ours) for row in rows}
    assert seen["ablation.mean", name] == ("all", 20)
    assert seen["ablation.least", name] == ("tiny-kv, 1.3x", 20)
    assert seen["margin.least", DEFAULT] == ("all", 10)
    assert len({compute(Cell(SMALL, 2.0, 0, one)) for one in ABLATIONS}) > 1


def test_report_and_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ground = replace(SMALL, name="bursty")
    few = [Cell(ground, 1.3, 0, system) for system in (BOUND, DEFAULT, "slack", STOCK)]
    few += [replace(cell, length_error=f) for cell in few[1:3] for f in (1.0, 2.0)]
    few += [replace(cell, latency_error=0.8) for cell in few[1:3]]
    default.main(Ask(True, True, out=tmp_path), some=few)
    result = json.loads(capsys.readouterr().out)
    assert (result["bench"], result["host"]) == ("default", "sim")
    settings = {row["setting"] for row in result["rows"] if row["id"] == "attainment.promised"}
    assert settings == {
        "bursty, 1.3x",
        "bursty, 1.3x, lengths off by 1x",
        "bursty, 1.3x, lengths off by 2x",
        "bursty, 1.3x, latency learned x0.8",
    }
    ids = {row["id"] for row in result["rows"] if row["setting"] == "bursty, 1.3x"}
    assert ids >= {
        "tardiness.p99",
        "gap.p99",
        "gap.over_1s",
        "unpromised.e2el.p99",
        "unpromised.e2el.mean",
        "tokens_per_s",
        "mean_wait.weighted",
        "worst_wait",
        "attainment.weighted",
        "bound.tokens_per_s",
    }
    made = {"matrix.png", "measures.png", "spread.png", "errors.png", "report.html"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    assert default_plots.errors([]) is None
