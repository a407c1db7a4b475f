"""`headway bench papers anneal`: its cases, its baselines, and what it prints."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.papers import anneal as bench
from benchmarks.papers.anneal_cases import AnnealCase, annealed, arrival_order, simulated, slo_scale, worth
from headway.policy.core.annealing import Schedule
from headway.whatif.output.results import Ask


def test_half_of_a_case_is_code_and_the_same_seed_draws_the_same() -> None:
    case, again = AnnealCase.drawn(10, 3), AnnealCase.drawn(10, 3)
    assert case.code.sum() == 5
    assert (case.output == again.output).all()
    assert (AnnealCase.drawn(10, 4).output != case.output).any()
    assert (case.prompt + case.output).max() < 2000


def test_code_has_its_whole_answer_and_chat_its_tokens_promised() -> None:
    case = AnnealCase.drawn(8, 0)
    costs = case.costs()
    assert np.isinf(costs["ttft"]).tolist() == case.code.tolist()
    assert np.isinf(costs["e2e"]).tolist() == (~case.code).tolist()
    load = case.workload(np.zeros(8), 2.0)
    assert load.prompt.tolist() == case.prompt.tolist()
    assert load.e2e[case.code].tolist() == [60.0] * 4
    assert load.ttft[~case.code].tolist() == [20.0] * 4


def test_arrival_order_fills_batches() -> None:
    costs = AnnealCase.drawn(5, 0).costs()
    assert arrival_order(costs, 2) == worth(costs, np.arange(5), np.array([2, 2, 1]))
    assert arrival_order(costs, 8) == worth(costs, np.arange(5), np.array([5]))


def test_the_annealed_order_is_worth_more() -> None:
    costs = AnnealCase.drawn(20, 0).costs()
    ours = worth(costs, *annealed(costs, 2, 0))
    assert ours.g > 1.5 * arrival_order(costs, 2).g
    assert ours.attainment > arrival_order(costs, 2).attainment


def test_forecasts_are_right_off_by_a_share_or_of_the_task() -> None:
    case, rng = AnnealCase.drawn(40, 0), np.random.default_rng(0)
    assert (case.forecast(0.0, rng) == case.output).all()
    off = case.forecast(0.1, rng) / case.output - 1
    assert 0.05 < off.std() < 0.15
    mean = case.forecast("mean", rng)
    assert {len(set(mean[rows].tolist())) for rows in (case.code, ~case.code)} == {1}
    drawn = case.forecast("draw", rng)
    assert len(set(drawn.tolist())) > 10
    assert drawn.min() >= 1


def test_the_event_simulator_is_a_second_host() -> None:
    load = AnnealCase.drawn(8, 1).workload(np.zeros(8), slo_scale())
    by = {name: simulated(name, load, 1) for name in ("vllm", "anneal", "anneal-queue")}
    assert by["anneal"].g > by["vllm"].g
    assert by["anneal-queue"].g > by["vllm"].g


def test_it_prints_rows_with_the_paper_s_figures(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = bench.AnnealPlan(2, (4, 10), {1: 4, 2: 4, 4: 4}, ((4,), 1), ((1.0,), 6, (2,), 1))
    bench.main(Ask(as_json=True, quick=True, seed=1), plan=tiny)
    report = json.loads(capsys.readouterr().out)
    assert (report["bench"], report["host"]) == ("anneal", "sim")
    rows = {(row["id"], row["system"], row["setting"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]), "no figure twice"
    assert rows["overhead.ms", "anneal", "10 requests, batch 1"]["paper"] == 0.48
    assert rows["g", "anneal", "10 requests, batch 1, over vllm"]["paper"] == 46.5
    assert rows["overhead.ms", "exhaustive", "4 requests, batch 1"]["paper"] == 1.2
    gap = rows["gap_to_exhaustive_pct", "anneal", "all settings, largest of the means"]
    assert 0 <= gap["ours"] <= 5
    for system in ("vllm", "anneal", "headway"):
        assert 0 <= rows["attainment", system, "load 1, batch 2"]["ours"] <= 100


def test_figures_of_another_unit_than_their_column_s_name_it() -> None:
    lines = bench._grid(
        [
            bench._row("g", "anneal", "a", 5.0, "req/ks"),
            bench._row("g", "anneal", "10 requests, batch 1, over vllm", 50.0, "%"),
            bench._row("attainment", "anneal", "b, over vllm", 5.0, "points"),
        ]
    ).cells()
    assert [line[2:4] for line in lines] == [["5", ""], ["50 %", ""], ["", "5 points"]]
    assert lines[1][-1] == "g 46.5"


def test_the_schedule_of_the_recipes_is_the_one_measured() -> None:
    costs = AnnealCase.drawn(6, 0).costs()
    mine, given = annealed(costs, 2, 7), annealed(costs, 2, 7, Schedule.of(6, 2))
    assert [part.tolist() for part in mine] == [part.tolist() for part in given]
