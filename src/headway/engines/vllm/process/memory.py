"""The GPUs that this process sees, and the memory that engines take on them or on a CPU, against what is free."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from headway.config import Engine
from headway.config.engines import numbers
from headway.engines.vllm.process.metadata import is_cpu_build
from headway.errors import ConfigError
from headway.models.resolve import resolve

VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA_BUILD = "Install vLLM's CUDA build in a new environment: make serve, or pip install '.[vllm]'."
_QUERY = "index,uuid,name,driver_version,memory.total,memory.free"
_SECONDS = 20.0
_PARALLEL = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
_DATA_PARALLEL = ("--data-parallel-size", "-dp")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as its driver reports it. memory, free: MiB; 0 where it shares the machine's."""

    index: str
    uuid: str
    name: str
    driver: str
    memory: int
    free: int


def cards() -> list[Card]:
    """Return the GPUs that this process may use, in the order in which vLLM counts them; [] = none, or no driver."""
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[field.strip() for field in line.split(",")] for line in told.splitlines()]
    found = [
        Card(index, uuid, name, driver, *(int(mib) if mib.isdecimal() else 0 for mib in memory))
        for index, uuid, name, driver, *memory in lines
    ]
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return found
    known = {name: card for card in found for name in (card.index, card.uuid)}
    return [known[name] for name in map(str.strip, visible.split(",")) if name in known]


def visible_to(engine: Engine) -> str | None:
    """Return what `CUDA_VISIBLE_DEVICES` has for an engine with `cards`, None = all that this process sees.

    A process that was given just the GPUs of one engine (by Ray, say) gives it all of them.
    """
    if engine.cards is None:
        return None
    places, names = numbers(engine.cards), os.environ.get(VISIBLE)
    if names is None:
        return ",".join(map(str, places))
    here = names.split(",")
    return names if len(here) == len(places) else ",".join(here[place] for place in places if place < len(here))


def parallel(engine: Engine) -> list[str]:
    """Return the option that spreads the model over the GPUs of an engine, unless its `args` do so."""
    count = 1 if engine.cards is None else len(numbers(engine.cards))
    return ["--tensor-parallel-size", str(count)] if count > 1 and not _has(engine, _PARALLEL) else []


def check_cards(where: str, engine: Engine, seen: Sequence[Card], *, on_cpu: bool | None = None) -> None:
    """Raise ConfigError for GPUs that are not there, and for several engine cores in one engine.

    seen: by this process. on_cpu: None = where this environment's vLLM runs.
    """
    ranks = [int(n) for word, n in pairwise([*_words(engine), ""]) if word in _DATA_PARALLEL and n.isdecimal()]
    if any(rank > 1 for rank in ranks):
        problem = f"{where}.args has {_DATA_PARALLEL[0]}: Headway would see the requests of one of its cores only."
        raise ConfigError(problem, "Use count instead: Headway shares the load itself.", param=f"{where}.args")
    if engine.cards is None:
        return
    needed = numbers(engine.cards)
    if is_cpu_build() if on_cpu is None else on_cpu:
        problem = f"{where} has GPUs, but this environment has vLLM's build for CPUs."
        hint = f"{CUDA_BUILD} On a CPU, set cores instead of gpus."
        raise ConfigError(problem, hint, param=f"{where}.gpus")
    if len(seen) != len(needed) and max(needed) >= len(seen):
        problem = f"{where} needs GPU {max(needed)} (counted from 0), and this process sees {len(seen)}."
        hint = "Lower count or gpus, or correct cards or CUDA_VISIBLE_DEVICES."
        raise ConfigError(problem, hint, param=f"{where}.gpus")


def _has(engine: Engine, options: Sequence[str]) -> bool:
    return any(word in options for word in _words(engine))


def _words(engine: Engine) -> list[str]:
    """Return `args` with names and values apart."""
    return [part for word in engine.args for part in word.split("=", 1)]


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
