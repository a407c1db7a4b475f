"""Golden decision logs: one workload through controller and packers, compared with the committed log.

A change of policy shows as a diff of `golden/<recipe>.jsonl`, which is reviewed and committed with it:
`HEADWAY_GOLDEN=write pytest tests/core/test_golden.py` rewrites the logs.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headway.engines.simulated.engine import SimulatedEngine
from headway.events import Arrived, Event, Finished, InstanceUp, Started
from headway.policy.core.controller import Controller
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.plan.by_fleet import ByFleet
from headway.policy.plan.ordered import Ordered
from headway.policy.recipes.registry import RECIPES
from headway.types import Instance, Request, Send, Slo
from tests.helpers.stepping import MAX_MODEL_LEN, Iteration, Stepper, Task

GOLDEN = Path(__file__).parent / "golden"
BUDGET = 256
# e1 has no slots for paused requests: one that is displaced there is evicted.
FLEET = {"e0": (Instance("e0", "m", 4, 60, 16, 1024), 6), "e1": (Instance("e1", "m", 2, 44, 16, 1024, lead=1), 2)}
# task, SLO, priority, prompt tokens from..to, output tokens from..to, share
MIX = (
    ("chat", Slo(ttft=0.8, tpot=0.1), 0, (20, 260), (5, 30), 0.4),
    ("code", Slo(ttft=0.3, e2e=1.0), 0, (100, 400), (2, 8), 0.2),
    ("report", Slo(e2e=8.0), -1, (150, 420), (10, 40), 0.15),
    ("batch", Slo(), 10, (200, 560), (20, 60), 0.25),
)


def workload(n: int = 60, seed: int = 7) -> list[tuple[Request, int]]:
    """Return requests and output lengths; `Random.random` gives the same stream in every Python version."""
    rng, now, out = Random(seed), 0.0, []
    for i in range(n):
        now = round(now - 0.035 * math.log(1 - rng.random()) * (3 if i % 20 < 8 else 0.5), 4)
        pick, shares = rng.random(), accumulate(share for *_, share in MIX)
        task, slo, priority, prompts, outputs, _ = MIX[sum(pick >= share for share in shares)]
        prompt, output = (low + int(rng.random() * (high - low)) for low, high in (prompts, outputs))
        out.append((Request(f"r{i}", "m", prompt, 64, now, slo, priority, task=task), output))
    return out


@dataclass(slots=True)
class Replay:
    """Controller and simulated engines on one virtual clock; the core sees tokens when an iteration ends."""

    core: Controller
    engines: dict[str, Stepper]
    targets: dict[str, int]
    heap: list[tuple[float, int, Any]] = field(default_factory=list)
    serial: count[int] = field(default_factory=count)
    busy: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    def at(self, time: float, what: Any) -> None:
        heapq.heappush(self.heap, (time, next(self.serial), what))

    def run(self) -> list[str]:
        while self.heap:
            now, _, what = self.heap[0]
            heapq.heappop(self.heap)
            if isinstance(what, str):
                self._iterate(what, now)
            else:
                self._deliver(what, now)
        return self.log

    def _iterate(self, name: str, now: float) -> None:
        """Start an engine's next iteration if it has work."""
        engine = self.engines[name]
        if not engine.engine.busy:
            self.busy.discard(name)
            return
        engine.now = now
        ran = engine.step()
        self._record(t=round(now, 4), e=name, run=ran.tokens, pause=ran.paused, evict=ran.evicted)
        self._ends(engine, ran)
        self.at(engine.now, name)

    def _ends(self, engine: Stepper, ran: Iteration) -> None:
        for id in ran.first:
            self.at(engine.now, Started(id))
        for id in ran.finished:
            self.at(engine.now, Finished(id, self.targets[id]))

    def _deliver(self, event: Event, now: float) -> None:
        commands = self.core.on(event, now)
        sends = [(c.id, c.instance) for c in commands if isinstance(c, Send)]
        name = event.id if isinstance(event, Finished) else ""
        self._record(t=round(now, 4), end=name, send=[list(send) for send in sends])
        for id, instance in sends:
            self._receive(self.core.requests[id], instance, now)

    def _receive(self, request: Request, instance: str, now: float) -> None:
        left = self.core.lengths.forecast(request).mean
        task = Task(
            request.id, request.prompt_tokens, self.targets[request.id], request.arrival, request.slo, request.priority
        )
        self.engines[instance].add(task, left)
        if instance not in self.busy:
            self.busy.add(instance)
            self.at(now, instance)

    def _record(self, **fields: Any) -> None:
        line = {key: value for key, value in fields.items() if value or key == "t"}
        if len(line) > 1:
            self.log.append(json.dumps(line, separators=(",", ":")))


def decisions(recipe: str) -> list[str]:
    """Run the workload to its end and return one JSON line per decision."""
    policy, latency = RECIPES[recipe], OnlineLatency()
    engines = {}
    for name, (instance, slots) in FLEET.items():
        spec = EngineSpec(instance.max_running, BUDGET, instance.block_size, latency=latency)
        engine = SimulatedEngine(
            policy.packer(spec),
            blocks=instance.blocks_total,
            size=instance.block_size,
            slots=slots,
            budget=BUDGET,
            max_model_len=MAX_MODEL_LEN,
        )
        engines[name] = Stepper(engine, latency)
    requests = workload()
    order = policy.planner()
    if isinstance(order, ByFleet):
        order = order.still  # this fleet cannot load other models
    assert isinstance(order, Ordered)
    pulling = Ordered(order.kind, order.displaces)  # the logs are of queues that pull, bros's too
    replay = Replay(Controller(pulling, TaskLengths(prior=32)), engines, {r.id: n for r, n in requests})
    for instance, _ in FLEET.values():
        replay.at(0.0, InstanceUp(instance))
    for request, _ in requests:
        replay.at(request.arrival, Arrived(request))
    log = replay.run()
    assert not replay.core.requests, "a request never finished"
    return log


@pytest.mark.parametrize("recipe", RECIPES)
def test_decisions_are_those_committed(recipe: str) -> None:
    path, now = GOLDEN / f"{recipe}.jsonl", decisions(recipe)
    if os.environ.get("HEADWAY_GOLDEN") == "write":
        path.write_text("\n".join(now) + "\n")
    assert path.exists(), "HEADWAY_GOLDEN=write makes it"
    before = path.read_text().splitlines()
    for number, (was, is_now) in enumerate(zip(before, now, strict=False), 1):
        assert is_now == was, f"first difference in line {number} of {path.name}"
    assert len(now) == len(before)
    assert path.stat().st_size < 60_000


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_workload_gives_the_same_decisions(recipe: str) -> None:
    assert decisions(recipe) == decisions(recipe)


def test_recipes_decide_differently() -> None:
    assert len({tuple(decisions(recipe)) for recipe in RECIPES}) == len(RECIPES)


def test_the_workload_has_pauses_evictions_and_a_queue() -> None:
    """The logs guard only what they contain."""
    for recipe in ("priority", "edf", "slack"):
        log = [json.loads(line) for line in decisions(recipe)]
        assert any("pause" in line for line in log), recipe
        assert any("evict" in line for line in log), recipe
        sent = {id for line in log for id, _ in line.get("send", [])}
        waited = [line for line in log if line.get("end") and line.get("send")]
        assert len(sent) == 60
        assert waited, "no request ever waited for room"
