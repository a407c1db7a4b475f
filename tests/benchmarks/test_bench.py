"""`headway bench rivals`: grounds, measures, rows, a tiny run of the command."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.cli import bench_app
from benchmarks.experiment import computed
from benchmarks.rivals import bench, cells, fidelity, grounds
from benchmarks.rivals.cells import STEPS, Cell, Figures, Search, figures, mean, with_line
from benchmarks.rivals.grounds import ARENAS, LOADS, Arena
from benchmarks.rivals.systems import DEFAULT, LINE, RIVALS
from benchmarks.simulated.grounds import GROUNDS
from headway.cli.checkout import bench_commands
from headway.cli.main import app
from headway.errors import ConfigError
from headway.simulate.outcome import Outcome
from headway.simulate.workload.traffic import concat, single
from headway.types import Slo
from headway.whatif import slo_violations

ROOT = Path(__file__).parents[2]
THEIRS = [arena for arena in ARENAS.values() if arena.base is None]
FIGURES = Figures(100.0, 90.0, 92.0, 1.0, 500.0, 5.0, 400.0, 0.2, 9.0, {"chat": 90.0})


@pytest.fixture(autouse=True)
def built_in_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_DATA", raising=False)
    grounds.conversations.cache_clear()


# ---- grounds


@pytest.mark.parametrize("arena", THEIRS, ids=lambda arena: arena.name)
def test_every_ground_has_promises_that_fit_its_engine(arena: Arena) -> None:
    load = arena.workload(1.2, 0, quick=True)
    assert load.promised.all()
    assert (load.prompt + load.output).max() <= arena.instance().instance.limit
    assert len(load) == pytest.approx(1.2 * arena.capacity * arena.quick, rel=0.35)
    again = arena.workload(1.2, 0, quick=True)
    np.testing.assert_array_equal(load.arrival, again.arrival)
    np.testing.assert_array_equal(load.ttft, again.ttft)


def test_there_are_the_grounds_of_all_papers_and_ours() -> None:
    assert {ground.name for ground in GROUNDS} <= set(ARENAS)
    assert {arena.paper for arena in THEIRS} == {"QoServe", "SLOs-Serve", "Scorpio", "JITServe", "SLAI"}
    names = {cell.setting for cell in bench.all_cells([0]) if isinstance(cell, Cell)}
    assert {f"G3, {load:g}x" for load in (*LOADS, 3.0)} <= names
    assert {"G1-hour, 1.2x", "G1-transient, 1.2x", "tiny-kv, 2x"} <= names
    assert not any(name.startswith("G5") for name in names), "it is for SLAI's own figure only"


def test_conversations_have_the_mean_lengths_of_the_published_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Means of the 19,366 rows: 1154.7 prompt and 211.1 answer tokens."""
    lengths = grounds.conversations()
    assert lengths.prompt_tokens.mean() == pytest.approx(1154.7, rel=0.06)
    assert lengths.output_tokens.mean() == pytest.approx(211.1, rel=0.06)
    (tmp_path / "arrivals").mkdir()
    (tmp_path / "arrivals" / "azure_conv_2023.csv").write_text(
        "timestamp_s,prompt_tokens,output_tokens\n0,7,8\n1,9,10\n"
    )
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    grounds.conversations.cache_clear()
    assert grounds.conversations().prompt_tokens.tolist() == [7, 9]


def test_first_tokens_of_g2_are_due_after_a_multiple_of_the_prompt_alone() -> None:
    for name, factor in (("G2-chat-short", 5), ("G2-summary", 3)):
        load = ARENAS[name].workload(1.0, 0, quick=True)
        alone = ARENAS[name].instance().latency
        longest = int(np.argmax(load.prompt))
        seconds = float(alone.prefill_seconds(np.array([float(load.prompt[longest])]))[0])  # type: ignore[attr-defined]
        assert load.ttft[longest] == pytest.approx(factor * seconds, rel=0.1)
        assert np.unique(load.ttft).size > 20
    mix = ARENAS["G2-mix"].workload(1.0, 0, quick=True)
    assert set(np.unique(mix.tpot)) == {0.05, 0.1}


def test_the_transient_goes_between_two_loads() -> None:
    arena = ARENAS["G1-transient"]
    at = arena.workload(1.0, 0).arrival
    counts = np.histogram(at, bins=np.arange(0, arena.seconds + 1, arena.phase))[0]
    assert counts[1::2].min() > 1.7 * counts[::2].max()


def test_other_seconds_of_arrivals_are_at_the_same_rate() -> None:
    short = ARENAS["G4"].lasting(20.0)
    assert short.capacity == ARENAS["G4"].capacity
    assert short.workload(1.0, 0).arrival.max() <= 20.0


# ---- measures


def test_the_token_line_counts_from_the_instant_at_which_the_first_token_is_due() -> None:
    chat = single(np.zeros(3), 10, 11, slo=Slo(ttft=1.0, tpot=0.1))
    load = concat(chat, single(np.zeros(2), 10, 11, slo=Slo(e2e=5.0)), single(np.zeros(1), 10, 11))
    outcome = Outcome.of(len(load))
    outcome.first[:] = [0.2, 1.5, 0.2, 1.0, 1.0, 1.0]
    outcome.end[:] = [1.9, 1.95, 2.1, 4.9, 5.1, 99.0]
    kept = slo_violations.met(with_line(load), outcome)
    assert kept.tolist() == [True, False, False, True, False, True], "an early start is used, a late one is late"
    seen = figures(load, outcome, 50.0)
    assert seen.kept == pytest.approx(100 * 1 / 5), "only the fourth by mean tpot and ttft"
    assert seen.line == pytest.approx(100 * 2 / 5)
    assert seen.promised == 5
    assert seen.tokens == pytest.approx(66 / 99)
    assert seen.best_effort == 0.0, "it ended behind the arrivals"
    assert seen.in_time == pytest.approx(11 / 50)
    assert 0.5 < seen.tardiness <= 0.9


def test_seeds_are_weighted_by_what_was_promised() -> None:
    other = Figures(300.0, 50.0, 52.0, 3.0, 700.0, 5.0, 400.0, 0.2, 9.0, {"chat": 50.0})
    both = mean([FIGURES, other])
    assert (both.kept, both.line, both.tardiness) == pytest.approx((60.0, 62.0, 2.0))
    assert both.classes == {"chat": 70.0}


# ---- searches


def test_a_search_finds_the_highest_load() -> None:
    asked: list[float] = []

    def simulate(cell: Cell) -> Figures:
        asked.append(cell.load)
        kept = 99.5 if cell.load <= 1.4 else 80.0
        return Figures(1.0, kept, 100.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    assert cells.highest(Search("G4", 0, "vllm", 1.0), simulate) == 1.4
    assert len(asked) <= 6
    assert cells.highest(Search("G4", 0, "vllm", 0.1), simulate) == 0.0
    assert cells.highest(Search("G4", 0, "vllm", 1.0, "line"), simulate) == STEPS[-1]


# ---- rows


def found(**kept: float) -> fidelity.Found:
    seen = {
        Cell("G3", 3.0, 0, name.replace("_", "-").replace("--", " ")): Figures(
            100.0, value, value + 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, {"c0": value}
        )
        for name, value in kept.items()
    }
    return dict(seen)


def test_a_rival_is_its_best_setting_and_the_lead_is_over_the_best_rival() -> None:
    seen = found(headway=70, vllm=99, qoserve=60)
    seen |= {Cell("G3", 3.0, 0, "qoserve alpha=17"): FIGURES, Cell("G3", 3.0, 0, "scorpio"): FIGURES}
    rows = bench.rows_of(seen, list(seen))
    at = {(row.id, row.system): row.ours for row in rows if row.setting == "G3, 3x"}
    assert at["attainment.promised", "qoserve"] == 90.0
    assert at["attainment.promised", "qoserve alpha=17"] == 90.0
    assert at["attainment.line", "qoserve"] == 92.0
    assert at["attainment.c0", "headway"] == 70.0
    assert {"tardiness.p99", "tokens_per_s", "best_effort.tokens_per_s"} <= {id for id, _ in at}
    sums = {row.id: row.ours for row in rows if row.setting == "rivals' grounds"}
    assert sums == {"cells": 1, "cells.behind": 1, "margin.mean": -20, "margin.least": -20}


def test_by_the_token_line_the_default_that_promises_it_is_compared() -> None:
    seen = found(headway=70, headway__line=80, vllm=99, qoserve=60)
    seen[Cell("G3", 3.0, 0, "qoserve line")] = replace(FIGURES, kept=50.0)
    rows = bench.rows_of(seen, list(seen))
    assert [row.ours for row in rows if row.id == "margin.mean"] == [10], "by the mean tpot"
    assert [(row.system, row.ours) for row in rows if row.id == "margin.line"] == [(LINE, 81 - 92)]
    load = with_line(ARENAS["G1-conv"].workload(1.0, 0, quick=True))
    assert (load.line == np.isfinite(load.tpot)).all()
    assert 0 < load.line.sum() < len(load), "a deadline alone has no line"


def test_narrow_leads_are_run_with_more_seeds() -> None:
    near = found(headway=70, vllm=99, qoserve=69, scorpio=40)
    assert {(cell.system, cell.seed) for cell in bench.more_seeds(near, 0) if isinstance(cell, Cell)} == {
        (name, seed) for name in (DEFAULT, "qoserve") for seed in (1, 2)
    }
    assert bench.more_seeds(found(headway=70, vllm=70, qoserve=60), 0) == []


@pytest.mark.parametrize("quick", [True, False])
def test_fidelity_has_rows_for_every_rival_and_the_headline(quick: bool) -> None:
    jobs = fidelity.jobs(0, quick=quick)
    seen: fidelity.Found = {job: FIGURES if isinstance(job, Cell) else 1.2 for job in jobs}
    rows = fidelity.rows(seen, 0, quick=quick)
    assert {row.system for row in rows if row.id == "headline.load"} == {"qoserve", DEFAULT}
    words = {"qoserve", "slos_serve", "scorpio", "jitserve"} | (set() if quick else {"slai", "fairbatching"})
    assert {row.id.split(".")[1] for row in rows if row.id.startswith("fidelity.")} == words
    assert all(row.ours is not None for row in rows)


# ---- the command


def tiny(seed: int, *, quick: bool) -> list[cells.Job]:
    return [Cell("tiny-kv", 2.0, seed, name, quick) for name in (DEFAULT, *RIVALS)]


def test_a_tiny_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process: a short ground, every rival, and no fidelity."""
    monkeypatch.setattr(bench, "jobs", tiny)
    monkeypatch.setattr(bench, "run", lambda jobs: {job: cells.compute(job) for job in jobs})
    arguments = ["bench", "rivals", "--quick", "--json", "--seed", "3", "--grounds", "tiny-kv", "--out", str(tmp_path)]
    result = CliRunner().invoke(_app(), arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout.splitlines()[-1])
    assert (data["bench"], data["host"]) == ("rivals", "sim")
    kept = {row["system"]: row["ours"] for row in data["rows"] if row["id"] == "attainment.promised"}
    assert set(kept) == {DEFAULT, *RIVALS}
    assert len(set(kept.values())) > 4, "they are different schedulers"
    assert (tmp_path / "report.html").exists()


def test_some_grounds_and_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[cells.Job] = []

    def run(jobs: Sequence[cells.Job]) -> dict[cells.Job, Figures]:
        seen.extend(jobs)
        return dict.fromkeys(jobs, FIGURES)

    monkeypatch.setattr(bench, "run", run)
    command = ["bench", "rivals", "--json", "--grounds", "G3,G4", "--rivals"]
    assert CliRunner().invoke(_app(), [*command, "scorpio"]).exit_code == 0
    assert {job.system for job in seen} == {DEFAULT, LINE, "vllm", "scorpio"}
    assert {job.arena for job in seen if isinstance(job, Cell)} == {"G3", "G4"}
    for few in (["slai"], ["fairbatching", "--quick"]):
        assert CliRunner().invoke(_app(), ["bench", "rivals", "--json", "--rivals", *few]).exit_code == 0
    wrong = CliRunner().invoke(_app(), [*command, "scorpion"])
    assert isinstance(wrong.exception, ConfigError)
    assert "scorpio," in wrong.exception.hint


@pytest.mark.parametrize("command", ["simulate", "bench placement --quick", "advise", "sweep"])
def test_a_seed_below_0_is_a_usage_error(command: str) -> None:
    wrong = CliRunner().invoke(_app(), [*command.split(), "--seed", "-1"])
    assert (wrong.exit_code, "greater than or equal to 0" in wrong.output) == (2, True)


def _app() -> object:
    if not any(group.name == "bench" for group in app.registered_groups):
        app.add_typer(bench_app, name="bench")
    return app


@pytest.mark.slow
def test_cells_run_in_processes_of_their_own() -> None:
    cell = Cell("tiny-kv", 0.7, 0, "vllm", True)
    both = cells.run([cell, cell, Cell("tiny-kv", 0.7, 1, "vllm", True)], processes=1)
    assert len(both) == 2
    assert both[cell] == cells.compute(cell)


def _fails(job: int) -> float:
    raise ConfigError(f"There is no {job}.", "Take another.", param="job")


def test_the_error_of_a_cell_keeps_its_hint() -> None:
    with pytest.raises(ConfigError) as raised:
        computed([1, 2, 3], _fails, processes=1)
    error = raised.value
    assert (error.hint, error.param, error.status) == ("Take another.", "job", 400)


def _drawn(job: int) -> float:
    return job + random.random()


def test_a_run_that_was_stopped_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    first = computed([1, 2], _drawn, sources=("experiment.py",), processes=1)
    more = computed([1, 2, 3], _drawn, sources=("experiment.py",), processes=1)
    assert {job: more[job] for job in first} == first
    assert 3 < more[3] < 4
    changed = computed([1], _drawn, sources=("experiment.py", "rivals"), processes=1)
    assert changed[1] != first[1]


def test_without_a_checkout_the_mend_is_told(tmp_path: Path) -> None:
    assert bench_commands() is bench_app
    shipped = typer.main.get_command(bench_commands(tmp_path / "site-packages" / "headway"))
    assert sorted(shipped.commands) == ["compare", "serve"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="others run from a checkout") as error:
        shipped.main(["rivals"], standalone_mode=False)
    assert "Clone the repository" in error.value.hint


def test_the_wheel_has_no_benchmarks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"] == {"where": ["src"]}
    assert "benchmarks" in project["tool"]["mypy"]["files"]
