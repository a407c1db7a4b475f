"""A controller with instances that are up, and shorthand for requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.events import Arrived, Finished, InstanceUp
from headway.policy.core.controller import Controller
from headway.ports import Planner
from headway.types import Command, Forecast, Instance, Loadable, Reject, Request, Send


@dataclass(frozen=True)
class Known:
    """Length forecasts for answers of exactly max_tokens."""

    def forecast(self, request: Request) -> Forecast:
        return Forecast(np.array([float(request.max_tokens)]))

    def learn(self, request: Request, output_tokens: int) -> None:
        """It is known."""


def instance(id: str, running: int = 4, *, model: str = "m", blocks: int = 10_000, **more: object) -> Instance:
    if more.get("loadable"):
        more = {"loaded": Loadable(model, 10.0, 1.0, 4096), **more}
    return Instance(id, model, running, blocks, 16, 4096, **more)  # type: ignore[arg-type]


def ask(id: str, at: float = 0.0, *, prompt: int = 10, answer: int = 10, **more: object) -> Request:
    fields = {"model": "m", **more}
    return Request(id=id, prompt_tokens=prompt, max_tokens=answer, arrival=at, **fields)  # type: ignore[arg-type]


class Place:
    """The controller and what it did: requests by instance, requests rejected."""

    def __init__(self, planner: Planner, *instances: Instance) -> None:
        self.core = Controller(planner, Known(), 10_000)
        self.inside: dict[str, str] = {}
        self.order: list[str] = []
        self.rejected: list[str] = []
        self.requests: dict[str, Request] = {}
        for one in instances:
            self.notify(InstanceUp(one), 0.0)

    def notify(self, event: object, now: float) -> list[Command]:
        return self.note(self.core.on(event, now))  # type: ignore[arg-type]

    def note(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Send):
                self.inside[command.id] = command.instance
                self.order.append(command.id)
            elif isinstance(command, Reject):
                self.rejected.append(command.id)
        return commands

    def come(self, request: Request) -> list[Command]:
        self.requests[request.id] = request
        return self.notify(Arrived(request), request.arrival)

    def end(self, id: str, now: float) -> list[Command]:
        self.inside.pop(id)
        return self.notify(Finished(id, self.requests[id].max_tokens), now)

    def load(self, name: str) -> int:
        return sum(at == name for at in self.inside.values())

    @property
    def queued(self) -> list[str]:
        return [id for id in self.core.requests if id not in self.inside]
