"""`headway bench agents --real`: the recorded coding agents beside chat on two real vLLM engines, a core each.

A smaller version of `benchmarks/catalog/agents.py`: tokens are divided by `_SCALE`, and tools take `_TOOLS_S` at most.
The engines' KV holds about half of the conversations. Each prompt continues the conversation with the engine's answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import numpy as np

from benchmarks.catalog import recorded
from benchmarks.catalog.margins import bars
from benchmarks.experiment import Result, experiment
from benchmarks.real.two_engines import (
    HEADWAY,
    HITS,
    LEAST_LOADED,
    LONGEST,
    QUERIES,
    ROUND_ROBIN,
    SESSION,
    System,
    check,
    counters,
    engines_of,
    say,
    served,
    words,
)
from headway.simulate.workload.arrivals import poisson
from headway.types import Slo
from headway.whatif.load import generator, metrics, mix
from headway.whatif.output.results import Ask, Row, system_grid

SYSTEMS = (HEADWAY, "hermes", ROUND_ROBIN, LEAST_LOADED, SESSION)
_APP, _UNIT = "coding-agent", "turn"
_SCALE, _TOOLS_S = 8, 10.0
_KV_BLOCKS = 100  # of each engine, 128 tokens each
_CHAT = mix.TrafficTier("chat", slo=Slo(ttft=1.0, tpot=0.15), max_tokens=32, ignore_eos=True, prompt_tokens=(60, 160))
_UNITS = {"conversation.mean": "s", "conversation.p95": "s", "attainment.promised": "%", "prompt.hit_pct": "%"}
_DRAWN = {"conversation.mean": "mean seconds of an agent", "attainment.promised": "promises of chat kept, %"}


class Turn(NamedTuple):
    """added: prompt tokens since the previous answer. answer: tokens. tools_s: seconds of tools after it."""

    added: int
    answer: int
    tools_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """agents: conversations. seconds: within which they begin. turns: maximum of each. chat: requests per second."""

    agents: int = 20
    seconds: float = 120.0
    turns: int = 60
    chat: float = 1.5


@experiment("agents", "vllm", "Coding agents in a closed loop beside chat on two engines")
def main(ask: Ask, systems: tuple[str, ...] = (), load: Load | None = None) -> Result:
    """Measure each system in turn; `quick`: four agents of five turns, with Headway alone."""
    systems = systems or ((HEADWAY,) if ask.quick else SYSTEMS)
    load = load or (Load(4, 4.0, 5) if ask.quick else Load())
    check(systems)
    rows = asyncio.run(_measure(systems, scripts(load.turns), load, ask.seed))
    stock = {row.system: row.ours for row in rows if row.id == "conversation.mean"}
    if base := stock.get(ROUND_ROBIN):
        setting = rows[0].setting
        rows += [Row("conversation.of_stock", name, setting, mean / base, "x") for name, mean in stock.items() if mean]
    workload = (
        f"{load.agents} agents of at most {load.turns} turns begin within {load.seconds:g} s, tokens a {_SCALE}th of "
        f"the recorded ones, tools {_TOOLS_S:g} s at most; {load.chat:g} chats/s ({mix.format_slo(_CHAT.slo)}); two "
        f"engines of smollm2 with {_KV_BLOCKS * 128:,} tokens of KV each."
    )
    return Result(rows, workload, lambda: {"agents": bars(rows, _DRAWN)}, system_grid(rows))


def scripts(turns: int) -> list[list[Turn]]:
    """Return the recorded conversations, scaled, with at most `turns` turns each."""
    return [scaled(talk[:turns]) for talk in recorded.conversations()]


def scaled(talk: Sequence[recorded.AgentTurn]) -> list[Turn]:
    """Return a conversation with tokens divided by `_SCALE`, up to the engines' context."""
    found, said = list[Turn](), 0
    for turn in talk:
        answer = max(round(turn.answer / _SCALE), 2)
        added = max(turn.prompt // _SCALE - said, 1)
        if said + added + answer >= LONGEST:
            break
        found.append(Turn(added, answer, min(turn.tools_s, _TOOLS_S)))
        said += added + answer
    return found


async def _measure(systems: Sequence[str], talks: Sequence[Sequence[Turn]], load: Load, seed: int) -> list[Row]:
    engines = engines_of("smollm2", ("--num-gpu-blocks-override", f"{_KV_BLOCKS}"))
    return [
        row async for system in served(systems, engines, ("chat",)) for row in await _run(system, talks, load, seed)
    ]


async def _run(system: System, talks: Sequence[Sequence[Turn]], load: Load, seed: int) -> list[Row]:
    """Replay all agents beside chat and return the system's figures."""
    rng = np.random.default_rng(seed)
    begins = np.sort(rng.uniform(0, load.seconds, load.agents))
    calls = mix.calls(mix.Mix("chat", (_CHAT,)), poisson(load.chat, load.seconds, rng), rng)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for engine in range(2):  # the first request of an engine is slow
            await say(http, system, f"{engine}", words(random.Random(engine), 40), 2)
        before = await counters(system.engines)
        urls = system.engines
        chats = (
            generator.run(url, "smollm2", calls[i :: len(urls)], progress=False, send_priority=False)
            for i, url in enumerate(urls)
        )
        agents = (
            _converse(http, system, talks[i % len(talks)], float(at), f"{seed}-{i}") for i, at in enumerate(begins)
        )
        took, records = await asyncio.gather(asyncio.gather(*agents), asyncio.gather(*chats))
        after = await counters(system.engines)
    kept = metrics.attainment([record for some in records for record in some])
    found = 100 * (after[HITS] - before[HITS]) / (after[QUERIES] - before[QUERIES])
    values = float(np.mean(took)), float(np.quantile(took, 0.95)), kept, found
    return [
        Row(id, system.name, f"{load.agents} agents", value, _UNITS[id])
        for id, value in zip(_UNITS, values, strict=True)
    ]


async def _converse(http: aiohttp.ClientSession, system: System, talk: Sequence[Turn], at: float, name: str) -> float:
    """Have a conversation and return its seconds."""
    rng, run = random.Random(f"{system.name} {name}"), f"{system.name}-{name}"
    headers = {"x-headway-app": _APP, "x-headway-run": run, "x-headway-unit": _UNIT}
    await asyncio.sleep(at)
    began, text = time.perf_counter(), ""
    for added, answer, tools_s in talk:
        text += words(rng, added)
        text += (await say(http, system, name, text, answer, headers)).text
        await asyncio.sleep(tools_s)
    took = time.perf_counter() - began
    if not system.stock:
        async with http.post(f"{system.engines[0]}/v1/runs/{run}/end", json={"app": _APP}) as ended:
            assert ended.status == 200, await ended.text()
    return took
