"""A live engine is measured over HTTP: here a FAKE one that batches with a pace we know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from headway import clock
from headway.engines.vllm.plugin.recording import IterationLog
from headway.errors import ConfigError, EngineError
from headway.policy.forecast.latency.laws import Additive, Shapes
from headway.policy.forecast.latency.profiles import load
from headway.types import Batch
from headway.whatif.measured import profile as live
from headway.whatif.measured import profile_report
from headway.whatif.measured.profile import ProfileTarget
from headway.whatif.measured.profile_report import Found
from headway.whatif.output.results import About, save

LAW = Additive(0.002, 2e-4, 0.0, 1e-5, 0.0)
RUNNING = 4


@dataclass
class Asked:
    """One request inside the fake engine."""

    id: str
    prompt: int
    output: int
    output_tokens: int = 0
    first: float = 0.0
    tokens: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)


@dataclass
class Engine:
    """Iterations of known length, a diary, and OpenAI's stream; control=False: nobody to ask."""

    control: bool = True
    refuse: bool = False
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    diary: IterationLog = field(default_factory=IterationLog)

    async def loop(self) -> None:
        while True:
            now = clock.now()
            self.diary.decide(now)
            while self.waiting and len(self.running) < RUNNING:
                self.running.append(self.waiting.pop(0))
            if not self.running:
                await asyncio.sleep(0.0005)
                continue
            await self._iteration(now)

    async def _iteration(self, now: float) -> None:
        fresh = [r for r in self.running if not r.output_tokens]
        old = [r for r in self.running if r.output_tokens]
        prefill = sum(r.prompt for r in fresh)
        batch = Batch(len(old), sum(r.prompt + r.output_tokens for r in old), prefill, prefill * prefill // 2)
        row = self.diary.begin(now, batch)
        await asyncio.sleep(float(LAW.seconds(Shapes.of([batch]))[0]))
        row[1] = clock.now() - now
        for one in self.running:
            one.output_tokens += 1
            one.first = one.first or clock.now()
            one.tokens.put_nowait(one.output_tokens == one.output)
        for one in [r for r in self.running if r.output_tokens == r.output]:
            self.running.remove(one)
            self.diary.leave(one.id, one.id, one.first, clock.now())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuse:
            return web.Response(status=500, text="no")
        words = len(body["messages"][0]["content"].split())
        asked = Asked(body["vllm_xargs"]["headway_id"], words, body["max_tokens"])
        self.diary.enter(asked.id, clock.now())
        self.waiting.append(asked)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        last = False
        while not last:
            last = await asked.tokens.get()
            choice = {"delta": {"content": "a"}, "finish_reason": "length" if last else None}
            await out.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    async def state(self, request: web.Request) -> web.Response:
        if not self.control:
            return web.Response(status=404, text="not found")
        rows = {"iterations": list(self.diary.iterations), "requests": list(self.diary.requests)}
        known = {"max_running": RUNNING, "blocks_total": 100, "block_size": 128}
        return web.json_response(rows | known)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 2048, "root": "/models/fake"}]})


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_post("/headway/control", engine.state)
    app.router.add_get("/v1/models", engine.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = asyncio.create_task(engine.loop())
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        task.cancel()
        await runner.cleanup()


def model(folder: Path) -> Path:
    shape: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return folder


async def test_the_pace_of_an_engine_is_measured_and_kept(tmp_path: Path) -> None:
    async with serving(Engine()) as url:
        target = await live.attached(url + "/v1", str(model(tmp_path)))
        assert target.name == "fake"
        measured = await live.measure(target, np.random.default_rng(0), quick=True, bar=False)
    assert (measured.limits.max_running, measured.limits.kv_tokens) == (RUNNING, 12_800)
    fits = measured.fits()
    law = fits.laws["additive"]
    shapes = Shapes.of([Batch(2, 500, 0), Batch(4, 1000, 0), Batch(0, 0, 256, 32_768)])
    # A sleep is never shorter than asked for; on a busy machine it is longer.
    assert np.all(law.seconds(shapes) > 0.9 * LAW.seconds(shapes))
    profile = measured.profile(fits, "FAKE")
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert profile.weights_bytes == 1000
    assert 0 < (profile.request_overhead_s or 0) < 0.05
    assert len(measured.seen) > 5
    assert measured.passes == [len(measured.rows)]
    assert measured.spread(law) is None
    measured.passes = [len(measured.rows) // 2, len(measured.rows) - len(measured.rows) // 2]
    assert (measured.spread(law) or 0) > 0  # by how much, the machine's other work decides
    found = Found(measured, fits, profile)
    report = profile_report.build(found, 1.0, About())
    files = save(report, tmp_path / "out", {"profile": profile_report.draw(found)})
    assert {f.name for f in files} == {"report.json", "profile.png", "report.html", "report.md"}
    found.profile.save(tmp_path / "pace.json")
    assert load(tmp_path / "pace.json").additive == law
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert {row["system"] for row in rows if row["id"] == "residual.mean_pct"} == set(fits.laws)
    assert report.table().row_count == len(fits.laws)


async def test_what_cannot_be_profiled_says_why(tmp_path: Path) -> None:
    async with serving(Engine(control=False)) as url:
        target = await live.attached(url, None)
        with pytest.raises(ConfigError, match="no control route"):
            await live.measure(target, np.random.default_rng(0), quick=True, bar=False)
    async with serving(Engine(refuse=True)) as url:
        target = ProfileTarget(url, url, "fake", str(tmp_path))
        with pytest.raises(EngineError, match="refused a probe"):
            await live.measure(target, np.random.default_rng(0), quick=True, bar=False)
    with pytest.raises(ConfigError, match="No vLLM answers"):
        await live.attached("http://127.0.0.1:9", None)
    with pytest.raises(ConfigError, match="not an HTTP address"):
        await live.attached("localhost:8000", None)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_model_directory_must_be_whole(tmp_path: Path, missing: str) -> None:
    (model(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError):
        live._shape(str(tmp_path), dummy=False)
