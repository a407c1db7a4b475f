"""A toy engine for tests: what vLLM's scheduler and our hook do with a `Step`, in virtual time.

NOT a simulator to take numbers from. Its block account is real: blocks are taken from a pool and given back,
prompts are admitted whole, and whoever runs out of blocks preempts the tail as stock vLLM does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headway.forecast.latency.online import OnlineLatency
from headway.memory.budget import KvBudget
from headway.ports import Packer
from headway.types import Batch, Jobs, Slo, Step


@dataclass(frozen=True, slots=True)
class Task:
    """What one toy request needs: prompt tokens in, `target` tokens out."""

    id: str
    prompt: int
    target: int
    arrival: float = 0.0
    slo: Slo = field(default_factory=Slo)
    priority: int = 0


@dataclass(slots=True)
class Ran:
    """What one iteration did."""

    start: float
    seconds: float
    tokens: dict[str, int]
    paused: list[str]
    evicted: list[str]
    finished: list[str]


class ToyEngine:
    """Packs, applies and accounts. `preempted` counts what stock vLLM had to take away by itself."""

    def __init__(
        self, packer: Packer, *, blocks: int, size: int, slots: int, budget: int, latency: OnlineLatency
    ) -> None:
        self.packer, self.latency, self.budget = packer, latency, budget
        self.total, self.size, self.slots = blocks, size, slots
        self.free, self.preempted, self.now = blocks, 0, 0.0
        self.jobs = Jobs(2)
        self.tasks: dict[str, Task] = {}
        self._serial = 0

    def add(self, task: Task, left: float | None = None) -> None:
        self._serial += 1
        self.tasks[task.id] = task
        promises = {
            name: math.inf if (value := getattr(task.slo, name)) is None else value
            for name in ("ttft", "tpot", "e2e")
        }
        self.jobs.add(
            task.id,
            arrival=task.arrival,
            prompt=task.prompt,
            tokens_left=task.target if left is None else left,
            priority=task.priority,
            serial=self._serial,
            **promises,
        )

    def ledger(self) -> KvBudget:
        return KvBudget(self.total, self.free, self.size, self.slots)

    def step(self) -> Ran:
        """Run one iteration and let time pass."""
        plan = self.packer.pack(self.jobs, self.ledger(), self.now)
        for row in plan.evict:
            self._evict(int(row))
        tokens, paused = self._apply(plan)
        ran = Ran(self.now, self._duration(tokens), self._named(tokens), paused, [], [])
        ran.evicted = self.jobs.names(plan.evict)
        self.now += ran.seconds
        ran.finished = self._advance(tokens)
        self.check()
        return ran

    def check(self) -> None:
        """Blocks are neither lost nor held twice, and nobody holds KV without a slot."""
        rows = self.jobs.rows()
        assert self.free + int(self.jobs.blocks[rows].sum()) == self.total
        assert self.free >= 0
        running = self.jobs.running[rows]
        assert int(running.sum()) <= self.slots
        assert not self.jobs.blocks[rows[~running]].any()

    def _apply(self, plan: Step) -> tuple[dict[int, int], list[str]]:
        jobs, order = self.jobs, [int(row) for row in plan.order]
        caps = dict.fromkeys(order, self.budget)
        if plan.tokens is not None:
            caps = dict(zip(order, plan.tokens.tolist(), strict=True))
        chosen = [row for row in order if jobs.running[row]]
        paused = [int(row) for row in jobs.rows() if jobs.running[row] and row not in chosen]
        budget = self.budget if plan.token_budget is None else min(plan.token_budget, self.budget)
        ran, lost = self._continue(chosen, caps, budget)
        if not lost:
            limit = min(plan.max_running or self.slots, self.slots - len(paused))
            waiting = [row for row in order if not jobs.running[row]]
            self._admit(waiting, caps, budget - sum(ran.values()), limit - len(chosen), ran)
        return ran, jobs.names(paused)

    def _continue(self, chosen: list[int], caps: dict[int, int], budget: int) -> tuple[dict[int, int], bool]:
        """Give running rows their tokens; preempt the tail when blocks run out (stock vLLM)."""
        ran: dict[int, int] = {}
        i, lost = 0, False
        while i < len(chosen) and budget > 0:
            row = chosen[i]
            tokens = min(self._missing(row), caps[row], budget)
            while self._short(row, tokens) > self.free and len(chosen) > i:
                lost = True
                self.preempted += 1
                self._evict(chosen.pop())
            if len(chosen) <= i:
                break
            self._run(row, tokens, ran)
            budget -= tokens
            i += 1
        return ran, lost

    def _admit(
        self, waiting: list[int], caps: dict[int, int], budget: int, places: int, ran: dict[int, int]
    ) -> None:
        for row in waiting:
            tokens = min(self._missing(row), caps[row], budget)
            whole = int(self.jobs.prompt[row] + self.jobs.output_tokens[row])
            if places <= 0 or tokens <= 0 or self._short(row, whole) > self.free:
                return
            self.jobs.running[row] = True
            self._run(row, tokens, ran)
            budget -= tokens
            places -= 1

    def _run(self, row: int, tokens: int, ran: dict[int, int]) -> None:
        need = self._short(row, tokens)
        self.free -= need
        self.jobs.blocks[row] += need
        if tokens:
            ran[row] = tokens

    def _short(self, row: int, tokens: int) -> int:
        """Blocks the row lacks to compute so many more tokens."""
        return int(-(-(self.jobs.computed[row] + tokens) // self.size) - self.jobs.blocks[row])

    def _missing(self, row: int) -> int:
        return int(self.jobs.prompt[row] + self.jobs.output_tokens[row] - self.jobs.computed[row])

    def _evict(self, row: int) -> None:
        assert self.jobs.running[row]
        self.free += int(self.jobs.blocks[row])
        self.jobs.blocks[row] = self.jobs.computed[row] = 0
        self.jobs.running[row] = False

    def _advance(self, tokens: dict[int, int]) -> list[str]:
        """Count what was computed; return who is finished."""
        jobs, finished = self.jobs, []
        for row, n in tokens.items():
            jobs.computed[row] += n
            if self._missing(row):
                continue
            jobs.output_tokens[row] += 1
            jobs.tokens_left[row] = max(jobs.tokens_left[row] - 1, 1.0)
            if jobs.output_tokens[row] == 1:
                jobs.first[row] = self.now
            id = str(jobs.keys[row])
            if jobs.output_tokens[row] >= self.tasks[id].target:
                finished.append(id)
        for id in finished:
            self.free += int(jobs.blocks[jobs.row_of[id]])
            jobs.remove(id)
        return finished

    def _named(self, tokens: dict[int, int]) -> dict[str, int]:
        return {str(self.jobs.keys[row]): n for row, n in tokens.items()}

    def _duration(self, tokens: dict[int, int]) -> float:
        """Virtual seconds of an iteration, by the pace's own law (nothing is learned)."""
        rows = np.fromiter(tokens, np.int64, len(tokens))
        new = np.fromiter(tokens.values(), np.int64, len(tokens))
        before, decode = self.jobs.computed[rows], new == 1
        context, prompt = int(before[decode].sum()), new[~decode]
        pairs = int((prompt * before[~decode] + prompt * prompt // 2).sum())
        return self.latency.seconds(Batch(int(decode.sum()), context, int(prompt.sum()), pairs))


def run_all(engine: ToyEngine, limit: int) -> list[Ran]:
    """Step until nobody is left; AssertionError after `limit` steps."""
    log: list[Ran] = []
    while len(engine.jobs):
        assert len(log) < limit, f"{len(engine.jobs)} jobs unfinished after {limit} steps"
        log.append(engine.step())
    return log
