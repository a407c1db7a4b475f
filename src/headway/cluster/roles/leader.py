"""Runs a controller in its own process for as long as it leads.

Gateways own the requests and agents the engines; the controller has only a copy, and corrects it whenever a
gateway reports (`Present`). So it keeps nothing on disk, and a standby that begins to lead has the whole queue
as soon as all have reported.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast, get_args

from headway import clock
from headway.cluster.wire.messages import (
    AgentEngines,
    Alive,
    Asked,
    EngineState,
    Gone,
    InFlight,
    Item,
    Message,
    Present,
    Progressed,
    Standing,
    Waiting,
    WireLink,
)
from headway.config import Engine
from headway.events import (
    Arrived,
    Cached,
    Event,
    Failed,
    Finished,
    InstanceDown,
    InstanceUp,
    Learned,
    Returned,
    Started,
    Swapped,
    Warmed,
)
from headway.gateway.control.control import Control, Execute, Inquire
from headway.gateway.control.remote.fleet import UNKNOWN
from headway.gateway.tasks import Loop
from headway.stages import Prewarm
from headway.types import Command, Plan, Recall, Reject, Request, Rerank, Send, Swap, Warm

EVERY_S = 0.5  # between two `Standing` messages
DOUBT_S = 2.0  # between two reports asked for because of a wrong count
SETTLE_S = 1.5  # at the start of a term, for gateways and agents to report
EVENTS = get_args(Event)

log = logging.getLogger("headway.gateway")
Make = Callable[[Execute, Inquire], Control]


@dataclass(slots=True)
class _Gateway:
    """A gateway. heard: instant of its last message. ids: its requests. waiting: as in `Alive`.

    known: it has reported. reporting: ids in an unfinished report, None = there is none. asked: instant of the
    last report asked for because of a wrong count.
    """

    heard: float
    ids: set[str] = field(default_factory=set)
    known: bool = False
    reporting: set[str] | None = None
    asked: float = 0.0
    waiting: tuple[Waiting, ...] = ()


@dataclass(slots=True)
class _Agent:
    """An agent. heard: instant of its last message. engines: ids of its engines that have reported.

    at_work: id -> model, of its engines that are up or starting. refused: ids of engines that get no work, already
    logged.
    """

    heard: float
    engines: set[str] = field(default_factory=set)
    at_work: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


class Leader:
    """Feeds messages to a controller, and sends its commands to gateways and agents.

    make: creates the `Control`, given functions that send its commands and its questions.
    lease_s: seconds of silence after which a gateway or agent counts as gone.
    engines: ids of the configured engines.
    """

    def __init__(self, link: WireLink, make: Make, lease_s: float, engines: Mapping[str, Engine]) -> None:
        self._link, self._lease_s, self._configured = link, lease_s, engines
        self.control = make(self._execute, self._inquire)
        self.control.have = self.have
        self._gateways: dict[str, _Gateway] = {}
        self._agents: dict[str, _Agent] = {}
        self._owner: dict[str, str] = {}  # request -> gateway
        self._since: dict[str, float] = {}  # request -> instant since when that gateway has it
        self._agent_of: dict[str, str] = {}  # instance -> agent
        self._doubted: set[str] = set()  # instances that a gateway could not reach
        self._settling: dict[str, InstanceUp | Swapped] | None = {}  # instance -> its latest event before `settle` ends
        self._numbers: dict[str, int] = {}  # number of the last message, by sender
        self._latest = ""  # the gateway that reported last
        self._outbox: defaultdict[str, list[Command]] = defaultdict(list)

    def loops(self) -> list[Loop]:
        """Return the loops that run while it leads."""
        return [*self.control.loops(), self._announce, self.settle]

    # ---- messages received

    def receive(self, message: Message) -> None:
        """Handle a message from a gateway or an agent."""
        now, name = clock.now(), message.sender
        if message.number and self._numbers.get(name, message.number - 1) != message.number - 1:
            log.warning("messages from %s were lost; asking it for a full report", name)
            self.distrust(name)
        self._numbers[name] = message.number
        for one in (self._gateways.get(name), self._agents.get(name)):
            if one is not None:
                one.heard = now
        # In order: a report includes the events before it, but not those after it.
        for are_events, run in itertools.groupby(message.items, lambda item: isinstance(item, EVENTS)):
            if are_events:
                self._receive_events(name, cast(list[Event], list(run)), message.apart)
            else:
                self._receive_reports(name, run, message.apart)

    def _receive_reports(self, name: str, items: Iterable[Item], apart: float) -> None:
        """Handle items of a gateway or an agent that are not events."""
        now = clock.now()
        for item in items:
            match item:
                case Present(requests, last):
                    self._receive_report(name, requests, apart, last=last)
                case Alive(waiting, count):
                    self._receive_alive(self._gateways.setdefault(name, _Gateway(now)), name, waiting, count)
                case EngineState():
                    self._receive_engine(name, item)
                case AgentEngines(ids) if name in self._agents:
                    self._forget_removed(name, ids)
                case Progressed(instance, progress, asked):
                    self.control.progressed(instance, progress, asked + apart)
                case Gone():
                    self._forget(name, "has ended")

    def _receive_alive(self, gateway: _Gateway, name: str, waiting: tuple[Waiting, ...], count: int) -> None:
        """Note a gateway's waiting requests; if its count differs from the one here, ask for a full report.

        Counts may differ for a while: until it knows that another gateway has taken a request over.
        """
        gateway.waiting = waiting
        now = clock.now()
        if gateway.known and count != len(gateway.ids) and now - gateway.asked > DOUBT_S:
            log.warning("%s has %d requests, not %d; asking it for a full report", name, count, len(gateway.ids))
            gateway.asked = now
            self.distrust(name)

    def distrust(self, name: str) -> None:
        """Ignore a gateway's events until it has reported, or count an agent's engines as down until then."""
        if name in self._gateways:
            self._gateways[name].known = False
        if name in self._agents:
            self._forget(name, "must report again")

    def _receive_events(self, name: str, events: Sequence[Event], apart: float) -> None:
        """Handle events; skip those of a process that has not reported, as its report will include them."""
        gateway, agent = self._gateways.get(name), self._agents.get(name)
        if agent is not None and agent.engines:
            for event in events:
                if _engine_of(event) in agent.engines:
                    self._engine_event(event)
        elif gateway is not None and gateway.known:
            self._latest = name
            noted = (self._noted(name, gateway, event, apart) for event in events)
            self.control.notify_all(*itertools.chain.from_iterable(noted))

    def _noted(self, name: str, gateway: _Gateway, event: Event, apart: float = 0.0) -> list[Event]:
        """Update the owner of an event's request; return the resulting events, in this clock's time.

        A background request belongs to the gateway that took it over, even while the previous one still reports
        it.
        """
        match event:
            case Arrived(request, keys):
                return self._arrived(name, gateway, request, apart, keys=keys)
            case Started(id) | Returned(id) | Finished(id) | Failed(id) if self._owner.get(id, name) != name:
                return []
            case Finished(id) | Failed(id):
                self._owner.pop(id, None)
                self._since.pop(id, None)
                gateway.ids.discard(id)
            case InstanceDown(id):
                self._doubted.add(id)
        return [event]

    def _arrived(
        self,
        name: str,
        gateway: _Gateway,
        request: Request,
        apart: float,
        since: float | None = None,
        keys: bytes = b"",
    ) -> list[Event]:
        """Return the events of a request that arrives, or starts over, at this gateway or coming from another.

        since: as in `InFlight`, by this clock; None = now.
        """
        before = self._owner.get(request.id)
        if before in self._gateways:
            self._gateways[before].ids.discard(request.id)
        self._owner[request.id], self._since[request.id] = name, clock.now() if since is None else since
        gateway.ids.add(request.id)
        arrived = Arrived(replace(request, arrival=request.arrival + apart), keys)
        return [arrived] if before is None else [Failed(request.id, "begun_anew"), arrived]

    def _receive_report(self, name: str, requests: Sequence[InFlight], apart: float, *, last: bool) -> None:
        """Correct the known requests of a gateway with its report."""
        cluster = self.control.controller.cluster
        gateway = self._gateways.setdefault(name, _Gateway(clock.now()))
        gateway.reporting = gateway.reporting or set()
        gateway.reporting.update(one.request.id for one in requests)
        events = list[Event]()
        for one in requests:
            events += self._corrections(name, gateway, one, apart)
        placed = {
            one.request.id: one.instance
            for one in requests
            if one.instance is not None and self._code(one.request.id) != cluster.code(one.instance)
        }
        if last:
            ended = [Failed(id, "gateway_gone") for id in gateway.ids - gateway.reporting]
            for event in ended:
                events += self._noted(name, gateway, event)
            gateway.reporting, gateway.known = None, True
            log.info("%s has %d requests", name, len(gateway.ids))
        self.control.correct(events, placed)

    def _corrections(self, name: str, gateway: _Gateway, one: InFlight, apart: float) -> list[Event]:
        """Return the events that a request still misses here, except for its sending."""
        id, events = one.request.id, list[Event]()
        since, owner = one.since + apart, self._owner.get(id, name)
        if owner != name and self._since[id] > since:
            return []  # another gateway has taken it over
        if id not in self.control.controller.requests or owner != name:
            events += self._arrived(name, gateway, one.request, apart, since, one.keys)
        elif (code := self._code(id)) is not None:
            cluster = self.control.controller.cluster
            if one.instance is None or code != cluster.code(one.instance):
                events.append(Returned(id, int(one.started), engines=one.request.engines))
        return [*events, Started(id)] if one.started else events

    def _code(self, id: str) -> int | None:
        """Return the code of the instance that a request was sent to, None = it is queued, or not known."""
        backlog = self.control.controller.cluster.backlog
        row = backlog.row_of.get(id)
        return None if row is None or not backlog.sent[row] else int(backlog.instance[row])

    # ---- engines

    def _receive_engine(self, name: str, state: EngineState) -> None:
        """Take note of an engine that is new or was doubted; all other changes come as events."""
        agent = self._agents.setdefault(name, _Agent(clock.now()))
        agent.at_work.pop(state.id, None)
        new = state.id not in agent.engines
        if new and (why := self._refusal(name, state)) is not None:
            if state.id not in agent.refused:
                log.warning("%s has an engine %s, which gets no work: %s", name, state.id, why)
            agent.refused.add(state.id)
            return
        if _at_work(state, self._configured.get(state.id)):
            agent.at_work[state.id] = state.current
        agent.refused.discard(state.id)
        agent.engines.add(state.id)
        self._agent_of[state.id] = name
        if new and state.loading is not None:
            self._note_swap(agent, state, state.loading)
        elif (new or state.id in self._doubted) and state.instance is not None:
            self._doubted.discard(state.id)
            self._admit(InstanceUp(state.instance))

    def _forget_removed(self, name: str, ids: Collection[str]) -> None:
        """Forget the engines of an agent that were removed; they are down already."""
        agent = self._agents[name]
        agent.at_work = {id: model for id, model in agent.at_work.items() if id in ids}
        for id in agent.engines - {*ids}:
            agent.engines.discard(id)
            self._agent_of.pop(id, None)

    def _refusal(self, name: str, state: EngineState) -> str | None:
        """Return why an agent's engine gets no work, and how to fix that; None = it gets work."""
        if state.id not in self._configured and state.settings is None:
            return UNKNOWN
        owner = self._agent_of.get(state.id, name)
        return None if owner == name else f"{owner} runs it, too. Start each engine with one agent (--engine)."

    def _note_swap(self, agent: _Agent, state: EngineState, model: str) -> None:
        """Take note of a swap that the previous leader ordered, so that it is not ordered again."""
        instance, controller, now = state.instance, self.control.controller, clock.now()
        if instance is None or not instance.can_load(model):
            agent.engines.discard(state.id)  # its agent reports when it serves again
            return
        controller.note(InstanceUp(instance), now)
        controller.apply(Plan(swap={instance.id: model}), now)

    def _engine_event(self, event: Event) -> None:
        """Take note of an event of an engine."""
        match event:
            case InstanceUp(instance) | Swapped(instance):
                self._doubted.discard(instance.id)
                self._admit(event)
            case InstanceDown(id) if self._settling is not None and id in self._settling:
                del self._settling[id]
            case _:
                self.control.notify(event)

    def _admit(self, up: InstanceUp | Swapped) -> None:
        """Let an instance take work once gateways have had time to report the requests in it."""
        if self._settling is None:
            self.control.notify(up)
        else:
            self._settling[up.instance.id] = up

    async def settle(self) -> None:
        """Let instances take work once gateways have had time to report."""
        await asyncio.sleep(SETTLE_S)
        ups, self._settling = self._settling or {}, None
        self.control.notify_all(*ups.values())

    # ---- leading

    def have(self, model: str) -> int:
        """Return how many engines of a model are up or starting."""
        at_work = {id: one for agent in self._agents.values() for id, one in agent.at_work.items()}
        return sum(one == model for one in at_work.values())

    async def _announce(self) -> None:
        """Announce that this controller leads, and forget silent gateways and agents, until cancelled."""
        while True:
            known = {name for name, one in self._gateways.items() if one.known}
            waiting = {name: one.waiting for name, one in self._gateways.items() if one.waiting}
            self._link.send("all", Standing(frozenset(known | {*self._agents}), waiting))
            await asyncio.sleep(EVERY_S)
            silent = clock.now() - self._lease_s
            for name in [name for name, one in (self._gateways | self._agents).items() if one.heard < silent]:
                self._forget(name, f"was silent for {self._lease_s:g} s")

    def _forget(self, name: str, why: str) -> None:
        """Remove a gateway with its requests, or an agent with its engines."""
        gateway, agent = self._gateways.pop(name, None), self._agents.pop(name, None)
        if gateway is not None:
            log.warning("%s %s; its requests (%d) end", name, why, len(gateway.ids))
            ended = [Failed(id, "gateway_gone") for id in gateway.ids]
            noted = [self._noted(name, gateway, event) for event in ended]
            self.control.notify_all(*itertools.chain.from_iterable(noted))
        if agent is not None:
            log.warning("%s %s; its engines take no work", name, why)
            for id in agent.engines:
                self._agent_of.pop(id, None)
                if self._settling is not None:
                    self._settling.pop(id, None)
            self.control.notify_all(*[InstanceDown(id) for id in agent.engines])

    # ---- commands

    def _execute(self, commands: Sequence[Command]) -> None:
        """Send commands soon, each to its receivers and in order."""
        if commands and not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        for command in commands:
            for to, part in self._addressed(command):
                self._outbox[to].append(part)

    def _addressed(self, command: Command) -> Iterator[tuple[str, Command]]:
        """Yield each receiver's name and its command; a request that has ended has no receiver."""
        match command:
            case Send(id) | Recall(id) | Reject(id):
                yield from ((name, command) for name in filter(None, [self._owner.get(id)]))
            case Rerank(instance, ranks):
                yield from self._to_agent(instance, command)
                owners = defaultdict[str, dict[str, float]](dict)
                for id, rank in ranks.items():
                    if id in self._owner:
                        owners[self._owner[id]][id] = rank
                yield from ((name, Rerank(instance, some)) for name, some in owners.items())
            case Swap(instance):
                yield from self._to_agent(instance, command)
                yield from ((name, command) for name in self._gateways)
            case Warm(instance):
                yield from self._to_agent(instance, command)
            case Prewarm() if self._latest:
                yield self._latest, command

    def _to_agent(self, instance: str, command: Command) -> Iterator[tuple[str, Command]]:
        if instance in self._agent_of:
            yield self._agent_of[instance], command

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, defaultdict(list)
        for to, commands in outbox.items():
            self._link.send(to, *commands)

    def _inquire(self, instance: str, ids: Sequence[str]) -> None:
        if instance in self._agent_of:
            self._link.send(self._agent_of[instance], Asked(instance, tuple(ids)))


def _at_work(state: EngineState, configured: Engine | None) -> bool:
    """Tell whether an engine takes work when it is up, and is up or starting; those for overflow do not count."""
    if state.leaving not in (None, "roll") or (configured is not None and configured.overflow):
        return False
    return state.failure is None if state.instance is None else state.instance.overflow is None


def _engine_of(event: Event) -> str | None:
    """Return the engine that an agent's event is about."""
    match event:
        case InstanceUp(instance) | Swapped(instance) | Warmed(instance):
            return instance.id
        case InstanceDown(id) | Learned(id) | Cached(id):
            return id
    return None
