"""Admits no more best-effort runs than the KV holds, so that they do not evict each other between requests.

An agent whose prompts continue each other reuses its KV after each tool call. While the admitted runs fill the KV that
requests with a promise leave, the next run waits. Runs are admitted in the order of best effort, when there is room:
when an admitted run ends, or has been silent for as long as computing all the KV of an engine takes, because from then
on keeping its KV costs more than computing it again. When the admitted runs have outgrown the KV, the newest wait from
their next request on (ThunderAgent, arXiv 2602.13692, pauses programs likewise).

No run waits for ever: if none has been admitted for a turn, the one that has waited longest is, and counts as the
oldest. A turn is `stretch` times what computing all the KV of an engine takes.

Requests with a promise never wait here, nor do those that reuse no KV: outside runs, of runs whose prompts do not
continue each other, without keys (one engine), or restricted to some engines.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import numpy as np

from headway.events import Event, Failed, Finished
from headway.policy.apps.run import Key, Run
from headway.policy.apps.runs import Runs
from headway.policy.core.cluster import Cluster
from headway.types import OBJECTIVES, Request

_KEY = 8  # bytes
_BEST_EFFORT = OBJECTIVES.index("best_effort")


@dataclass(slots=True, eq=False)
class _Member:
    """The best-effort requests of a live run to one model.

    prompt: number of bytes of the newest prompt's keys, and the last key. tokens: of that prompt and its answer.
    reuses: whether a prompt continued the one before; None = only one has come.
    asks: tokens of the requests in progress, by id. held: those that wait. counted: its part of `_Group.taken`.
    """

    group: _Group
    prompt: tuple[int, bytes] | None = None
    tokens: float = 0.0
    reuses: bool | None = None
    asks: dict[str, float] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    counted: float = 0.0


@dataclass(slots=True)
class _Group:
    """The runs that use one model.

    engines: those that serve it. kv: tokens of all of them.
    runs: the admitted ones, the oldest first. taken: tokens of KV that they need together.
    silent: the admitted ones without requests in progress, with the instant at which their admission ends.
    waiting: those that wait, with where they stand, the longest first. entered: instant of the latest admission.
    """

    engines: list[str] = field(default_factory=list)
    kv: int = 0
    runs: OrderedDict[_Member, None] = field(default_factory=OrderedDict)
    taken: float = 0.0
    silent: dict[_Member, float] = field(default_factory=dict)
    waiting: dict[_Member, float] = field(default_factory=dict)
    entered: float = 0.0

    def count(self, one: _Member) -> None:
        """Count what a run needs, if it is admitted."""
        if one in self.runs:
            self.taken -= one.counted
            one.counted = sum(one.asks.values()) or one.tokens
            self.taken += one.counted

    def out(self, one: _Member) -> None:
        """End the admission of a run."""
        self.silent.pop(one, None)
        if one in self.runs:
            del self.runs[one]
            self.taken, one.counted = self.taken - one.counted, 0.0


class RunAdmission:
    """Admits best-effort runs.

    runs: the live ones. stretch: length of a turn, in times that computing all the KV of an engine takes.

    Attributes:
        held: requests that wait, by id.
        wake_at: instant at which the next run may be admitted if nothing ends before, inf = none waits.
    """

    def __init__(self, runs: Runs, stretch: float) -> None:
        self.held: set[str] = set()
        self.wake_at = math.inf
        self._runs, self._stretch, runs.closed = runs, stretch, self._close
        self._members: dict[tuple[Key, str], _Member] = {}  # by run and model
        self._of: dict[str, _Member] = {}  # by id of a request in progress
        self._asked: dict[_Member, float] = {}  # those with new requests: where the newest stands
        self._groups = defaultdict[str, _Group](_Group)
        self._fleet_version, self._changed = -1, False

    def came(self, request: Request, stands: float, cluster: Cluster) -> None:
        """Hold a best-effort request of a run until `enter`, if the run may come back for its KV."""
        id, stage, keys = request.id, request.stage, cluster.placement.keys(request.id)
        place = self._runs.run_of(id).key, request.model
        if stage is None or not stage.run or request.engines or not keys:
            return
        if stage.final and place not in self._members:
            return
        one = self._members.setdefault(place, _Member(self._groups[request.model]))
        if one.prompt is not None:
            one.reuses = one.reuses or keys[one.prompt[0] - _KEY : one.prompt[0]] == one.prompt[1]
        one.prompt, one.tokens = (len(keys), keys[-_KEY:]), cluster.backlog.tokens.item(cluster.backlog.row_of[id])
        one.asks[id] = one.tokens
        one.held.append(id)
        self._of[id], self._asked[one], self._changed = one, stands, True
        self.held.add(id)
        one.group.silent.pop(one, None)
        one.group.count(one)

    def note(self, event: Event, now: float) -> None:
        """Take note of the end of a request, which may make room; other events are ignored."""
        if not isinstance(event, Finished | Failed):
            return
        self._changed |= bool(self.held)
        if (one := self._of.pop(event.id, None)) is None:
            return
        del one.asks[event.id]
        if event.id in self.held:
            self.held.remove(event.id)
            one.held.remove(event.id)
        if not one.held:
            one.group.waiting.pop(one, None)
        one.group.count(one)
        if one in one.group.runs and not one.asks:
            one.group.silent[one] = now + self._worth(one.group)

    def enter(self, cluster: Cluster, now: float) -> list[str]:
        """Admit runs as long as the KV holds them; return their requests that go on."""
        self._follow(cluster)
        if not self._changed and now < self.wake_at:
            return []
        out, asked, self._asked = list[str](), self._asked, {}
        self.wake_at, self._changed = math.inf, False
        for one, stands in asked.items():
            group = one.group
            if one.reuses is False or self._stays(one, cluster):
                out += self._go_on(one)
            elif one.held and one not in group.waiting:
                group.out(one)
                group.entered = group.entered if group.waiting else now
                group.waiting[one] = stands
        for group in self._groups.values():
            out += self._let_in(group, cluster, now)
        return out

    def _stays(self, one: _Member, cluster: Cluster) -> bool:
        """Tell whether a run stays admitted: the oldest does, and those that fit beside the older ones."""
        group = one.group
        if one not in group.runs:
            return False
        over = group.taken - self._room(group, cluster)
        for newest in reversed(group.runs):
            if over <= 0:
                return True
            if newest is one:
                break
            over -= newest.counted
        return one is next(iter(group.runs))

    def _let_in(self, group: _Group, cluster: Cluster, now: float) -> list[str]:
        """Admit the runs that wait for a model, in their order; return their requests."""
        out = list[str]()
        while group.silent and next(iter(group.silent.values())) <= now:
            group.out(next(iter(group.silent)))
        if not group.waiting or not group.engines:
            return out
        room, turn_ends = self._room(group, cluster), group.entered + self._stretch * self._worth(group)
        while group.waiting:
            one, fits = min(group.waiting, key=group.waiting.__getitem__), True
            if group.runs and group.taken + sum(one.asks.values()) > room:
                if now < turn_ends:
                    self.wake_at = min(self.wake_at, turn_ends, next(iter(group.silent.values()), math.inf))
                    break
                one, fits = next(iter(group.waiting)), False
            group.runs[one] = None
            group.runs.move_to_end(one, last=fits)
            group.count(one)
            group.entered, turn_ends = now, now + self._stretch * self._worth(group)
            out += self._go_on(one)
        return out

    def _worth(self, group: _Group) -> float:
        """Return the seconds that computing all the KV of an engine of a model takes, mean."""
        return self._runs.costs.prompt * group.kv / max(len(group.engines), 1)

    def _room(self, group: _Group, cluster: Cluster) -> float:
        """Return the KV of a model that requests with a promise leave, tokens."""
        backlog = cluster.backlog
        rows = np.concatenate([np.empty(0, np.int64), *(cluster.inside(name).rows for name in group.engines)])
        return group.kv - float(backlog.tokens[rows[backlog.objective[rows] != _BEST_EFFORT]].sum())

    def _go_on(self, one: _Member) -> list[str]:
        """Release the held requests of a run; return their ids."""
        ids, one.held = one.held, []
        self.held.difference_update(ids)
        one.group.waiting.pop(one, None)
        if one.reuses is False:
            one.group.out(one)
        return ids

    def _close(self, run: Run) -> None:
        """Forget a run that has ended."""
        for model, group in self._groups.items():
            if (one := self._members.pop((run.key, model), None)) is not None:
                group.out(one)
                self._changed = True

    def _follow(self, cluster: Cluster) -> None:
        """Follow the fleet."""
        if cluster.fleet_version == self._fleet_version:
            return
        self._fleet_version, self._changed = cluster.fleet_version, True
        for group in self._groups.values():
            group.engines, group.kv = [], 0
        for name, instance in cluster.instances.items():
            self._groups[instance.model].engines.append(name)
            self._groups[instance.model].kv += instance.blocks_total * instance.block_size
