"""`headway bench elastic`: its plans with hindsight, the other autoscalers' rules, and its verdicts on streams."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cli import bench_app
from benchmarks.elastic import real
from benchmarks.elastic.autoscalers import ConcurrencyTarget, Profile, Schedule, best_schedule
from benchmarks.elastic.grounds import GROUNDS
from benchmarks.real.streams import Stream
from headway.errors import ConfigError

# Promises kept by one, two and three engines in six windows of a minute; the load is high in the middle.
KEPT = np.array([[10, 10, 10, 10, 10, 10], [10, 10, 20, 20, 10, 10], [10, 10, 30, 30, 10, 10]], float)


def loop(inside: int) -> Any:
    return SimpleNamespace(controller=SimpleNamespace(requests=range(inside)))


def test_the_best_plan_has_engines_where_they_keep_promises() -> None:
    assert best_schedule(KEPT, 60.0, 0.0, 0.01) == (1, 1, 3, 3, 1, 1)
    assert best_schedule(KEPT, 60.0, 0.0, 1.0) == (1,) * 6, "too dear"
    assert best_schedule(KEPT, 60.0, 3000.0, 0.01) == (3, 3, 3, 3, 1, 1), "those of the beginning need no start"


def test_a_schedule_starts_engines_in_time() -> None:
    plan = Schedule((1, 1, 3, 3, 1, 1), 60.0, 65.0)
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


def stream(text: str = "abcd", times: tuple[float, ...] = (0.0, 1.0, 2.0), **more: Any) -> Stream:
    return Stream(0.0, 200, "id", list(times), text, **{"ends": ["length"], "done": 1, "tokens": 4, **more})


@pytest.mark.parametrize(
    ("got", "verdict", "exact"),
    [
        (stream(), "whole", True),
        (stream("abce"), "whole", False),
        (stream(tokens=5), "whole", False),
        (stream("abc"), "lost", False),
        (stream(ends=[]), "lost", False),
        (stream("abcdd"), "twice", False),
        (stream(done=2), "twice", True),
        (stream(ends=["length", "length"]), "twice", False),
        (stream(done=0), "broken", True),
        (stream(error="engine_gone"), "broken", True),
    ],
)
def test_a_stream_is_judged_by_an_unbroken_one(got: Stream, verdict: str, exact: bool) -> None:
    seen = real.Seen(got, stream())
    assert (seen.verdict, seen.exact) == (verdict, exact)


@pytest.mark.parametrize(("ids", "verdict"), [([7, 7, 7, 7], "whole"), ([7], "lost"), ([7] * 5, "twice")])
def test_a_sampled_stream_is_judged_by_its_usage(ids: list[int], verdict: str) -> None:
    assert real.Seen(stream(ids=ids), None).verdict == verdict


def test_events_have_the_figures_of_the_streams_under_way() -> None:
    moved = real.Seen(stream(times=(0.0, 1.0, 4.5, 5.0)), stream(), moved=True)
    late, wrong = real.Seen(stream(times=(7.0, 7.5)), None), real.Seen(stream("abcz", times=(0.0, 2.0)), stream())
    events = {real.DRAIN: (0.2, 0.8), real.KILL: (1.2, 1.5), real.REPLACE: (6.0, 6.5)}
    streams = [moved, wrong, real.Seen(replace(late.got, began=6.9), None)]
    found = {(row.setting, row.id): row.ours for row in real.rows(streams, events)}
    assert [found[name, "streams"] for name in (real.ALL, *events)] == [3, 2, 2, 0]
    assert [found[name, "streams.moved"] for name in (real.ALL, *events)] == [1, 0, 1, 0]
    assert found[real.KILL, "seam.p99_s"] == found[real.ALL, "seam.p50_s"] == 3.5
    assert found[real.KILL, "gap.p99_s"] == 2.0
    assert (real.DRAIN, "seam.p50_s") not in found
    assert found[real.KILL, "streams.exact_pct"] == 50.0
    assert found[real.REPLACE, "streams.exact_pct"] is None
    assert real.plot(streams, events).startswith(b"\x89PNG")


def test_a_chat_and_a_completion_are_read_alike() -> None:
    seen = Stream(0.0)
    chat = {"delta": {"content": "ab"}, "token_ids": [1, 2], "finish_reason": None}
    for choices in ([{"delta": {"role": "assistant"}}], [chat], [{"text": "c", "finish_reason": "stop"}]):
        seen.add({"choices": choices}, 1.0)
    seen.add({"choices": [], "usage": {"completion_tokens": 3}}, 2.0)
    assert (seen.text, seen.ids, seen.ends, seen.tokens, seen.times) == ("abc", [1, 2], ["stop"], 3, [1.0, 1.0])


def test_requests_repeat_so_that_each_has_an_unbroken_one() -> None:
    assert real.asked(3, 8) == real.asked(3 + real.DISTINCT, 8)
    assert len({str(real.asked(number, 8)) for number in range(real.DISTINCT)}) == real.DISTINCT


def test_the_simulated_settings_are_not_for_engines() -> None:
    wrong = CliRunner().invoke(bench_app, ["elastic", "--real", "--grounds", "step"])
    assert isinstance(wrong.exception, ConfigError)
