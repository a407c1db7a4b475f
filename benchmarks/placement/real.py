"""`headway bench placement --real`: conversations with long histories on two real vLLM engines, a core each.

Every system gets the same engines, started once, and the same conversations, each time under another name so that
none finds what the one before has cached. Headway is in front of engines of its own, with its scheduler inside.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.real.peer_gateways import SGLANG_ROUTER, installed, router_argv
from headway.config import Engine
from headway.engines.vllm.process.launch import Child, free_port
from headway.errors import ConfigError
from headway.whatif.measured.starting import START_S
from headway.whatif.measured.systems import answering, gateway, running
from headway.whatif.output.plots import colours, png, sheet
from headway.whatif.output.results import Ask, Row, system_grid

HEADWAY, ROUND_ROBIN, LEAST_LOADED = "headway", "round-robin", "least-loaded"
SYSTEMS = (HEADWAY, SGLANG_ROUTER, ROUND_ROBIN, LEAST_LOADED)
_BLOCK = 128  # tokens of KV in a block of vLLM on a CPU
_CORES = ("0", "1")
_LONGEST, _RUNNING = 4096, 8
_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you"
)
_WORDS += (
    " were their one all we can her has there been if more when will would who so no out up into do any your what time"
)


@dataclass(frozen=True, slots=True)
class Talk:
    """Conversations: each turn comes `gap` seconds after the answer before it.

    apart: mean seconds between their beginnings: together they would first of all wait for each other.
    first: tokens of the first prompt. added: of each further turn. answer: tokens of an answer.
    """

    conversations: int = 8
    turns: int = 6
    first: int = 1500
    added: int = 60
    answer: int = 16
    gap: float = 2.0
    apart: float = 3.0


@dataclass(frozen=True, slots=True)
class Said:
    """A turn. first: seconds to its first token. gap: longest silence after it. prompt: tokens. text: of the answer."""

    first: float
    gap: float
    prompt: int
    text: str


@dataclass(slots=True)
class System:
    """A running system. choose: the address of the next turn, given the requests in progress at each."""

    name: str
    engines: Sequence[str]
    choose: Callable[[], str]
    inside: dict[str, int] = field(default_factory=dict)


@experiment("placement", "vllm", "Conversations on two engines")
def main(ask: Ask, systems: tuple[str, ...], model: str, talk: Talk) -> Result:
    """Measure each system in turn; `quick`: four conversations of three turns, without the peers."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("Two engines need two cores.", "Run it where this process may use two.")
    if SGLANG_ROUTER in systems and not installed(SGLANG_ROUTER):
        raise ConfigError(
            f"{SGLANG_ROUTER} is not installed.", "Install it with `make peers`, or leave it out of --systems."
        )
    if ask.quick:
        talk = Talk(4, 3)
    rows = asyncio.run(_measure(systems, model, talk, ask.seed))
    workload = (
        f"{talk.conversations} conversations of {talk.turns} turns, a first prompt of {talk.first} tokens, then "
        f"{talk.added} more each, answers of {talk.answer}, {talk.gap:g} s between, begun {talk.apart:g} s apart; "
        f"two engines of {model}."
    )
    return Result(rows, workload, lambda: _pictures(rows), system_grid(rows))


async def _measure(systems: Sequence[str], model: str, talk: Talk, seed: int) -> list[Row]:
    logs, rows = Path(tempfile.mkdtemp(prefix="headway-placement-")), list[Row]()
    engines = tuple(
        Engine(model=model, cores=core, max_running=_RUNNING, max_model_len=_LONGEST, start_timeout_s=START_S)
        for core in _CORES
    )
    others = [name for name in systems if name != HEADWAY]
    if HEADWAY in systems:
        async with _headway(engines, logs) as system:
            rows += await _run(system, talk, seed)
    if others:
        async with AsyncExitStack() as stack:
            started = (stack.enter_async_context(running("vllm-fcfs", one, logs, ())) for one in engines)
            urls = [await one for one in started]
            for name in others:
                async with _router(name, urls, logs) as system:
                    rows += await _run(system, talk, seed)
    return rows


@asynccontextmanager
async def _headway(engines: tuple[Engine, ...], logs: Path) -> AsyncIterator[System]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with answering(HEADWAY, gateway(HEADWAY, engines, port, logs, ()), f"{url}/ready"):
        yield System(HEADWAY, [url], lambda: url)


@asynccontextmanager
async def _router(name: str, urls: Sequence[str], logs: Path) -> AsyncIterator[System]:
    if name == SGLANG_ROUTER:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        child = Child(router_argv(urls, port, "--policy", "cache_aware"), dict(os.environ), logs / f"{name}.log")
        async with answering(name, child, f"{url}/readiness"):
            yield System(name, urls, lambda: url)
        return
    inside, turns = dict.fromkeys(urls, 0), cycle(urls)
    choose = (lambda: next(turns)) if name == ROUND_ROBIN else (lambda: min(urls, key=inside.__getitem__))
    yield System(name, urls, choose, inside)


async def _run(system: System, talk: Talk, seed: int) -> list[Row]:
    """Hold all conversations and return the figures of a system."""
    before = await _counters(system.engines)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for engine in range(2):  # the first request of all is slow
            await _say(http, system, _words(random.Random(engine), 40), 2)
        each = (_converse(http, system, talk, f"{seed} {i}") for i in range(talk.conversations))
        talks = await asyncio.gather(*each)
    after = await _counters(system.engines)
    found = 100 * (after[_HITS] - before[_HITS]) / (after[_QUERIES] - before[_QUERIES])
    first = [turn.first for turns in talks for turn in turns[1:]]
    gaps = [turn.gap for turns in talks for turn in turns]
    prompts = [turn.prompt for turns in talks for turn in turns]
    left = [(turn.prompt + talk.answer - 1) // _BLOCK * _BLOCK for turns in talks for turn in turns[:-1]]
    setting = f"{talk.conversations} conversations"
    values = (
        ("ttft.p50", float(np.quantile(first, 0.5)), "s"),
        ("ttft.p99", float(np.quantile(first, 0.99)), "s"),
        ("gap.p50", float(np.quantile(gaps, 0.5)), "s"),
        ("gap.p99", float(np.quantile(gaps, 0.99)), "s"),
        ("prompt.hit_pct", found, "%"),
        ("prompt.hit_share", found * sum(prompts) / (100 * sum(left)), "of what could be found"),
    )
    return [Row(id, system.name, setting, value, unit) for id, value, unit in values]


async def _counters(urls: Sequence[str]) -> dict[str, float]:
    """Return the prompt tokens that all engines have looked up and found so far."""
    sums = dict.fromkeys((_HITS, _QUERIES), 0.0)
    async with aiohttp.ClientSession() as http:
        for url in urls:
            async with http.get(f"{url}/metrics") as page:
                for line in (await page.text()).splitlines():
                    if (name := line.partition("{")[0]) in sums:
                        sums[name] += float(line.rpartition(" ")[2])
    return sums


async def _converse(http: aiohttp.ClientSession, system: System, talk: Talk, name: str) -> list[Said]:
    """Return the turns of a conversation: for each system at the same times, and of words of its own."""
    times, words, turns = random.Random(name), random.Random(f"{system.name} {name}"), list[Said]()
    await asyncio.sleep(times.uniform(0, talk.apart * talk.conversations))
    text = _words(words, talk.first)
    for turn in range(talk.turns):
        if turn:
            await asyncio.sleep(times.uniform(0.5, 1.5) * talk.gap)
            text += _words(words, talk.added)
        turns.append(await _say(http, system, text, talk.answer))
        text += turns[-1].text
    return turns


def _words(rng: random.Random, count: int) -> str:
    """Return words of one token each."""
    return "".join(f" {word}" for word in rng.choices(_WORDS.split(), k=count))


async def _say(http: aiohttp.ClientSession, system: System, prompt: str, most: int) -> Said:
    """Send a prompt and read its answer."""
    url = system.choose()
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    system.inside[url] = system.inside.get(url, 0) + 1
    began, times, text, tokens = time.perf_counter(), list[float](), "", 0
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event: Mapping[str, Any] = json.loads(line[6:])
                    if event["choices"]:
                        times.append(time.perf_counter() - began)
                    text += "".join(choice["text"] for choice in event["choices"])
                    tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
    finally:
        system.inside[url] -= 1
    return Said(times[0], float(np.diff(times).max(initial=0.0)), tokens, text)


def _pictures(rows: Sequence[Row]) -> dict[str, Any]:
    systems = list(dict.fromkeys(row.system for row in rows))
    figure, grid = sheet(1, 3, 9.6, 3.2)
    for axes, (id, unit) in zip(grid, (("ttft.p99", "s"), ("gap.p99", "s"), ("prompt.hit_pct", "%")), strict=True):
        values = [next(row.ours or 0.0 for row in rows if (row.id, row.system) == (id, name)) for name in systems]
        axes.bar(systems, values, color=list(colours(systems).values()))
        axes.set(ylabel=f"{id}, {unit}")
        axes.tick_params(axis="x", rotation=20)
    return {"placement": png(figure)}
