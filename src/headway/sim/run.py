"""What if? A workload meets a recipe and a fleet in virtual time.

The same controller, planner and packers as in the server; only the clients, the network and the GPU are
replaced. `loop.py` runs it; `compiled_loop.py` does where all parts of it are compiled, with the same outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.errors import ConfigError
from headway.forecast.lengths.padding import QUANTILE, Padded
from headway.forecast.lengths.task import TaskLengths
from headway.ports import Lengths
from headway.recipes.recipe import Recipe
from headway.sim import compiled_loop
from headway.sim.forecasts import Oracle
from headway.sim.instance import InstanceSpec, Load, check, check_fleet
from headway.sim.loop import CHUNK, Loop
from headway.sim.observer import Observer
from headway.sim.outcome import Failure, Outcome
from headway.sim.workload.traffic import Workload

__all__ = ["Failure", "InstanceSpec", "Load", "Outcome", "Simulation", "no_time"]


def no_time(queued: int) -> float:
    """Planning that costs nothing."""
    return 0.0


@dataclass(slots=True)
class Simulation:
    """One run. `lengths` forecasts outputs as in the server (default: learned per task while it runs).
    A recipe that is meant for padded or an oracle's forecasts gets those.

    plan_seconds: what the planner takes for that many queued requests, in virtual seconds. What it decides
    takes effect that much later, on a cluster that may have changed; it does not run twice at once, so what
    happens meanwhile is noted and decided about afterwards. failures: instances that die. What dies has lost
    its work: its requests come back and are answered anew.
    until: instant at which the run ends; what is not answered then never is (NaN).
    fast: run as one compiled loop when every part of it can (`compiled_loop.py`); the outcome is the same.
    """

    recipe: Recipe
    nodes: Sequence[InstanceSpec]
    workload: Workload
    lengths: Lengths = field(default_factory=TaskLengths)
    max_queued: int = 1_000_000
    plan_seconds: Callable[[int], float] = no_time
    failures: Sequence[Failure] = ()
    tick: float = 1.0  # seconds after which the planner is asked again when requests wait and nothing runs
    until: float = math.inf
    fast: bool = True

    def __post_init__(self) -> None:
        if self.recipe.lengths == "padded":
            self.lengths = Padded(self.lengths, QUANTILE)
        elif self.recipe.lengths == "oracle":
            self.lengths = Oracle(self.workload)

    def run(self, progress: Callable[[int], None] | None = None, observer: Observer | None = None) -> Outcome:
        """Run to the end of the last request, or `until`.

        progress is told how many have arrived, observer every iteration (it costs nothing when absent; with
        it the run is not one compiled loop).

        Raises ConfigError, before anything runs, for a fleet that can never serve this workload; HeadwayError
        when requests wait that the planner sends nowhere.
        """
        check(self.nodes)
        check_fleet(self.nodes, self.workload, swaps=self.recipe.swaps)
        self._check_failures()
        if self.fast and observer is None and (outcome := self._compiled(progress)) is not None:
            return outcome
        run = Loop(self, observer)
        run.go(progress, self.until)
        return run.outcome

    def _compiled(self, progress: Callable[[int], None] | None) -> Outcome | None:
        """Run as one compiled loop; None when this run has a part that is known to Python only."""
        plain = len(self.nodes) == 1 and not self.failures and self.plan_seconds is no_time
        plain = plain and math.isinf(self.until)
        plain = plain and self.recipe.pull and not self.nodes[0].others and not self.nodes[0].delays
        if not plain or type(self.lengths) is not TaskLengths:
            return None
        world = compiled_loop.world(self.recipe, self.nodes[0], self.workload, self.lengths)
        if world is None:
            return None
        size = len(self.workload)
        for stop in range(min(CHUNK, size), size + CHUNK, CHUNK):
            compiled_loop.advance(world, min(stop, size))
            if progress is not None:
                progress(min(stop, size))
        node = np.where(world.jobs["serial"] > 0, 0, -1)
        counts = world.counts
        return Outcome(
            world.first, world.end, node, world.jobs["evictions"].copy(), int(counts[compiled_loop.ITERATIONS]),
            float(world.clock[compiled_loop.BUSY]), int(counts[compiled_loop.PREEMPTED]), int(counts[compiled_loop.PAUSED]),
        )  # fmt: skip

    def _check_failures(self) -> None:
        known = {node.instance.id for node in self.nodes}
        for failure in self.failures:
            if failure.instance not in known:
                raise ConfigError(
                    f"No instance {failure.instance!r} can fail.", f"Use one of {', '.join(sorted(known))}."
                )
            if not (math.isfinite(failure.at) and failure.at >= 0 and failure.seconds >= 0):
                raise ConfigError(f"{failure} is no failure.", "Give seconds of 0 or more.")
