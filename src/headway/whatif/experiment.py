"""Simulates a workload on a fleet under several recipes, with the figures of real runs.

Simulated requests become `Record`s, so the same code computes the figures of simulated and real runs. Planners
and packers are those of `headway serve`; time is virtual and every result is labelled SIMULATED.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.progress import Progress

from headway.config import Scale
from headway.errors import ConfigError
from headway.policy.core.engine_spec import EngineSpec
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.recipes.registry import find
from headway.simulate import fleet as fleets
from headway.simulate.record import run_folder
from headway.simulate.record.recorder import Recorder, Recording
from headway.simulate.record.run_folder import Header, Machine, Run
from headway.simulate.run import InstanceSpec, Outcome, Simulation, no_time
from headway.simulate.workload.traffic import TrafficClass, Workload, make, poisson
from headway.types import Slo
from headway.whatif.load.records import Counters, Record

_NO_GAPS = np.empty(0, np.float32)  # a simulated client sees no chunks


class Machines(Protocol):
    """A fleet to simulate."""

    @property
    def scale(self) -> Mapping[str, Scale]:
        """The models whose engines come and go."""

    def instances(self, model: str) -> list[InstanceSpec]:
        """Return the simulated instances. model: name of the model of instances that do not name one."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """`count` equal instances of one latency profile.

    profile: name or path of the latency profile
    max_running: batch limit, vLLM's --max-num-seqs
    budget: tokens per iteration, vLLM's --max-num-batched-tokens
    kv_tokens: KV capacity of each instance; None = the profile's
    """

    profile: str
    count: int = 1
    max_running: int = 256
    budget: int = 2048
    max_model_len: int = 2048
    kv_tokens: int | None = None
    scale: Mapping[str, Scale] = field(default_factory=dict, hash=False)

    def instances(self, model: str) -> list[InstanceSpec]:
        """Return the simulated instances. ConfigError for an unknown profile or a fleet that cannot run."""
        spec = fleets.Spec(
            self.profile, self.count, model, self.max_running, self.budget, self.max_model_len, self.kv_tokens
        )
        return spec.instances()


@dataclass(frozen=True, slots=True)
class Mixed:
    """Instances of several kinds, which may serve and load several models."""

    specs: tuple[fleets.Spec, ...]
    scale: Mapping[str, Scale] = field(default_factory=dict, hash=False)

    def instances(self, model: str = "") -> list[InstanceSpec]:
        """Return the simulated instances; each has the model that its spec names."""
        return fleets.build(self.specs)


@dataclass(frozen=True, slots=True)
class Given:
    """A fleet of given instances."""

    specs: tuple[InstanceSpec, ...]
    scale: Mapping[str, Scale] = field(default_factory=dict, hash=False)

    def instances(self, model: str = "") -> list[InstanceSpec]:
        """Return the instances; each has its own model."""
        return list(self.specs)


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a simulation.

    wall: seconds of wall time
    simulated: seconds of virtual time
    """

    wall: float
    simulated: float
    iterations: int

    @property
    def times_real(self) -> float:
        """Return simulated seconds per wall second."""
        return self.simulated / self.wall


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a simulation, by recipe.

    records: records and counters, as `load.report.build` reads them
    speeds: speeds of the simulator
    events: refused requests, model swaps and planner time, in words
    runs: recorded runs
    """

    records: dict[str, tuple[list[Record], Counters]] = field(default_factory=dict)
    speeds: dict[str, Speed] = field(default_factory=dict)
    events: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Keep:
    """The folder for recorded runs, `folder`/runs/RECIPE, and fields of their headers.

    megabytes: limit of a recording
    """

    folder: Path
    megabytes: float
    seed: int
    command: str
    about: str

    def run(
        self, recipe: str, instances: Sequence[InstanceSpec], workload: Workload, outcome: Outcome, recording: Recording
    ) -> Run:
        """Write a run to its folder and return it."""
        machines = tuple(map(Machine.of, instances))
        header = Header(recipe, machines, self.seed, self.command, self.about)
        run = Run(header, workload, outcome, recording)
        run_folder.save(run, self.folder / "runs" / file_name(recipe))
        return run


def chat_and_batch(chat: Slo, models: Sequence[str] = ("default",)) -> tuple[TrafficClass, ...]:
    """Return 60 % ShareGPT-like chat with an SLO and 40 % best effort (BROS 7.1's lengths) for each model."""
    return tuple(
        traffic
        for model in models
        for traffic in (
            TrafficClass("chat", 0.6, chat, 0, "sharegpt", model),
            TrafficClass("batch", 0.4, Slo(), 10, "bros-best-effort", model),
        )
    )


def chat_batch(rate: float, duration: float, seed: int, chat: Slo, longest: int) -> Workload:
    """Return `chat_and_batch` with Poisson arrivals, without requests longer than `longest` tokens."""
    rng = np.random.default_rng(seed)
    workload = make(chat_and_batch(chat), poisson(rate, duration, rng), rng)
    return workload.take(np.flatnonzero(workload.prompt + workload.output <= longest))


def simulate(
    recipes: Sequence[str],
    fleet: Machines,
    workload: Workload,
    *,
    bar: bool = True,
    plan_seconds: Callable[[int], float] = no_time,
    keep: Keep | None = None,
) -> Results:
    """Run the workload under each recipe; with `keep`, record each run and write its folder."""
    _check(recipes, fleet.instances(workload.models[0]))
    found = Results()
    with Progress(disable=not bar, transient=True) as progress:
        for name in recipes:
            task = progress.add_task(name, total=workload.arrival.size)

            def advance(done: int, task: Any = task) -> None:
                progress.update(task, completed=done)

            _simulate(name, fleet, workload, plan_seconds, keep, advance, found)
    return found


def _simulate(
    name: str,
    fleet: Machines,
    workload: Workload,
    plan_seconds: Callable[[int], float],
    keep: Keep | None,
    advance: Callable[[int], None],
    found: Results,
) -> None:
    """Run the workload under one recipe and add the results to `found`."""
    instances = fleet.instances(workload.models[0])
    recorder = Recorder(keep.megabytes) if keep else None
    began = time.perf_counter()
    run = Simulation(find(name), instances, workload, plan_seconds=plan_seconds, scale=fleet.scale)
    outcome = run.run(advance, recorder)
    wall = time.perf_counter() - began
    counters = {"preemptions": float(outcome.evictions.sum()), "engine_hours": outcome.engine_s / 3600}
    counters |= {"prompt.hit_pct": outcome.hit_pct} if outcome.queried else {}
    found.records[name] = (records(workload, outcome), counters)
    end = float(np.nanmax(outcome.end, initial=0.0))
    found.speeds[name] = Speed(wall, end, outcome.iterations)
    found.events[name] = _events(outcome) + _overflowed(instances, workload, outcome)
    if keep and recorder:
        found.runs[name] = keep.run(name, run.instances, workload, outcome, recorder.recording())


def file_name(recipe: str) -> str:
    """Return a recipe's name without characters that do not belong in a file name, as in module:attribute."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", recipe)


def _check(recipes: Sequence[str], instances: Sequence[InstanceSpec]) -> None:
    """Raise ConfigError for an unknown recipe, or one that copies KV if a profile has no bandwidth for that."""
    for name in recipes:
        recipe = find(name)
        unknown = [
            spec.instance.id
            for spec in instances
            if not math.isfinite(spec.copy_seconds) and recipe.packer(spec.engine_spec(OnlineLatency())).kv.saves
        ]
        if unknown:
            needs = recipe.packer(EngineSpec(1, 1)).kv.saves
            other = "use another recipe" if needs else "set host_kv_gib=0 in --instance"
            raise ConfigError(
                f"{name} copies KV to the host; the profile of {unknown[0]} has no bandwidth for it.",
                f"Add kv_copy_gb_s to a copy of its latency profile, or {other}.",
                param="recipes",
            )


def _events(outcome: Outcome) -> str:
    """Describe refusals, model swaps and planner time, which a table of latencies lacks."""
    parts = {
        "requests shed": outcome.shed,
        "requests infeasible": outcome.infeasible,
        "requests failed": outcome.failed,
        "engine failures": outcome.failures,
        "model swaps": outcome.swaps,
        "s of planning": round(outcome.planning, 3),
    }
    return "".join(f", {count:g} {what}" for what, count in parts.items() if count)


def _overflowed(instances: Sequence[InstanceSpec], workload: Workload, outcome: Outcome) -> str:
    """Say how many requests went to overflow engines, and for how much."""
    parts = list[str]()
    for number, spec in enumerate(instances):
        if (terms := spec.instance.overflow) is not None:
            there = np.isfinite(outcome.end) & (outcome.instance == number)
            units = terms.units(int(workload.prompt[there].sum()), int(workload.output[there].sum()))
            parts.append(f", {there.sum()} requests to {spec.instance.id} for {units:.4g} units")
    return "".join(parts)


def records(workload: Workload, outcome: Outcome) -> list[Record]:
    """Return the simulated requests as records."""
    slos = _slos(workload)
    columns = zip(
        workload.tier.tolist(),
        workload.arrival.tolist(),
        outcome.first.tolist(),
        outcome.end.tolist(),
        outcome.gap.tolist(),
        workload.prompt.tolist(),
        workload.output.tolist(),
        slos,
        strict=True,
    )
    return [_record(workload.tiers[tier], *rest) for tier, *rest in columns]


def _record(tier: str, at: float, first: float, end: float, gap: float, prompt: int, output: int, slo: Slo) -> Record:
    """Return one request's record; a request without an end was refused or fits no instance."""
    if math.isfinite(end):
        return Record(tier, at, at, first, end, prompt, output, _NO_GAPS, 200, None, slo, longest_gap=gap)
    return Record(tier, at, at, None, None, prompt, 0, _NO_GAPS, 429, "dropped: refused or too long", slo)


def _slos(workload: Workload) -> list[Slo]:
    """Return each request's SLO; equal SLOs share an object, which is faster for 100,000 requests."""
    names = ("ttft", "tpot", "e2e", "itl", "line", "share")
    columns = np.stack([getattr(workload, name) for name in names], axis=1)
    kinds, which = np.unique(columns, axis=0, return_inverse=True)
    limits = [[limit if math.isfinite(limit) else None for limit in kind] for kind in kinds.tolist()]
    slos = [
        Slo(ttft, tpot, e2e, line=bool(line), itl=itl, share=share if share and share < 1.0 else None)
        for ttft, tpot, e2e, itl, line, share in limits
    ]
    return [slos[kind] for kind in which.ravel().tolist()]
