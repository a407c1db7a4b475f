"""What is inside an engine is told apart: what it computes, what is paused, what waits in it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from headway.engines.vllm.process.limits import Inside, inside_of
from tests.gateway.conftest import Serve
from tests.gateway.gateway import Fake, Gateway, until
from tests.gateway.stock_engine import SEQUENCES
from tests.gateway.test_dashboard import live
from tests.gateway.test_request_ends import crowd

PAGE = """vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="1"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
"""


@pytest.mark.parametrize(
    ("state", "page", "inside"),
    [
        ({"running": 5, "paused": 2, "waiting": 3}, "", Inside(3, 2, 3)),
        ({"running": 5, "paused": 2, "waiting": 3}, PAGE, Inside(3, 2, 3)),  # stock counts paused ones, too
        ({"running": 5, "waiting": 3}, "", Inside(5, 0, 3)),  # stock vLLM with Headway's counters
        ({}, PAGE, Inside(4, 0, 2)),
        ({}, "vllm:num_requests_running 3\n", None),
        ({}, "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n", None),
        ({"running": "many", "paused": None, "waiting": []}, PAGE, None),
        ({}, "<html>", None),
        ({}, "", None),
    ],
)
def test_what_an_engine_tells(state: dict[str, Any], page: str, inside: Inside | None) -> None:
    assert inside_of(state, page) == inside


@contextmanager
def crowded(gateway: Gateway, stock: Fake, more: int) -> Iterator[None]:
    """Fill an engine's batch, and have so many more wait in it."""
    with ThreadPoolExecutor(SEQUENCES + more) as pool:
        crowd(gateway, pool, SEQUENCES + more, "inside")
        try:
            until(lambda: stock.last()["open"] == SEQUENCES + more)
            yield
        finally:
            stock.release("inside")


def test_what_waits_in_an_engine_is_told_apart(serve: Serve, stock: Fake) -> None:
    with serve(stock.url) as gateway, crowded(gateway, stock, 3):
        with live(gateway) as events:
            told = next(event for event in events if event["engines"]["e0"]["inside"] == SEQUENCES + 3)
        shown = {state: told["engines"]["e0"][state] for state in ("computing", "paused", "waiting")}
        assert shown == {"computing": SEQUENCES, "paused": 0, "waiting": 3}
        assert gateway.metric("headway_queue_length") == 0
        for state, count in shown.items():
            sample = f'headway_engine_requests{{instance="e0",state="{state}"}}'
            assert f"{sample} {count:.1f}" in gateway.get("/metrics").text


def test_an_engine_that_is_down_tells_nothing(serve: Serve, mortal: Fake) -> None:
    with serve(mortal.url) as gateway:
        assert "headway_engine_requests{" in gateway.get("/metrics").text
        mortal.stop()
        until(lambda: "headway_engine_requests{" not in gateway.get("/metrics").text)
