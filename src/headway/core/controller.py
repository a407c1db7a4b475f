"""What should be done about what just happened? The slow loop, and the only writer of cluster state.

`on(event, now) -> commands` is pure given its own state: the server and the simulator drive the same object
and, fed the same events, get the same commands.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headway.core.cluster import Cluster
from headway.plan.dispatch import sends, swaps, warms
from headway.ports import Lengths, Planner
from headway.types import (
    OBJECTIVES,
    Arrived,
    Command,
    Event,
    Failed,
    Finished,
    Instance,
    InstanceDown,
    InstanceUp,
    Plan,
    Reject,
    Request,
    Returned,
    Started,
    Swap,
    Swapped,
    Warmed,
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
        return self.decide(now) if self.note(event, now) else []

    def note(self, event: Event, now: float) -> bool:
        """Take note of an event; tell whether there may now be something to do.

        A host whose planner takes time notes what happens meanwhile and asks `decide` when it is free.
        """
        match event:
            case Arrived(request):
                self._add(request)
            case Returned(id):
                self._take_back(id)
            case InstanceUp(instance) | Swapped(instance):
                self._takes_work(instance)
            case Warmed(instance):
                self._warmed(instance)
            case InstanceDown(id):
                self._forget(id)
        self.planner.on(event, self.cluster, now)
        match event:
            case Finished(id, output_tokens):
                self._end(id, output_tokens, now)
            case Failed(id):
                self._end(id, 0, now)
        return not isinstance(event, Started)  # then nothing has moved: no room was made, nobody came

    def decide(self, now: float) -> list[Command]:
        """Plan until the plan has nothing more to do: one send can change what the next line holds."""
        out: list[Command] = []
        while self._queued and self.cluster.instances:
            commands = self._carry_out(self.planner.plan(self.cluster, now), now)
            if not commands:
                break
            out += commands
        return out

    def _takes_work(self, instance: Instance) -> None:
        self._forget(instance.id)
        self.cluster.instances[instance.id] = instance

    def _warmed(self, instance: Instance) -> None:
        if instance.id in self.cluster.instances:
            self.cluster.instances[instance.id] = instance
            self.cluster.warming.pop(instance.id, None)

    def _forget(self, id: str) -> None:
        for table in (self.cluster.instances, self.cluster.loading, self.cluster.warming):
            table.pop(id, None)

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
            longest=request.prompt_tokens + request.max_tokens,
            model=self.cluster.code(request.model),
            tenant=self.cluster.code(request.tenant),
            objective=OBJECTIVES.index(request.slo.objective),
            serial=self._serial,
        )
        self._serial += 1
        self._queued += 1

    def _end(self, id: str, output_tokens: int, now: float) -> None:
        request = self._drop(id)
        if request is not None:
            self.lengths.learn(request, output_tokens)
            self._ends.append(now)

    def _drop(self, id: str) -> Request | None:
        request = self.requests.pop(id, None)
        if request is not None:
            row = self.cluster.backlog.row_of[id]
            self._queued -= not self.cluster.backlog.sent[row]
            self.cluster.backlog.remove(id)
        return request

    def _take_back(self, id: str) -> None:
        row = self.cluster.backlog.row_of.get(id)
        if row is not None and self.cluster.backlog.sent[row]:
            self.cluster.backlog.sent[row] = False
            self._queued += 1

    def _carry_out(self, plan: Plan, now: float) -> list[Command]:
        """Return the commands of a plan, and keep the cluster as it is once they are obeyed."""
        rejects = [self._reject(id, now) for id in self.cluster.backlog.names(plan.reject)]
        swapping, warming = swaps(plan, self.cluster), warms(plan, self.cluster)
        for swap in swapping:
            self._begin_swap(swap)
        warming = [warm for warm in warming if warm.instance in self.cluster.instances]
        for warm in warming:
            self.cluster.warming[warm.instance] = warm.model
        sending = sends(plan, self.cluster)
        for send in sending:
            row = self.cluster.backlog.row_of[send.id]
            self.cluster.backlog.sent[row] = True
            self.cluster.backlog.instance[row] = self.cluster.code(send.instance)
        self._queued -= len(sending)
        return [*rejects, *swapping, *warming, *sending]

    def _begin_swap(self, swap: Swap) -> None:
        """The instance takes no work until it is `Swapped`; what it runs comes back request by request."""
        instance = self.cluster.instances[swap.instance]
        self._forget(swap.instance)
        self.cluster.loading[swap.instance] = (instance, swap.model)

    def _reject(self, id: str, now: float) -> Reject:
        """Refuse a queued request: it ends here, and its length teaches nothing."""
        assert not self.cluster.backlog.sent[self.cluster.backlog.row_of[id]], f"{id} is inside an engine"
        self._drop(id)
        return Reject(id, "saturated", retry_after=self._until_room(now))

    def _until_room(self, now: float) -> float:
        """Return seconds until about one queued request has left, from the recent rate of endings."""
        if len(self._ends) < 2:
            return 1.0
        latency = (now - self._ends[0]) / len(self._ends)
        return min(max(latency * (self._queued - self.max_queued + 1), 1.0), 60.0)
