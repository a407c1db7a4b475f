"""The hook keeps a diary that simulation can be measured by: shapes, times and requests, all in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.engines.vllm import oracle
from headway.engines.vllm.oracle import SchedulerOracle
from headway.engines.vllm.plugin.control import _control
from headway.engines.vllm.plugin.hook import HeadwayScheduler
from headway.engines.vllm.plugin.recording import IterationLog
from headway.types import Batch

pytestmark = pytest.mark.filterwarnings("default")


def build(recipe: str = "vllm") -> SchedulerOracle:
    setup = oracle.config(
        max_running=2, max_batched_tokens=64, max_model_len=512, block_size=16, recipe=recipe, slots=4
    )
    return SchedulerOracle(oracle.scheduler(setup, 64, 16, HeadwayScheduler))


def asked(made: SchedulerOracle, **message: Any) -> dict[str, Any]:
    class Core:
        scheduler = made.scheduler

    state = _control(Core, {"op": "state", **message})
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def test_a_request_s_iterations_are_written_down_with_shape_and_times() -> None:
    made = build()
    made.add("a", 100, 3, metadata={"headway_id": "ours", "headway_arrival": 0.0})
    for _ in range(5):
        made.step(0.05)
    state = asked(made, iterations=100, requests=100, log=1)
    shapes = [row[3:7] for row in state["iterations"]]
    assert shapes == [[0, 0, 64, 2048], [0, 0, 36, 36 * 64 + 648], [1, 100, 0, 0], [1, 101, 0, 0]]
    assert [row[0] for row in state["iterations"]] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert all(row[1] == row[2] == pytest.approx(0.05) for row in state["iterations"])
    assert state["requests"] == [["ours", 0.0, pytest.approx(0.1), pytest.approx(0.2), 0.0, []]]
    assert [row[7:] for row in state["iterations"]] == [[4, 0], [7, 0], [7, 0], [7, 0]]
    assert state["log"][0][4] == state["iterations"][-1], "the log shows the same row"
    assert (state["max_running"], state["token_budget"]) == (2, 64)


def test_rows_are_there_only_when_asked_for_and_only_so_many() -> None:
    made = build()
    made.add("a", 10, 5, metadata={})
    for _ in range(4):
        made.step(0.05)
    assert "iterations" not in asked(made)
    assert len(asked(made, iterations=2)["iterations"]) == 2
    assert asked(made, requests=5)["requests"] == []
    assert "error" in asked(made, iterations="many")


def test_an_answer_of_one_token_begins_when_it_ends() -> None:
    made = build()
    made.add("a", 10, 1, metadata={"headway_id": "x"})
    made.step(0.05)
    made.step(0.05)
    assert asked(made, requests=9)["requests"] == [["x", 0.0, pytest.approx(0.05), pytest.approx(0.05), 0.0, []]]


def test_the_diary_forgets_its_oldest_rows() -> None:
    diary = IterationLog(max_rows=3)
    for i in range(5):
        diary.decide(float(i))
        diary.begin(float(i), Batch(1, i, 0))[1] = 0.5
        diary.enter(f"k{i}", float(i))
        diary.leave(f"k{i}", f"r{i}", 0.0, i + 1.0)
    assert [row[4] for row in diary.iterations] == [2, 3, 4]
    assert [row[2] for row in diary.iterations] == [1.0, 1.0, None]
    assert [row[0] for row in diary.requests] == ["r2", "r3", "r4"]
    diary.leave("unknown", "x", 0.0, 9.0)
    assert len(diary.requests) == 3
