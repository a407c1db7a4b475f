"""Conformance with prefix caching: random workloads whose requests share system prompts and conversations.

`conformance.py` drives both engines. Besides what it compares, these must be equal in every step: the queue
of free blocks, block by block, and vLLM's counts of queried and cached tokens; where the packer reads them,
the columns `computed`, `blocks` and `shared` of `Jobs`, too; where it copies KV to the host, what is there, its room
and the tokens copied. With the hook inside, chains are pinned and given back, and application runs end now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.validate import conformance
from benchmarks.validate.conformance import BLOCK, COMMON, HOOK, STOCK, Both, ConformanceCase, StepTally, Task
from headway.engines.simulated import prefix_blocks
from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran
from headway.prefix import Prefix

PAIRS = (*COMMON, ("qlm", HOOK), ("fastserve", HOOK))
_SHARED = 0.8  # share of drawn requests that share a prefix with others
_PINNED = 0.05  # share of the steps before which a chain is pinned or given back
_ENDED = 0.2  # share of the steps before which an application run ends
_RUNS = 4
_SALT = 1000  # tokens below it stand for nothing


def draw(rng: np.random.Generator) -> ConformanceCase:
    """Return a workload of `conformance.draw` with prefixes, its KV often scarce, on the host too.

    Conversations go on to at most 300 tokens or to the longest that a request may have.
    """
    case = conformance.draw(rng)
    systems = [Prefix(f"system {i}", int(rng.integers(1, 200))) for i in range(int(rng.integers(1, 4)))]
    most = int(rng.choice((300, conformance.LONGEST)))
    said = dict[str, int]()
    tasks = tuple(_with_prefix(task, systems, said, most, rng) for task in case.tasks)
    runs = np.random.default_rng((case.seed, 5)).integers(0, _RUNS + 1, len(tasks)).tolist()
    tasks = tuple(replace(task, run=run) for task, run in zip(tasks, runs, strict=True))
    least = max(-(-(task.prompt + task.output) // BLOCK) for task in tasks)
    blocks = int(rng.choice((least, 2 * least, max(least, case.blocks))))
    host_blocks = int(np.random.default_rng((case.seed, 4)).choice((1, 8, 64, 1 << 20)))
    return replace(case, tasks=tasks, blocks=blocks, host_blocks=host_blocks)


def _with_prefix(task: Task, systems: list[Prefix], said: dict[str, int], most: int, rng: np.random.Generator) -> Task:
    """Return a task that begins with a system prompt, or that is the next turn of a conversation.

    said: tokens of each conversation so far. most: most tokens of a conversation.
    """
    if rng.random() >= _SHARED:
        return task
    system = systems[rng.integers(len(systems))]
    if rng.random() < 0.5:
        prompt = max(task.prompt, system.tokens + int(rng.integers(0, 2)))
        return replace(task, prompt=prompt, prefix=system)
    name = f"conversation {rng.integers(6)} after {system.id}"
    prompt = said.get(name, system.tokens) + task.prompt
    if prompt + task.output > most:
        return task
    said[name] = prompt + task.output
    return replace(task, prompt=prompt, prefix=Prefix(name, prompt, answer=True, parent=system))


class Caching(Both):
    """vLLM's scheduler and the simulated engine, both with prefix caching."""

    lean: CachingEngine

    def __init__(self, case: ConformanceCase, recipe: str, host: str) -> None:
        from vllm.v1.metrics.stats import PrefixCacheStats

        super().__init__(case, recipe, host, caching=True)
        manager = self.real.scheduler.kv_cache_manager
        manager.log_stats, manager.prefix_cache_stats = True, PrefixCacheStats()
        prefixes = (task.prefix for task in case.tasks)
        chains = {one for prefix in prefixes if prefix for one in (prefix, prefix.parent) if one}
        self.chains = [] if host == STOCK else sorted(chains, key=lambda one: (one.id, one.tokens))
        self.pins = np.random.default_rng((case.seed, 3))
        self.ends = np.random.default_rng((case.seed, 6)) if host == HOOK else None
        self.ended = 0  # blocks of runs that have ended
        self.saved = dict[str, int]()  # tokens on the host after the last step

    def _add(self, id: str, task: Task, **text: Any) -> None:
        tokens, answer = _text(id, task)
        super()._add(id, task, tokens=tokens, answer=answer)

    def _step(self, seconds: float) -> str | None:
        difference = None
        if self.chains and self.pins.random() < _PINNED:
            difference = self._pin(self.chains[self.pins.integers(len(self.chains))])
        if self.ends is not None and self.ends.random() < _ENDED:
            difference = self._end_run(int(self.ends.integers(1, _RUNS + 1))) or difference
        return super()._step(seconds) or difference

    def _pin(self, prefix: Prefix) -> str | None:
        """Pin a piece of a chain in both engines, or give it back; return a difference in what they hold."""
        control = self.real.scheduler.control
        if self.pins.random() < 0.5:
            self.lean.unpin(prefix.id)
            return str(control({"op": "unpin", "chain": prefix.id}).get("error", "")) or None
        ours = self.lean.pin(prefix)
        theirs = control({"op": "pin", "chain": prefix.id, "tokens": _tokens(prefix)}).get("pinned")
        return None if ours == theirs else f"vLLM holds {theirs} tokens of {prefix}, we {ours}"

    def _end_run(self, run: int) -> str | None:
        """End an application run in both engines; return a difference in how many blocks that gives up first."""
        ours, theirs = self.lean.end_run(run), self.real.scheduler.control({"op": "end", "runs": [run]}).get("ended")
        self.ended += ours
        return None if ours == theirs else f"vLLM gives up {theirs} blocks of run {run} first, we {ours}"

    def _pairs(self, output: Any, ran: Ran) -> dict[str, tuple[Any, Any]]:
        manager, pool = self.real.scheduler.kv_cache_manager, self.lean.pool
        queue = manager.block_pool.free_block_queue.get_all_free_blocks()
        stats = {name: getattr(manager.prefix_cache_stats, name) for name in self.lean.cache_stats}
        return super()._pairs(output, ran) | {
            "has counted": (stats, self.lean.cache_stats),
            "frees": ([block.block_id for block in queue], prefix_blocks.free_queue(pool).tolist()),
            "shows the packer": self._columns(ran),
            **self._host(output, ran),
        }

    def _host(self, output: Any, ran: Ran) -> dict[str, tuple[Any, Any]]:
        """Return what is on the host, what was copied there and back in this step, and the room left."""
        connector, jobs = self.real.scheduler.connector, self.lean.jobs
        if connector is None:
            return {}
        before, self.saved = self.saved, dict(connector.saved)
        copies = output.kv_connector_metadata
        moved = sum(self.saved[id] for id, _ in copies.out)
        moved += sum(before[id] - there * BLOCK for id, _, there in copies.back)
        held = {id: int(jobs.saved[row]) for id, row in jobs.row_of.items() if jobs.saved[row]}
        return {
            "saves": ([id for id, _ in copies.out], jobs.names(ran.saved)),
            "has on the host": (self.saved, held),
            "copies": (moved, ran.copied),
            "has host room": (connector.free, self.lean.host_room if self.case.host_blocks else connector.free),
        }

    def _columns(self, ran: Ran) -> tuple[list[Any], list[Any]]:
        """Return the columns that a cache-aware packer saw of each request before this step.

        That is in the table still, but for what requests have computed that run or have just given up their KV.
        """
        if not self.lean.follows:
            return [], []
        ours, theirs = self.lean.jobs, self.real.scheduler.jobs
        lost = {*ours.names(ran.evicted), *ours.names(ran.saved)}
        seen: tuple[list[Any], list[Any]] = [], []
        for id, row in ours.row_of.items():
            waits = not ours.running[row] and id not in lost
            names = ("shared", "computed", "blocks") if waits else ("shared",)
            for jobs, columns in zip((theirs, ours), seen, strict=True):
                columns.append((id, *(int(jobs.data[name][jobs.row_of[id]]) for name in names)))
        return seen


def _text(id: str, task: Task) -> tuple[list[int], int]:
    """Return the tokens of a prompt and the one that its answer repeats."""
    own, prefix = _SALT + 2 * crc32(id.encode()), task.prefix
    if prefix is None:
        return [own] * task.prompt, own
    tokens = _tokens(prefix)
    return tokens + [own] * (task.prompt - len(tokens)), _token(prefix) if prefix.answer else own


def _tokens(prefix: Prefix) -> list[int]:
    """Return the tokens of a piece of a chain: each chain has its own, behind those of the parent."""
    before = [] if prefix.parent is None else _tokens(prefix.parent)
    return before + [_token(prefix)] * (prefix.tokens - len(before))


def _token(prefix: Prefix) -> int:
    return _SALT + 1 + 2 * crc32(prefix.id.encode())


def compare(case: ConformanceCase, recipe: str, host: str = HOOK) -> StepTally:
    """Drive both engines with a workload and compare each step, like `conformance.compare`."""
    return conformance.tally_of(Caching(case, recipe, host))


def run(
    rng: np.random.Generator,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    *,
    steps: int,
    progress: Callable[[int], None] | None = None,
) -> dict[tuple[str, str], StepTally]:
    """Compare at least this number of steps of every pair; keys and progress are as in `conformance.run`."""
    found = {}
    for recipe, host in pairs:
        tally = found[recipe, f"{host}, prefix cache"] = StepTally()
        while tally.steps < steps:
            one = compare(draw(rng), recipe, host)
            tally.add(one)
            if progress is not None:
                progress(one.steps)
    return found
