"""`headway bench placement --index`: what the index of prefix caches costs: memory, lookups, reports."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from benchmarks.experiment import Result, experiment
from headway.policy.placement.index import PrefixIndex
from headway.prefix import GRAIN, CacheReport, prompt_seed, token_keys
from headway.types import Ints
from headway.whatif.output.results import Ask, Row

_PROMPT = 32_768  # tokens
_ENGINES, _BLOCKS = 64, 8192  # engines, and blocks that each holds
_SOME = 512  # blocks of a report


@experiment("placement-index", "sim", "The index of prefix caches")
def main(ask: Ask) -> Result:
    """Measure one process; half of the engines hold a part of the prompt that is looked up."""
    rng = np.random.default_rng(ask.seed)
    keys = token_keys(rng.integers(0, 30_000, _PROMPT).tolist(), prompt_seed(None, None))
    index, size = _filled(keys, rng)
    rows = [
        ("index.bytes", size / (_ENGINES * _BLOCKS), "bytes/block", f"{_ENGINES} engines of {_BLOCKS} blocks"),
        ("index.lookup_us", _lookup(index, keys), "us", f"{_PROMPT} tokens, {_ENGINES} engines"),
        ("index.keys_ms", _hashing(rng), "ms", f"{_PROMPT} tokens"),
        ("index.events_per_s", _events(index, rng), "1/s", f"reports of {_SOME} blocks"),
    ]
    found = [Row(id, "headway", setting, value, unit) for id, value, unit, setting in rows]
    return Result(found, f"one core; a prompt of {_PROMPT} tokens is half of what an engine with it holds at most")


def _filled(keys: Ints, rng: np.random.Generator) -> tuple[PrefixIndex, int]:
    """Return an index, and the bytes that it takes."""
    reports = []
    for engine in range(_ENGINES):
        held = keys[: rng.integers(1, keys.size)] if engine % 2 else keys[:0]
        more = rng.integers(1, 1 << 62, _BLOCKS - held.size)
        reports.append(CacheReport("a", 0, 1, np.concatenate([held, more]).tobytes(), whole=True))
    tracemalloc.start()
    index = PrefixIndex()
    for engine, report in enumerate(reports):
        index.add(f"e{engine}", _BLOCKS, GRAIN)
        index.report(f"e{engine}", report)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return index, size


def _lookup(index: PrefixIndex, keys: Ints) -> float:
    names, times = [f"e{engine}" for engine in range(_ENGINES)], list[float]()
    for _ in range(200):
        began = time.perf_counter()
        for name in names:
            index.tokens(name, keys)
        times.append(time.perf_counter() - began)
    return 1e6 * float(np.median(times))


def _hashing(rng: np.random.Generator) -> float:
    ids, times = rng.integers(0, 30_000, _PROMPT).tolist(), list[float]()
    for _ in range(20):
        began = time.perf_counter()
        token_keys(ids, b"seed")
        times.append(time.perf_counter() - began)
    return 1e3 * float(np.median(times))


def _events(index: PrefixIndex, rng: np.random.Generator) -> float:
    """Return the blocks taken in and given up per second."""
    before, until, count = rng.integers(1, 1 << 62, _SOME).tobytes(), 1, 0
    began = time.perf_counter()
    while time.perf_counter() < began + 1.0:
        added = rng.integers(1, 1 << 62, _SOME).tobytes()
        index.report("e0", CacheReport("a", until, until + 1, added, before))
        before, until, count = added, until + 1, count + 2 * _SOME
    return count / (time.perf_counter() - began)
