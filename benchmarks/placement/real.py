"""`headway bench placement --real`: conversations with long histories on two real vLLM engines, a core each.

Every system gets the same engines, started once, and the same conversations, each time under another name so that
none finds what the one before has cached. Headway is in front of engines of its own, with its scheduler inside.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from benchmarks.experiment import Result, experiment
from benchmarks.real.peers import SGLANG_ROUTER
from benchmarks.real.two_engines import (
    HEADWAY,
    HITS,
    LEAST_LOADED,
    QUERIES,
    ROUND_ROBIN,
    SESSION,
    Said,
    System,
    check,
    counters,
    engines_of,
    say,
    served,
    words,
)
from headway.whatif.output.plots import colours, png, sheet
from headway.whatif.output.results import Ask, Row, system_grid

SYSTEMS = (HEADWAY, SGLANG_ROUTER, ROUND_ROBIN, LEAST_LOADED, SESSION)
_BLOCK = 128  # tokens of KV in a block of vLLM on a CPU


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


@experiment("placement", "vllm", "Conversations on two engines")
def main(ask: Ask, systems: tuple[str, ...], model: str, talk: Talk) -> Result:
    """Measure each system in turn; `quick`: four conversations of three turns, without the peers."""
    check(systems)
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
    return [row async for system in served(systems, engines_of(model)) for row in await _run(system, talk, seed)]


async def _run(system: System, talk: Talk, seed: int) -> list[Row]:
    """Hold all conversations and return the figures of a system."""
    before = await counters(system.engines)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for engine in range(2):  # the first request of all is slow
            await say(http, system, f"{engine}", words(random.Random(engine), 40), 2)
        each = (_converse(http, system, talk, f"{seed} {i}") for i in range(talk.conversations))
        talks = await asyncio.gather(*each)
    after = await counters(system.engines)
    found = 100 * (after[HITS] - before[HITS]) / (after[QUERIES] - before[QUERIES])
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


async def _converse(http: aiohttp.ClientSession, system: System, talk: Talk, name: str) -> list[Said]:
    """Return the turns of a conversation: for each system at the same times, and of words of its own."""
    times, rng, turns = random.Random(name), random.Random(f"{system.name} {name}"), list[Said]()
    await asyncio.sleep(times.uniform(0, talk.apart * talk.conversations))
    text = words(rng, talk.first)
    for turn in range(talk.turns):
        if turn:
            await asyncio.sleep(times.uniform(0.5, 1.5) * talk.gap)
            text += words(rng, talk.added)
        turns.append(await say(http, system, name, text, talk.answer))
        text += turns[-1].text
    return turns


def _pictures(rows: Sequence[Row]) -> dict[str, Any]:
    systems = list(dict.fromkeys(row.system for row in rows))
    figure, grid = sheet(1, 3, 9.6, 3.2)
    for axes, (id, unit) in zip(grid, (("ttft.p99", "s"), ("gap.p99", "s"), ("prompt.hit_pct", "%")), strict=True):
        values = [next(row.ours or 0.0 for row in rows if (row.id, row.system) == (id, name)) for name in systems]
        axes.bar(systems, values, color=list(colours(systems).values()))
        axes.set(ylabel=f"{id}, {unit}")
        axes.tick_params(axis="x", rotation=20)
    return {"placement": png(figure)}
