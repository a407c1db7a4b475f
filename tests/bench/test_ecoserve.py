"""The EcoServe benchmark: every figure by the contract, the paper's beside ours, pictures on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.bench.papers import ecoserve
from headway.bench.papers.ecoserve import Plan

IDS = {
    "rate_sustained", "jct.mean", "jct.p99", "normalized_latency", "ssr", "throughput.req_per_s",
    "kv.utilization", "compute.utilization", "kv.alloc_failures_pct", "sched.share_pct", "sched.kept_pct",
}  # fmt: skip
TINY = Plan(
    ("ecoserve", "ecoserve-oracle", "vllm-v0"),
    {"alpaca": (20.0, 40.0), "sharegpt": (4.0,), "bookcorpus": (0.3,)}, 0.05, 2,
)  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> object:
    monkeypatch.setattr(ecoserve, "QUICK", TINY)
    monkeypatch.setattr(ecoserve, "_compile", lambda seed: None)
    ecoserve.main(quick=True, as_json=True, seed=1, out=tmp_path)
    for name in ("report.json", "report.html", "rates.png", "sweeps.png"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "SIMULATED" in (tmp_path / "report.html").read_text()
    return json.loads(capsys.readouterr().out)


def test_it_tells_every_figure_and_the_papers(told: dict[str, object]) -> None:
    rows = told["rows"]
    assert isinstance(rows, list)
    assert (told["bench"], told["host"]) == ("ecoserve", "sim")
    assert {row["id"] for row in rows} == IDS
    assert {row["system"] for row in rows} == set(TINY.systems)
    assert sorted(row["paper"] for row in rows if row["paper"] is not None) == [-91.0, 4.0, 8.0, 91.0]
    assert len({(row["id"], row["system"], row["setting"]) for row in rows}) == len(rows)
    shares = [row["ours"] for row in rows if row["id"] in ("kv.utilization", "compute.utilization")]
    assert all(0 < share <= 100 for share in shares)
