"""`headway bench elastic`: its plans with hindsight, and the other autoscalers' rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.elastic.autoscalers import ConcurrencyTarget, Profile, Schedule, best_schedule
from benchmarks.elastic.grounds import GROUNDS

# Promises kept by one, two and three engines in six windows of a minute; the load is high in the middle.
KEPT = np.array([[10, 10, 10, 10, 10, 10], [10, 10, 20, 20, 10, 10], [10, 10, 30, 30, 10, 10]], float)


def loop(inside: int) -> Any:
    return SimpleNamespace(controller=SimpleNamespace(requests=range(inside)))


def test_the_best_plan_has_engines_where_they_keep_promises() -> None:
    assert best_schedule(KEPT, 60.0, 0.0, 0.01) == (1, 1, 3, 3, 1, 1)
    assert best_schedule(KEPT, 60.0, 0.0, 1.0) == (1,) * 6, "too dear"
    assert best_schedule(KEPT, 60.0, 3000.0, 0.01) == (3, 3, 3, 3, 1, 1), "those of the beginning need no start"


def test_a_schedule_starts_engines_in_time() -> None:
    plan = Schedule((1, 1, 3, 3, 1, 1), 60.0, 60.0)
    wanted = [plan(loop(0), "m", now, 1) for now in (30.0, 60.0, 119.0, 200.0, 240.0, 1e4)]
    assert wanted == [1, 3, 3, 3, 1, 1]


def test_a_target_of_concurrency_is_kubernetes_rule() -> None:
    rule = ConcurrencyTarget(10.0, window=300.0)
    assert rule(loop(40), "m", 15.0, 2) == 4
    assert rule(loop(400), "m", 20.0, 4) == 4, "it looks every 15 s"
    assert rule(loop(43), "m", 30.0, 4) == 4, "within the tolerance"
    assert rule(loop(5), "m", 45.0, 4) == 4, "not below what was wanted in the window"
    assert rule(loop(5), "m", 400.0, 4) == 1


def test_a_profile_gives_the_highest_rate_within_the_targets() -> None:
    profile = Profile((1.0, 2.0, 3.0), (0.1, 0.4, 2.0), (0.05, 0.06, 0.2), 1000.0)
    assert profile.capacity(0.5, 0.1) == 2.0
    assert profile.capacity(0.01, 0.1) == 1.0
    assert profile.expected(1.5) == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["diurnal", "bursty", "step"])
def test_generated_grounds_need_no_data(name: str) -> None:
    work, before = GROUNDS[name].workload(600.0, 0)
    assert len(work) > 200
    assert work.arrival.max() < 600
    assert (before < 0).all()
    assert (len(before) > 0) == (name == "diurnal")
