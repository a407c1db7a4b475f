"""One order for a fleet whose instances swap models: vLLM's first come, first served, and EDF (QLM 2.4, 8).

Each instance with room takes the next request of the order. If that is for another model than the one loaded,
the instance takes nothing more, runs its batch to the end and then loads that model: nothing weighs the
cost of a swap, so models thrash (QLM 2.4, Insight 3). What QLM leaves open is decided in favour of these
baselines:

- a request goes to an instance that serves its model and has room, if there is one: the least loaded;
- else it waits if an instance is already on its way to its model;
- else the first idle instance that can load its model does so; without one, of those with room the one with
  the fewest requests runs empty for it;
- without room anywhere it holds up the instances that could serve it, and only those;
- an instance that has loaded a model serves a request of it before it loads another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headway.events import Arrived, Event, Failed, Finished, InstanceDown, InstanceUp, Returned, Swapped
from headway.policy.core.cluster import Cluster
from headway.policy.plan.dispatch import max_context
from headway.policy.plan.estimator import limit_of
from headway.policy.plan.waiting import Entry, WaitingQueue, entry_of
from headway.ports import Planner
from headway.types import Instance, Plan, Send


class ModelSwap(Planner):
    """A kind of rank (`policy/core/ranks.py`) as the order; models are swapped as its requests ask for them.

    A plan costs as much as its sends and swaps, times instances and models, whatever the queue's length.
    """

    swaps = True

    def __init__(self, kind: int) -> None:
        self._kind = kind
        self._queues: dict[str, WaitingQueue] = {}  # by model
        self._models: dict[int, str] = {}  # by their code
        self._inside: dict[str, _Inside] = {}  # by instance
        self._place: dict[str, str] = {}  # request -> the instance that it is inside of
        self._target: dict[str, str] = {}  # an instance that runs empty -> the model that it loads then
        self._loaded: set[str] = set()  # instances that have served no request of the model they loaded

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Queue a request that has come, or come back; forget one that has left its instance."""
        match event:
            case Arrived(request):
                self._models[cluster.code(request.model)] = request.model
                self._push(cluster, request.id)
            case Returned(id):
                self._forget(id)
                self._push(cluster, id)
            case Finished(id) | Failed(id):
                self._forget(id)
            case InstanceUp(instance):
                self._reset(instance.id)
            case Swapped(instance):
                self._reset(instance.id)
                self._loaded.add(instance.id)
            case InstanceDown(id):
                self._reset(id)

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return what the instances with room get, and the swaps of those that have run empty."""
        heads, fleet, send = _Heads(self._queues, cluster, now), cluster.instances, list[Send]()
        self._target = {name: model for name, model in self._target.items() if model in heads}
        self._loaded = {name for name in self._loaded if fleet[name].model in heads}
        for name in sorted(self._loaded):
            self._send_head(cluster, heads, fleet[name].model, [name], send)
        closed = set(self._target)
        while (model := heads.next()) is not None:
            serving = [name for name, one in fleet.items() if one.model == model and name not in closed]
            if self._send_head(cluster, heads, model, serving, send):
                continue
            if not self._on_the_way(cluster, model):
                closed |= self._take_over(cluster, heads.row(model), model, closed)
            heads.skip(model)
        heads.put_back()
        return Plan(send, swap={name: model for name, model in self._target.items() if self._idle(name)})

    # ---- what goes where

    def _send_head(self, cluster: Cluster, heads: _Heads, model: str, names: Iterable[str], send: list[Send]) -> bool:
        """Send the first request of a model, if there is one, to the least loaded of these with room."""
        if model not in heads:
            return False
        row, fleet = heads.row(model), cluster.instances
        able = [name for name in names if self._has_room(cluster, fleet[name], model, row)]
        if not able:
            return False
        best = min(able, key=lambda name: len(self._inside[name]) / fleet[name].window)
        id = str(cluster.backlog.keys[row])
        self._inside[best].add(id, _blocks(cluster, fleet[best], row))
        self._place[id] = best
        self._loaded.discard(best)
        heads.take(model)
        send.append(Send(id, best))
        return True

    def _take_over(self, cluster: Cluster, row: int, model: str, closed: set[str]) -> set[str]:
        """Give a model an instance with room; return the instances that serve nothing else until then."""
        able = [one for name, one in cluster.instances.items() if name not in closed and limit_of(one, model)]
        free = [
            one.id
            for one in able
            if one.model != model and one.id not in self._loaded and self._has_room(cluster, one, model, row)
        ]
        if not free:
            return {one.id for one in able}
        chosen = next(filter(self._idle, free), min(free, key=lambda name: len(self._inside[name])))
        self._target[chosen] = model
        return {chosen}

    def _has_room(self, cluster: Cluster, instance: Instance, model: str, row: int) -> bool:
        """Tell whether an instance could take this request if it served its model."""
        inside = self._inside[instance.id]
        room = instance.blocks_total - inside.blocks
        fits = len(inside) < instance.window and _blocks(cluster, instance, row) <= room
        return (fits or not inside) and _holds(cluster, model, limit_of(instance, model), row)

    def _on_the_way(self, cluster: Cluster, model: str) -> bool:
        loading = (target for _, target in cluster.loading.values())
        return model in loading or model in self._target.values()

    def _idle(self, name: str) -> bool:
        return not self._inside[name]

    # ---- what waits, and what is inside

    def _push(self, cluster: Cluster, id: str) -> None:
        backlog = cluster.backlog
        row = backlog.row_of[id]
        queue = self._queues.setdefault(self._models[int(backlog.model[row])], WaitingQueue(self._kind))
        queue.push(entry_of(self._kind, backlog, row))

    def _forget(self, id: str) -> None:
        place = self._place.pop(id, None)
        if place is not None:
            self._inside[place].remove(id)

    def _reset(self, name: str) -> None:
        """Begin anew with an instance that has come, gone or loaded a model."""
        for id in self._inside.get(name, _Inside()).requests:
            self._place.pop(id)
        self._inside[name] = _Inside()
        self._target.pop(name, None)
        self._loaded.discard(name)


@dataclass(slots=True)
class _Inside:
    """The requests inside an instance and the KV blocks that they are expected to take."""

    requests: dict[str, int] = field(default_factory=dict)
    blocks: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, id: str, blocks: int) -> None:
        self.requests[id] = blocks
        self.blocks += blocks

    def remove(self, id: str) -> None:
        self.blocks -= self.requests.pop(id)


class _Heads:
    """The next request of each model while a plan is made."""

    def __init__(self, queues: dict[str, WaitingQueue], cluster: Cluster, now: float) -> None:
        self._queues = queues
        self._walks: dict[str, Iterator[Entry]] = {
            model: queue.walk(cluster.backlog, now) for model, queue in queues.items()
        }
        first = {model: next(walk, None) for model, walk in self._walks.items()}
        self._entry = {model: entry for model, entry in first.items() if entry is not None}
        self._open, self._taken = set(self._entry), set[int]()

    def __contains__(self, model: str) -> bool:
        return model in self._entry

    def next(self) -> str | None:
        """Return the model of the first request in the order, of the models that are not skipped."""
        return min(self._open, key=self._entry.__getitem__, default=None)

    def row(self, model: str) -> int:
        """Return the row of a model's next request."""
        return self._entry[model][4]

    def skip(self, model: str) -> None:
        """Leave a model out for the rest of this plan."""
        self._open.discard(model)

    def take(self, model: str) -> None:
        """Go on to the next request of a model: this one is sent."""
        self._taken.add(self._entry.pop(model)[4])
        entry = next(self._walks[model], None)
        if entry is None:
            self._open.discard(model)
        else:
            self._entry[model] = entry

    def put_back(self) -> None:
        """Leave in the queues what was not taken."""
        for queue in self._queues.values():
            queue.put_back(self._taken)


def _blocks(cluster: Cluster, instance: Instance, row: int) -> int:
    """Return the KV blocks that a request is expected to take on an instance."""
    return int(np.ceil(cluster.backlog.tokens[row] / instance.block_size))


def _holds(cluster: Cluster, model: str, limit: int, row: int) -> bool:
    """Tell whether a request fits into `limit` tokens, or no instance holds more of its model."""
    longest = int(cluster.backlog.longest[row])
    return longest <= limit or limit >= max_context(cluster, model, later=True)
