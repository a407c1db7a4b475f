"""The dashboard's history: what is counted in which bucket, what a view shows, how much memory it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.keys import OTHER
from headway.gateway.watch.history import (
    FINEST,
    KEPT,
    OWED,
    RATIO,
    WINDOWS,
    Attained,
    History,
    HistoryView,
    RatePair,
    _bin,
    attained,
    figures,
    quantile,
)

LOWEST, BINS = 0.001, range(56)


def answer(history: History, tier: str = "chat", tenant: str = "alpha", *, kept: bool = True) -> None:
    """Count an answer of 30 tokens in, 12 of them cached, and 10 out."""
    pair = history.pair(tier, tenant)
    history.answered(pair, 0.2, 0.05, 30, 12, 10)
    history.judged(pair, kept)


@pytest.mark.parametrize("window", WINDOWS)
def test_an_answer_is_shown_as_long_as_the_window_is(window: str) -> None:
    seconds, step = WINDOWS[window]
    history, now = History(0.0), 0.0
    answer(history)
    while now < seconds - step:
        now += min(step, 60)
        history.note(now)
        assert figures(history, HistoryView(window), now)["answered"] == 1
    history.note(seconds + step)
    assert figures(history, HistoryView(window), seconds + step)["answered"] == 0
    assert figures(history, HistoryView("24h"), seconds + step)["answered"] == (window != "24h")


def test_a_gateway_that_slept_for_days_shows_nothing_old() -> None:
    history = History(0.0)
    answer(history)
    history.note(10.0)
    history.note(1e6)
    assert [figures(history, HistoryView(window), 1e6)["answered"] for window in WINDOWS] == [0] * len(WINDOWS)


def test_rates_count_the_seconds_that_the_gateway_has_lived() -> None:
    history = History(1000.0)
    for _ in range(20):
        answer(history)
    history.note(1004.0)
    found = figures(history, HistoryView("24h"), 1004.0)
    assert found["ends"] == [1004.0]
    assert found["tokens"] == {"in": [150.0], "out": [50.0]}
    assert found["cached"] == 12 / 30
    assert (found["requests_per_s"], found["tokens_per_s"]) == (5.0, 200.0)


def test_a_young_bucket_is_part_of_the_one_before() -> None:
    history = History(0.0)
    for now in (10.0, 20.0, 21.0):
        answer(history)
        history.note(now)
    found = figures(history, HistoryView(), 21.0)
    assert found["ends"] == [10.0, 21.0]
    assert found["tokens"]["out"] == [1.0, pytest.approx(20 / 11)]


def test_a_view_shows_its_class_and_tenant_only() -> None:
    history = History(0.0)
    answer(history, "chat", "alpha", kept=False)
    answer(history, "chat", "beta")
    answer(history, "code", "beta")
    history.failed(history.pair("code", "alpha"))
    history.note(5.0)

    def seen(tier: str | None, tenant: str | None) -> tuple[int, int, list[str]]:
        found = figures(history, HistoryView(FINEST, tier, tenant), 5.0)
        return found["answered"], found["failed"], list(found["attained"])

    assert seen(None, None) == (3, 1, ["chat", "code"])
    assert seen("chat", None) == (2, 0, ["chat"])
    assert seen(None, "beta") == (2, 0, ["chat", "code"])
    assert seen("code", "alpha") == (0, 1, [])
    assert seen("none", None) == (0, 0, [])
    assert figures(history, HistoryView(FINEST, "none"), 5.0)["cached"] == 0.0


def test_memory_depends_on_neither_requests_nor_tenants() -> None:
    history = History(0.0)
    size = history.size
    assert size < 14.1e6, "docs/dashboard.md says 14.1 MB"
    for number in range(1000):
        answer(history, f"class {number % 20}", f"tenant {number // 20}")
    history.note(5.0)
    assert history.size == size
    assert history.pair("class 1", "another tenant") == RatePair(OTHER, OTHER)
    assert len(history.tenants) <= 65
    assert figures(history, HistoryView(), 5.0)["answered"] == 1000, "those without a row of their own count, too"


def test_attained_by_bucket() -> None:
    counts = np.zeros((3, 8), np.int64)
    counts[:, KEPT], counts[:, OWED] = [3, 0, 0], [4, 0, 2]
    assert attained(counts) == Attained(3, 6, [75.0, None, 0.0])


@given(st.lists(st.floats(0.001, 260.0), min_size=1, max_size=50), st.sampled_from([0.5, 0.99]))
def test_quantiles_are_off_by_half_a_bin_at_most(values: list[float], share: float) -> None:
    counts = np.zeros((1, len(BINS)), np.int64)
    for value in values:
        counts[0, _bin(value, LOWEST, BINS)] += 1
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    found = quantile(counts, share, LOWEST)[0]
    assert found is not None
    assert RATIO**-0.501 < found / exact < RATIO**0.501


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile(np.zeros((2, len(BINS)), np.int64), 0.5, LOWEST) == [None, None]
