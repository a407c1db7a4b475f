"""Two real vLLM engines, a core each, for conversations: behind Headway, a router, or rules in this module.

Each recipe gets new engines with Headway's scheduler; all other systems share two stock engines.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.real.peers import SGLANG_ROUTER, installed, router_argv
from headway.config import Engine
from headway.engines.vllm.process.launch import Child, free_port
from headway.errors import ConfigError
from headway.whatif.measured.systems import START_S, answering, gateway, running

HEADWAY, ROUND_ROBIN, LEAST_LOADED, SESSION = "headway", "round-robin", "least-loaded", "session"
STOCK = (SGLANG_ROUTER, ROUND_ROBIN, LEAST_LOADED, SESSION)  # all other systems are recipes
CORES = ("0", "1")
LONGEST = 4096  # tokens of a prompt and its answer
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_RUNNING = 8
_WORDS = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you"
)
_WORDS += (
    " were their one all we can her has there been if more when will would who so no out up into do any your what time"
)


@dataclass(frozen=True, slots=True)
class Said:
    """A turn. first: seconds to the first token. gap: longest between tokens. prompt: tokens. text: of the answer."""

    first: float
    gap: float
    prompt: int
    text: str


@dataclass(slots=True)
class System:
    """A running system. choose: conversation -> address for its next turn. inside: requests in progress, by address."""

    name: str
    engines: Sequence[str]
    choose: Callable[[str], str]
    inside: dict[str, int] = field(default_factory=dict)

    @property
    def stock(self) -> bool:
        """Whether its engines are stock vLLM."""
        return self.name in STOCK


def check(systems: Iterable[str]) -> None:
    """Raise ConfigError if two engines or these systems cannot run here."""
    if len(os.sched_getaffinity(0)) < len(CORES):
        raise ConfigError("Two engines need two cores.", "Run it where this process may use two.")
    if SGLANG_ROUTER in systems and not installed(SGLANG_ROUTER):
        raise ConfigError(
            f"{SGLANG_ROUTER} is not installed.", "Install it with `make peers`, or leave it out of --systems."
        )


def engines_of(model: str, args: tuple[str, ...] = ()) -> tuple[Engine, ...]:
    """Return the two engines. args: further arguments of vLLM."""
    one = Engine(model=model, max_running=_RUNNING, max_model_len=LONGEST, start_timeout_s=START_S, args=args)
    return tuple(replace(one, cores=core) for core in CORES)


async def served(
    systems: Sequence[str], engines: Sequence[Engine], classes: Sequence[str] = ()
) -> AsyncIterator[System]:
    """Yield each system while it runs, recipes first. classes: of requests. EngineError if one does not start."""
    logs = Path(tempfile.mkdtemp(prefix="headway-conversations-"))
    for name in systems:
        if name not in STOCK:
            async with _recipe(name, engines, logs, classes) as system:
                yield system
    others = [name for name in systems if name in STOCK]
    if others:
        async with AsyncExitStack() as stack:
            started = (stack.enter_async_context(running("vllm-fcfs", one, logs, ())) for one in engines)
            urls = [await one for one in started]
            for name in others:
                async with _router(name, urls, logs) as system:
                    yield system


@asynccontextmanager
async def _recipe(name: str, engines: Sequence[Engine], logs: Path, classes: Sequence[str]) -> AsyncIterator[System]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with answering(name, gateway(name, tuple(engines), port, logs, classes), f"{url}/ready"):
        yield System(name, [url], lambda _: url)


@asynccontextmanager
async def _router(name: str, urls: Sequence[str], logs: Path) -> AsyncIterator[System]:
    if name == SGLANG_ROUTER:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        child = Child(router_argv(urls, port, "--policy", "cache_aware"), dict(os.environ), logs / f"{name}.log")
        async with answering(name, child, f"{url}/readiness"):
            yield System(name, urls, lambda _: url)
        return
    inside, turns = dict.fromkeys(urls, 0), cycle(urls)
    choose: dict[str, Callable[[str], str]] = {
        ROUND_ROBIN: lambda _: next(turns),
        LEAST_LOADED: lambda _: min(urls, key=inside.__getitem__),
        SESSION: lambda talk: urls[zlib.crc32(talk.encode()) % len(urls)],
    }
    yield System(name, urls, choose[name], inside)


async def counters(urls: Sequence[str]) -> dict[str, float]:
    """Return the prompt tokens that all engines have looked up and found in their caches so far."""
    sums = dict.fromkeys((HITS, QUERIES), 0.0)
    async with aiohttp.ClientSession() as http:
        for url in urls:
            async with http.get(f"{url}/metrics") as page:
                for line in (await page.text()).splitlines():
                    if (name := line.partition("{")[0]) in sums:
                        sums[name] += float(line.rpartition(" ")[2])
    return sums


def words(rng: random.Random, count: int) -> str:
    """Return words of one token each."""
    return "".join(f" {word}" for word in rng.choices(_WORDS.split(), k=count))


async def say(
    http: aiohttp.ClientSession,
    system: System,
    talk: str,
    prompt: str,
    most: int,
    headers: Mapping[str, str] | None = None,
) -> Said:
    """Send a turn of a conversation and read its answer, which has exactly `most` tokens."""
    url = system.choose(talk)
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    system.inside[url] = system.inside.get(url, 0) + 1
    began, times, text, tokens = time.perf_counter(), list[float](), "", 0
    try:
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
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
