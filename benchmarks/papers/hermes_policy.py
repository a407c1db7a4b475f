"""Decision time of Hermes' policy by the number of live runs (Hermes 5.5)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.papers.hermes_workloads import GRAPHS, HERMES, knowledge, pool
from benchmarks.papers.quoted import quoted
from headway.policy.apps.runs import RankOptions, Runs
from headway.stages import Stage
from headway.types import Request
from headway.whatif.output.results import Row

_BUCKET = 10.0  # seconds between two refreshes, in which each run passes about one bucket
_PAPER_MS = quoted(3.0, "hermes", "5.5", 238, "less than 3 ms")  # at every arrival rate


def policy_rows(live: Sequence[int]) -> list[Row]:
    """Return milliseconds per refresh of all ranks, and per arrival that begins a visit."""
    rows = []
    for count in live:
        runs = _live(count)
        refreshes = [_timed(runs, 1000.0 + _BUCKET * i) for i in range(20)]
        setting = f"{count} live runs"
        rows.append(Row("policy.ms", HERMES, setting, float(np.median(refreshes)), "ms", _PAPER_MS))
        rows.append(Row("policy.event_ms", HERMES, setting, _event_ms(runs, count), "ms"))
    return rows


def _live(count: int) -> Runs:
    """Return runs of all applications, each with a request in progress."""
    runs, apps = Runs(knowledge(GRAPHS[0]), RankOptions()), list(pool()[0].items())
    for i in range(count):
        app, some = apps[i % len(apps)]
        unit = some[0].steps[0].unit
        runs.arrived(_request(i, app, unit), 100.0, now=i / count)
        runs.started(f"r{i}", 1.0)
    runs.refresh(2.0)
    return runs


def _timed(runs: Runs, now: float) -> float:
    began = time.perf_counter()
    runs.refresh(now)
    return 1000 * (time.perf_counter() - began)


def _event_ms(runs: Runs, count: int) -> float:
    """Return milliseconds of an arrival that begins a visit, and of the refresh after it."""
    app, some = next(iter(pool()[0].items()))
    taken, now = [], 2000.0
    for i in range(50):
        request = _request(count + i, app, some[0].steps[0].unit)
        began = time.perf_counter()
        runs.arrived(request, 100.0, now)
        runs.refresh(now)
        taken.append(1000 * (time.perf_counter() - began))
    return float(np.median(taken))


def _request(number: int, app: str, unit: str) -> Request:
    stage = Stage(app, str(number), unit)
    return Request(f"r{number}", "llama-2-7b-hf", 500, 500, 0.0, stage=stage)
