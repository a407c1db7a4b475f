"""QLM's benchmark: workloads as stated, figures by hand, and every row of a tiny run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import qlm, qlm_tables
from benchmarks.papers.parts import PaperPart
from benchmarks.papers.qlm import QlmPlan
from benchmarks.papers.qlm_estimates import Estimate, PlanningTimes, estimates
from benchmarks.papers.qlm_motivation import Memory, blocking, drain, rising
from benchmarks.papers.qlm_orders import best_cost, plan_orders
from benchmarks.papers.qlm_tables import QlmResults, QlmTrial, claims, judge, rows
from benchmarks.papers.qlm_workloads import FIVE, ONE, QlmSetting, capacity
from benchmarks.papers.recipes import STUDIED, find
from headway.simulate import fleet
from headway.simulate.instance import SimulatedInstance
from headway.simulate.outcome import Outcome
from headway.simulate.workload.traffic import concat, single
from headway.types import Slo
from headway.whatif.output.results import Ask
from tests.plan.test_queue_order import drawn, every_order

MULTI = QlmSetting("W_A", (("a100", 3),), FIVE, 0.8, 400.0, (("mistral-7b", "vicuna-13b"),))
IDS = {
    "attainment",
    "attainment.latency_sensitive",
    "throughput.req_per_s",
    "swaps",
    "estimator.r2",
    "plan.us_per_request",
    "plan.arrival_us",
    "attainment.points",
    "attainment.latency_sensitive.points",
    "throughput.req_per_s.times",
    "slo_scale.all_met",
}


def test_every_system_is_a_recipe() -> None:
    plans = (qlm.full(), qlm.quick())
    systems = {name for plan in plans for one in plan.experiments for name in one.systems}
    assert {name for name in STUDIED if name.startswith("qlm")} <= systems
    assert systems == {find(name).name for name in systems}
    assert {other for _, other, _, _, _ in qlm_tables.CLAIMS} <= systems


def test_requests_of_w_a_come_as_stated() -> None:
    work = MULTI.workload(0)
    rate = {name: float((work.model == code).sum()) / 400 for code, name in enumerate(work.models)}
    for model in FIVE:
        assert rate[model.name] == pytest.approx(MULTI.rate() * model.share, rel=0.15)
    urgent = work.e2e == 25.0
    assert urgent.mean() == pytest.approx(0.2, abs=0.03)
    assert set(work.e2e[~urgent]) == {300.0}
    assert work.output[urgent].max() <= 512
    gaps = np.diff(work.arrival)
    assert gaps.std() / gaps.mean() == pytest.approx(4.0, rel=0.2)
    assert sum(model.tail for model in FIVE) > len(FIVE) / 2
    assert len(FIVE) > len(MULTI.instances())


def test_the_load_is_a_share_of_what_the_fleet_can_do() -> None:
    single_model = QlmSetting("W_B", (("a100", 2),), ONE, 0.5, 10.0)
    assert single_model.rate() == pytest.approx(0.5 * 2 * capacity("opt-13b-a100"))
    busy = sum(model.share / (3 * capacity(str(model.profile("a100")))) for model in FIVE)
    assert MULTI.rate() * busy == pytest.approx(0.8)


def test_what_is_varied_is_varied_and_named() -> None:
    base = len(MULTI.workload(0))
    slow = replace(MULTI, tail=0.2).workload(0)
    tail = np.isin(slow.model, [slow.models.index(model.name) for model in FIVE if model.tail])
    assert tail.mean() == pytest.approx(0.06 / 0.76, abs=0.02)
    mega = replace(MULTI, mega=0.01).workload(0)
    huge = mega.prompt >= 8000
    assert huge.sum() == pytest.approx(0.01 * base, abs=3)
    assert mega.output[huge].min() >= 1000
    queued = replace(MULTI, queued=500).workload(0)
    assert (queued.arrival == 0).sum() == pytest.approx(500, abs=10)
    assert set(replace(MULTI, slo_scale=3.0).workload(0).e2e) == {75.0, 900.0}
    changes = {"tail": 0.2, "mega": 0.01, "queued": 500, "slo_scale": 3.0, "interactive": 0.5}
    some = [MULTI, *(replace(MULTI, **{name: value}) for name, value in changes.items())]  # type: ignore[arg-type]
    assert len({one.describe() for one in some}) == len(some)


def test_no_13b_model_is_on_an_a10_and_every_model_is_served_somewhere() -> None:
    setting = qlm._fleet(10.0, "fleet")
    instances = setting.instances()
    assert len(instances) == 16
    assert {spec.instance.model for spec in instances} == {model.name for model in FIVE}
    for spec in instances[8:]:
        assert all(name.startswith("mistral-7b") for name in spec.variants())
    assert set(fleet.models(instances[:8])) == {model.name for model in FIVE}
    assert np.isfinite(fleet.holds(instances, setting.workload(0))).all()


def test_figures_by_hand() -> None:
    """Interactive: on time, late; batch: on time, never; one that waited from the start, late."""
    work = concat(
        single(np.zeros(1), 10, 10, slo=Slo(e2e=5.0), tier="standing"),
        single(np.zeros(2), 10, 10, slo=Slo(e2e=5.0), tier="interactive"),
        single(np.ones(2), 10, 10, slo=Slo(e2e=50.0), tier="batch"),
    )
    none = np.zeros(5, np.int64)
    end = np.array([20.0, 4.0, 6.0, 51.0, np.nan])
    found = judge(work, Outcome(end - 1, end, none, none, np.zeros(5), swaps=3), 80.0)
    assert found == {
        "attainment": 50.0,
        "attainment.latency_sensitive": 50.0,
        "throughput.req_per_s": 4 / 80.0,
        "swaps": 3.0,
    }
    end[4] = 60.0
    found = judge(work, Outcome(end - 1, end, none, none, np.zeros(5)), 80.0)
    assert found["throughput.req_per_s"] == 5 / 60.0


def point(system: str, attainment: float, throughput: float, **changes: float) -> QlmTrial:
    figures = {"attainment": attainment, "throughput.req_per_s": throughput}
    return QlmTrial(system, replace(MULTI, **changes), figures)  # type: ignore[arg-type]


def test_claims_are_taken_where_they_show_most() -> None:
    trials = {
        "multi": [
            point("qlm", 90, 8),
            point("shepherd", 60, 4),
            point("qlm", 70, 9, interactive=0.5),
            point("shepherd", 65, 3, interactive=0.5),
        ],
        "queue": [point("qlm", 99.5, 8, queued=1000), point("vllm", 0, 0, queued=1000)],
        "slo": [
            point("qlm", 99.5, 8),
            point("vllm-model-swap", 10, 1),
            point("qlm", 100, 8, slo_scale=3.0),
            point("vllm-model-swap", 40, 1, slo_scale=3.0),
        ],
    }
    found = {(row.id, row.system): row for row in claims(QlmResults(trials, {}, (), ()))}
    gain = found["attainment.points", "qlm vs shepherd"]
    assert (gain.ours, gain.paper, gain.setting) == (30, 90.0, MULTI.describe())
    times = found["throughput.req_per_s.times", "qlm vs shepherd"]
    assert (times.ours, times.paper) == (3, 4.0)
    assert "50% latency-sensitive" in times.setting
    assert found["attainment.points", "qlm vs vllm"].ours == 99.5
    assert found["slo_scale.all_met", "qlm"].ours == 1.0
    assert found["slo_scale.all_met", "vllm-model-swap"].ours is None
    assert found["slo_scale.all_met", "vllm-model-swap"].paper == 11.0


def test_warm_starts_are_bounded_by_what_arrives() -> None:
    trials = [point("qlm", 90, 8), point("qlm", 80, 4, host_gb=0.0)]
    found = {row.id: row for row in claims(QlmResults({"warm": trials}, {}, (), ()))}
    times = found["throughput.req_per_s.warm_start.times"]
    assert (times.ours, times.paper) == (2, 4.0)
    bound = found["throughput.req_per_s.warm_start.times.bound"].ours
    assert bound == pytest.approx(MULTI.rate() / max(MULTI.load, 1.0) / 4)


def test_r2_and_planning_by_hand() -> None:
    estimate = Estimate("x", np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    assert estimate.r2 == pytest.approx(1 - 1 / 2)
    one = PlanningTimes(400_000, 8, 2.0, 20.0)
    assert (one.us_per_request, one.arrival_us) == (pytest.approx(50.0), pytest.approx(5.0))
    (row, *_) = rows(QlmResults({}, {}, (), (one,)))
    assert (row.id, row.paper, row.setting) == ("plan.us_per_request", 5000.0, "400000 queued, 8 instances")


@pytest.mark.parametrize("seed", range(4))
def test_the_best_order_is_found_instance_by_instance(seed: int) -> None:
    problem = drawn(seed, items=5, instances=1 + seed % 2)
    assert best_cost(problem) == pytest.approx(every_order(problem))
    fixed = problem._replace(fixed=np.array([-1, 0, -1, -1, -1]))
    assert best_cost(fixed) >= best_cost(problem) - 1e-9


def test_small_plans_are_those_of_the_plan_generator() -> None:
    (one,) = plan_orders(find("qlm"), 1, 0, seconds=0.0)
    assert one.items > 4
    assert one.best <= one.search + 1e-9 <= one.program + 2e-9, "without time HiGHS returns where it began"
    gaps = rows(QlmResults({}, {}, (), (), (one,)))
    assert {row.id for row in gaps} == {"plan.gap_to_best_pct", "plan.proved_pct"}


def test_the_estimator_knows_when_a_queued_request_is_served() -> None:
    for one in estimates("m", "llama-2-7b-a100", 600, 3):
        assert one.r2 > 0.9
        assert one.forecast.shape == one.simulated.shape


def test_kv_is_counted_until_the_last_arrival() -> None:
    memory = Memory(10.0)
    engine = SimulatedInstance(fleet.spec("opt-13b-a100").instances()[0], find("vllm")).engine
    engine.usage["free_blocks"], engine.usage["on_host"] = engine.blocks // 4, 7
    for start in (0.0, 9.0, 20.0):
        memory.iteration(0, engine, engine.schedule(start), 2.0, 0)
    assert memory.held == pytest.approx(3 * (1 - engine.blocks // 4 / engine.blocks))
    assert memory.host == 7


def test_blocking_drain_times_and_a_rising_load() -> None:
    one = QlmSetting("W_B", (("a100", 1),), ONE, 1.5, 15.0)
    found = {(row.id, row.system): row.ours or 0.0 for row in blocking(one, ("qlm", "vllm"), 0)}
    assert 0 <= found["wait.latency_sensitive_s", "qlm"] <= found["wait.latency_sensitive_s", "vllm"] < one.until
    assert 0 < found["kv.used_pct", "vllm"] < 100
    drained = {(row.id, row.system): row.ours or 0.0 for row in drain(replace(MULTI, queued=60), 0)}
    assert drained["drain_s", "edf-model-swap"] > 2 * drained["drain_s", "oracle"]
    assert drained["swaps", "edf-model-swap"] > drained["swaps", "oracle"] >= len(FIVE) - 3
    work, _ = rising(one, 0)
    assert np.histogram(work.arrival, 2, (0, 900))[0].tolist() == sorted(np.histogram(work.arrival, 2, (0, 900))[0])


def tiny() -> QlmPlan:
    multi, one = replace(MULTI, load=0.5, seconds=15.0), QlmSetting("W_B", (("a100", 1),), ONE, 0.5, 15.0)
    return QlmPlan(
        (
            PaperPart("multi", (multi,), qlm.MULTI),
            PaperPart("single", (one,), ("qlm", "vllm")),
            PaperPart("slo", (multi, replace(multi, slo_scale=3.0)), ("qlm", "shepherd")),
            PaperPart("mix", (qlm._mixed(4.0, 5),), ("qlm", "qlm-random")),
            PaperPart("multi-ablation", (multi,), ("qlm", "qlm-no-warm")),
        ),
        (200,),
        300,
        0,
        (1, 4),
        multi,
    )


def test_it_prints_every_row_and_writes_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    qlm.main(Ask(as_json=True, quick=True, out=tmp_path), plan=tiny())
    found = json.loads(capsys.readouterr().out)
    assert (found["bench"], found["host"]) == ("papers qlm", "sim")
    keys = [(row["id"], row["system"], row["setting"]) for row in found["rows"]]
    assert len(set(keys)) == len(keys)
    assert {row["id"] for row in found["rows"]} == IDS
    shares = [row["ours"] for row in found["rows"] if row["unit"] == "%"]
    assert all(0 <= share <= 100 for share in shares)
    for name in ("qlm-multi", "qlm-single", "qlm-mix", "qlm-ablation", "qlm-estimator"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert "SIMULATED" in (tmp_path / "report.html").read_text()
