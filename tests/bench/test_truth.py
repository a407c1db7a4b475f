"""Real against simulated: the errors are those of the figures, and a perfect twin has none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.validate import conformance, report, validate
from benchmarks.validate import replay as replays
from benchmarks.validate.conformance import StepTally
from benchmarks.validate.replay import Replay, ReplayRun, ReplaySetup, TwinPair, check
from benchmarks.validate.report import Findings, compared
from headway.errors import ConfigError
from headway.policy.forecast.latency.measurement import Limits, Samples, fit_all
from headway.policy.forecast.latency.profiles import LatencyProfile, load
from headway.policy.recipes.registry import find
from headway.simulate.run import Simulation
from headway.simulate.workload.traffic import poisson
from headway.whatif import experiment
from headway.whatif.load import mix
from headway.whatif.load.mix import BUILTIN
from headway.whatif.load.records import Call, Record
from headway.whatif.measured.profile import ProfileMeasurement, ProfileTarget
from headway.whatif.measured.systems import standard_engine
from headway.whatif.output.results import save

ENGINE = standard_engine("smollm2", max_running=8, blocks=None)
PROFILE = replace(load("smollm2-135m-cpu2"), request_overhead_s=0.008, token_overhead_s=0.004, interruption_s=0.003)
IDS = {
    *(f"error.{metric}.{kind}" for metric in ("ttft", "tpot", "e2e") for kind in ("mean", "p50", "p99")),
    "error.tokens_per_s",
    "error.attainment",
}


def planned(rate: float, seed: int = 0) -> list[Call]:
    rng = np.random.default_rng(seed)
    return mix.calls(BUILTIN["chat-batch"], poisson(rate, 30.0, rng), rng, warn=lambda _: None)


def answered(calls: list[Call]) -> list[Record]:
    rng = np.random.default_rng(1)
    return [
        Record(
            call.tier,
            call.at,
            call.at,
            call.at + 0.1,
            call.at + 1.0,
            int(rng.integers(20, 400)),
            int(rng.integers(1, call.max_tokens)),
            np.empty(0, np.float32),
            200,
            None,
            call.slo,
        )
        for call in calls
    ]


def replay(recipe: str, setting: str = "below", rate: float = 2.0, profile: LatencyProfile = PROFILE) -> Replay:
    """A 'real' run that the simulator itself made, with a pace of its own."""
    calls = planned(rate)
    work = replays.workload(list(zip(calls, answered(calls), strict=True)), ENGINE.name)
    outcome = Simulation(find(recipe), [replays.instance(profile, ENGINE)], work).run()
    rows: list[list[float | None]] = [[0.0, 0.02, 0.021, 4.0, 900.0, 0.0, 0.0]] * 9
    return Replay(recipe, setting, rate, calls, experiment.records(work, outcome), rows)


def run_of(replays: list[Replay]) -> ReplayRun:
    rows = [row for one in replays for row in one.rows]
    measured = ProfileMeasurement(
        ProfileTarget("", "", "m", ""), Limits(8, 4096, 2048), 128, rows, [], {"sent": []}, [len(rows)]
    )
    return ReplayRun(replays[0].system, replays, measured, fit_all(Samples.of(rows)), PROFILE)


def pair_of(one: Replay) -> TwinPair:
    return replays.pair(one, run_of([one]), ReplaySetup(BUILTIN["chat-batch"], ENGINE))


@pytest.mark.parametrize("recipe", ["vllm", "slack"])
def test_a_run_that_the_simulator_made_itself_has_no_error(recipe: str) -> None:
    for one in compared(pair_of(replay(recipe))):
        assert one.error == pytest.approx(0.0, abs=1e-9), one


def test_a_slower_machine_is_seen_in_every_figure_of_an_overload() -> None:
    slow = replace(PROFILE, law=replace(PROFILE.law, decode_base=0.016))  # type: ignore[call-arg]
    found = {one.id: one for one in compared(pair_of(replay("vllm", "above", 6.0, slow)))}
    assert (found["tpot.mean"].error or 0) > 5
    assert (found["ttft.mean"].error or 0) > 5
    assert (found["tpot.mean"].simulated or 0) < (found["tpot.mean"].real or 0)


def test_the_workload_has_what_the_real_run_had() -> None:
    calls = planned(3.0)
    records = answered(calls)
    work = replays.workload(list(zip(calls, records, strict=True)), "m")
    assert work.output.tolist() == [record.output_tokens for record in records]
    assert work.prompt.tolist() == [record.prompt_tokens for record in records]
    assert work.arrival.tolist() == [call.at for call in calls]
    for i in (0, len(calls) - 1):
        request = work.request(i)
        assert request.slo == calls[i].slo
        assert (request.tier, request.priority) == (calls[i].tier, calls[i].priority)


def test_what_did_not_complete_is_in_neither_world_and_said_so() -> None:
    one = replay("vllm")
    one.records[3] = replace(one.records[3], error="HTTP 500: no", first=None, last=None)
    output_tokens = pair_of(one)
    assert len(output_tokens.real) == len(output_tokens.simulated) == len(one.calls) - 1
    notes = Findings([output_tokens], [run_of([one])], {}).notes()
    assert any("1 requests did not complete" in line for line in notes)


def test_rows_have_the_agreed_ids_and_attainment_is_in_points(tmp_path: Path) -> None:
    one = replay("slack", "above", 6.0)
    tallies = {("slack", conformance.HOOK): StepTally(3, 500, 499, "at 1.0: vLLM runs [], we [1]")}
    found = Findings([pair_of(one)], [run_of([one])], tallies)
    rows = {row.id: row for row in found.rows() if row.id.startswith(("error", "conformance"))}
    assert set(rows) == IDS | {"conformance.steps", "conformance.identical_pct"}
    assert rows["error.attainment"].unit == "percentage points"
    assert rows["error.ttft.p99"].unit == "%"
    assert (rows["error.ttft.mean"].system, rows["error.ttft.mean"].setting) == ("slack", "above")
    assert rows["conformance.identical_pct"].ours == pytest.approx(99.8)
    assert any("differs from vLLM" in line for line in found.notes())
    built = validate.main.report(report.result(found, "load"))
    result = json.loads(json.dumps(built.to_json(), allow_nan=False))
    assert result["host"] == "vllm"
    assert all(row["paper"] is None for row in result["rows"])
    files = [*save(built, tmp_path, report.pictures(found)), *report.save_profiles(found, tmp_path)]
    names = {"report.json", "report.html", "report.md", "slack-above.png", "pace-slack.json"}
    assert {file.name for file in files} == names
    assert load(tmp_path / "pace-slack.json").interruption_s == 0.003
    assert built.table().row_count == len(IDS) + 1 + 2


@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "0,1", "1,-2", "nan,1"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="not two rates"):
        validate.fixed(text)


def test_stock_and_unknown_recipes_are_refused() -> None:
    for names in ((), ("vllm-fcfs",), ("slak",)):
        with pytest.raises(ConfigError):
            check(names)
    check(("vllm", "slack"))


def test_quick_is_one_system_and_short() -> None:
    setup = validate.shortened(ReplaySetup(BUILTIN["chat-batch"], ENGINE))
    assert setup.systems == ("vllm",)
    assert setup.quick
    assert setup.duration <= 5
    assert setup.rates is not None
