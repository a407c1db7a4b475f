"""`headway bench batch`: its figures, and that no line of its batch is like another."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.real.batch import ALONE, BESIDE, BatchOutcome, BatchTrial, plot, rows_of
from headway.config import Engine
from headway.types import Slo
from headway.whatif.load.records import Record

TRIAL = BatchTrial(Engine(), lines=4, rate=2.0, seconds=5.0)


def record(ttft: float | None) -> Record:
    """Return an interactive request with that ttft, None = it failed."""
    return Record(
        tier="interactive",
        at=0.0,
        sent=0.0,
        first=ttft,
        last=9.0,
        prompt_tokens=1,
        output_tokens=2,
        gaps=np.array([0.1], np.float32),
        status=200,
        error=None if ttft else "HTTP 500: x",
        slo=Slo(ttft=1.5),
    )


def outcome(answered: list[str], refused: list[str]) -> BatchOutcome:
    records = {ALONE: [record(0.5)] * 3, BESIDE: [record(1.0), record(1.0), record(None)]}
    batch = {"created_at": 100, "completed_at": 160, "expired_at": None}
    return BatchOutcome(records, batch, answered, refused, 2)


def figures(outcome: BatchOutcome) -> dict[tuple[str, str], float | None]:
    """Return {(id, first word of the setting or the whole one of ttft): value}."""
    rows = rows_of(TRIAL, outcome)
    return {(row.id, row.setting if row.id.startswith("ttft") else ""): row.ours for row in rows}


def test_figures() -> None:
    found = figures(outcome(["line-0", "line-1", "line-2"], ["line-3"]))
    assert found["ttft.p99", ALONE] == 0.5
    assert found["ttft.p99", BESIDE] == np.inf, "one of three has no first token"
    assert found["ttft.p50", BESIDE] == 1.0
    assert found["batch.in_window_pct", ""] == 75.0
    assert found["batch.lines_answered_once", ""] == 4
    assert found["batch.lost", ""] == 0
    assert found["batch.seconds", ""] == 60


def test_a_line_that_is_lost_and_one_that_is_answered_twice() -> None:
    found = figures(outcome(["line-0", "line-1", "line-0"], ["line-1"]))
    assert found["batch.lines_answered_once", ""] == 0
    assert found["batch.lost", ""] == 2
    assert found["batch.in_window_pct", ""] == 50.0


def test_a_picture() -> None:
    assert plot(outcome([], [])).startswith(b"\x89PNG")


def test_the_workload_is_the_same_with_the_same_seed() -> None:
    lines = [json.loads(line) for line in TRIAL.content.splitlines()]
    assert [line["custom_id"] for line in lines] == [f"line-{i}" for i in range(4)]
    assert lines[0]["body"]["messages"][0]["content"]
    assert TRIAL.content == BatchTrial(Engine(), lines=4).content
    assert TRIAL.calls == TRIAL.calls
