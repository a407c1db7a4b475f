"""`headway bench gpu`: its figures, and its short run, without engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.real import gpu
from benchmarks.validate.replay import ReplaySetup
from headway.config import Engine
from headway.errors import EngineError
from headway.whatif.load.mix import BUILTIN
from headway.whatif.measured.profile import ProfileTarget
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


class FakeEngine(web.Application):
    """Answers /headway/model, as an engine does, and records the operations."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__()
        self.ops: list[str] = []
        self.refuses = refuses
        self.router.add_post("/headway/model", self._order)

    async def _order(self, request: web.Request) -> web.Response:
        self.ops.append((await request.json())["op"])
        return web.json_response({"error": "no memory"}, status=500 if self.ops[-1] == self.refuses else 200)


async def swaps(app: FakeEngine, model: Path, engine: Engine) -> dict[str, float | None]:
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        return {row.id: row.ours for row in await gpu._swaps(ProfileTarget(url, url, "m", str(model)), engine)}


def test_the_model_is_swapped_for_itself_then_sleeps(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    app = FakeEngine()
    found = asyncio.run(swaps(app, tmp_path, replace(ENGINE, sleep_mode=True)))
    assert app.ops == ["load", "load", "sleep", "wake"]
    assert all(found.values())


def test_figures_are_none_without_weights_or_sleep_mode_and_a_refusal_raises(tmp_path: Path) -> None:
    app = FakeEngine()
    assert asyncio.run(swaps(app, tmp_path, ENGINE)) == {"swap.s_per_gb": None, "sleep_s": None, "wake_s": None}
    assert not app.ops
    with pytest.raises(EngineError, match=r"failed to sleep: .*no memory"):
        asyncio.run(swaps(FakeEngine("sleep"), tmp_path, replace(ENGINE, sleep_mode=True)))


def test_the_short_run_has_fixed_rates_and_short_answers() -> None:
    short = gpu.shortened(ReplaySetup(BUILTIN["chat-batch"], ENGINE, ("headway",), dict(gpu.LOADS)))
    assert short.rates is not None
    assert short.rates.keys() == short.loads.keys()
    assert max(tier.max_tokens for tier in short.mix.tiers) <= 32
