"""The benchmark of endurance: what its checker calls lost or answered twice, and its parts in small."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import soak
from benchmarks.real.soak_clients import End, SoakHistory, check, judged
from benchmarks.real.streams import Stream
from headway.errors import ConfigError
from headway.whatif.output.results import Ask, Row, save
from testing.fake_engine import NAME

SMALL = soak.Sizes(streams=60, kills=1, requests=400, calls=60, period=0.2)
DONE, OTHER, WAITS, UNKNOWN = ("completed", "a"), ("completed", "b"), ("queued", ""), ("unknown", "")


@pytest.mark.parametrize(
    ("looks", "lost", "twice"),
    [
        ([DONE], 0, 0),
        ([WAITS, DONE], 0, 0),
        ([WAITS, DONE, DONE], 0, 0),  # the same answer is given as often as it is asked for
        ([], 1, 0),
        ([WAITS], 1, 0),
        ([("failed", "engine_gone")], 1, 0),
        ([UNKNOWN], 1, 0),
        ([DONE, UNKNOWN], 1, 1),  # it was there
        ([DONE, OTHER], 0, 1),
        ([("failed", ""), DONE], 0, 1),
        ([DONE, WAITS, DONE], 0, 1),
    ],
)
def test_a_history_is_judged(looks: list[End], lost: int, twice: int) -> None:
    history = SoakHistory({"good": [DONE], "a": []})
    for look in looks:
        history.saw("a", *look)
    verdict = check(history)
    assert (verdict.lost_ids, verdict.twice_ids) == (("a",) * lost, ("a",) * twice)
    assert (verdict.accepted, verdict.lost, verdict.twice, verdict.recomputed) == (2, lost, twice, 0)


def test_answers_to_waiting_clients_and_computations_count() -> None:
    computed = Counter({"a": 1, "b": 3})
    verdict = check(SoakHistory({"a": [DONE]}, whole=5, silent=2, doubled=1, computed=computed))
    assert (verdict.accepted, verdict.lost, verdict.twice, verdict.recomputed) == (8, 2, 1, 2)


@pytest.mark.parametrize(
    ("seen", "lived", "verdict"),
    [
        ({"text": "fake fake "}, True, "whole"),
        ({"text": "fake fake ", "ids": [1000, 1001]}, True, "whole"),
        ({"text": "fake fake ", "ids": [1000, 1000]}, True, "twice"),
        ({"text": "fake fake ", "ids": [1000, 1002]}, True, "lost"),
        ({"text": "fake "}, True, "lost"),
        ({"text": "fake fake fake "}, True, "twice"),
        ({"text": "fake ", "done": 0}, True, "broken"),
        ({"text": "fake ", "done": 0}, False, "gateway gone"),
        ({"text": "fake "}, False, "lost"),  # it has an end
    ],
)
def test_a_long_stream_is_judged(seen: dict[str, Any], lived: bool, verdict: str) -> None:
    assert judged(Stream(0.0, 200, **{"ends": ["length"], "done": 1, **seen}), 2, lived) == verdict


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return soak.measure(tuple(soak.PARTS), SMALL, 1)


def test_every_part_has_its_figures(rows: list[Row]) -> None:
    found = {row.id: row.ours for row in rows}
    assert set(found) > set(soak.GOALS)
    exact = {id: found[id] for id, goal in soak.GOALS.items() if goal == 0.0}
    assert set(exact.values()) == {0.0}, exact
    assert found["soak.shorts"]
    assert found["soak.accepted"]


def test_it_is_written(rows: list[Row], tmp_path: Path) -> None:
    found = soak.result(rows)
    assert found.pictures is not None
    save(soak.main.report(found), tmp_path, found.pictures())
    assert json.loads((tmp_path / "report.json").read_text())["bench"] == "soak"
    assert NAME in (tmp_path / "report.html").read_text()


def test_parts_are_named() -> None:
    with pytest.raises(ConfigError, match="no part 'x'"):
        soak.main(Ask(True, True), ("x",))
