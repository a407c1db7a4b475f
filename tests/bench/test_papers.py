"""Do the papers' tables say what was simulated, and only that?"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headway.bench.cli import bench_app
from headway.bench.papers import PAPERS, PARTED, bros, closed_loop
from headway.bench.papers.bros import Point, judge
from headway.bench.papers.observers import TokenDeadlines, inside
from headway.errors import ConfigError
from headway.recipes.registry import find
from headway.sim.observer import Observer
from headway.sim.outcome import Outcome
from headway.sim.workload.traffic import concat, single


def outcome(first: list[float], end: list[float]) -> Outcome:
    none = np.zeros(len(first), np.int64)
    return Outcome(np.array(first), np.array(end), none, none, iterations=10, busy=2.0)


def test_figures_by_hand() -> None:
    """Real-time: in time, late first token, slow answer, never ended; and two best-effort requests."""
    chat = single(np.zeros(4), 10, 11, slo=bros.SLO, tier="rt")
    work = concat(chat, single(np.zeros(2), 10, 11, tier="be"))
    run = outcome([0.3, 1.0, 0.4, np.nan, 3.0, 3.0], [1.3, 2.0, 4.4, np.nan, 9.0, 11.0])
    tokens = TokenDeadlines(work)
    tokens.steady[:] = [10, 9, 1, 0, 10, 10]
    tokens.ahead[:] = [10, 0, 5, 0, 10, 10]
    found = judge(work, run, tokens, 10.0, [0.001, 0.002, 0.003])
    assert found == pytest.approx({
        "rt.normalized_latency": (1.3 + 2.0 + 4.4) / 33, "rt.ttft_attainment": 50.0,
        "rt.tpot_attainment": 50.0, "rt.token_attainment": 50.0, "rt.token_due_attainment": 37.5,
        "rt.req_per_s": 0.3, "be.req_per_s": 0.1, "sched.share_pct": 100 * 0.002 * 10 / 2.0,
    })  # fmt: skip


CASE = bros.Case(bros.PROFILE, 1.0, "sharegpt", (1.0, 2.0))


def point(system: str, rate: float, latency: float | None, ttft: float, batch: float, seed: int = 0) -> Point:
    return Point(system, CASE, rate, seed, {
        "rt.normalized_latency": latency, "rt.ttft_attainment": ttft, "rt.tpot_attainment": 100.0,
        "rt.token_attainment": 90.0, "rt.token_due_attainment": 90.0, "rt.req_per_s": rate,
        "be.req_per_s": batch, "sched.share_pct": 1.0,
    })  # fmt: skip


def test_claims_are_averages_over_rates_with_the_extremes_of_the_seeds() -> None:
    points = [
        point("bros", 1, 0.1, 100, 0.9), point("vllm-v0", 1, 0.2, 5, 1.0),
        point("bros", 2, 0.1, 80, 0.5), point("vllm-v0", 2, 0.4, 0, 1.0),
        point("bros", 1, 0.1, 90, 1.0, 1), point("vllm-v0", 1, 0.1, 9, 1.0, 1),
        point("bros", 2, None, 90, 1.0, 1), point("vllm-v0", 2, 0.4, 9, 1.0, 1),
    ]  # fmt: skip
    found = {row.id: (row.ours, row.paper) for row in bros.claims(points)}
    assert found["rt.normalized_latency.change"] == (pytest.approx((-62.5 + 0) / 2), -74.2)
    assert found["rt.normalized_latency.change.least"] == (pytest.approx(-62.5), None)
    assert found["rt.ttft_attainment.times"] == (pytest.approx((180 / 5 + 10) / 2), 36.38)
    assert found["be.req_per_s.change.most"] == (pytest.approx(0.0), None)
    assert "rt.req_per_s.times" not in found


def test_every_system_has_a_recipe_and_a_line() -> None:
    assert {find(name).name for name in bros.SYSTEMS} >= {"bros", "vllm-v0", "rr", "vllm-priority"}
    assert tuple(bros._STYLE) == bros.SYSTEMS
    assert set(bros.QUICK_SYSTEMS) <= set(bros.SYSTEMS)


def test_the_workload_is_the_papers() -> None:
    work = bros.traffic("sharegpt", 6.0, 600.0, 0, 256)
    promised = np.isfinite(work.ttft)
    assert promised.sum() / 600 == pytest.approx(6.0, rel=0.1)
    assert not promised[int(promised.sum()) :].any()
    assert set(work.ttft[promised]) == {0.4}
    assert set(work.tpot[promised]) == {0.2}
    assert work.prompt[promised].mean() == pytest.approx(222.76, rel=0.1)
    assert work.output[promised].mean() == pytest.approx(234.51, rel=0.1)
    assert work.prompt[~promised].min() >= 512
    assert work.output[~promised].max() <= 128
    assert np.isfinite(bros.traffic("lmsys", 2.0, 30.0, 0, 0).ttft).all()


def test_a_best_effort_batch_comes_when_the_one_before_has_ended() -> None:
    case = bros.Case(bros.PROFILE, 1.0, "sharegpt", (1.0,))
    chat = single(np.array([0.5]), 10, 5, slo=bros.SLO, tier="rt")
    work = concat(chat, single(np.zeros(4), 600, 20, priority=10, tier="be"))
    ended = closed_loop.run(
        inside(find("vllm-v0"), []), bros.instance(case), work, open=1, batch=2, stop=1.0, until=60.0,
        observer=Observer(),
    )  # fmt: skip
    assert ended.end[0] > 0.5
    assert ended.first[3:].min() > ended.end[1:3].max()


def test_the_command_prints_one_object_and_writes_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bros, "QUICK_SYSTEMS", ("bros", "vllm-v0"))
    monkeypatch.setattr(bros, "QUICK", (bros.Case(bros.PROFILE, 1.0, "sharegpt", (2.0,)),))
    ended = CliRunner().invoke(bench_app, ["papers", "bros", "--quick", "--json", "--out", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert (found["bench"], found["host"]) == ("papers bros", "sim")
    rows = {(row["id"], row["system"]): row for row in found["rows"]}
    assert rows["rt.ttft_attainment", "bros"]["ours"] > 90
    assert rows["sched.share_pct", "bros"]["paper"] == 9.0
    assert rows["rt.normalized_latency.change", "bros vs vllm-v0"]["paper"] == -74.2
    names = {"report.json", "report.html", "report.md", "bros-sharegpt.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "SIMULATED" in (tmp_path / "report.html").read_text()


def test_an_unknown_paper_is_told_which_there_are() -> None:
    error = CliRunner().invoke(bench_app, ["papers", "boss"]).exception
    assert isinstance(error, ConfigError)
    assert "anneal, bros, ecoserve, hermes, hermes-caches, qlm" in error.hint
    assert set(PAPERS) == {"anneal", "bros", "ecoserve", "hermes", "hermes-caches", "qlm"}


@pytest.mark.parametrize("paper", PARTED)
def test_only_the_named_parts_are_run(paper: str) -> None:
    module = importlib.import_module(PAPERS[paper].partition(":")[0])
    plan = module.full()
    first = plan.experiments[0].name
    assert [one.name for one in module.part(plan, [first]).experiments] == [first]
    assert module.part(plan, ()) == plan
    everything = [*(one.name for one in plan.experiments), *module._MEASURED]
    assert module.part(plan, everything) == plan
    with pytest.raises(ConfigError) as refused:
        module.part(plan, ["zzz"])
    assert first in refused.value.hint


def test_only_the_policy_of_hermes_is_timed() -> None:
    result = CliRunner().invoke(
        bench_app, ["papers", "hermes", "--quick", "--only", "policy", "--json"], catch_exceptions=False
    )
    assert {row["id"].partition(".")[0] for row in json.loads(result.stdout)["rows"]} == {"policy"}


def test_papers_without_parts_say_so() -> None:
    result = CliRunner().invoke(bench_app, ["papers", "anneal", "--only", "table1"])
    assert isinstance(result.exception, ConfigError)
    assert "Leave --only out" in result.exception.hint
