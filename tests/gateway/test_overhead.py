"""The benchmark of the gateway itself: it measures what it says, and says that the engine is fake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import dashboard_cost, overhead, planning_overhead, responses
from headway.errors import EngineError
from headway.whatif.output.results import Row, save
from testing.fake_engine import NAME


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> overhead.Measured:
    """Measure for a moment, the dashboard, too; the hook's rows are made up."""
    measured, rng = overhead.Measured(), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch, overhead.servers(tmp_path_factory.mktemp("o")) as peers:
        for module in (overhead, responses):
            patch.setattr(module, "TOKENS", 20)
        overhead._latency(peers, measured, 10, rng)
        overhead._throughput(peers, measured, 0.2, rng)
        measured.rows += dashboard_cost.dashboard_rows(*peers, 0.3, 0)
    measured.rows.append(Row("hook.ratio", "slack", "16 running", 1.5, "x"))
    return measured


def test_every_figure_is_there(measured: overhead.Measured) -> None:
    found = {(row.id, row.system): row for row in measured.rows if row.ours is not None and row.ours > 0}
    for name in ("added_ms.p50", "added_ms.p99", "req_per_s", "tokens_per_s"):
        assert (f"gateway.{name}", "headway") in found
    for name in ("latency_ms.p50", "req_per_s", "tokens_per_s", "tokens_per_s.wall"):
        assert (f"gateway.{name}", "direct") in found
    assert found["gateway.req_per_s", "headway"].unit == "req/s per core"
    assert found["gateway.tokens_per_s", "headway"].unit == "tokens/s per core"
    assert found["gateway.latency_ms.p50", "headway"].ours > found["gateway.latency_ms.p50", "direct"].ours
    assert all("FAKE" in row.setting for row in measured.rows if row.id.startswith("gateway."))


def test_it_is_written(measured: overhead.Measured, tmp_path: Path) -> None:
    report = overhead.main.report(overhead.result(measured))
    files = save(report, tmp_path, {"overhead": overhead.plot(measured)})
    assert {file.name for file in files} == {"report.json", "overhead.png", "report.html", "report.md"}
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["bench"] == "overhead"
    assert set(data["rows"][0]) == {"id", "system", "setting", "paper", "ours", "unit"}
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
    assert NAME in (tmp_path / "report.html").read_text()
    assert report.table().row_count == len(measured.rows)


def test_a_gateway_is_measured_while_its_planner_thinks() -> None:
    rows = {(row.id, row.system): row for row in planning_overhead.planning_rows(0.5)}
    assert set(rows) == {
        (f"planning.{p}_ms", system) for p in ("p50", "p99") for system in ("thinks", "answers at once")
    }
    assert all(row.ours is not None and row.ours > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("data", "complete"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n", False),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", True),
    ],
)
def test_whole_answers_are_told_from_parts(data: bytes, complete: bool) -> None:
    assert responses.complete(data) == complete


def test_refusals_are_not_counted_as_speed() -> None:
    with pytest.raises(EngineError, match="refused"):
        responses.count_response(b"HTTP/1.1 429 Too Many\r\n\r\n", False)
    with pytest.raises(EngineError, match="0 tokens"):
        responses.count_response(b"HTTP/1.1 200 OK\r\n\r\n", True)


def test_an_event_that_a_proxy_cuts_in_two_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "TOKENS", 2)
    head, mark = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", responses.MARK
    whole, parts = b"%x\r\n%s\r\n" % (len(mark), mark), b"3\r\n%s\r\n%x\r\n%s\r\n"
    cut = parts % (mark[:3], len(mark) - 3, mark[3:])
    responses.count_response(head + whole + cut + b"0\r\n\r\n", True)
    with pytest.raises(EngineError, match="1 tokens"):
        responses.count_response(head + cut + b"0\r\n\r\n", True)


def test_a_viewer_of_the_dashboard_is_measured(measured: overhead.Measured) -> None:
    found = [row for row in measured.rows if row.id.startswith("dashboard.")]
    rows = {(row.id, row.setting.split(",")[0]): row for row in found}
    assert rows["dashboard.us_per_request", "no viewer"].ours > 0  # type: ignore[operator]
    assert rows["dashboard.us_per_request", "a viewer"].ours > 0  # type: ignore[operator]
    assert len(rows) == 3
