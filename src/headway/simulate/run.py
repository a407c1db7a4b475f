"""The simulator's entry point: a workload, a recipe and a fleet in virtual time.

Controller, planner and packers are the server's; the clients, the network and the GPU are simulated.
`loop.py` runs a simulation. Where numba can compile all parts of it, `compiled_loop.py` does, with the same
outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headway.config.tables import Scale
from headway.errors import ConfigError
from headway.policy.core.controller import Controller
from headway.policy.forecast.lengths.padding import QUANTILE, Padded
from headway.policy.forecast.lengths.task import GaussianLengths, TaskLengths
from headway.policy.recipes.recipe import Recipe
from headway.policy.scale.rates import DAY_S
from headway.policy.scale.scaler import Scaling
from headway.ports import Lengths, Planner
from headway.simulate import compiled_loop, compiled_state
from headway.simulate.elastic import Decide, ElasticLoop, by_promises, expanded
from headway.simulate.fleet import check_fleet
from headway.simulate.forecasts import Oracle
from headway.simulate.instance import InstanceSpec, Load, SimulatedInstance, check
from headway.simulate.loop import CHUNK
from headway.simulate.outcome import Failure, Observer, Outcome
from headway.simulate.workload.traffic import Workload
from headway.types import Floats

if TYPE_CHECKING:
    from headway.simulate.compiled_fleet import CompiledFleet

__all__ = ["Failure", "InstanceSpec", "Load", "Outcome", "Simulation", "no_time"]


def no_time(queued: int) -> float:
    """Return the planning time of a planner that costs nothing."""
    return 0.0


@dataclass(slots=True)
class Simulation:
    """One run. Several tenants take turns, as on a server whose keys name several.

    instances: the fleet.
    lengths: forecasts output lengths (default: learned per task during the run). A recipe that is meant for
        padded or an oracle's forecasts gets those.
    max_queued: requests that may wait in the gateway.
    plan_seconds: virtual seconds that the planner takes for that many queued requests. Its commands take
        effect that much later, on a cluster that may have changed. It runs once at a time; events in the
        meantime are noted, and planned for when it has ended. Of a planner that thinks (`Planner.thinks`) it
        is `deliberate` that takes so long.
    failures: of instances; a failed instance has lost its work, so its requests run again from the start.
    tick: seconds after which the planner runs again while requests wait and no iteration is in progress.
    ends: runs of applications end with their last request, and engines are told, as where clients say so.
    until: instant at which the run ends; requests without an end by then have NaN.
    scale: models whose engines come and go; the fleet is the one at the start. decide: how many there should be.
    history: arrivals before the run by model, in negative seconds, that the forecast has seen.
    day_s: seconds of a day of the traffic.
    seed: of failures at random times, and of lengths that a recipe draws.
    fast: run as one compiled loop where every part of the run can be; the outcome is the same.
    """

    recipe: Recipe
    instances: Sequence[InstanceSpec]
    workload: Workload
    lengths: Lengths = field(default_factory=TaskLengths)
    max_queued: int = 1_000_000
    plan_seconds: Callable[[int], float] = no_time
    failures: Sequence[Failure] = ()
    tick: float = 1.0
    ends: bool = False
    until: float = math.inf
    fast: bool = True
    scale: Mapping[str, Scale] = field(default_factory=dict, hash=False)
    decide: Decide = by_promises
    history: Mapping[str, Floats] = field(default_factory=dict)
    day_s: float = DAY_S
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recipe.lengths == "padded":
            self.lengths = Padded(self.lengths, QUANTILE)
        elif self.recipe.lengths == "oracle":
            self.lengths = Oracle(self.workload)
        elif self.recipe.lengths == "drawn" and not isinstance(self.lengths, GaussianLengths):
            self.lengths = GaussianLengths(draws=np.random.default_rng(self.seed))

    def run(self, progress: Callable[[int], None] | None = None, observer: Observer | None = None) -> Outcome:
        """Run to the end of the last request, or `until`.

        progress: is called with the number of requests that have arrived.
        observer: is called for every iteration; with one the run is not a compiled loop.

        Raises ConfigError, before anything runs, for a fleet that can never serve this workload; HeadwayError
        when requests wait that the planner sends nowhere.
        """
        planner = self.recipe.planner()
        running = [spec.instance.id for spec in self.instances]
        self.instances = expanded(self.instances, self.scale)
        check(self.instances)
        check_fleet(self.instances, self.workload, swaps=planner.swaps)
        self._check_failures()
        if self.fast and observer is None and (outcome := self._compiled(planner, progress)) is not None:
            return outcome
        if self._several_tenants:
            planner.take_turns()
        instances = [SimulatedInstance(spec, self.recipe) for spec in self.instances]
        scaling = self._scaling() if self.scale else None
        controller = Controller(planner, self.lengths, self.max_queued, scaling=scaling)
        loop = ElasticLoop(
            self.workload,
            controller,
            instances,
            plan_seconds=self.plan_seconds,
            tick=self.tick,
            ends=self.ends,
            failures=self.failures,
            observer=observer,
            scale=self.scale,
            running=running,
            decide=self.decide,
            rng=np.random.default_rng(self.seed),
            compiled=self._fleet(instances) if self.fast and observer is None else None,
        )
        return loop.run(progress, self.until)

    def _fleet(self, instances: Sequence[SimulatedInstance]) -> CompiledFleet | None:
        """Return the engines as compiled loops take them; None when one of them cannot be compiled."""
        from headway.simulate.compiled_fleet import CompiledFleet  # brings numba

        return CompiledFleet.of(instances)

    def _scaling(self) -> Scaling:
        """Return the scaling, which knows the history."""
        scaling = Scaling(self.scale, self.day_s)
        for model, times in self.history.items():
            scaling.scalers[model].expected()  # from now on forecasts are compared with what came
            for at in times.tolist():
                scaling.scalers[model].came(at)
        return scaling

    @property
    def _several_tenants(self) -> bool:
        return np.unique(self.workload.tenant).size > 1

    def _compiled(self, planner: Planner, progress: Callable[[int], None] | None) -> Outcome | None:
        """Run as one compiled loop; None when a part of this run cannot be compiled."""
        if self._several_tenants and type(planner).take_turns is not Planner.take_turns:
            return None
        plain = len(self.instances) == 1 and not self.failures and self.plan_seconds is no_time
        one = self.instances[0]
        plain = plain and planner.pull and not one.others and not one.delays
        plain = plain and not self.workload.drop.any() and not one.prefix_caching
        plain = plain and not (self.workload.share < 1).any()
        plain = plain and not self.scale and math.isinf(one.mtbf_s) and one.instance.overflow is None
        if not plain:
            return None
        state = compiled_state.initial_state(self.recipe, self.instances[0], self.workload, self.lengths)
        if state is None:
            return None
        size = len(self.workload)
        for stop in range(min(CHUNK, size), size + CHUNK, CHUNK):
            compiled_loop.advance(state, min(stop, size), self.until)
            if progress is not None:
                progress(min(stop, size))
        outcome = compiled_state.outcome(state)
        outcome.engine_s = min(float(np.nanmax(outcome.end, initial=0.0)), self.until)
        return outcome

    def _check_failures(self) -> None:
        known = {spec.instance.id for spec in self.instances}
        for failure in self.failures:
            if failure.instance not in known:
                raise ConfigError(
                    f"No instance {failure.instance!r} can fail.", f"Use one of {', '.join(sorted(known))}."
                )
            if not (math.isfinite(failure.at) and failure.at >= 0 and failure.seconds >= 0):
                raise ConfigError(f"{failure} is impossible.", "Give seconds of 0 or more.")
