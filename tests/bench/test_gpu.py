"""`headway bench gpu`: its figures, and its short run, without engines."""

from __future__ import annotations

from benchmarks.real import gpu
from benchmarks.validate.replay import ReplaySetup
from headway.whatif.load.mix import BUILTIN
from tests.bench.test_truth import ENGINE, answered, pair_of, planned, replay, run_of


def test_systems_and_forecast_are_in_one_table() -> None:
    ours = replay("headway", "0.9x")
    found = gpu.GpuFindings({"vllm-fcfs": 20.0, "headway": 30.0}, capacity=4.0, run=run_of([ours]))
    found.records = {("vllm-fcfs", "0.9x"): answered(planned(2.0)), ("headway", "0.9x"): ours.records}
    found.pairs = [pair_of(ours)]
    rows = {(row.id, row.system, row.setting): row.ours for row in gpu.rows(found)}
    assert len(rows) == len(gpu.rows(found)), "ids are unique"
    assert rows["start_s", "headway", "start"] == 30.0
    assert rows["capacity.req_per_s", "vllm-fcfs", "saturation"] == 4.0
    assert all((id, name, "0.9x") in rows for id in gpu._SHOWN for name in found.started)
    assert rows["error.ttft.mean", "headway", "0.9x"] == 0.0, "the simulator made that run itself"
    assert rows["simulated.tpot.p99", "headway", "0.9x"] == rows["tpot.p99", "headway", "0.9x"]


def test_the_short_run_has_fixed_rates_and_short_answers() -> None:
    short = gpu.shortened(ReplaySetup(BUILTIN["chat-batch"], ENGINE, ("headway",), dict(gpu.LOADS)))
    assert short.rates is not None
    assert short.rates.keys() == short.loads.keys()
    assert max(tier.max_tokens for tier in short.mix.tiers) <= 32
