"""The benchmark of the gateway itself: it measures what it says, and says that the engine is fake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.real import hook_overhead, overhead, responses
from benchmarks.real.overhead import token_rows
from benchmarks.real.planning_overhead import planning_rows
from headway.errors import EngineError
from headway.whatif.output.results import save
from testing.fake_engine import NAME


@pytest.fixture(scope="module")
def measured() -> overhead.OverheadFigures:
    """Measure everything for a moment, the hook in small batches."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (overhead, responses):
            patch.setattr(module, "TOKENS", 20)
        for name, value in (("RUNNING", (2, 4)), ("QUEUED", (2,)), ("WAITING", 20)):
            patch.setattr(hook_overhead, name, value)
        for name, amount in (("_latency", 10), ("_throughput", 0.2), ("dashboard_rows", 0.3)):
            whole = getattr(overhead, name)
            patch.setattr(overhead, name, lambda *args, whole=whole, amount=amount: whole(*args[:2], amount, args[3]))
        patch.setattr(overhead, "planning_rows", lambda seconds: planning_rows(0.5))
        patch.setattr(overhead, "token_rows", lambda count: token_rows(20))
        return overhead.measure((), True, 0)


def test_every_figure_is_there(measured: overhead.OverheadFigures) -> None:
    found = {(row.id, row.system): row for row in measured.rows if row.ours is not None and row.ours > 0}
    for name in ("added_ms.p50", "added_ms.p99", "req_per_s", "tokens_per_s"):
        assert (f"gateway.{name}", "headway") in found
    for name in ("latency_ms.p50", "req_per_s", "tokens_per_s", "tokens_per_s.wall"):
        assert (f"gateway.{name}", "direct") in found
    assert found["gateway.req_per_s", "headway"].unit == "req/s per core"
    assert found["gateway.tokens_per_s", "headway"].unit == "tokens/s per core"
    assert found["gateway.latency_ms.p50", "headway"].ours > found["gateway.latency_ms.p50", "direct"].ours
    assert all("FAKE" in row.setting for row in measured.rows if row.id.startswith("gateway."))
    tokens = {row.setting for row in measured.rows if row.id == "jwt.check_us.p50"}
    assert {"RS256, first time", "RS256, known token", "RS256, signature alone"} <= tokens
    hook = {row.setting for row in measured.rows if row.id in ("hook.ratio", "hook.iteration_ratio")}
    assert hook == {"2 running", "4 running", "2 running, 20 waiting"}
    assert ("hook.update_us", "stock") in found


def test_it_is_written(measured: overhead.OverheadFigures, tmp_path: Path) -> None:
    report = overhead.main.report(overhead.result(measured))
    files = save(report, tmp_path, {"overhead": overhead.plot(measured)})
    assert {file.name for file in files} == {"report.json", "overhead.png", "report.html", "report.md"}
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["bench"] == "overhead"
    assert set(data["rows"][0]) == {"id", "system", "setting", "paper", "ours", "unit"}
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
    assert NAME in (tmp_path / "report.html").read_text()
    assert report.table().row_count == len(measured.rows)


def test_a_gateway_is_measured_while_its_planner_thinks(measured: overhead.OverheadFigures) -> None:
    rows = {(row.id, row.system): row for row in measured.rows if row.id.startswith("planning.")}
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


def test_an_event_that_a_proxy_cuts_in_two_is_a_token() -> None:
    head, mark = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", responses.MARK
    whole, parts = b"%x\r\n%s\r\n" % (len(mark), mark), b"3\r\n%s\r\n%x\r\n%s\r\n"
    cut = parts % (mark[:3], len(mark) - 3, mark[3:])
    responses.count_response(head + (responses.TOKENS - 1) * whole + cut + b"0\r\n\r\n", True)
    with pytest.raises(EngineError, match="1 tokens"):
        responses.count_response(head + cut + b"0\r\n\r\n", True)


def test_a_viewer_of_the_dashboard_is_measured(measured: overhead.OverheadFigures) -> None:
    found = [row for row in measured.rows if row.id.startswith("dashboard.")]
    rows = {(row.id, row.setting.split(",")[0]): row for row in found}
    assert rows["dashboard.us_per_request", "no viewer"].ours > 0  # type: ignore[operator]
    assert rows["dashboard.us_per_request", "a viewer"].ours > 0  # type: ignore[operator]
    assert len(rows) == 3
