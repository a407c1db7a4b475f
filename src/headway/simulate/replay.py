"""Runs of applications in virtual time: a step begins when the one before it has ended.

The simulation is closed: how fast an engine answers decides when a run's next requests arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.engines.simulated.engine import Ran
from headway.errors import ConfigError
from headway.events import Prewarmed, Started, UnitBegan, UnitEnded
from headway.policy.apps.demand import SAMPLES, Costs, Draw
from headway.policy.apps.graph import LLM
from headway.policy.apps.run import Run, within
from headway.policy.apps.runs import Futures
from headway.policy.core.controller import Controller
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.recipe import Recipe
from headway.simulate.fleet import check_fleet
from headway.simulate.instance import InstanceSpec, SimulatedInstance, check
from headway.simulate.loop import Loop
from headway.simulate.outcome import Observer, Outcome
from headway.simulate.run import no_time
from headway.simulate.warm_engines import Adapters, KvCache, WarmEngine, around
from headway.simulate.warm_pool import WarmPool
from headway.simulate.workload.applications import Applications, Step
from headway.simulate.workload.traffic import Workload, concat
from headway.stages import Prewarm, Resource, Stage
from headway.types import Floats, Request, Slo

if TYPE_CHECKING:
    from headway.simulate.compiled_fleet import CompiledFleet


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the runs.

    end: instants at which they were complete, NaN = never.
    outcome: of their requests.
    pool: the backends outside the LLM.
    engine: with its cache, where there is one.
    """

    end: Floats
    outcome: Outcome
    pool: WarmPool
    engine: WarmEngine | None = None


@dataclass(slots=True)
class _Progress:
    """Where a run is: its step, and how many requests of it are to end."""

    step: int = -1
    left: int = 0


class ReplayLoop(Loop):
    """The loop over requests that arrive when a run's earlier steps have ended.

    pause: seconds between two steps of a run. pool: backends outside the LLM. warm: the engine with a cache.
    beside: requests with arrivals of their own, sorted; they are the first rows of the loop's workload.
    compiled: as in `Loop`.
    """

    def __init__(
        self,
        apps: Applications,
        controller: Controller,
        instances: Sequence[SimulatedInstance],
        *,
        pause: float,
        pool: WarmPool,
        observer: Observer | None = None,
        warm: WarmEngine | None = None,
        beside: Workload | None = None,
        compiled: CompiledFleet | None = None,
    ) -> None:
        workload = apps.workload if beside is None else concat(beside, apps.workload)
        more: dict[str, Any] = {"observer": observer, "compiled": compiled}
        super().__init__(workload, controller, instances, plan_seconds=no_time, tick=1.0, **more)
        self._beside = 0 if beside is None else len(beside)
        del self._arrivals[self._beside :]  # each request of a run arrives when its run gets there
        self.end = np.full(len(apps), math.nan)
        self._apps, self._pause, self._pool, self._warm_engine = apps, pause, pool, warm
        self._progress = [_Progress() for _ in range(len(apps))]
        self._due = len(apps)  # runs to come, or in progress
        for run, arrival in enumerate(apps.arrival.tolist()):
            self._future.at(arrival, partial(self._next_step, run))

    @property
    def _more(self) -> bool:
        return self._due > 0

    def _started(self, instance: SimulatedInstance, ran: Ran, now: float) -> None:
        jobs = instance.engine.jobs
        for id in jobs.names(ran.rows[jobs.first[ran.rows] == now]):
            self._notify(Started(id), now)

    def _prewarm(self, command: Prewarm, now: float) -> None:
        resource, seconds = command.resource, 0.0
        if resource.kind == "backend":
            seconds = self._pool.warm(resource.name, now, command.until)
        elif self._warm_engine is not None:
            seconds = self._warm_engine.warm(resource, command.run, now, command.until)
        if seconds:
            self._future.at(now + seconds, partial(self._end_warm_up_of, Prewarmed(resource, seconds)))

    def _end_warm_up_of(self, event: Prewarmed, now: float) -> None:
        """Tell that a resource is warm; an engine with a cache begins its next load."""
        if self._warm_engine is not None:
            self._warm_engine.follow(now)
        self._notify(event, now)

    def _next_step(self, run: int, now: float) -> None:
        """Begin the next step of a run, or end the run."""
        script, progress = self._apps.runs[run], self._progress[run]
        progress.step += 1
        if progress.step == len(script.steps):
            self.end[run] = now
            self._stop(run, now)
            return
        step, stage = script.steps[progress.step], self._stage(run)
        if step.backend != LLM:
            self._begin_outside(run, step, stage, now)
            return
        rows = self._apps.rows[run]
        mine = range(rows[progress.step], rows[progress.step + 1])
        progress.left = len(mine)
        slo = within(Slo(), stage.target, float(self._apps.arrival[run]), now)
        adapter = self._apps.adapters[run] if self._apps.adapters else None
        for row in mine:
            request = self.workload.request(self._beside + row)
            request = replace(request, arrival=now, stage=stage, slo=slo, adapter=adapter)
            self._come(request, now)

    def _come(self, request: Request, now: float) -> None:
        """Let a request arrive; an engine with a cache knows it before it gets it."""
        if self._warm_engine is not None:
            self._warm_engine.arrived(request)
        self._arrive(request, now)
        if self._warm_engine is not None:
            self._warm_engine.follow(now)

    def _begin_outside(self, run: int, step: Step, stage: Stage, now: float) -> None:
        """Begin a unit outside the LLM; its recorded seconds are those with a cold backend."""
        self._notify(UnitBegan(self._tenant(run), stage, step.backend), now)
        cold = self._pool.cold_s.get(step.backend, 0.0)
        serves = max(step.seconds - cold, 0.0)
        delay = self._pool.take(step.backend, serves, now)
        if delay and delay == cold:
            warm = Prewarmed(Resource("backend", step.backend), cold)
            self._future.at(now + cold, partial(self._notify, warm))
        self._future.at(now + delay + serves, partial(self._end_outside, run, stage))

    def _end_outside(self, run: int, stage: Stage, now: float) -> None:
        self._notify(UnitEnded(self._tenant(run), stage), now)
        self._go_on(run, now)

    def _end_request(self, id: str, first: float, evictions: int, overhead: float, now: float) -> None:
        super()._end_request(id, first, evictions, overhead, now)
        row = self.workload.row_of(id)
        if row < self._beside:
            return
        run = int(self.workload.runs[self.workload.run[row]])
        self._progress[run].left -= 1
        if self._progress[run].left == 0:
            self._go_on(run, now + overhead)

    def _go_on(self, run: int, end: float) -> None:
        """Schedule what follows a step: the next one after a pause, or the run's end."""
        last = self._progress[run].step + 1 == len(self._apps.runs[run].steps)
        self._future.at(end if last else end + self._pause, partial(self._next_step, run))

    def _stop(self, run: int, now: float) -> None:
        self._due -= 1
        if self._warm_engine is not None:
            self._warm_engine.run_ended(str(run))
        self._end_run((self._tenant(run), self._apps.runs[run].app, str(run)), now)

    def _stage(self, run: int) -> Stage:
        script, target = self._apps.runs[run], float(self._apps.target[run])
        unit = script.steps[self._progress[run].step].unit
        return Stage(script.app, str(run), unit, None if math.isinf(target) else target)

    def _tenant(self, run: int) -> str:
        return self._apps.runs[run].app


def replay(
    recipe: Recipe,
    instances: Sequence[InstanceSpec],
    apps: Applications,
    *,
    pause: float = 0.0,
    cold_s: Mapping[str, float] | None = None,
    progress: Callable[[int], None] | None = None,
    observer: Observer | None = None,
    until: float = math.inf,
    cache: KvCache | Adapters | None = None,
    beside: Workload | None = None,
    fast: bool = False,
) -> Replayed:
    """Run applications to their end, at most to the instant `until`.

    Each application is a tenant, as fair sharing (VTC) counts it. cold_s: seconds that backends outside the
    LLM need to start, by name; they are part of the recorded seconds of the units that they serve. cache: of
    the only instance. beside: other requests, as in `ReplayLoop`. fast: iterations are compiled, where they can be;
    the planner then plans at ends of requests, not at first tokens.
    Raises ConfigError for a fleet that cannot serve the workload.
    """
    planner = recipe.planner()
    check(instances)
    check_fleet(instances, apps.workload, swaps=planner.swaps)
    fleet = [SimulatedInstance(spec, recipe) for spec in instances]
    controller = Controller(planner, TaskLengths(), max_queued=1 << 40)
    pool = WarmPool(cold_s or {})
    warm = None if cache is None else _install(fleet, cache)
    if warm is not None:
        warm.rank = planner.rank
    compiled = _compiled(fleet) if fast else None
    more: dict[str, Any] = {"observer": observer, "warm": warm, "beside": beside, "compiled": compiled}
    loop = ReplayLoop(apps, controller, fleet, pause=pause, pool=pool, **more)
    outcome = loop.run(progress, until)
    pool.close()
    if warm is not None:
        warm.cache.close()
    return Replayed(loop.end, outcome, pool, warm)


def _compiled(fleet: Sequence[SimulatedInstance]) -> CompiledFleet | None:
    from headway.simulate.compiled_fleet import CompiledFleet  # brings numba

    return CompiledFleet.of(fleet)


def _install(fleet: Sequence[SimulatedInstance], cache: KvCache | Adapters) -> WarmEngine:
    """Give the only instance an engine with a cache."""
    if len(fleet) != 1:
        raise ConfigError(
            f"A cache of KV or adapters is simulated on one instance, not on {len(fleet)}.", "Give one instance."
        )
    engine = around(fleet[0].engine, cache)
    fleet[0].engine = engine
    return engine


def oracle(apps: Applications) -> Futures:
    """Return the futures of runs as they will be, in the place of a demand graph's."""

    def futures(run: Run, costs: Costs) -> Draw:
        steps = apps.runs[int(run.key[2])].steps[run.steps - 1 :]
        work = sum(_service(step, costs) for step in steps)
        path = sum(_path(step, costs) for step in steps)
        same = np.ones(SAMPLES)
        return Draw(work * same, path * same, _path(steps[0], costs) * same, np.full(SAMPLES, -1))

    return futures


def _service(step: Step, costs: Costs) -> float:
    return step.seconds + sum(prompt * costs.delay + out * costs.output for prompt, out in step.requests)


def _path(step: Step, costs: Costs) -> float:
    prompts = sum(prompt for prompt, _ in step.requests)
    return step.seconds + prompts * costs.prompt + max((o for _, o in step.requests), default=0) * costs.output
