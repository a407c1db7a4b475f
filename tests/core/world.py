"""The controller's surroundings in tests: clients, and engines that answer, die and come back.

It keeps its own account of every request, and `tell` compares each command with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.events import Arrived, Event, Failed, Finished, InstanceDown, InstanceUp, Returned, Started, Tick
from headway.policy.core.controller import Controller
from headway.policy.forecast.lengths.task import TaskLengths
from headway.policy.recipes.registry import find
from headway.types import Command, Instance, Progress, Reject, Request, Send, Slo
from tests.core.tables import Bits

MODELS = ("m0", "m1")
# Two that serve m0, one m1; unlike in size.
FLEET = {
    "e0": Instance("e0", "m0", 2, 60, 16, 2048, lead=1),
    "e1": Instance("e1", "m0", 4, 400, 16, 2048),
    "e2": Instance("e2", "m1", 1, 100, 16, 2048, lead=0),
}


def controller(recipe: str, max_queued: int = 1000) -> Controller:
    return Controller(find(recipe).planner(), TaskLengths(), max_queued)


@dataclass(slots=True)
class World:
    """queued: requests in the queue, in order of arrival. inside: request -> its instance. requests: both.

    watch is told what each single event led to (one act may be several events).
    drops: every other request is one that is dropped when it is late.
    bound: every third request may go to one instance only.
    started: requests inside that have a token. refused: those dropped, with what they were told and when.
    """

    core: Controller
    now: float = 1000.0
    queued: dict[str, Request] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    up: dict[str, Instance] = field(default_factory=dict)
    rejected: dict[str, Request] = field(default_factory=dict)
    watch: Callable[[list[Send]], None] = lambda sends: None
    serial: int = 0
    drops: bool = False
    bound: bool = False
    started: set[str] = field(default_factory=set)
    refused: dict[str, tuple[Request, Reject, float]] = field(default_factory=dict)

    def notify(self, event: Event) -> list[Command]:
        """Give the core an event and check its commands."""
        commands = self.core.on(event, self.now)
        for command in commands:
            if isinstance(command, Reject):  # refused while it was queued: that is its end
                self.rejected[command.id] = self.queued.pop(command.id)
                self.requests.pop(command.id)
                continue
            assert isinstance(command, Send), "no instance here can load another model"
            request = self.queued.pop(command.id)  # KeyError: not accepted, ended, or inside already
            assert command.instance in self.up, "sent to an instance that is not there"
            assert self.up[command.instance].model == request.model
            assert request.may(command.instance)
            self.inside[command.id] = command.instance
        self.watch([command for command in commands if isinstance(command, Send)])
        return commands

    def check(self, computed: int = 0) -> None:
        """Do what a host does at `Controller.next_check`; engines have computed so much of every prompt."""
        overdue = self.core.overdue(self.now)
        for reject in overdue.rejects:
            self._refuse(reject, self.queued.pop(reject.id))
        for name, ids in overdue.inside.items():
            assert all(self.inside[id] == name for id in ids)
            progress = {id: Progress(computed, int(id in self.started)) for id in ids}
            for reject in self.core.refuse(name, progress, self.now):
                assert reject.id not in self.started, "it has a token"
                del self.inside[reject.id]
                self._refuse(reject, self.requests[reject.id])

    def _refuse(self, reject: Reject, request: Request) -> None:
        assert request.drop
        self.refused[reject.id] = self.requests.pop(reject.id), reject, self.now
        self.notify(Failed(reject.id, "refused"))  # the request's own task ends, too

    def arrive(self, request: Request) -> list[Command]:
        self.requests[request.id] = self.queued[request.id] = request
        return self.notify(Arrived(request))

    def end(self, id: str, event: Event) -> list[Command]:
        """A request ends, inside or still queued (its client left)."""
        self.requests.pop(id)
        self.queued.pop(id, None)
        self.inside.pop(id, None)
        self.started.discard(id)
        return self.notify(event)

    def give_back(self, id: str) -> list[Command]:
        self.inside.pop(id)
        self.started.discard(id)
        self.queued[id] = self.requests[id]
        return self.notify(Returned(id))

    def start(self, name: str) -> list[Command]:
        self.up[name] = FLEET[name]
        return self.notify(InstanceUp(FLEET[name]))

    def stop(self, name: str) -> list[Command]:
        """An engine dies; its requests come back one by one, as the driver sees their streams break."""
        del self.up[name]
        out = self.notify(InstanceDown(name))
        for id in [id for id, at in self.inside.items() if at == name]:
            out += self.give_back(id)
        return out

    def load(self, name: str) -> int:
        return sum(at == name for at in self.inside.values())

    def act(self, choice: int) -> list[Command]:
        """Do the event that `choice` encodes."""
        bits = Bits(choice)
        kind = bits.take(10)
        self.now += bits.take(4) * 0.25
        if kind < 4:
            return self.arrive(self._request(bits))
        if kind < 8:
            return self._something_ends(kind, bits)
        name = list(FLEET)[bits.take(len(FLEET))]
        if kind == 8 and name in self.up:
            return self.stop(name)
        return self.start(name) if name not in self.up else self.notify(Tick())

    def _something_ends(self, kind: int, bits: Bits) -> list[Command]:
        inside, anywhere = list(self.inside), list(self.requests)
        if kind == 7 and anywhere:
            id = anywhere[bits.take(len(anywhere))]
            return self.end(id, Failed(id, "client_gone"))
        if not inside:
            return self.notify(Finished("stranger", 5))
        id = inside[bits.take(len(inside))]
        if kind == 6:
            return self.give_back(id)
        self.notify(Started(id))
        if self.drops and bits.take(2):  # it goes on
            self.started.add(id)
            return []
        return self.end(id, Finished(id, 1 + bits.take(40)))

    def _request(self, bits: Bits) -> Request:
        self.serial += 1
        late = bits.take(3) * 0.5  # a later event may be of an earlier arrival
        slo = Slo(ttft=[None, 0.5, 2.0][bits.take(3)], e2e=[None, 5.0][bits.take(2)])
        model = MODELS[bits.take(2)]
        able = [name for name, instance in FLEET.items() if instance.model == model]
        return Request(
            f"r{self.serial}",
            model,
            1 + bits.take(500),
            1 + bits.take(200),
            self.now - late,
            slo,
            bits.take(3) - 1,
            task=f"t{bits.take(2)}",
            drop=self.drops and self.serial % 2 == 0,
            engines=(able[self.serial % 2 % len(able)],) if self.bound and self.serial % 3 == 0 else (),
        )
