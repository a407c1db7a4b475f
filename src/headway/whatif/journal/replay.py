"""Turns the traffic of a journal into a workload to simulate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway.simulate.workload.traffic import Workload
from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import RequestRow
from headway.types import Ints
from headway.whatif.journal.past import workload_of


def traffic_of(journal: JournalReader, seed: int) -> Workload:
    """Return the requests of a journal; incomplete answers get lengths drawn from complete ones of their class.

    seed: seed of that draw.
    """
    rows = journal.requests
    workload = workload_of(rows, _outputs(rows, np.random.default_rng(seed)))
    drops = {row.tier for row in rows if row.reason == "infeasible"}
    codes = [code for code, name in enumerate(workload.tiers) if name in drops]
    drop = np.isin(workload.tier, codes) & np.isfinite(np.minimum(workload.ttft, workload.e2e))
    return replace(workload, drop=drop.astype(np.int64))


def busiest(workload: Workload, seconds: float) -> Workload:
    """Return the requests of the `seconds` in which most tokens arrived, shifted to begin at 0."""
    at, tokens = workload.arrival, (workload.prompt + workload.output).astype(float)
    if not len(workload) or at[-1] - at[0] <= seconds:
        return workload
    sums = np.concatenate([[0.0], np.cumsum(tokens)])
    ends = np.searchsorted(at, at + seconds, "left")
    begin = int(np.argmax(sums[ends] - sums[:-1]))
    part = workload.take(slice(begin, int(ends[begin])))
    return replace(part, arrival=part.arrival - part.arrival[0])


def _outputs(rows: list[RequestRow], rng: np.random.Generator) -> Ints:
    """Return the length of each answer, drawn if it is incomplete."""
    known: dict[str, list[int]] = {}
    for row in rows:
        if row.outcome == "finished":
            known.setdefault(row.tier, []).append(row.output_tokens)
    every = [length for lengths in known.values() for length in lengths] or [1]
    return np.array([_length(row, known.get(row.tier, every), rng) for row in rows], np.int64)


def _length(row: RequestRow, others: list[int], rng: np.random.Generator) -> int:
    if row.outcome == "finished":
        return max(row.output_tokens, 1)
    return max(min(others[int(rng.integers(len(others)))], row.max_tokens), 1)
