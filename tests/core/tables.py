"""Random engines at a moment: a `Jobs` table with its kv_budget, consistent block by block (Hypothesis)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from headway.policy.memory.budget import KvBudget
from headway.types import Ints, Jobs

SIZE = 4
_ROW = st.integers(0, 2**30 - 1)  # one draw per row: fast, and shrinks to simpler rows


@dataclass(frozen=True, slots=True)
class Moment:
    """What a packer is shown. `ranked`: the rows that are not held, most urgent first."""

    jobs: Jobs
    ranked: Ints
    kv_budget: KvBudget
    max_running: int
    budget: int

    def __repr__(self) -> str:
        columns = ("prompt", "computed", "output_tokens", "blocks", "running", "held")
        rows = [tuple(int(getattr(self.jobs, c)[row]) for c in columns) for row in self.jobs.rows()]
        limits = f"max_running={self.max_running} budget={self.budget} {self.kv_budget}"
        return f"Moment({columns}={rows} ranked={self.ranked.tolist()} {limits})"


class Bits:
    """Small numbers out of a large one."""

    def __init__(self, value: int) -> None:
        self.value = value

    def take(self, n: int) -> int:
        """Return a number in 0..n-1."""
        self.value, rest = divmod(self.value, n)
        return rest


@st.composite
def moments(draw: st.DrawFn, *, held: bool = True) -> Moment:
    """Draw up to 16 jobs, some running, some held, in an engine with few blocks."""
    rows = draw(st.lists(_ROW, max_size=16))
    bits = Bits(draw(_ROW))
    total, max_running, spare, wide = 3 + bits.take(28), 1 + bits.take(8), bits.take(6), bits.take(2)
    slots = max_running + spare
    jobs, free, order = Jobs(4), total, []
    for i, row in enumerate(rows):
        free -= _row(jobs, f"j{i}", Bits(row), free, total, slots, held)
        order.append((jobs.urgency[i], i))
    ranked = np.array([i for _, i in sorted(order) if not jobs.held[i]], np.int64)
    budget = 1 + bits.take(64) if wide else max_running + bits.take(16)
    return Moment(jobs, ranked, KvBudget(total, free, SIZE, slots), max_running, budget)


def _row(jobs: Jobs, name: str, bits: Bits, free: int, total: int, slots: int, held: bool) -> int:
    """Add a job; return the blocks it holds. One that could never fit is cut to what fits."""
    prompt = 1 + bits.take(min(24, (total - 2) * SIZE))
    output_tokens = min(bits.take(9), (total - 1) * SIZE - prompt)
    running, answering, rank, stop = bits.take(2), bits.take(2), bits.take(100), held and bits.take(8) == 0
    computed = prompt + output_tokens - 1 if answering else bits.take(prompt + output_tokens)
    blocks = -(-computed // SIZE)
    holds = bool(running and computed and blocks <= free and jobs.running.sum() < slots)
    jobs.add(
        name,
        prompt=prompt,
        output_tokens=output_tokens,
        computed=computed if holds else 0,
        blocks=blocks if holds else 0,
        running=holds,
        held=stop,
        urgency=rank,
        serial=len(jobs) + 1,
        arrival=float(rank),
        ttft=1.0 + bits.take(4) if bits.take(2) else math.inf,
        tpot=0.1 if bits.take(2) else math.inf,
        e2e=math.inf,
        first=float(rank) + 1 if output_tokens else 0.0,
        tokens_left=4.0,
    )
    return blocks if holds else 0
