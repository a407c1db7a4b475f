"""The memory that engines take, against what is free: on a CPU their total, on GPUs the weights of each engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from headway.config import Engine
from headway.config.copies import numbers
from headway.engines.vllm.process.cards import cards
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.errors import ConfigError
from headway.models.resolve import resolve

_GIB = 2**30
_OVERHEAD = 2 * _GIB  # approximate memory of a vLLM on a CPU besides weights and KV


class MemoryUse(NamedTuple):
    """A comparison in words. fix: how to mend it, empty if the engines fit."""

    what: str
    found: str
    fix: str


def memory_uses(engines: Mapping[str, Engine]) -> Iterator[MemoryUse]:
    """Compare free memory with the needs of engines, by id, that do not run yet; those at a `url` need none here."""
    own = {id: engine for id, engine in engines.items() if engine.url is None}
    if not is_cpu_build():
        yield from _on_cards(own)
    elif own:
        needed = sum(_OVERHEAD + _weights(one) + (one.kv_gib + one.host_kv_gib) * _GIB for one in own.values())
        free = psutil.virtual_memory().available
        found = f"{free / _GIB:.1f} GiB free, engines take about {needed / _GIB:.1f} GiB"
        yield MemoryUse("memory", found, "" if needed <= free else "Lower kv_gib, or start fewer engines.")


def check_memory(engines: Mapping[str, Engine]) -> None:
    """Raise ConfigError if these engines do not fit beside what runs already."""
    for what, found, fix in memory_uses(engines):
        if fix:
            raise ConfigError(f"There is not enough memory for {', '.join(engines)} ({what}: {found}).", fix)


def _on_cards(own: Mapping[str, Engine]) -> Iterator[MemoryUse]:
    seen = cards()
    for id, engine in own.items():
        places = range(len(seen)) if engine.cards is None else numbers(engine.cards)
        if not seen or not (weights := _weights(engine)):
            continue
        used = 1 if engine.cards is None else len(places)
        # A process that sees exactly the number of GPUs of one engine gives it all of them (`visible_to`).
        given = seen if len(seen) == len(places) else [seen[place] for place in places if place < len(seen)]
        if not given:
            continue  # the check of the configuration reports it
        share, free = weights / used / _GIB, min(card.free for card in given) / 1024
        found = f"{share:.1f} GiB of weights per GPU, {free:.1f} GiB free"
        fix = "Use more GPUs (gpus = 2) or a quantised model, or stop the processes that hold the memory."
        yield MemoryUse(f"GPU memory for {id}", found, "" if share < free else fix)


def _weights(engine: Engine) -> int:
    folder = Path(resolve(engine.model))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
