"""Warm-ups on a real engine: a prefix is computed and held, an adapter loaded, before requests need them.

And the KV of an application run that has ended, which is the first to go.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headway import clock
from headway.config import Engine
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.request_metadata import write_metadata
from headway.errors import EngineError
from headway.gateway.control.prefixes import PrefixBook, PrefixWarmer
from headway.gateway.control.prewarm import AdapterWarmer
from headway.gateway.parsing.requests import ChatBody
from headway.gateway.parsing.tokens import TokenCounter
from headway.prefix import run_number
from headway.stages import Prewarm, Resource, Stage
from headway.types import Forecast, Request
from tests.conftest import CORE
from tests.engine.conftest import LAYERS

BLOCK = 32
HIDDEN, RANK = 576, 8
SYSTEM = " ".join(f"Rule {i}: be brief and kind." for i in range(20))


@asynccontextmanager
async def engine(folder: Path, model: str) -> AsyncIterator[VllmEngine]:
    """Run one engine with Headway's scheduler, a prefix cache, and memory for one adapter of two."""
    config = Engine(
        model,
        served_name="smollm2",
        cores=CORE,
        max_running=4,
        max_model_len=512,
        blocks=40,
        start_timeout_s=1200,
        adapters={name: str(adapter(folder / name, seed)) for seed, name in enumerate(("kind", "terse"))},
        args=("--block-size", str(BLOCK), "--max-loras", "1", "--max-cpu-loras", "1"),
    )
    running = VllmEngine("e0", config, "hermes", folder, lambda event: None)
    await running.start()
    try:
        await asyncio.wait_for(running.up.wait(), 1200)
        yield running
    finally:
        await running.stop()


def adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of random weights for SmolLM2, as PEFT does."""
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, size in (("q_proj", HIDDEN), ("v_proj", HIDDEN // 3)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = rng.normal(0, 0.1, (RANK, HIDDEN)).astype(np.float32)
            weights[f"{at}.lora_B.weight"] = rng.normal(0, 0.1, (size, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def chat(run: str, unit: str) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": f"{unit}. {SYSTEM}"},
        {"role": "user", "content": f"{run}: name the capital of France."},
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
    async with engine.open("/v1/chat/completions", [body]) as response:
        assert response.status == 200, await response.text()
        await response.read()
    rows = (await state(engine))["iterations"][before:]
    return sum(int(row[5]) for row in rows)


def asked(run: str, unit: str) -> Request:
    return Request(f"{run}-{unit}", "smollm2", 1, 2, clock.now(), stage=Stage("app", run, unit))


async def prefixes_are_held(running: VllmEngine) -> None:
    counter, book = await TokenCounter.load("smollm2"), PrefixBook()
    for run in ("r1", "r2"):  # seen by the gateway; this engine has never had such a prompt
        for unit in ("act", "check"):
            ids = counter.read(ChatBody.model_validate(chat(run, unit)), 2048).ids
            assert ids is not None
            book.learn(asked(run, unit), ids)
    shared = book.common("default", "app/act")
    full = shared.size // BLOCK * BLOCK
    assert full >= 3 * BLOCK
    assert (running.prefix_caching, running.instance.block_size) == (True, BLOCK)
    free = (await state(running))["blocks_free"]
    warmer = PrefixWarmer({"e0": running}, book)
    command = Prewarm("default", Resource("prefix", "app/act"), clock.now() + 600)
    held = await warmer.warm(command)
    assert held is not None
    assert held.fresh
    assert (await state(running))["blocks_free"] == free - full // BLOCK, "it is held by no request"
    again = await warmer.warm(command)
    assert again is not None
    assert not again.fresh

    prompt = counter.read(ChatBody.model_validate(chat("r3", "act")), 2048).tokens
    assert await computed(running, "r3", "act") == prompt - full
    cold = await computed(running, "r3", "check")
    assert cold == counter.read(ChatBody.model_validate(chat("r3", "check")), 2048).tokens
    await held.release()
    assert (await state(running))["blocks_free"] == free


async def adapters_are_loaded(running: VllmEngine) -> None:
    """The adapter that was registered last is in memory; another one takes its place."""
    warmer = AdapterWarmer({"e0": running})
    fresh = []
    for name in ("terse", "kind", "kind", "terse"):
        held = await warmer.warm(Prewarm("default", Resource("adapter", name), clock.now() + 600))
        assert held is not None
        fresh.append(held.fresh)
        body = json.dumps(chat("r4", "act") | {"model": name}).encode()
        async with running.open("/v1/chat/completions", [body]) as response:
            assert (response.status, (await response.json())["model"]) == (200, name)
    assert fresh == [False, True, False, True]
    with pytest.raises(EngineError, match="no adapter 'rude' is registered"):
        await running.load_adapter("rude")


async def kv_of_an_ended_run_goes_first(running: VllmEngine) -> None:
    """Of two runs with prompts of their own, the next request takes the blocks of the later one, which has ended.

    Hardly a block is left that holds nothing.
    """
    for name in ("first", "second", "third", "fourth", "old", "ended"):
        prompt = await computed(running, name, name)
    number = run_number(("default", "app", "ended"))
    answer = await running.control({"op": "end", "runs": [number, number + 1]})
    assert answer["ended"] == (prompt + 1) // BLOCK >= 3
    await running.end_runs([number])
    await computed(running, "other", "other")
    assert await computed(running, "old", "old") <= BLOCK, "all but the end of its prompt was there"
    assert await computed(running, "ended", "ended") > prompt // 2


async def test_warm_ups_and_ends_on_a_real_engine(tmp_path: Path, few_layers: str) -> None:
    async with engine(tmp_path, few_layers) as running:
        await kv_of_an_ended_run_goes_first(running)
        await prefixes_are_held(running)
        await adapters_are_loaded(running)
