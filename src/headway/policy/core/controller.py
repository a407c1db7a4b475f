"""The slow loop: events in, commands out. The controller is the only writer of the cluster's state.

`on(event, now) -> commands` is pure given its own state: the server and the simulator drive the same object
and, fed the same events, get the same commands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
from headway.policy.core.attainment import Attainment
from headway.policy.core.cluster import Cluster
from headway.policy.core.drops import Drops, Needs
from headway.policy.core.overflow import Overflow
from headway.policy.core.ranks import SOFT
from headway.policy.core.shares import Group, QueueShares, Waiting
from headway.policy.plan.dispatch import swaps, warms
from headway.policy.scale.scaler import Scaling
from headway.ports import Lengths, Planner
from headway.stages import Prewarm
from headway.types import OBJECTIVES, Command, Instance, Plan, Progress, Reject, Request, Rerank, Send, Swap

_AGAIN = 1.0  # seconds after which an engine is asked again about a request, unless it answers


class Overdue(NamedTuple):
    """Requests whose last start has passed.

    rejects: those that were queued.
    inside: instance -> those inside it; only the engine knows how far it is with them.
    """

    rejects: list[Reject]
    inside: dict[str, list[str]]


@dataclass(slots=True)
class Controller:
    """Holds every accepted request until it ends, and says when it goes where.

    max_queued bounds the requests that wait, outside or inside engines, by their places; once they have so
    many, `admit` refuses.
    shares: what one tenant may take of them, None = all.
    scaling: how many engines models need, of those with [scale].
    overflow: the engines that cost money, which no planner sees.
    attainment: what classes that promise a share of their requests have kept.
    """

    planner: Planner
    lengths: Lengths
    max_queued: int = 1000
    shares: QueueShares | None = None
    scaling: Scaling | None = None
    cluster: Cluster = field(default_factory=Cluster)
    overflow: Overflow = field(default_factory=Overflow)
    attainment: Attainment = field(default_factory=Attainment)
    requests: dict[str, Request] = field(default_factory=dict)
    _places: int = 0  # of all requests, and of those not inside an engine
    _queued: int = 0
    _serial: int = 0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _drops: Drops = field(default_factory=Drops)

    @property
    def queued(self) -> int:
        """Requests accepted and not inside an engine."""
        return len(self.requests) - self.cluster.sent_count

    @property
    def _waiting(self) -> int:
        """Places of what waits, also inside engines whose packers choose among more than fit."""
        inside = sum(instance.window for instance in self.cluster.instances.values())
        return max(self._queued, self._places - self.overflow.places - inside)

    def admit(
        self,
        request: Request,
        now: float,
        storing: Mapping[Group, int] | None = None,
        most: int | None = None,
        keys: bytes = b"",
    ) -> Reject | None:
        """Tell, before anything is stored, whether the queue has room for this request.

        storing: places of what was admitted and has not arrived yet, because it is being stored.
        most: places of its tenant that may wait, as far as its key is concerned. keys: as in `Arrived`.
        """
        full = self.full(request.tenant, request.tier, now, storing or {}, most)
        return self.infeasible(request, now, keys) if full is None else replace(full, id=request.id)

    def full(
        self, tenant: str, tier: str | None, now: float, storing: Mapping[Group, int], most: int | None = None
    ) -> Reject | None:
        """Return the refusal if the queue has no room for a request of a tenant; arguments as in `admit`.

        tier: its class, None = not known yet.
        """
        if self._waiting + sum(storing.values()) >= self.max_queued:
            return Reject("", "queue_full", retry_after=self._until_room(now))
        if self.shares is None:
            return None
        queue = Waiting(self.max_queued, self._places - self._waiting, storing, most)
        limit = self.shares.exceeded(tenant, tier, queue)
        if limit is None:
            return None
        wait = self._seconds_of_ends(limit.waiting - limit.most + 1, now)
        return Reject("", "tenant_queue_full", wait, limit=limit)

    # ---- requests that are refused rather than served late (`Request.drop`)

    def infeasible(self, request: Request, now: float, keys: bytes = b"") -> Reject | None:
        """Refuse a request, at arrival, that not even an idle engine could serve on time.

        Nothing is refused before the engines of its model have learned their latency (`Learned`). What an engine
        holds of the prompt need not be computed there. keys: as in `Arrived`.
        """
        if not request.drop:
            return None
        needs = self._needs(request, self._serving(request), keys)
        if needs.last_start(request) >= now:
            return None
        if Needs().last_start(request) >= now and self._drops.try_anyway(request, now):
            return None
        self.attainment.refused(request)
        return Reject(request.id, "infeasible", shortfall=needs.shortfall(request, now))

    @property
    def next_check(self) -> float:
        """The instant at which the host calls `overdue` and `decide`, inf = not as things are.

        It changes with events and plans.
        """
        wake_at = self.planner.wake_at if self.cluster.instances else math.inf
        return min(self._drops.next_check, self.overflow.next_check, wake_at)

    def overdue(self, now: float) -> Overdue:
        """Refuse the queued requests that cannot be on time any more, and name those inside engines.

        The host asks their engines how far they are and calls `refuse`; what an engine does not know is named
        again a second later. Rejections make room: the host lets the planner run when they are carried out.
        """
        backlog, rejects, inside = self.cluster.backlog, list[Reject](), dict[str, list[str]]()
        names = {self.cluster.code(name): name for name in self.cluster.instances}
        for id in self._drops.due(now):
            row, request = backlog.row_of[id], self.requests[id]
            sent = bool(backlog.sent[row])
            name = names.get(int(backlog.instance[row])) if sent else None
            needs = self._needs(request, [name or ""] if sent else self._serving(request))
            last = needs.last_start(request)
            if last >= now:  # it was sent, or the engines are faster than they were
                self._drops.watch(id, last)
            elif not sent:
                rejects.append(self._refuse(request, needs, now))
            else:
                self._drops.watch(id, now + _AGAIN)
                if name is not None:
                    inside.setdefault(name, []).append(id)
        return Overdue(rejects, inside)

    def refuse(self, instance: str, progress: Mapping[str, Progress], now: float) -> list[Reject]:
        """Refuse the requests inside an instance that cannot be on time any more and have no token yet.

        progress: of those that `overdue` named, as far as the engine knows them. now: an instant at or before
        that of the progress, so that nothing is refused that the engine has begun meanwhile.
        """
        rejects, inside = list[Reject](), self.cluster.inside(instance)
        for id, done in progress.items():
            if id not in self._drops or self.cluster.backlog.row_of[id] not in inside:
                continue  # it has ended, or is elsewhere by now
            if done.output_tokens:
                self._drops.discard(id)
                continue
            request = self.requests[id]
            needs = self._drops.needs(request, self.lengths.forecast(request), {instance: done.computed}, exact=True)
            last = needs.last_start(request)
            if last >= now:
                self._drops.watch(id, last)
            else:
                rejects.append(self._refuse(request, needs, now))
        return rejects

    def _serving(self, request: Request) -> list[str]:
        instances = self.cluster.instances.values()
        return [one.id for one in instances if one.model == request.model and request.may(one.id)]

    def _needs(self, request: Request, instances: Sequence[str], keys: bytes = b"") -> Needs:
        found, prompt = self.cluster.placement.found, request.prompt_tokens
        computed = {name: found(request.id, name, prompt, keys) for name in instances}
        return self._drops.needs(request, self.lengths.forecast(request), computed)

    def _watch(self, request: Request) -> None:
        """Look at a queued request again when it must have started."""
        if request.drop:
            last = self._needs(request, self._serving(request)).last_start(request)
            self._drops.watch(request.id, last)

    def _refuse(self, request: Request, needs: Needs, now: float) -> Reject:
        """Refuse a request, wherever it is: it ends here, and its length teaches nothing."""
        self.cluster.version += 1
        self.planner.on(Failed(request.id, "infeasible"), self.cluster, now)
        retry = self._seconds_of_ends(max(self._queued, 1), now)
        self._drop(request.id, kept=False)
        return Reject(request.id, "infeasible", retry, needs.shortfall(request, now))

    # ---- events and plans

    def on(self, event: Event, now: float) -> list[Command]:
        """Take note of an event and return what to do. Events about ended requests change nothing."""
        return self.decide(now) if self.note(event, now) else []

    def note(self, event: Event, now: float) -> bool:
        """Take note of an event; tell whether there may now be something to do.

        A host in which planning takes time notes what happens meanwhile and asks `decide` when it is free.
        """
        self.cluster.version += 1
        if self._is_of_overflow(event, now):
            return True
        match event:
            case Arrived(request, keys):
                self.cluster.placement.came(request, keys)
                self._add(request, now)
            case Returned(id, output_tokens, engines=engines):
                if not self._take_back(id, output_tokens, engines):
                    return False
            case Started(id):
                self._began(id, now)
            case Learned(name, theta):
                self._drops.learn(event)
                self.cluster.placement.learned(name, theta)
            case Finished(id, _, int(cached)):
                self.cluster.placement.index.answered(id, cached)
            case Cached(name, report):
                self.cluster.placement.index.report(name, report)
            case InstanceUp(instance) | Swapped(instance):
                self._takes_work(instance)
            case Warmed(instance):
                self._warmed(instance)
            case InstanceDown(id):
                self._forget(id)
        self.planner.on(event, self.cluster, now)
        if self.scaling is not None:
            self.scaling.note(event, self.cluster, self.requests, now)
        match event:
            case Finished(id, output_tokens):
                self._end(id, output_tokens, event.met, now)
            case Failed(id, _, missed):
                self._end(id, 0, False if missed else None, now)
        return not isinstance(event, Started | Learned | Cached)  # a first token frees nothing

    def _began(self, id: str, now: float) -> None:
        self._drops.discard(id)
        self.attainment.started(self.requests.get(id), now)
        self.cluster.placement.started(self.cluster.backlog, id, now)

    def _is_of_overflow(self, event: Event, now: float) -> bool:
        """Take note of an event for overflow; tell whether it is about an overflow engine alone."""
        alone = self.overflow.note(event, self.requests, now)
        if alone:
            self.cluster.placement.forecasts = bool(self.overflow.instances)
        return alone

    def place(self, id: str, instance: str, now: float) -> None:
        """Take note of where a queued request is that another controller sent, whatever is there."""
        row = self.cluster.backlog.row_of[id]
        assert not self.cluster.backlog.sent[row], f"{id} is inside an engine"
        self.cluster.send(row, instance)
        self.cluster.placement.sent(self.cluster.backlog, row, instance, now)
        if instance in self.overflow.instances:
            self.overflow.sent(self.requests[id], instance, now)
        self._queued -= self.requests[id].places

    def decide(self, now: float) -> list[Command]:
        """Plan until nothing is left to do: one send can change what belongs inside another instance."""
        out = self._overflowing(now)
        planner, due = self.planner, self.planner.wake_at <= now
        while (self._queued or planner.reranks or due) and self.cluster.instances:
            plan = self.planner.plan(self.cluster, now)
            commands = self.apply(plan, now)
            out += commands
            due = False
            if plan.final or all(isinstance(command, Rerank | Prewarm) for command in commands):
                break
        return out

    def _overflowing(self, now: float) -> list[Command]:
        """Send what would be late to overflow engines, or take it back from other ones first."""
        out = list[Command]()
        for id in self.overflow.take(now):
            command = self.overflow.look(self.requests[id], self.cluster, now) if id in self.requests else None
            if isinstance(command, Send):
                self.place(id, command.instance, now)
            if command is not None:
                out.append(command)
        return out

    def deliberate(self, now: float) -> Callable[[], object] | None:
        """Return the planner's computation that takes long, if one is due (`Planner.deliberate`)."""
        return self.planner.deliberate(self.cluster, now) if self.cluster.instances else None

    def conclude(self, result: object, now: float) -> list[Command]:
        """Hand the planner what such a computation returned, and return what to do."""
        self.planner.conclude(result, self.cluster, now)
        return self.decide(now)

    def apply(self, plan: Plan, now: float) -> list[Command]:
        """Return a plan's commands, and keep the cluster as it is once they are carried out.

        A plan that is based on an earlier cluster (`Plan.based_on`) is carried out as far as it still holds:
        for requests that are still queued and instances that are still there. A plan for the cluster as it
        is must hold as a whole.
        """
        if plan.based_on not in (None, self.cluster.version):
            plan = still_holding(plan, self.cluster)
        rejects = [self._reject(id, now) for id in plan.reject]
        swapping, warming = swaps(plan, self.cluster), warms(plan, self.cluster)
        for swap in swapping:
            self._begin_swap(swap)
        warming = [warm for warm in warming if warm.instance in self.cluster.instances]
        for warm in warming:
            self.cluster.warming[warm.instance] = warm.model
        sending = [self._with_found(send) for send in plan.send if self.knows(send.instance)]
        for send in sending:
            self.place(send.id, send.instance, now)
        return [*rejects, *swapping, *warming, *sending, *plan.rerank, *plan.prewarm]

    def knows(self, instance: str) -> bool:
        """Tell whether requests can be sent to an instance."""
        return instance in self.cluster.instances or instance in self.overflow.instances

    def _with_found(self, send: Send) -> Send:
        placement, id, name = self.cluster.placement, send.id, send.instance
        found, moved = placement.found(id, name, self.requests[id].prompt_tokens), placement.moved(id, name)
        return replace(send, found=found, moved=moved) if found > 0 or moved else send

    def _takes_work(self, instance: Instance) -> None:
        self._forget(instance.id)
        self.cluster.instances[instance.id] = instance
        self.cluster.placement.up(instance)

    def _warmed(self, instance: Instance) -> None:
        if instance.id in self.cluster.instances:
            self.cluster.instances[instance.id] = instance
            self.cluster.warming.pop(instance.id, None)
            self.cluster.fleet_version += 1

    def _forget(self, id: str) -> None:
        self.cluster.fleet_version += 1
        self._drops.forget(id)
        for table in (self.cluster.instances, self.cluster.loading, self.cluster.warming):
            table.pop(id, None)
        self.cluster.placement.down(id)

    def _add(self, request: Request, now: float) -> None:
        forecast = self.lengths.forecast(request)
        tokens = request.prompt_tokens + forecast.mean * request.places
        self.requests[request.id] = request
        self.cluster.backlog.add(
            request.id,
            arrival=request.arrival,
            due=request.slo.due(request.arrival),
            soft=request.slo.soft or SOFT,
            priority=request.priority,
            prompt=request.prompt_tokens,
            tokens=tokens,
            longest=request.context + request.max_tokens,
            places=request.places,
            model=self.cluster.code(request.model),
            tenant=self.cluster.code(request.tenant),
            objective=OBJECTIVES.index(request.slo.objective),
            serial=self._serial,
            expendable=self.attainment.came(request, tokens, now),
        )
        self._restrict(request)
        self._serial += 1
        self._places += request.places
        self._queued += request.places
        if self.shares is not None:
            self.shares.came(request.tenant, request.tier, request.places)
        self._watch(request)

    def _end(self, id: str, output_tokens: int, kept: bool | None, now: float) -> None:
        request = self._drop(id, kept)
        if request is not None:
            self.lengths.learn(request, request.per_answer(output_tokens))
            self._ends.extend([now] * request.places)

    def _drop(self, id: str, kept: bool | None = None) -> Request | None:
        request = self.requests.pop(id, None)
        if request is not None:
            self.attainment.ended(id, kept)
            self._drops.discard(id)
            self.overflow.ended(id)
            if self.shares is not None:
                self.shares.left(request.tenant, request.tier, request.places)
            self._places -= request.places
            if not self.cluster.backlog.sent[self.cluster.backlog.row_of[id]]:
                self._queued -= request.places
            self.cluster.placement.ended(self.cluster.backlog, id)
            self.cluster.remove(id)
        return request

    def _restrict(self, request: Request) -> None:
        row = self.cluster.backlog.row_of[request.id]
        if request.engines:
            self.cluster.only[row] = frozenset(request.engines)
        else:
            self.cluster.only.pop(row, None)

    def _take_back(self, id: str, output_tokens: int, engines: tuple[str, ...] | None) -> bool:
        """Queue a request again that was inside an engine; tell whether it was. engines: as in `Returned`."""
        row = self.cluster.backlog.row_of.get(id)
        if row is None or not self.cluster.backlog.sent[row]:
            return False
        self.cluster.placement.left(self.cluster.backlog, id)
        self.cluster.unsend(row)
        if engines is not None:
            self.requests[id] = replace(self.requests[id], engines=engines)
            self._restrict(self.requests[id])
        self._queued += self.requests[id].places
        if output_tokens:
            self._drops.discard(id)
        else:
            self._watch(self.requests[id])
        return True

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
        """Return seconds until about one place of the queue is free."""
        return self._seconds_of_ends(self._queued - self.max_queued + 1, now)

    def _seconds_of_ends(self, count: int, now: float) -> float:
        """Return seconds until that many places are free, from the recent rate; 1 to 60."""
        if len(self._ends) < 2:
            return 1.0
        latency = (now - self._ends[0]) / len(self._ends)
        return min(max(latency * count, 1.0), 60.0)


def still_holding(plan: Plan, cluster: Cluster) -> Plan:
    """Return the part of a plan that concerns requests still queued and instances still there."""
    there = cluster.instances
    return Plan(
        send=[send for send in plan.send if _queued(cluster, send.id) and _serves(cluster, send)],
        rerank=[kept for one in plan.rerank if (kept := _inside(cluster, one)).ranks],
        swap={name: model for name, model in plan.swap.items() if _can_load(there.get(name), model)},
        warm={name: model for name, model in plan.warm.items() if _can_load(there.get(name), model)},
        reject=[id for id in plan.reject if _queued(cluster, id)],
    )


def _queued(cluster: Cluster, id: str) -> bool:
    row = cluster.backlog.row_of.get(id)
    return row is not None and not cluster.backlog.sent[row]


def _serves(cluster: Cluster, send: Send) -> bool:
    """Tell whether the instance still serves the model of a request that is still queued."""
    instance, row = cluster.instances.get(send.instance), cluster.backlog.row_of[send.id]
    return instance is not None and cluster.code(instance.model) == int(cluster.backlog.model[row])


def _inside(cluster: Cluster, rerank: Rerank) -> Rerank:
    """Return a rerank of those of its requests that are inside its instance."""
    backlog, inside = cluster.backlog, cluster.inside(rerank.instance)
    ranks = {id: rank for id, rank in rerank.ranks.items() if backlog.row_of.get(id, -1) in inside}
    return Rerank(rerank.instance, ranks)


def _can_load(instance: Instance | None, model: str) -> bool:
    return instance is not None and instance.can_load(model)
