"""The controller as a gateway in another process sees it.

The gateway has a controller, too, which plans nothing: from its own requests and what agents report
of their engines it admits requests, and knows what is loaded, by the same rules. What waits at other gateways
comes with `Standing`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from headway import clock
from headway.cluster.wire.messages import Alive, InFlight, Message, Present, Standing, Waiting, WireLink
from headway.events import Arrived, Event, Failed, Finished, Returned, Started
from headway.gateway.control.control import ControlView
from headway.policy.core.cluster import Cluster
from headway.policy.core.controller import Controller
from headway.policy.core.shares import Group
from headway.ports import Planner
from headway.stages import Prewarm
from headway.types import Command, Plan, Reject, Request, Send, Swap

EVERY_S = 0.5  # between two signs of life
REPORT_S = 1.0  # between two reports to a controller that still does not know this gateway ...
_REPORTED_PER_S = 10_000  # ... and more for what it has to take note of
_MOST, _MOST_KEYS = 500, 2**20  # requests in one message, and bytes of keys after which it is full
COMMANDS = get_args(Command)
log = logging.getLogger("headway.gateway")


class NoPlanner(Planner):
    """Plans nothing: the controller that leads does. planner: such a one as that controller has."""

    def __init__(self, planner: Planner) -> None:
        self._restricts = planner.restricts

    @property
    def restricts(self) -> bool:
        """Tell whether that planner keeps to `Request.engines`."""
        return self._restricts

    def plan(self, cluster: Cluster, now: float) -> Plan:
        return Plan()


@dataclass(slots=True)
class Leader:
    """What a gateway knows of the controller that leads.

    epoch: its term, 0 = none is known. heard: instant of its last message.
    knows: it has this gateway's requests. reported: instant of the last report of all of them.
    """

    epoch: int = 0
    heard: float = 0.0
    knows: bool = False
    reported: float = 0.0
    remote_counts: Mapping[Group, int] = field(default_factory=dict)


class RemoteControl(ControlView):
    """Reports events to a controller in another process, and takes its commands.

    execute: carries out a command for requests in flight; to be set before the first message.
    """

    execute: Callable[[Command], None]

    def __init__(self, controller: Controller, link: WireLink) -> None:
        self.controller, self._link = controller, link
        self.leader = Leader()
        self._started: set[str] = set()
        self._since: dict[str, float] = {}  # request -> instant of its arrival here
        self._at: dict[str, str] = {}  # request -> instance that it was sent to
        self._waiting = Counter[Group]()
        self._outbox: list[Event] = []
        self._flushing = False

    @property
    def remote_counts(self) -> Mapping[Group, int]:
        return self.leader.remote_counts

    def problem(self) -> str | None:
        return None if self._link.connected else "The wire to the controller is down."

    # ---- events

    def notify(self, event: Event) -> None:
        self._follow(event)
        self.controller.note(event, clock.now())
        self._outbox.append(event)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _follow(self, event: Event) -> None:
        """Keep up to date what is reported of requests; to be called before the controller forgets one."""
        match event:
            case Arrived(request):
                self._waiting[_group(request)] += request.places
                self._since[request.id] = clock.now()
            case Started(id):
                self._started.add(id)
            case Returned(id):
                if self._at.pop(id, None) is not None:
                    request = self.controller.requests[id]
                    self._waiting[_group(request)] += request.places
            case Finished(id) | Failed(id):
                if id in self.controller.requests and self._at.pop(id, None) is None:
                    self._waits_no_longer(id)
                self._started.discard(id)
                self._since.pop(id, None)

    def _waits_no_longer(self, id: str) -> None:
        request = self.controller.requests[id]
        group = _group(request)
        self._waiting[group] -= request.places
        if not self._waiting[group]:
            del self._waiting[group]

    def _flush(self) -> None:
        """Send the events of this turn of the event loop in one message.

        A controller that does not know this gateway learns them with its requests (`report`).
        """
        self._flushing = False
        events, self._outbox = self._outbox, []
        if self.leader.knows and events:
            self._link.send("controller", *events)

    def fleet_changed(self, event: Event) -> None:
        """Take note of what an agent says of an engine; the controller hears it from the agent itself."""
        self.controller.note(event, clock.now())

    async def live(self) -> None:
        """Report that this gateway lives, and what waits here, until cancelled."""
        connections = self._link.connections
        while True:
            if self._link.connections != connections:  # commands may have been lost
                connections = self._link.connections
                self.report()
            waiting = (Waiting(tenant, tier, count) for (tenant, tier), count in self._waiting.items())
            self._flush()  # the counted requests are reported first
            self._link.send("controller", Alive(tuple(waiting), len(self.controller.requests)))
            await asyncio.sleep(EVERY_S)

    # ---- what the controller says

    def receive(self, message: Message) -> None:
        """Take a message of a controller; those of one that leads no longer are ignored."""
        if message.epoch < self.leader.epoch:
            log.debug("a message of %s, which leads no longer", message.sender)
            return
        if message.epoch > self.leader.epoch:
            self.leader = Leader(message.epoch)
        self.leader.heard = clock.now()
        for item in message.items:
            if isinstance(item, Standing):
                self._receive_standing(item)
            elif isinstance(item, COMMANDS):
                self._obey(_shifted(item, message.apart))

    def _receive_standing(self, standing: Standing) -> None:
        me = self._link.name
        self.leader.remote_counts = {
            (one.tenant, one.tier): one.count
            for name, waiting in standing.waiting.items()
            if name != me
            for one in waiting
        }
        known = me in standing.known
        again = REPORT_S + len(self.controller.requests) / _REPORTED_PER_S
        if not known and clock.now() - self.leader.reported > again:
            self.leader.reported = clock.now()
            self.report()
        self.leader.knows = True

    def report(self) -> None:
        """Report all requests of this gateway to the controller."""
        keys = self.controller.cluster.placement.keys
        held = (
            InFlight(request, self._at.get(id), id in self._started, self._since[id], keys(id))
            for id, request in self.controller.requests.items()
        )
        self._outbox = []
        parts = list(reported(held))
        for i, part in enumerate(parts):
            self._link.send("controller", Present(tuple(part), last=i == len(parts) - 1))

    def _obey(self, command: Command) -> None:
        """Carry out a command, unless it came too late for what it is about."""
        match command:
            case Send():
                self._send(command)
            case Reject(id) if id not in self.controller.requests:
                return
            case Swap(instance, model):
                if instance in self.controller.cluster.instances:
                    self.controller.apply(Plan(swap={instance: model}), clock.now())
                self.execute(command)
            case _:
                self.execute(command)

    def _send(self, send: Send) -> None:
        """Hand a request to an engine, once: the first command counts; the controller is notified."""
        if send.id not in self.controller.requests:
            return
        if not self.controller.knows(send.instance):
            self.notify(Returned(send.id, int(send.id in self._started)))
        elif send.id in self._at:
            if self._at[send.id] != send.instance:
                self.report()
        else:
            self.controller.apply(Plan(send=[send]), clock.now())
            self._at[send.id] = send.instance
            self._waits_no_longer(send.id)
            self.execute(send)


def _group(request: Request) -> Group:
    return request.tenant, request.tier


def _shifted(command: Command, apart: float) -> Command:
    """Return a command with its instants by the clock of this machine."""
    return replace(command, until=command.until + apart) if isinstance(command, Prewarm) else command


def reported(held: Iterable[InFlight]) -> Iterator[list[InFlight]]:
    """Split requests into messages; yield at least one, which may be empty."""
    part, size = list[InFlight](), 0
    for one in held:
        if len(part) == _MOST or size > _MOST_KEYS:
            yield part
            part, size = [], 0
        part.append(one)
        size += len(one.keys)
    yield part
