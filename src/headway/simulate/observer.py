"""The observer of a simulation, which is called as things happen.

What every run records is in its `Outcome`; what only some users need is an observer's task.
"""

from __future__ import annotations

from headway.engines.simulated.engine import Ran, SimulatedEngine


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
