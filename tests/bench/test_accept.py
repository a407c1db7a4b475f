"""The benchmark of accepting, in small: a queue, and a controller's takeover of a backlog."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real import accept
from headway.whatif.output.results import Row, save
from testing.fake_engine import NAME
from tests.helpers import postgres, rabbitmq


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rabbitmq.new().remove()  # skips where there is none
    postgres.new().remove()
    told = list[str]()
    made = accept.measure(accept.AcceptSizes(0.5, (), 300), told.append)
    assert told == [accept.SQLITE, "a backlog of 300"]
    return made


def test_a_queue_and_a_backlog_have_their_figures(rows: list[Row]) -> None:
    found = {(row.id, row.setting): row.ours or 0.0 for row in rows}
    assert found["accept.req_per_s", accept.SQLITE] > 10
    assert found["accept.req_per_cpu_s", accept.SQLITE] > 10
    assert 0 < found["accept.ms.p50", accept.SQLITE] <= found["accept.ms.p99", accept.SQLITE]
    assert 0 < found["accept.takeover_s", "300 queued"] < 60
    assert found["accept.rss_mb", "controller, 300 queued"] > 20


def test_it_is_written(rows: list[Row], tmp_path: Path) -> None:
    found = accept.result(rows)
    assert found.pictures is not None
    save(accept.main.report(found), tmp_path, found.pictures())
    assert json.loads((tmp_path / "report.json").read_text())["bench"] == "accept"
    assert NAME in (tmp_path / "report.html").read_text()
