"""The failures that a simulation is given, and the outcome that it returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance fails.

    at: the instant.
    seconds: after which it is up again, inf = never.
    """

    instance: str
    at: float
    seconds: float = math.inf


@dataclass(slots=True)
class Outcome:
    """What became of the requests of a workload.

    Columns, by row of the workload:
    first, end: instants of the first token and of the end, NaN = never.
    instance: the index of its (last) instance in the fleet, -1 = it was never sent.
    evictions: how often it lost its KV, of those that have ended.
    gap: the longest silence between two tokens, seconds, of those that have ended.

    Sums over all instances:
    iterations, busy: how many, and their seconds.
    preempted: requests that lost their KV because memory was short.
    paused: requests that kept their KV and computed nothing, summed over iterations.
    shed: requests that the planner refused after they had arrived.
    infeasible: requests of classes that drop which were refused because they could not be on time.
    failed: requests that were too long for the instance they were sent to.
    swaps: models loaded in place of others. restarts: those of them that were not loaded in a running engine.
    planning: virtual seconds that the planner took.
    engine_s: seconds that engines ran, each from its start until it has stopped. failures: at random times.
    queried, hits: tokens that requests looked up in a prefix cache when they were admitted for the first
        time, and those that it had, as vLLM's `prefix_cache_queries` and `prefix_cache_hits` count them.
    """

    first: Floats
    end: Floats
    instance: Ints
    evictions: Ints
    gap: Floats
    iterations: int = 0
    busy: float = 0.0
    preempted: int = 0
    paused: int = 0
    shed: int = 0
    failed: int = 0
    swaps: int = 0
    planning: float = 0.0
    infeasible: int = 0
    restarts: int = 0
    queried: int = 0
    hits: int = 0
    engine_s: float = 0.0
    failures: int = 0

    @property
    def hit_pct(self) -> float:
        """Share of the queried tokens that prefix caches had, in %; 0 where nothing was queried."""
        return 100 * self.hits / self.queried if self.queried else 0.0

    @classmethod
    def of(cls, size: int) -> Outcome:
        """Return the outcome of `size` requests before the run."""
        never = np.full(size, np.nan)
        return cls(never, never.copy(), np.full(size, -1), np.zeros(size, np.int64), np.zeros(size))


class Observer:
    """Base class whose methods do nothing; subclasses override those they need.

    Requests are rows of the workload, instances their number in the fleet.
    """

    def sent(self, request: int, instance: int, now: float, found: int) -> None:
        """A request was submitted to an instance, which has not admitted it yet. found: as in `Send`."""

    def entered(self, request: int, instance: int, row: int) -> None:
        """It was admitted between two iterations, and is `row` of the jobs there."""

    def returned(self, request: int, now: float) -> None:
        """A request was taken out of its instance unfinished."""

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        """An iteration was decided; the jobs are as they were before it computes.

        ran: without rows, and with 0 seconds: the engine idles from now on.
        queued: requests in no instance.
        """
