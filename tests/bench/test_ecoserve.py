"""The EcoServe benchmark: every figure by the contract, the paper's beside ours, pictures on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import ecoserve
from benchmarks.papers.ecoserve import EcoServePlan
from benchmarks.papers.ecoserve_setup import DATA, _shortest_first, bound, options_of, tables, workload
from benchmarks.papers.ecoserve_tables import TableCase
from benchmarks.papers.parts import PaperPart
from benchmarks.papers.trial import trial
from headway.whatif.output.results import Ask

MEASURED = {
    "jct.mean",
    "jct.p99",
    "normalized_latency",
    "tbt.mean",
    "ssr",
    "throughput.req_per_s",
    "kv.utilization",
    "compute.utilization",
    "kv.alloc_failures_pct",
    "sched.share_pct",
    "sched.kept_pct",
}
CLAIMED = {
    "rate_sustained",
    "rate_sustained.times",
    "rate_sustained.more",
    "jct.mean.change",
    "tbt.mean.change",
    "jct.mean.alone",
    "jct.mean.alone.change",
    "jct.mean.bound",
    "jct.mean.bound.change",
    "tbt.mean.alone",
    "tbt.mean.alone.change",
    "ssr.change",
    "throughput.req_per_s.change",
    "throughput.bound",
    "throughput.bound.gain",
    "forecast.accuracy_pct",
    "forecast.over_pct",
    "forecast.under_pct",
    "sweet_spot.padding",
    "sweet_spot.reserve",
    "sweet_spot.buffer",
}
TINY = EcoServePlan(
    (
        PaperPart("rates", (TableCase(),), ("ecoserve", "ecoserve-oracle", "vllm-v0-swap")),
        PaperPart("copies", (TableCase(copies=5.0),), ("vllm-v0-swap",)),
    ),
    {"alpaca": (5.0, 36.0, 190.0), "sharegpt": (2.0, 28.0), "bookcorpus": (0.1, 1.2)},
    0.05,
    1,
    2,
    False,
    limit=0.05,  # exceeded within these few seconds
)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> object:
    ecoserve.main(Ask(True, True, 1, tmp_path), plan=TINY)
    for name in ("report.json", "report.html", "rates.png", "sweeps.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "SIMULATED" in (tmp_path / "report.html").read_text()
    return json.loads(capsys.readouterr().out)


def test_it_tells_every_figure_and_the_papers(told: dict[str, object]) -> None:
    rows = told["rows"]
    assert isinstance(rows, list)
    assert (told["bench"], told["host"]) == ("ecoserve", "sim")
    assert {row["id"] for row in rows} == MEASURED | CLAIMED
    stated = {row["id"] for row in rows if row["paper"] is not None}
    without = {"rate_sustained", "throughput.bound", "jct.mean.alone", "jct.mean.bound", "tbt.mean.alone"}
    assert stated == CLAIMED - without
    assert all(row["paper"] is None for row in rows if "copies x5" in row["setting"])
    assert len({(row["id"], row["system"], row["setting"]) for row in rows}) == len(rows)
    shares = [row["ours"] for row in rows if row["id"] in ("kv.utilization", "compute.utilization")]
    assert all(0 < share <= 100 for share in shares)


@pytest.mark.parametrize("data", DATA, ids=lambda data: data.name)
def test_lengths_are_those_of_table_2(data: ecoserve.Data) -> None:
    shares = (np.arange(1000) + 0.5) / 1000
    for side, made in zip((data.prompt, data.output), tables(data), strict=True):
        assert made.at(shares).mean() == pytest.approx(side.mean, rel=0.01)
        assert side.least <= min(made.tokens) <= max(made.tokens) <= side.most


@pytest.mark.parametrize("data", DATA, ids=lambda data: data.name)
def test_no_system_serves_more_or_faster_than_the_bounds(data: ecoserve.Data) -> None:
    rate = max(data.rates)
    load = workload(data, rate, data.seconds / 5, 2)
    at_most = bound(load, exact=False)
    assert bound(load, exact=True) < at_most
    for name in ("ecoserve-oracle", "vllm-v0-swap", "fastgen"):
        found = trial(name, data, rate, load, 2)
        assert found.throughput <= at_most
        assert found.jct >= found.jct_bound > 0


def test_the_bound_on_the_jct_is_shortest_remaining_time_first() -> None:
    arrival, seconds = np.array([0.0, 1.0, 1.0, 20.0]), np.array([5.0, 1.0, 3.0, 2.0])
    assert _shortest_first(arrival, seconds) == pytest.approx((9 + 1 + 4 + 2) / 4)


def test_a_slower_engine_is_the_same_run_in_slower_time() -> None:
    """So no factor of the iterations, copies among them, changes what one system serves over another."""
    data = DATA[0]
    usual, slow = (workload(data, 60.0 / steps, 6.0 * steps, 2, steps) for steps in (1.0, 2.0))
    fast = trial("vllm-v0-swap", data, 60.0, usual, 2)
    slower = trial("vllm-v0-swap", data, 30.0, slow, 2, copies=2.0, steps=2.0)
    assert (slower.jct, slower.throughput) == pytest.approx((2 * fast.jct, fast.throughput / 2))
    assert slower.ssr == fast.ssr


def test_the_papers_numbers_are_a_data_sets_own() -> None:
    shipped, text = (options_of(name, DATA[2]) for name in ("ecoserve", "ecoserve-paper"))
    assert shipped is not None
    assert text is not None
    assert (shipped.reserve, text.reserve) == (0.05, 0.05)
    assert (shipped.buffer, shipped.buffer_share, text.buffer, text.buffer_share) == (8, 0.0, 0, 0.10)
    assert options_of("vllm", DATA[2]) is None


def test_parts_are_run_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ecoserve.main(Ask(True, True, 1, tmp_path), ("copies",), TINY)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["setting"].rpartition(", ")[2] for row in rows if row["id"] == "jct.mean"} == {"copies x5"}
    assert not any(row["id"].startswith("sweet_spot") for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json", "report.md"}
