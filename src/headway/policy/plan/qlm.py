"""QLM's planner: request groups on virtual queues, and what their order makes each instance do (QLM 4, 5, 7).

The order of the groups on an instance's virtual queue decides the LLM serving operations: the head group's
requests are pulled while there is room; where the head group has another model, that is swapped in as soon as what
is ahead of it has drained; models further back are brought into host memory. New groups go to the place that costs
least. When a violation is foreseen, or an instance idles while others have queues, the plan generator orders all
groups anew, beside the event loop.

Within a model requests are bound one by one (`pulling.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headway.events import Arrived, Event, Failed, Finished, InstanceDown, Learned, Returned, Swapped
from headway.policy.core.cluster import Cluster
from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.plan.estimator import Normal, fleet_of, load_seconds
from headway.policy.plan.generator import Shortage, improve, prepare, see, shortage
from headway.policy.plan.group_placement import GroupPlacement, QlmOptions, served_by, serves
from headway.policy.plan.group_queues import Item, SentRequest
from headway.policy.plan.groups import Group, RequestGroups, Sort, centres_of
from headway.policy.plan.pulling import Pulling, urgency_of
from headway.policy.plan.queue_order import QueueOrder
from headway.policy.plan.situation import INTERACTIVE, Situation, describe
from headway.ports import Planner
from headway.types import Backlog, Floats, Plan, Rerank

_UPCOMING = 2  # models further back on a virtual queue that are brought into host memory


class Generated(NamedTuple):
    """What the plan generator has worked out: a better order (None = there is none), and new kinds.

    due: the swaps that it was asked about, by instance.
    """

    situation: Situation
    order: QueueOrder | None
    due: dict[str, str]
    centres: list[tuple[Sort, Floats]]


class Qlm(Planner):
    """See the module.

    shortage: by how much the capacity is short, as the plan generator saw it last.
    """

    swaps = True
    thinks = True

    def __init__(self, options: QlmOptions | None = None) -> None:
        self.options = options or QlmOptions()
        self.shortage = Shortage()
        self._groups = RequestGroups(self.options.delta)
        self._places = GroupPlacement(self.options)
        self._pulling = Pulling(self.options, self._groups, self._places)
        self._fleet_version = -1
        self._limits: dict[int, list[int]] = {}
        self._batch: dict[int, float] = {}
        self._due: dict[str, str] = {}  # swaps that the plan generator is to judge first, by instance
        self._judged: dict[str, str] = {}  # those that it has judged
        self._next = -math.inf  # when the plan generator may run again

    @property
    def gauges(self) -> dict[str, float]:
        """Groups, requests in them, and by how much the capacity is short."""
        return {
            "request_groups": float(len(self._groups.groups)),
            "short_requests": float(self.shortage.requests),
            "short_seconds": self.shortage.seconds,
        }

    def prepare(self) -> None:
        """Compile the search."""
        prepare()

    # ---- events

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Put arrivals into groups, and take requests out of them; learn from answers."""
        match event:
            case Arrived(request):
                self._places.arrivals.arrived(now)
                self._places.models[cluster.code(request.model)] = request.model
                self._add(cluster, cluster.backlog.row_of[request.id])
            case Returned(id, output_tokens):
                self._come_back(cluster, id, begun=output_tokens > 0)
            case Finished(id, output_tokens):
                self._leave(cluster, id, now, output_tokens)
            case Failed(id):
                self._leave(cluster, id, now, 0)
            case Swapped(instance):
                self._places.has_loaded(instance.id, now)
            case InstanceDown(id):
                self._places.loading.pop(id, None)
                self._places.stays.pop(id, None)
                self._places.estimator.latencies.pop(id, None)
            case Learned(id, theta):
                learned = OnlineLatency()
                learned.theta = theta
                self._places.estimator.latencies[id] = learned.seconds

    def _add(self, cluster: Cluster, row: int) -> None:
        backlog = cluster.backlog
        batch = self._batch.get(int(backlog.model[row]), 64.0)
        group, half = self._groups.add(backlog, row, self._size(backlog, row), batch)
        self._joined(group, float(backlog.due[row]))
        if half is not None:
            if group.instance:
                self._places.queues.after(group, half)
            else:
                self._places.queues.unplaced.append(half)

    def _size(self, backlog: Backlog, row: int) -> int:
        """Return the index of the smallest limit that holds a request (`Sort.size`)."""
        limits, longest = self._limits.get(int(backlog.model[row]), []), int(backlog.longest[row])
        return sum(longest > limit for limit in limits[:-1])

    def take_over(self, cluster: Cluster, now: float) -> None:
        """Go on with the requests that another planner has queued and sent."""
        backlog, names = cluster.backlog, {cluster.code(name): name for name in cluster.instances}
        self._places.models |= {code: name for name, code in cluster.codes.items()}
        self._follow_fleet(cluster, now)
        rows = backlog.rows()
        for row in rows[np.argsort(backlog.serial[rows])].tolist():
            if not backlog.sent[row]:
                self._add(cluster, row)
            elif (name := names.get(int(backlog.instance[row]))) is not None:
                kind = self._groups.kind_of(backlog, row, self._size(backlog, row))
                instance = cluster.instances[name]
                blocks = math.ceil(float(backlog.tokens[row]) / instance.block_size)
                urgency = urgency_of(float(backlog.due[row]))
                id = self._pulling.note_sent(backlog, row, kind, name, 0.0, urgency, blocks, now, full=False)
                if self.options.ranks:
                    self._pulling.rerank.setdefault(name, {})[id] = urgency

    def _joined(self, group: Group, due: float) -> None:
        """Note that a request has joined a group, which may be new."""
        if group.instance:
            self._places.changed.add(group.instance)
            if group.first == due:
                self._places.queues.settle(group)
        elif group.size == 1:
            self._places.queues.unplaced.append(group)

    def _come_back(self, cluster: Cluster, id: str, *, begun: bool) -> None:
        request, backlog, row = self._pulling.sent.pop(id, None), cluster.backlog, cluster.backlog.row_of[id]
        if request is None:  # it was placed without this planner
            self._pulling.ungroup(int(backlog.serial[row]))
            self._add(cluster, row)
            return
        self._pulling.vacate(request)
        begun &= request.kind.sort.objective == INTERACTIVE
        group = self._groups.put_back(backlog, row, request.kind, begun=begun)
        self._joined(group, float(backlog.due[row]))

    def _leave(self, cluster: Cluster, id: str, now: float, output_tokens: int) -> None:
        request = self._pulling.sent.pop(id, None)
        if request is None:
            row = cluster.backlog.row_of.get(id)
            if row is not None:
                self._pulling.ungroup(int(cluster.backlog.serial[row]))
            return
        self._pulling.vacate(request)
        if output_tokens:
            request.kind.answered(float(output_tokens))
            if request.full:
                self._learn_pace(cluster, request, now - request.sent, output_tokens)

    def _learn_pace(self, cluster: Cluster, request: SentRequest, taken: float, output_tokens: int) -> None:
        instance = cluster.instances.get(request.instance)
        if instance is None:
            return
        serving = self._places.estimator.serving(instance, instance.model)
        assert serving is not None, "an instance serves its own model"
        pace = self._places.estimator.pace(serving._replace(factor=1.0), request.kind.tokens)
        forecast = pace.prefill + output_tokens * pace.token
        self._places.estimator.inefficiency.learn(instance.id, instance.model, taken, forecast)

    # ---- plans

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what the virtual queues make their instances do now; costs follow what has changed."""
        self._follow_fleet(cluster, now)
        self._places.place_new(cluster, now)
        changed = {one.model: None for name, one in cluster.instances.items() if name in self._places.changed}
        send = [one for model in changed for one in self._pulling.pull(cluster, model, now)]
        swap, warm = dict[str, str](), dict[str, str]()
        for name in [name for name in cluster.instances if name in self._places.changed]:
            model = self._swap_to(cluster, name)
            if model is not None and self._takes_long(cluster, name, model):
                self._due[name] = model
            elif model is not None:
                swap[name] = model
                self._places.loading[name] = now
            elif self.options.warms and (ahead := self._to_warm(cluster, name)) is not None:
                warm[name] = ahead
        self._places.changed -= set(cluster.instances)
        self._judged.clear()
        rerank = [Rerank(name, ranks) for name, ranks in self._pulling.rerank.items() if name in cluster.instances]
        self._pulling.rerank.clear()
        return Plan(send, rerank, swap, warm, final=True)

    def _follow_fleet(self, cluster: Cluster, now: float) -> None:
        if cluster.fleet_version == self._fleet_version:
            return
        self._fleet_version = cluster.fleet_version
        self._places.queues.follow([*cluster.instances, *cluster.loading])
        self._places.loading = {name: self._places.loading.get(name, now) for name in cluster.loading}
        self._places.changed |= set(cluster.instances)
        for group in [group for group in self._groups if group.instance]:
            if not serves(cluster, group.instance, self._places.model(group)):
                self._places.queues.remove(group)
                self._places.queues.unplaced.append(group)
        limits: dict[int, set[int]] = {}
        batches: dict[int, list[float]] = {}
        for instance in fleet_of(cluster):
            for model, limit in served_by(instance):
                limits.setdefault(cluster.code(model), set()).add(limit)
                batches.setdefault(cluster.code(model), []).append(float(instance.max_running))
        self._limits = {model: sorted(some) for model, some in limits.items()}
        self._batch = {model: sum(some) / len(some) for model, some in batches.items()}

    def _swap_to(self, cluster: Cluster, name: str) -> str | None:
        """Return the model to be swapped in: that of the head group, when nothing that runs is before it."""
        queue = self._places.queues.queues[name]
        if not queue:
            return None
        model = self._places.models[queue[0].kind.sort.model]
        instance, inside = cluster.instances[name], self._places.queues.inside[name]
        if model == instance.model or not instance.can_load(model):
            return None
        if any(not self.options.evicts or one.rank <= queue[0].rank for one in inside):
            return None
        return model

    def _takes_long(self, cluster: Cluster, name: str, model: str) -> bool:
        """Tell whether the plan generator is to judge a swap first, as things are now.

        It may have been planned long ago. Swaps that take less than the generator's period are not worth it.
        """
        if self.options.orders != "planned" or self._judged.get(name) == model:
            return False
        instance = cluster.instances[name]
        return load_seconds(instance, model, instance.model) > self.options.period

    def _to_warm(self, cluster: Cluster, name: str) -> str | None:
        """Return the next model of a virtual queue that is not in host memory (model warm start)."""
        instance, upcoming = cluster.instances[name], list[str]()
        for group in self._places.queues.queues[name]:
            model = self._places.model(group)
            if model != instance.model and model not in upcoming:
                upcoming.append(model)
                if model not in instance.warm and instance.can_load(model):
                    return model
                if len(upcoming) == _UPCOMING:
                    return None
        return None

    # ---- the plan generator

    def deliberate(self, cluster: Cluster, now: float) -> Callable[[], object] | None:
        """Return a run of the plan generator if there is reason for one.

        That is: a violation is foreseen, an instance idles in vain, or is about to load a model for long.
        """
        if not self._groups.groups:
            self.shortage = Shortage()
        if (now < self._next and not self._due) or not self._groups.groups:
            return None
        self._next = now + self.options.period
        stale = [(sort, self._groups.points(sort)) for sort in self._groups.stale()]
        situation = describe(self._places, cluster, now, list(self._places.queues.unplaced))
        seen = see(situation)
        self.shortage = shortage(situation, seen)
        idle = self._places.idles(cluster)
        due, self._due = self._due, {}
        wanted = self.options.orders == "planned" and (self.shortage.requests > 0 or idle or bool(due))
        if not (stale or wanted):
            return None
        options = self.options

        def generate() -> Generated:
            order = None
            if wanted:
                eager = idle or bool(due)
                order = improve(situation, options.exact, options.time_limit, eager=eager)
            return Generated(situation, order, due, [(sort, centres_of(points)) for sort, points in stale])

        return generate

    def conclude(self, result: object, cluster: Cluster, now: float) -> None:
        """Take over a new order, as far as its groups and instances are still there."""
        assert isinstance(result, Generated)
        for sort, centres in result.centres:
            self._groups.refit(sort, centres)
        self._judged = result.due
        self._places.changed |= set(result.due) & set(self._places.queues.queues)
        if result.order is None:
            return
        situation, order = result.situation, result.order
        seen = see(situation, order)
        self.shortage = shortage(situation, seen)
        orders: dict[str, list[Item]] = {}
        for g, name in enumerate(situation.names):
            if name in self._places.queues.queues:
                items = [situation.items[i] for i in order.queue(g)]
                orders[name] = [item for item in items if self._still_holds(cluster, name, item)]
        self._places.queues.adopt(orders)
        self._places.changed |= set(self._places.queues.queues)

    def _still_holds(self, cluster: Cluster, name: str, item: Item) -> bool:
        """Tell whether an item of a plan is still there, and can still be served where the plan has it."""
        if item.group is None:
            return True
        there = item.group.id in self._groups.groups
        return there and serves(cluster, name, self._places.model(item.group))

    # ---- estimates

    def completion(self, cluster: Cluster, id: str, now: float) -> Normal | None:
        """Return the distribution of the seconds until a request is complete; None = it has no place yet."""
        if id in self._pulling.sent:
            sent = self._pulling.sent[id]
            instance = cluster.instances.get(sent.instance)
            return self._places.estimator.completion(instance, sent.kind, 0.0, 0.0) if instance else None
        row = cluster.backlog.row_of.get(id)
        group = self._groups.of(int(cluster.backlog.serial[row])) if row is not None else None
        if row is None or group is None or not group.instance:
            return None
        situation = describe(self._places, cluster, now, [])
        ahead = group.position(int(cluster.backlog.serial[row]), cluster.backlog)
        i = next(i for i, item in enumerate(situation.items) if item.group is group)
        base, work = see(situation).waiting(i)
        instance = next(one for one in fleet_of(cluster) if one.id == group.instance)
        return self._places.estimator.completion(instance, group.kind, base, work, ahead, self._places.model(group))
