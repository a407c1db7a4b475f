"""Warm-ups on a real engine: a prefix is computed and held before the requests that begin with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headway.config import Engine
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.request_metadata import write_metadata
from headway.serve.prefixes import PrefixBook, PrefixWarmer
from headway.serve.request_parsing import ChatBody
from headway.serve.tokens import TokenCounter
from headway.stages import Prewarm, Resource, Stage
from headway.types import Forecast, Request

BLOCK = 32
SYSTEM = " ".join(f"Rule {i}: be brief and kind." for i in range(20))


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[VllmEngine]:
    """Run one engine with Headway's scheduler and a prefix cache."""
    config = Engine(
        max_running=4, max_model_len=512, blocks=40, args=("--block-size", str(BLOCK)), start_timeout_s=1200
    )
    running = VllmEngine("e0", config, "hermes", folder, lambda event: None)
    await running.start()
    try:
        await asyncio.wait_for(running.up.wait(), 1200)
        yield running
    finally:
        await running.stop()


def chat(run: str, unit: str) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"{unit}. {SYSTEM}"},
        {"role": "user", "content": f"{run}: what is the capital of France?"},
    ]
    return {"model": "smollm2", "messages": messages, "max_tokens": 2, "temperature": 0}


async def state(engine: VllmEngine) -> dict[str, Any]:
    return await engine.control({"op": "state", "iterations": 1000})


async def computed(engine: VllmEngine, run: str, unit: str) -> int:
    """Return how many prompt tokens an engine computed for a request."""
    before = len((await state(engine))["iterations"])
    request = asked(run, unit)
    extra = write_metadata(request, Forecast(np.ones(1)))
    body = json.dumps(chat(run, unit) | {"vllm_xargs": extra}).encode()
    async with engine.open("/v1/chat/completions", body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    rows = (await state(engine))["iterations"][before:]
    return sum(int(row[5]) for row in rows)


def asked(run: str, unit: str) -> Request:
    return Request(f"{run}-{unit}", "smollm2", 1, 2, time.time(), stage=Stage("app", run, unit))


async def test_a_prefix_is_computed_and_held_before_it_is_needed(tmp_path: Path) -> None:
    counter, book = await TokenCounter.load("smollm2"), PrefixBook()
    for run in ("r1", "r2"):  # seen by the gateway; this engine has never had such a prompt
        for unit in ("act", "check"):
            ids = (await counter.read(ChatBody.model_validate(chat(run, unit)))).ids
            assert ids is not None
            book.learn(asked(run, unit), ids)
    shared = book.common("default", "app/act")
    full = shared.size // BLOCK * BLOCK
    assert full >= 3 * BLOCK
    async with engine(tmp_path) as running:
        assert (running.prefix_caching, running.block_size) == (True, BLOCK)
        free = (await state(running))["blocks_free"]
        warmer = PrefixWarmer({"e0": running}, book)
        command = Prewarm("default", Resource("prefix", "app/act"), time.time() + 600)
        held = await warmer.warm(command)
        assert held is not None
        assert held.fresh
        assert (await state(running))["blocks_free"] == free - full // BLOCK, "it is held by no request"
        again = await warmer.warm(command)
        assert again is not None
        assert not again.fresh

        prompt = (await counter.read(ChatBody.model_validate(chat("r3", "act")))).tokens
        assert await computed(running, "r3", "act") == prompt - full
        cold = await computed(running, "r3", "check")
        assert cold == (await counter.read(ChatBody.model_validate(chat("r3", "check")))).tokens
        await held.release()
        assert (await state(running))["blocks_free"] == free
