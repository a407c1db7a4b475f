"""Open real-time arrivals beside a closed loop of best-effort batches (BROS 7.1), SIMULATED."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from headway.policy.core.controller import Controller
from headway.policy.recipes.recipe import Recipe
from headway.simulate.forecasts import Oracle
from headway.simulate.instance import InstanceSpec, SimulatedInstance, check
from headway.simulate.loop import Loop
from headway.simulate.outcome import Observer, Outcome
from headway.simulate.run import no_time
from headway.simulate.workload.traffic import Workload

_QUEUED = 1_000_000


class ClosedLoop(Loop):
    """The closed loop over a workload's last rows: each batch arrives when the previous one has ended.

    open: number of rows with a fixed arrival; the rows after them form the batches.
    batch: requests per batch.
    stop: time after which no batch begins.
    """

    def __init__(
        self,
        workload: Workload,
        controller: Controller,
        instances: list[SimulatedInstance],
        *,
        open: int,
        batch: int,
        stop: float,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(workload, controller, instances, plan_seconds=no_time, tick=1.0, observer=observer)
        self._arrivals = self._arrivals[:open]
        self._rest = deque(range(open, len(workload)))
        self._open, self._batch, self._stop, self._left = open, batch, stop, 0
        self._due = bool(self._rest)  # a batch arrives now
        if self._due:
            self._future.at(0.0, self._next_batch)

    @property
    def _more(self) -> bool:
        return self._due

    def _next_batch(self, now: float) -> None:
        assert self._rest, "the workload has fewer batches than were served"
        self._due = False
        for _ in range(min(self._batch, len(self._rest))):
            self._left += 1
            self._arrive(replace(self.workload.request(self._rest.popleft()), arrival=now), now)

    def _end_request(self, id: str, first: float, evictions: int, overhead: float, now: float) -> None:
        super()._end_request(id, first, evictions, overhead, now)
        if self.workload.row_of(id) < self._open:
            return
        self._left -= 1
        if not self._left and now < self._stop:
            self._due = True
            self._future.at(now, self._next_batch)


def run(
    recipe: Recipe,
    spec: InstanceSpec,
    workload: Workload,
    *,
    open: int,
    batch: int,
    stop: float,
    until: float,
    observer: Observer,
) -> Outcome:
    """Run a recipe that knows all lengths on one engine, at most until time `until`."""
    check([spec])
    controller = Controller(recipe.planner(), Oracle(workload), _QUEUED)
    loop = ClosedLoop(
        workload, controller, [SimulatedInstance(spec, recipe)], open=open, batch=batch, stop=stop, observer=observer
    )
    return loop.run(None, until)
