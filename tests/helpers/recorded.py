"""Recorded runs for tests: small fleets that are short of memory, so that every state occurs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.engines.simulated.engine import Ran
from headway.policy.core import ranks
from headway.policy.memory.budget import KvBudget
from headway.policy.pack.allocation import allocate
from headway.policy.plan import ordered
from headway.policy.recipes.registry import RECIPES, Recipe
from headway.ports import Packer
from headway.simulate.record.recorder import Recorder
from headway.simulate.record.run_folder import Header, Machine, Run
from headway.simulate.run import InstanceSpec, Outcome, Simulation
from headway.simulate.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Batch, Instance, Jobs, Slo, Step


@dataclass(frozen=True)
class Linear:
    """A plausible GPU: fixed cost, cost per answer in progress, cost per prompt token."""

    def seconds(self, batch: Batch) -> float:
        return 0.01 + 1e-4 * batch.decodes + 1e-7 * batch.context + 1.5e-4 * batch.prefill

    def learn(self, batch: Batch, seconds: float) -> None:
        """It is known."""


@dataclass
class HostPoolEngine(Packer):
    """First come, first served, but now and then the youngest running row goes to the host and returns."""

    max_running: int
    budget: int
    steps: int = 0

    def pack(self, jobs: Jobs, kv_budget: KvBudget, now: float) -> Step:
        self.steps += 1
        rows = jobs.rows()
        ranked = rows[np.lexsort((jobs.serial[rows],))]
        running = ranked[jobs.running[ranked]]
        if self.steps % 7 == 0 and running.size > 1:
            saved = running[-1:]
            return Step(running[:-1], save=saved, max_running=self.max_running, token_budget=self.budget)
        return allocate(jobs, ranked, kv_budget, self.max_running, self.budget)


SWAPPING = Recipe(
    "swapping",
    "for tests",
    lambda: ordered.Ordered(ranks.DUE),
    lambda spec: HostPoolEngine(spec.max_running, spec.token_budget),
)
ALL = {**RECIPES, "swapping": SWAPPING}


def mixed(seed: int, rate: float = 14.0, duration: float = 8.0) -> Workload:
    rng = np.random.default_rng(seed)
    classes = (
        TrafficClass("chat", 0.5, Slo(ttft=0.4, tpot=0.015), 0, "sharegpt", max_tokens=120),
        TrafficClass("report", 0.1, Slo(e2e=6.0), 5, "sharegpt", max_tokens=200),
        TrafficClass("batch", 0.4, Slo(), 10, "bros-best-effort"),
    )
    workload = make(classes, poisson(rate, duration, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= 2048))


def fleet(count: int, blocks: int = 300, running: int = 16) -> list[InstanceSpec]:
    return [
        InstanceSpec(
            Instance(f"e{i}", "default", running, blocks, 16, 2048), Linear(), 2 * running, 512, copy_seconds=1e-5
        )
        for i in range(count)
    ]


class Spy(Recorder):
    """Keeps, besides, what the engine itself said: per iteration the names and tokens of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, Ran, dict[int, int], set[int], set[int]]] = []

    def iteration(self, instance, engine, ran, seconds, queued) -> None:  # type: ignore[no-untyped-def]
        def who(rows: np.ndarray) -> list[int]:  # type: ignore[type-arg]
            return [int(name[1:]) for name in engine.jobs.names(rows.tolist())]

        tokens = dict(zip(who(ran.rows), ran.tokens.tolist(), strict=True))
        self.said.append((instance, ran, tokens, set(who(ran.paused)), set(who(ran.evicted))))
        super().iteration(instance, engine, ran, seconds, queued)


def record(
    recipe: str, seed: int, count: int = 1, blocks: int = 300, recorder: Recorder | None = None, **more: float
) -> Run:
    """Simulate and record a random workload."""
    nodes, workload = fleet(count, blocks), mixed(seed, **more)
    recorder = recorder or Recorder()
    outcome: Outcome = Simulation(ALL[recipe], nodes, workload).run(observer=recorder)
    header = Header(recipe, tuple(map(Machine.of, nodes)), seed, "headway simulate --seed 0", "a test")
    return Run(header, workload, outcome, recorder.recording())
