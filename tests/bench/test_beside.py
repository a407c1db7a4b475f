"""`headway bench beside`: interactive bursts beside a batch with a deadline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulated import beside
from benchmarks.simulated.beside import ALONE, BESIDE, batch, compute, deadline, interactive
from headway.whatif.output.results import Ask


def test_bursts_and_idle_time_alternate() -> None:
    at = interactive(180.0, np.random.default_rng(0)).arrival
    counts = np.histogram(at, [0, 45, 90, 135, 180])[0]
    assert counts[0] > 5 * counts[1] < counts[2] > 5 * counts[3] > 0
    assert (batch(60.0, 50, np.random.default_rng(0)).e2e == 60.0).all()
    assert deadline(0.5) == pytest.approx(deadline() / 2)


def test_the_default_recipe_keeps_both_promises() -> None:
    rows, _ = compute(("vllm", "headway"), 0.1, 3)
    at = {(row.id, row.system, row.setting): row.ours or 0.0 for row in rows}
    assert at["ttft.p99_ratio", "headway", BESIDE] < 2 < at["ttft.p99_ratio", "vllm", BESIDE]
    assert at["batch.in_time", "headway", BESIDE] > 90
    assert at["attainment.interactive", "headway", BESIDE] > 99
    assert at["plain.ttft.p99_ratio", "headway", BESIDE] < 4 < at["plain.ttft.p99_ratio", "vllm", BESIDE]
    assert at["gap.max", "headway", BESIDE] < 1000
    assert ("batch.in_time", "headway", ALONE) not in at


def test_report_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    beside.main(Ask(True, True, out=tmp_path))
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bench"], printed["host"]) == ("beside", "sim")
    assert {row["id"] for row in printed["rows"]} == {
        "ttft.p99",
        "attainment.interactive",
        "ttft.p99_ratio",
        "batch.in_time",
        "plain.ttft.p99",
        "plain.ttft.p99_ratio",
        "gap.max",
    }
    assert (tmp_path / "beside.png").stat().st_size > 1000
