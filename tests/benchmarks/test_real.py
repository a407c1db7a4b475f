"""`headway bench rivals --real`: what its grounds ask, and its figures, without engines."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cli import bench_app
from benchmarks.rivals import real
from benchmarks.rivals.real import Alone
from headway.errors import ConfigError
from headway.types import Slo
from headway.whatif.load.records import Call, Record


def record(slo: Slo, first: float, last: float, tokens: int = 11, at: float = 0.0) -> Record:
    gaps = np.full(tokens - 1, (last - first) / (tokens - 1), np.float32)
    return Record("chat", at, at, at + first, at + last, 5, tokens, gaps, 200, None, slo)


def test_what_an_idle_engine_does_is_fitted_and_scales_the_promises() -> None:
    calls = [Call(float(at), "chat", "x" * size, 8) for at, size in enumerate((100, 200, 400))]
    seen = [record(Slo(), 0.05 + 0.001 * len(call.prompt), 1.25, at=call.at) for call in calls]
    alone = Alone.of(calls, seen)
    assert (alone.char, alone.gap) == pytest.approx((0.001, 0.1))
    assert alone.first(calls[0]) == pytest.approx(0.1 + alone.gap)
    chat, tiers = real.grounds(real._CHAT, alone, 120.0).values()
    made = real.calls(chat, alone, 5.0, 20.0, 0)
    assert len({call.slo.ttft for call in made}) > 5, "each has the ttft of its own prompt"
    assert all(call.slo.ttft == pytest.approx(5 * alone.first(call)) for call in made)
    assert [tier.slo.e2e for tier in tiers.tiers] == [None, 30.0, 90.0], "as 60 and 180 of 240 s"
    assert tiers.tiers[0].slo.ttft == 3.0
    assert tiers.tiers[0].slo.tpot == pytest.approx(3 * alone.gap)


def test_figures_by_mean_pace_and_by_line() -> None:
    pace = Slo(ttft=1.0, tpot=0.1)
    seen = [record(pace, 0.5, 1.5), record(pace, 0.2, 1.9), record(pace, 1.5, 1.9), record(Slo(e2e=2.0), 1.0, 5.0)]
    rows = {row.id: row.ours for row in real.rows_of({("headway", "G"): seen})}
    assert rows["attainment.promised"] == 25.0
    assert rows["attainment.line"] == 50.0, "an early start is used, a late one is late"
    assert rows["tardiness.p99"] == pytest.approx(3.0, rel=0.05)
    assert rows["tokens_per_s"] == pytest.approx(44 / 5)


def test_the_simulated_grounds_cannot_be_chosen() -> None:
    wrong = CliRunner().invoke(bench_app, ["rivals", "--real", "--grounds", "G3"])
    assert isinstance(wrong.exception, ConfigError)
