"""The planner of a simulation, and the virtual seconds that it takes.

One plan at a time, as in the gateway (`gateway/control/control.py`): what happens while one is
made is planned for when it is ready. Of a planner that thinks (`Planner.thinks`),
`deliberate` takes the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from headway.errors import ConfigError
from headway.policy.core.controller import Controller
from headway.simulate.event_queue import EventQueue
from headway.types import Command, Swap, Warm

Execute = Callable[[Sequence[Command], float], None]


class PlanningTime:
    """Asks the controller for commands and has them executed when the planner's time is over.

    plan_seconds: virtual seconds for that many queued requests.
    spent: the sum of them.
    """

    def __init__(
        self, controller: Controller, plan_seconds: Callable[[int], float], future: EventQueue, execute: Execute
    ) -> None:
        self._controller, self._plan_seconds = controller, plan_seconds
        self._future, self._execute = future, execute
        self._planned: list[Command] | None = None  # what the planner, which is still running, will command
        self._deliberates = False  # a long computation of the planner is under way
        self._again = False  # something has happened since the planner began
        self.spent = 0.0

    def decide(self, now: float) -> None:
        """Start the planner unless it is running; its commands are executed when its time is over."""
        if self._planned is not None:
            self._again = True
            return
        thinks = self._controller.planner.thinks
        plans = self._controller.queued and self._controller.cluster.instances
        seconds = self._seconds() if plans and not thinks else 0.0
        commands = self._controller.decide(now)
        if seconds > 0:
            self._planned = commands
            self._future.at(now + seconds, self._plan_ends)
        else:
            self._execute(commands, now)
            if thinks:
                self._deliberate(now)

    def drop(self, instance: str) -> None:
        """Drop the swaps and warm-ups planned for an instance that has failed in the meantime."""
        if self._planned is not None:
            self._planned = [
                command
                for command in self._planned
                if not (isinstance(command, Swap | Warm) and command.instance == instance)
            ]

    def _deliberate(self, now: float) -> None:
        """Run the planner's long computation; what it returns is known when its time is over."""
        if self._deliberates or (work := self._controller.deliberate(now)) is None:
            return
        seconds, result = self._seconds(), work()
        if seconds > 0:
            self._deliberates = True
            self._future.at(now + seconds, partial(self._conclude, result))
        else:
            self._conclude(result, now)

    def _conclude(self, result: object, now: float) -> None:
        self._deliberates = False
        self._execute(self._controller.conclude(result, now), now)

    def _plan_ends(self, now: float) -> None:
        """Execute the plan; plan again for what has happened since it began."""
        commands, self._planned = self._planned or [], None
        again, self._again = self._again, False
        self._execute(commands, now)
        if again:
            self.decide(now)

    def _seconds(self) -> float:
        seconds = self._plan_seconds(self._controller.queued)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"A plan cannot take {seconds} s.", "Let plan_seconds give 0 or more.")
        self.spent += seconds
        return seconds
