"""The cost of the slow loop: microseconds per event and per plan against the length of the queue.

A controller with its planner, a fleet of full instances and a queue; then arrivals and ends by turns, so that
the queue keeps its length: each end makes room, and each room is filled. No engine runs.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from rich.progress import track

from benchmarks.experiment import Result, experiment
from headway.events import Arrived, Event, Finished, InstanceUp
from headway.policy.core.controller import Controller
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.default import DEFAULT
from headway.policy.recipes.registry import find
from headway.ports import Planner
from headway.types import Command, Floats, Instance, Plan, Request, Send, Slo
from headway.whatif.output.plots import png, sheet
from headway.whatif.output.results import Ask, Row

QUEUED = (1_000, 100_000, 1_000_000)
FLEETS = (8, 64)
_EVENTS = 2_000
_RUNNING = 256
_MEMORY_FROM = 100_000  # queued requests of the run whose memory is measured: later ones use it again
_WARM_UP = 100


@dataclass(slots=True)
class _TimedPlanner(Planner):
    """A planner whose plans are timed."""

    planner: Planner
    seconds: list[float] = field(default_factory=list)

    def on(self, event: Event, cluster: object, now: float) -> None:
        self.planner.on(event, cluster, now)  # type: ignore[arg-type]

    def plan(self, cluster: object, now: float) -> Plan:
        began = time.perf_counter()
        plan = self.planner.plan(cluster, now)  # type: ignore[arg-type]
        self.seconds.append(time.perf_counter() - began)
        return plan


@dataclass(frozen=True, slots=True)
class PlannerPoint:
    """One planner with one queue: seconds of each arrival, end and plan; bytes per queued request."""

    planner: str
    queued: int
    instances: int
    arrivals: Floats
    ends: Floats
    plans: Floats
    bytes_each: float | None

    @property
    def setting(self) -> str:
        """Name the queue and the fleet, as in a row's setting."""
        return f"{self.queued} queued, {self.instances} instances"

    @property
    def event_us(self) -> float:
        """Return the mean microseconds of an event."""
        return float(np.concatenate([self.arrivals, self.ends]).mean() * 1e6)


class _Crowd:
    """Requests of four tasks: half with a deadline, priorities 0 to 3, one arrival a millisecond."""

    def __init__(self, seed: int) -> None:
        self._rng, self.count = np.random.default_rng(seed), 0

    def request(self) -> Request:
        """Return the next request."""
        i, self.count = self.count, self.count + 1
        prompt, answer, patience, priority = self._rng.random(4)
        slo = Slo(ttft=1.0 + 600.0 * float(patience), tpot=0.2) if i % 2 else Slo()
        return Request(
            f"r{i}",
            "m",
            20 + int(700 * prompt),
            16 + int(500 * answer),
            i / 1000,
            slo,
            int(4 * priority),
            task=f"t{i % 4}",
        )


def measure(planner: str, queued: int, instances: int, events: int, seed: int, *, memory: bool = False) -> PlannerPoint:
    """Return what events cost a planner once its fleet is full and `queued` requests wait."""
    before = _resident()
    crowd, timed = _Crowd(seed), _TimedPlanner(find(planner).planner())
    core, inside = Controller(timed, TaskLengths(), max_queued=1 << 40), list[str]()
    gc.disable()  # nothing is freed while the queue is filled
    for _ in range(queued + instances * (_RUNNING + 2)):
        core.note(Arrived(crowd.request()), 0.0)
    gc.enable()
    grown = (_resident() - before) / crowd.count
    now, rng = crowd.count / 1000, np.random.default_rng(seed + 1)
    for i in range(instances):
        spec = Instance(f"e{i}", "m", _RUNNING, 1 << 20, 16, 4096)
        inside += _sent(core.on(InstanceUp(spec), now))

    def refill() -> None:
        while core.queued < queued:  # some recipes take more inside than a batch, and urgent requests overtake
            inside.extend(_sent(core.on(Arrived(crowd.request()), now)))

    refill()
    arrivals, ends = np.zeros(events + _WARM_UP), np.zeros(events + _WARM_UP)
    for i in range(events + _WARM_UP):
        if i == _WARM_UP:
            timed.seconds.clear()
        refill()
        now += 0.001
        arrivals[i] = _time(core, Arrived(crowd.request()), now, inside)
        id = inside.pop(int(rng.integers(len(inside))))
        ends[i] = _time(core, Finished(id, 1 + int(rng.integers(400))), now, inside)
    arrivals, ends, plans = arrivals[_WARM_UP:], ends[_WARM_UP:], np.array(timed.seconds)
    return PlannerPoint(planner, queued, instances, arrivals, ends, plans, grown if memory else None)


def _time(core: Controller, event: Event, now: float, inside: list[str]) -> float:
    began = time.perf_counter()
    commands = core.on(event, now)
    seconds = time.perf_counter() - began
    inside += _sent(commands)
    return seconds


def _sent(commands: Sequence[Command]) -> list[str]:
    return [command.id for command in commands if isinstance(command, Send)]


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def rows_of(point: PlannerPoint) -> list[Row]:
    """Return the figures of one measurement."""
    all_events = np.concatenate([point.arrivals, point.ends])
    figures = [
        ("event.us", point.event_us, "us"),
        ("event.p99_us", float(np.quantile(all_events, 0.99) * 1e6), "us"),
        ("arrival.us", float(point.arrivals.mean() * 1e6), "us"),
        ("end.us", float(point.ends.mean() * 1e6), "us"),
        ("plan.us", float(point.plans.mean() * 1e6), "us"),
    ]
    if point.bytes_each is not None:
        figures.append(("bytes_per_request", point.bytes_each, "bytes"))
    return [Row(id, point.planner, point.setting, ours, unit) for id, ours, unit in figures]


@experiment("planner", "sim", "Cost of an event in the planner")
def main(ask: Ask) -> Result:
    """Measure; `quick` stops at 100,000 queued requests and 8 instances."""
    queued, fleets = (QUEUED[:2], FLEETS[:1]) if ask.quick else (QUEUED, FLEETS)
    events, points = _EVENTS // 4 if ask.quick else _EVENTS, list[PlannerPoint]()
    for size, instances, name in track([*product(queued, fleets, DEFAULT)], "planning", disable=ask.as_json):
        first = size == _MEMORY_FROM and not any(point.bytes_each for point in points)
        points.append(measure(name, size, instances, events, ask.seed, memory=first))
    rows = [row for point in points for row in rows_of(point)]
    workload = f"{events} arrivals and {events} ends, alternating; instances are full ({_RUNNING} running)."
    return Result(rows, workload, lambda: {"planner": plot(points)})


def plot(points: Sequence[PlannerPoint]) -> bytes:
    """Return a PNG: microseconds per event against queued requests, one line per planner and fleet."""
    figure, (axes,) = sheet(1, 1, 7, 4)
    for name in dict.fromkeys(point.planner for point in points):
        for style, instances in zip(("-", "--"), FLEETS, strict=True):
            mine = [p for p in points if p.planner == name and p.instances == instances]
            if mine:
                label = f"{name}, {instances} instances"
                sizes, costs = [p.queued for p in mine], [p.event_us for p in mine]
                axes.plot(sizes, costs, style, marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="queued requests", ylabel="us per event")
    axes.legend()
    return png(figure)
