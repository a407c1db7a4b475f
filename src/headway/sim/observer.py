"""Who watches a run?

A simulation tells its observer what it does, as it does it; without one that costs nothing. What a run must
know of itself is in its `Outcome`; what only somebody wants to know is an observer's.
"""

from __future__ import annotations

from headway.engines.simulated.engine import Ran, SimulatedEngine


class Observer:
    """What is told of a run. Requests are rows of the workload, instances their number in the fleet.

    Who subclasses it says only what it wants to know: the rest does nothing.
    """

    def sent(self, request: int, instance: int, now: float) -> None:
        """A request was sent to an instance, and is before its door."""

    def entered(self, request: int, instance: int, row: int) -> None:
        """It was let in between two iterations, and is `row` of the jobs there."""

    def returned(self, request: int, now: float) -> None:
        """A request came out of its instance unfinished."""

    def iteration(
        self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int
    ) -> None:
        """An iteration was decided: the jobs are as they were before it computes.

        No rows and 0 seconds: nothing can run from now on. queued: requests in no instance.
        """
