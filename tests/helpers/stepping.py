"""A simulated engine stepped one iteration at a time; requests are named and time follows a latency model."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.ports import LatencyModel
from headway.types import Ints, Slo

MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """One request for the engine.

    Attributes:
        prompt: prompt tokens.
        target: output tokens after which it ends.
    """

    id: str
    prompt: int
    target: int
    arrival: float = 0.0
    slo: Slo = field(default_factory=Slo)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration, by request id.

    Attributes:
        tokens: tokens that each request computed.
        paused: requests that kept KV and slot without computing.
        evicted: requests whose KV the packer took.
        preempted: number of requests whose KV the engine took because blocks ran out.
        first: requests that made their first token and go on.
        finished: requests that ended.
    """

    start: float
    seconds: float
    tokens: dict[str, int]
    paused: list[str]
    evicted: list[str]
    preempted: int
    first: list[str]
    finished: list[str]


@dataclass(slots=True)
class Stepper:
    """Runs an engine and checks its block account after every iteration."""

    engine: SimulatedEngine
    latency: LatencyModel
    now: float = 0.0
    preempted: int = 0

    def add(self, task: Task, tokens_left: float | None = None) -> None:
        """Queue a request; tokens_left is its forecast (default: its target)."""
        self.engine.add(
            task.id,
            task.prompt,
            task.target,
            arrival=task.arrival,
            slo=task.slo,
            priority=task.priority,
            tokens_left=tokens_left,
        )

    def step(self) -> Iteration:
        """Run one iteration and let time pass."""
        engine, jobs, start = self.engine, self.engine.jobs, self.now
        ran = engine.schedule(start)
        seconds = engine.seconds(ran, self.latency.seconds(engine.batch(ran)))
        tokens = dict(zip(self._names(ran.rows), ran.tokens.tolist(), strict=True))
        paused, evicted = self._names(ran.paused), self._evicted(ran)
        new = {id for id in tokens if jobs.output_tokens[jobs.row_of[id]] == 0}
        self.now += seconds
        self.preempted += ran.preempted
        finished = engine.complete(ran, self.now).ids
        first = [id for id in tokens if id in new and id in jobs and jobs.output_tokens[jobs.row_of[id]]]
        self._check()
        return Iteration(start, seconds, tokens, paused, evicted, ran.preempted, first, finished)

    def run(self, limit: int) -> list[Iteration]:
        """Step until the engine is empty; AssertionError after `limit` iterations."""
        log: list[Iteration] = []
        while self.engine.busy:
            assert len(log) < limit, f"{len(self.engine.jobs)} requests unfinished after {limit} iterations"
            log.append(self.step())
        return log

    def _evicted(self, ran: Ran) -> list[str]:
        return self._names(ran.evicted[: ran.evicted.size - ran.preempted])

    def _check(self) -> None:
        """Blocks are neither lost nor held twice, and only requests with a slot hold KV."""
        engine, jobs = self.engine, self.engine.jobs
        rows = jobs.rows()
        assert engine.free + int(jobs.blocks[rows].sum()) == engine.blocks
        assert engine.free >= 0
        running = jobs.running[rows]
        assert int(running.sum()) <= engine.limits.slots
        assert not jobs.blocks[rows[~running]].any()

    def _names(self, rows: Ints) -> list[str]:
        return self.engine.jobs.names(rows)
