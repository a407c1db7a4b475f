"""Do the papers' tables say what was simulated, and only that?"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.cli import bench_app
from benchmarks.papers import PAPERS, bros, bros_choices, closed_loop
from benchmarks.papers.bros import judge
from benchmarks.papers.bros_choices import CHOICES, OURS, TEXT, system
from benchmarks.papers.bros_claims import FIXED, LATE_LAST, ClaimCase, ClaimPoint, claims
from benchmarks.papers.observers import TokenDeadlines, inside
from benchmarks.papers.parts import PaperPart, part
from benchmarks.papers.recipes import find
from headway.errors import ConfigError
from headway.policy.core.engine_spec import EngineSpec
from headway.simulate.outcome import Observer, Outcome
from headway.simulate.workload.traffic import concat, single
from headway.whatif.output.results import Ask


def outcome(first: list[float], end: list[float]) -> Outcome:
    none, lost = np.zeros(len(first), np.int64), np.ones(len(first), np.int64)
    return Outcome(np.array(first), np.array(end), none, lost, np.zeros(len(first)), iterations=10, busy=2.0)


def test_figures_by_hand() -> None:
    """Real-time: in time, late first token, slow answer, never ended; and two best-effort requests."""
    chat = single(np.zeros(4), 10, 11, slo=bros.SLO, tier="rt")
    work = concat(chat, single(np.zeros(2), 10, 11, tier="be"))
    run = outcome([0.3, 1.0, 0.4, np.nan, 3.0, 3.0], [1.3, 2.0, 4.4, np.nan, 9.0, 11.0])
    tokens = TokenDeadlines(work)
    tokens.steady[:] = [10, 9, 1, 0, 10, 10]
    tokens.ahead[:] = [10, 0, 5, 0, 10, 10]
    found = judge(work, run, tokens, 10.0, [0.001, 0.002, 0.003])
    assert found == pytest.approx(
        {
            "rt.normalized_latency": (1.3 + 2.0 + 4.4) / 33,
            "rt.ttft_attainment": 50.0,
            "rt.tpot_attainment": 50.0,
            "rt.token_attainment": 50.0,
            "rt.token_due_attainment": 37.5,
            "rt.req_per_s": 0.3,
            "be.req_per_s": 0.1,
            "kv.preemptions": 6 / 5,
            "sched.share_pct": 100 * 0.002 * 10 / 2.0,
        }
    )


CASE = ClaimCase(bros.OPT_13B, 1.0, "sharegpt", (1.0, 2.0))


def point(
    system: str, rate: float, latency: float | None, ttft: float, batch: float, seed: int = 0, case: ClaimCase = CASE
) -> ClaimPoint:
    return ClaimPoint(
        system,
        case,
        rate,
        seed,
        {
            "rt.normalized_latency": latency,
            "rt.ttft_attainment": ttft,
            "rt.tpot_attainment": 100.0,
            "rt.token_attainment": 90.0,
            "rt.token_due_attainment": 90.0,
            "rt.req_per_s": rate,
            "be.req_per_s": batch,
            "kv.preemptions": 0.0,
            "sched.share_pct": 1.0,
        },
    )


def test_claims_are_averages_over_rates_with_the_extremes_of_the_seeds() -> None:
    points = [
        point("bros", 1, 0.1, 100, 0.9),
        point("vllm-v0", 1, 0.2, 5, 1.0),
        point("bros", 2, 0.1, 80, 0.5),
        point("vllm-v0", 2, 0.4, 0, 1.0),
        point("bros", 1, 0.1, 90, 1.0, 1),
        point("vllm-v0", 1, 0.1, 9, 1.0, 1),
        point("bros", 2, None, 90, 1.0, 1),
        point("vllm-v0", 2, 0.4, 9, 1.0, 1),
    ]
    found = {row.id: (row.ours, row.paper) for row in claims(points)}
    assert found["rt.normalized_latency.change"] == (pytest.approx((-62.5 + 0) / 2), -74.2)
    assert found["rt.normalized_latency.change.least"] == (pytest.approx(-62.5), None)
    assert found["rt.ttft_attainment.times"] == (pytest.approx((180 / 5 + 10) / 2), 36.38)
    assert found["rt.ttft_attainment.times_each"] == (pytest.approx((20 + 10) / 2), 36.38)
    assert found["rt.ttft_attainment.mean"] == (pytest.approx((2.5 + 9) / 2), 1.28)
    assert found["be.req_per_s.change.most"] == (pytest.approx(0.0), None)
    assert "rt.req_per_s.times" not in found


def test_the_papers_figure_stands_beside_the_mean_of_the_models() -> None:
    other = ClaimCase(bros.OPT_30B, 1.0, "sharegpt", (1.0,))
    slower = ClaimCase(bros.OPT_13B, 1.6, "sharegpt", (1.0,))
    points = [
        point(name, 1, latency, 50, 1.0, case=case)
        for case, ours, theirs in ((CASE, 0.1, 0.2), (other, 0.1, 0.8), (slower, 0.3, 0.4))
        for name, latency in (("bros", ours), ("vllm-v0", theirs))
    ]
    found = {row.setting: (row.ours, row.paper) for row in claims(points) if row.id == "rt.normalized_latency.change"}
    assert found == {
        "opt-13b-a100 + opt-30b-a100-40g-tp4 x1, sharegpt": (pytest.approx((-50 - 87.5) / 2), -74.2),
        "opt-13b-a100 x1, sharegpt": (pytest.approx(-50), None),
        "opt-30b-a100-40g-tp4 x1, sharegpt": (pytest.approx(-87.5), None),
        "opt-13b-a100 x1.6, sharegpt": (pytest.approx(-25), -74.2),
    }


def test_variants_of_bros_stand_beside_the_paper_and_beside_bros() -> None:
    slow = ClaimCase(bros.OPT_13B, 1.9, "sharegpt", (1.0,))
    rates = (("bros", 1.0), (FIXED, 1.05), (LATE_LAST, 0.9), ("vllm-v0", 1.2))
    points = [point(name, 1, 0.1, 50, rate, case=slow) for name, rate in rates]
    setting = "opt-13b-a100 x1.9, authors' speed, sharegpt"
    assert {row.setting for row in claims(points)} == {setting}
    found = {row.system: (row.ours, row.paper) for row in claims(points) if row.id == "be.req_per_s.change"}
    assert found == {
        "bros vs vllm-v0": (pytest.approx(100 * (1 / 1.2 - 1)), -11.29),
        f"{FIXED} vs vllm-v0": (pytest.approx(100 * (1.05 / 1.2 - 1)), -11.29),
        f"{FIXED} vs bros": (pytest.approx(5.0), None),
        f"{LATE_LAST} vs vllm-v0": (pytest.approx(-25.0), -11.29),
        f"{LATE_LAST} vs bros": (pytest.approx(-10.0), None),
    }


def test_the_ablation_is_compared_only_where_the_paper_has_it() -> None:
    shared = ClaimCase(bros.OPT_30B, 1.0, "sharegpt", (10.0,), "shared blocks")
    points = [
        point(name, 10, 0.1, 50, 1.0, case=case) for case in (CASE, shared) for name in ("bros", "bros-recompute")
    ]
    found = {(row.id, row.setting, row.paper) for row in claims(points) if row.system.endswith("recompute")}
    assert found == {
        (f"rt.{name}_attainment.{how}", shared.setting, paper)
        for name, paper in (("ttft", 1.23), ("tpot", 1.63))
        for how in ("times", "times_each")
    }


def test_the_choices_are_all_by_which_the_text_differs() -> None:
    spec = EngineSpec(256, 2048, copy_seconds=1e-5, host_tokens=1000, two_ended=True)
    ours, text = (bros_choices._options(name, spec) for name in (OURS, TEXT))
    chosen = [option for options in CHOICES.values() for option in options]
    assert sorted(chosen) == sorted(name for name in ours if ours[name] != text[name])
    for name, options in CHOICES.items():
        one = system(f"{OURS}, {name}").packer(spec)
        other = system(f"{TEXT}, not {name}").packer(spec)
        for option in options:
            assert getattr(one, option) == getattr(find(TEXT).packer(spec), option)
            assert getattr(other, option) == getattr(find(OURS).packer(spec), option)


def test_every_figure_of_the_evaluation_has_a_part() -> None:
    cases = [case for one in bros.full().experiments for case in one.settings]
    assert {(case.profile, case.lengths) for case in cases if case.kind == "hybrid"} == {
        (model, data) for model in (bros.OPT_13B, bros.OPT_30B, bros.LLAMA_3) for data in ("sharegpt", "lmsys")
    }
    assert {case.kind for case in cases} == {"hybrid", "real-time only", "shared blocks", "choices"}
    assert len({(case.setting, rate) for case in cases for rate in case.rates}) == sum(
        len(case.rates) for case in cases
    )


def test_every_system_has_a_recipe_and_a_line() -> None:
    assert {system(name).name for name in bros.SYSTEMS} >= {"bros", "vllm-v0", "rr", "vllm-priority"}
    assert tuple(bros._STYLE) == bros.SYSTEMS
    assert all(set(one.systems) <= set(bros.SYSTEMS) for one in bros.quick_plan().experiments)


def test_the_workload_is_the_papers() -> None:
    work = bros.traffic(CASE, 6.0, 600.0, 0)
    promised = np.isfinite(work.ttft)
    assert promised.sum() / 600 == pytest.approx(6.0, rel=0.1)
    assert not promised[int(promised.sum()) :].any()
    assert set(work.ttft[promised]) == {0.4}
    assert set(work.tpot[promised]) == {0.2}
    assert work.prompt[promised].mean() == pytest.approx(222.76, rel=0.1)
    assert work.output[promised].mean() == pytest.approx(234.51, rel=0.1)
    assert work.prompt[~promised].min() >= 512
    assert work.output[~promised].max() <= 128
    alone = ClaimCase(bros.OPT_13B, 1.0, "lmsys", (2.0,), "real-time only")
    assert np.isfinite(bros.traffic(alone, 2.0, 30.0, 0).ttft).all()


def test_a_best_effort_batch_comes_when_the_one_before_has_ended() -> None:
    chat = single(np.array([0.5]), 10, 5, slo=bros.SLO, tier="rt")
    work = concat(chat, single(np.zeros(4), 600, 20, priority=10, tier="be"))
    ended = closed_loop.run(
        inside(find("vllm-v0"), []),
        bros.instance(CASE),
        work,
        open=1,
        batch=2,
        stop=1.0,
        until=60.0,
        observer=Observer(),
    )
    assert ended.end[0] > 0.5
    assert ended.first[3:].min() > ended.end[1:3].max()


def test_it_prints_one_object_and_writes_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = PaperPart("opt-13b", (ClaimCase(bros.OPT_13B, 1.0, "sharegpt", (2.0,)),), ("bros", "vllm-v0"))
    bros.main(Ask(as_json=True, quick=True, out=tmp_path), plan=bros.BrosPlan((one,), 30.0, 1))
    found = json.loads(capsys.readouterr().out)
    assert (found["bench"], found["host"]) == ("papers bros", "sim")
    rows = {(row["id"], row["system"]): row for row in found["rows"]}
    assert rows["rt.ttft_attainment", "bros"]["ours"] > 90
    assert rows["sched.share_pct", "bros"]["paper"] == 9.12
    assert rows["rt.normalized_latency.change", "bros vs vllm-v0"]["paper"] == -74.2
    names = {"report.json", "report.html", "report.md", "bros-sharegpt.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "SIMULATED" in (tmp_path / "report.html").read_text()


def test_an_unknown_paper_is_told_which_there_are() -> None:
    error = CliRunner().invoke(bench_app, ["papers", "boss"]).exception
    assert isinstance(error, ConfigError)
    assert "anneal, bros, ecoserve, hermes, hermes-caches, qlm" in error.hint
    assert set(PAPERS) == {"anneal", "bros", "ecoserve", "hermes", "hermes-caches", "qlm"}


@pytest.mark.parametrize("paper", sorted(set(PAPERS) - {"anneal", "hermes-caches"}))
def test_only_the_named_parts_are_run(paper: str) -> None:
    module = importlib.import_module(PAPERS[paper].partition(":")[0])
    plan = module.full()
    first = plan.experiments[0].name
    assert [one.name for one in part(plan, [first], module._MEASURED).experiments] == [first]
    assert part(plan, (), module._MEASURED) == plan
    everything = [*(one.name for one in plan.experiments), *module._MEASURED]
    assert part(plan, everything, module._MEASURED) == plan
    with pytest.raises(ConfigError) as refused:
        part(plan, ["zzz"], module._MEASURED)
    assert first in refused.value.hint


def test_only_the_policy_of_hermes_is_timed() -> None:
    result = CliRunner().invoke(
        bench_app, ["papers", "hermes", "--quick", "--only", "policy", "--json"], catch_exceptions=False
    )
    assert {row["id"].partition(".")[0] for row in json.loads(result.stdout)["rows"]} == {"policy"}


def test_an_error_for_an_unknown_kind_of_cache_lists_the_kinds() -> None:
    result = CliRunner().invoke(bench_app, ["papers", "hermes-caches", "--only", "table1"])
    assert isinstance(result.exception, ConfigError)
    assert "kv, lora" in result.exception.hint
