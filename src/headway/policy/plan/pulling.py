"""Request pulling: which queued requests go inside the instances that have their model loaded (QLM 5).

Within a model requests are bound one by one: the groups at the head of all instances that have it loaded are pulled
by deadline, what is overdue behind the rest of its run of one model, each request to the instance that costs least, if
it can be in time there. A request that is due before what runs is sent anyway, with a rank that makes the engine evict
for it (recompute or swap, as its packer chooses).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from headway.policy.core.cluster import Cluster
from headway.policy.forecast.completion import Pace
from headway.policy.plan.dispatch import cheapest
from headway.policy.plan.group_placement import GroupPlacement, QlmOptions
from headway.policy.plan.group_queues import SentRequest
from headway.policy.plan.groups import Group, Kind, RequestGroups
from headway.policy.plan.situation import INTERACTIVE
from headway.types import Backlog, Instance, Send

_LOST = 1e12  # the urgency of requests overdue begins here


class Pulling:
    """See the module.

    sent: the requests inside instances, by id. rerank: their ranks that have changed and are to be told, by instance.
    """

    def __init__(self, options: QlmOptions, groups: RequestGroups, places: GroupPlacement) -> None:
        self.sent: dict[str, SentRequest] = {}
        self.rerank: dict[str, dict[str, float]] = {}
        self._options, self._groups, self._places = options, groups, places

    def vacate(self, request: SentRequest) -> None:
        """Note that a request is no longer inside its instance."""
        inside = self._places.queues.inside.get(request.instance)
        if inside is not None:
            inside.remove(request)
            self._places.changed.add(request.instance)

    def ungroup(self, serial: int) -> None:
        """Take a request out of its group; an empty group disappears with all its traces."""
        group = self._groups.left(serial)
        if group is not None and group.size == 0:
            if group.instance:
                self._places.changed.add(group.instance)
            self._places.queues.remove(group)

    def pull(self, cluster: Cluster, model: str, now: float) -> Iterator[Send]:
        """Yield the requests of a model that belong inside its instances now, by deadline (request pulling)."""
        backlog, queues = cluster.backlog, self._places.queues.queues
        heads = [name for name, one in cluster.instances.items() if one.model == model]
        peers, sent = dict.fromkeys(heads), defaultdict[str, float](float)  # peers: those that may have room
        for name in heads:
            self._give_up_inside(cluster.instances[name], now)
        while waiting := [name for name in heads if self._head(cluster, name)]:
            name = min(waiting, key=lambda one: (queues[one][0].lost, queues[one][0].first))
            group = queues[name][0]
            row = group.head(backlog)
            if row is None:  # its requests were placed without this planner
                self._drop(group)
            elif not (group.lost or group.begun) and backlog.due[row] < now:
                self._give_up(backlog, group)
            elif target := self._target(cluster, group, row, peers, now, sent):
                yield self._send(backlog, row, group, cluster.instances[target], now)
            else:
                heads.remove(name)
                peers.pop(name, None)  # what is later must not take the room that it waits for

    def _drop(self, group: Group) -> None:
        self._places.changed.add(group.instance)
        self._places.queues.remove(group)
        self._groups.forget(group)

    def _head(self, cluster: Cluster, name: str) -> bool:
        """Tell whether the first group of a virtual queue is of the model that its instance has."""
        queue = self._places.queues.queues[name]
        return bool(queue) and self._places.model(queue[0]) == cluster.instances[name].model

    def _target(
        self, cluster: Cluster, group: Group, row: int, peers: dict[str, None], now: float, sent: dict[str, float]
    ) -> str | None:
        """Return the instance that takes a group's head: that of its queue, or another one where it is in time.

        peers: instances that may have room; those without a place for it leave, as they have none for later ones.
        """
        backlog, own = cluster.backlog, cluster.instances[group.instance]
        urgency = urgency_of(float(backlog.due[row]), lost=group.lost) if self._options.evicts else math.inf
        able = []
        for name in [one for one in peers if self._options.places == "planned" or one == own.id]:
            instance, queue = cluster.instances[name], self._places.queues.queues[name]
            other = instance is not own and bool(queue) and not self._head(cluster, name)
            if other or instance.limit < min(int(backlog.longest[row]), own.limit):
                continue
            count, blocks = self._places.queues.inside[name].ahead(urgency)
            needs = math.ceil(float(backlog.tokens[row]) / instance.block_size)
            if count >= instance.window:
                del peers[name]
            elif not count or blocks + needs <= instance.blocks_total:
                able += [name] if self._in_time(instance, own, group, row, backlog, now) else []
        return cheapest(row, able, cluster, now, sent) if able else None

    def _in_time(self, instance: Instance, own: Instance, group: Group, row: int, backlog: Backlog, now: float) -> bool:
        """Tell whether a request can be in time on an instance, or as soon as on that of its queue."""
        if instance is own:
            return True
        finish, there = (self._pace(one, group.kind).finish(0.5) for one in (instance, own))
        return finish <= max(float(backlog.due[row]) - now, there)

    def _pace(self, instance: Instance, kind: Kind) -> Pace:
        serving = self._places.estimator.serving(instance, instance.model)
        assert serving is not None, "an instance serves its own model"
        return self._places.estimator.pace(serving, kind.tokens)

    def _give_up(self, backlog: Backlog, group: Group) -> None:
        """Let a queued request that is overdue wait behind all that can be in time."""
        queues = self._places.queues
        self._places.changed.add(group.instance)
        lost = self._groups.give_up(group, backlog)
        if not lost.instance:
            queues.after(group, lost)
        else:
            queues.settle(lost)
        if group.size:
            queues.settle(group)
        else:
            queues.remove(group)

    def _give_up_inside(self, instance: Instance, now: float) -> None:
        """Let requests inside that are overdue go behind all that can be in time; answers that stream go on."""
        inside = self._places.queues.inside[instance.id]
        for one in inside.before(now):
            if one.kind.sort.objective != INTERACTIVE:
                inside.change(one, urgency_of(one.due, lost=True))
                if self._options.ranks:
                    self.rerank.setdefault(instance.id, {})[one.id] = one.urgency

    def _send(self, backlog: Backlog, row: int, group: Group, instance: Instance, now: float) -> Send:
        group.entries.popleft()
        urgency = urgency_of(float(backlog.due[row]), lost=group.lost)
        blocks = math.ceil(float(backlog.tokens[row]) / instance.block_size)
        ahead = self._places.queues.inside[instance.id].ahead(urgency)[0]
        full = 10 * (ahead + 1) >= 9 * instance.max_running
        id = self.note_sent(
            backlog, row, group.kind, instance.id, self._rank_on(instance, group), urgency, blocks, now, full=full
        )
        self.ungroup(int(backlog.serial[row]))
        if group.size:
            self._groups.refresh(group, backlog)
            self._places.queues.settle(group)
        return Send(id, instance.id, urgency if self._options.ranks else 0.0)

    def _rank_on(self, instance: Instance, group: Group) -> float:
        """Return the rank of a group's request on an instance: that of the head there, which has its model, too."""
        queue, inside = self._places.queues.queues[instance.id], self._places.queues.inside[instance.id]
        if group.instance == instance.id:
            return group.rank
        return queue[0].rank if queue else inside.highest if len(inside) else 0.0

    def note_sent(
        self,
        backlog: Backlog,
        row: int,
        kind: Kind,
        name: str,
        rank: float,
        urgency: float,
        blocks: int,
        now: float,
        *,
        full: bool,
    ) -> str:
        """Take note that a request is inside an instance; return its id."""
        id, due = str(backlog.keys[row]), float(backlog.due[row])
        serial, places = int(backlog.serial[row]), int(backlog.places[row])
        request = SentRequest(id, serial, name, kind, rank, urgency, blocks, due, now, full, places)
        self.sent[id] = request
        self._places.queues.inside[name].add(request)
        return id


def urgency_of(due: float, *, lost: bool = False) -> float:
    """Return the rank of a request inside an engine: its deadline, behind all others if it is overdue."""
    return _LOST + due if lost else due
