"""What should be done about what just happened? The slow loop, and the only writer of cluster state.

`on(event, now) -> commands` is pure given its own state: the server and the simulator drive the same object
and, fed the same events, get the same commands.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headway.plan.actions import sends
from headway.ports import Cluster, Lengths, Planner
from headway.types import (
    Arrived,
    Command,
    Event,
    Failed,
    Finished,
    InstanceDown,
    InstanceUp,
    Reject,
    Request,
    Returned,
    Started,
)


@dataclass(slots=True)
class Controller:
    """Holds every accepted request until it ends, and says when it goes where.

    max_queued bounds the requests that are ours to order; beyond it `admit` refuses.
    """

    planner: Planner
    lengths: Lengths
    max_queued: int = 1000
    cluster: Cluster = field(default_factory=Cluster)
    requests: dict[str, Request] = field(default_factory=dict)
    _queued: int = 0
    _serial: int = 0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def queued(self) -> int:
        """Requests accepted and not inside an engine."""
        return self._queued

    def admit(self, request: Request, now: float, storing: int = 0) -> Reject | None:
        """Tell, before anything is stored, whether the queue has room for this request.

        storing: requests that were admitted and have not arrived yet, because they are being stored.
        """
        if self._queued + storing < self.max_queued:
            return None
        return Reject(request.id, "queue_full", retry_after=self._until_room(now))

    def on(self, event: Event, now: float) -> list[Command]:
        """Take note of an event and return what to do. Events about ended requests change nothing."""
        match event:
            case Arrived(request):
                self._add(request)
            case Finished(id, made):
                self._end(id, made, now)
            case Failed(id):
                self._end(id, 0, now)
            case Returned(id):
                self._take_back(id)
            case InstanceUp(instance):
                self.cluster.instances[instance.id] = instance
            case InstanceDown(id):
                self.cluster.instances.pop(id, None)
            case Started():
                return []  # nothing has moved: no room was made, nobody came
        return list(self._send(now))

    def _add(self, request: Request) -> None:
        forecast = self.lengths.forecast(request)
        self.requests[request.id] = request
        self.cluster.backlog.add(
            request.id,
            arrival=request.arrival,
            due=request.slo.due(request.arrival),
            priority=request.priority,
            prompt=request.prompt_tokens,
            tokens=request.prompt_tokens + forecast.mean,
            model=self.cluster.code(request.model),
            serial=self._serial,
        )
        self._serial += 1
        self._queued += 1

    def _end(self, id: str, made: int, now: float) -> None:
        request = self.requests.pop(id, None)
        if request is None:
            return
        row = self.cluster.backlog.row_of[id]
        self._queued -= not self.cluster.backlog.sent[row]
        self.cluster.backlog.remove(id)
        self.lengths.learn(request, made)
        self._ends.append(now)

    def _take_back(self, id: str) -> None:
        row = self.cluster.backlog.row_of.get(id)
        if row is not None and self.cluster.backlog.sent[row]:
            self.cluster.backlog.sent[row] = False
            self._queued += 1

    def _send(self, now: float) -> list[Command]:
        """Send until the plan has nothing more to send: one send can change what the next line holds."""
        out: list[Command] = []
        while self._queued and self.cluster.instances:
            batch = sends(self.planner.plan(self.cluster, now), self.cluster)
            if not batch:
                break
            for send in batch:
                row = self.cluster.backlog.row_of[send.id]
                self.cluster.backlog.sent[row] = True
                self.cluster.backlog.instance[row] = self.cluster.code(send.instance)
            self._queued -= len(batch)
            out += batch
        return out

    def _until_room(self, now: float) -> float:
        """Return seconds until about one queued request has left, from the recent rate of endings."""
        if len(self._ends) < 2:
            return 1.0
        pace = (now - self._ends[0]) / len(self._ends)
        return min(max(pace * (self._queued - self.max_queued + 1), 1.0), 60.0)
