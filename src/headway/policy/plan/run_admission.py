"""Which best-effort runs are in: no more than the KV holds, so that they do not evict each other between requests.

An agent whose prompts continue each other comes back for its KV after each tool call. Where such runs fill the KV of
the engines, others wait until one of these has ended, or has been silent for as long as computing all the KV of an
engine takes: from then on, keeping its KV has cost the others more than computing it again. When those on an engine
have grown too large together, the ones that stand last wait before their next request (ThunderAgent, arXiv
2602.13692, pauses programs likewise). A run stays on its engine unless another one has room for it.

None waits for ever: a run that has waited for a turn goes in before the others, and those that have been in for a turn
make room for it. A turn is `stretch` times what it takes to compute all the KV of an engine, so exchanging all runs
once in a turn costs 1/`stretch` of the engines' time.

Requests with a promise never wait here, nor those of runs whose prompts do not continue each other, or are not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from headway.policy.apps.run import Key, Run
from headway.policy.apps.runs import Runs
from headway.policy.core.cluster import Cluster
from headway.types import Instance, Request

_KEY = 8  # bytes
_Rooms = dict[str, float]  # by engine: tokens of KV that are left there for further runs, below 0 = it has too many


@dataclass(slots=True)
class _Member:
    """A live run with best-effort requests.

    tokens: of its newest requests and their answers. stands: where the newest one does.
    keys: bytes of its newest prompt's keys, and the last one.
    reuses: a prompt of it continued the one before; None = it had only one.
    entered: it is in. since: instant from which it is in, or waits.
    ended, silent_at: instants at which its latest request did, and from which it counts as silent; inf = it has some.
    home: engine of its newest request that was sent.
    inside, held: ids of its requests in progress that have gone on, and that wait.
    """

    run: Run
    model: str
    tokens: float = 0.0
    stands: float = 0.0
    keys: tuple[int, bytes] = (0, b"")
    reuses: bool | None = None
    entered: bool = False
    since: float = 0.0
    ended: float = math.inf
    silent_at: float = math.inf
    home: str = ""
    inside: set[str] = field(default_factory=set)
    held: list[str] = field(default_factory=list)

    def asks(self, tokens: float, keys: bytes) -> None:
        """Take note of a request, by its tokens and its prompt's keys."""
        length, last = self.keys
        busy = bool(self.inside or self.held)
        if busy or self.ended < math.inf:
            self.reuses = self.reuses or (length > 0 and keys[length - _KEY : length] == last)
        self.tokens = tokens + (self.tokens if busy else 0.0)
        self.keys, self.ended = (len(keys), keys[-_KEY:]), math.inf


class RunAdmission:
    """Lets best-effort runs in.

    runs: the live ones. stretch: turns' length.

    Attributes:
        held: requests that wait, by id.
        able: engines that requests may go to which have gone on since the last plan, by id; others go to any.
        wake_at: instant at which the next run that is in counts as silent, inf = none waits for that.
    """

    def __init__(self, runs: Runs, stretch: float) -> None:
        self.held: dict[str, _Member] = {}
        self.able: dict[str, frozenset[str]] = {}
        self.wake_at = math.inf
        self._runs, self._stretch = runs, stretch
        self._members: dict[Key, _Member] = {}
        self._inside: dict[str, _Member] = {}  # by id of a request

    def came(self, request: Request, stands: float, cluster: Cluster, now: float) -> None:
        """Let a best-effort request of a run go on, or hold it until `enter`."""
        run, keys = self._runs.run_of(request.id), cluster.placement.keys(request.id)
        one = self._members.get(run.key)
        if one is None or one.run is not run:
            one = self._members[run.key] = _Member(run, request.model)
        one.asks(cluster.backlog.tokens.item(cluster.backlog.row_of[request.id]), keys)
        one.stands = stands
        if one.reuses is False or not keys or request.engines:
            one.entered = False
            self._go_on(one, request.id)
            return
        rooms = self._rooms(one.model, cluster, now)
        if one.inside or (one.entered and self._stays(one, rooms, cluster, now)):
            self._go_on(one, request.id)
            if one.home in rooms:
                self.able[request.id] = _roomy(one, rooms) | {one.home}
            return
        if not one.held:
            one.entered, one.since = False, now
        one.held.append(request.id)
        self.held[request.id] = one

    def sent(self, id: str, name: str) -> None:
        """Take note of where a request goes; others are ignored."""
        if (one := self._inside.get(id)) is not None:
            one.home = name

    def left(self, id: str, now: float) -> None:
        """Take note of the end of a request; others are ignored."""
        one = self._inside.pop(id, None) or self.held.pop(id, None)
        if one is None:
            return
        one.inside.discard(id)
        one.held = [other for other in one.held if other != id]
        if not one.inside and not one.held:
            one.ended = now

    def enter(self, cluster: Cluster, now: float) -> list[str]:
        """Let runs in, in their order, as long as the KV holds them; return their requests that go on."""
        self.wake_at, out = math.inf, list[str]()
        if not self.held:
            return out
        waiting = {one.run.key: one for one in self.held.values()}.values()
        for model in {one.model for one in waiting}:
            turn, rooms = self._stretch * self._kv_seconds(model, cluster), self._rooms(model, cluster, now)
            mine = [(now - one.since < turn, one) for one in waiting if one.model == model]
            for _, one in sorted(mine, key=lambda it: (it[0], it[1].stands if it[0] else it[1].since)):
                if not (able := _roomy(one, rooms)):
                    break
                for name in able:  # which of them gets it is not known yet
                    most = _kv(cluster.instances[name]) if one.reuses else math.inf
                    rooms[name] = min(rooms[name], most) - one.tokens
                one.entered, one.since = True, now
                out += one.held
                for id in one.held:
                    del self.held[id]
                    self._go_on(one, id)
                    self.able[id] = able
                one.held = []
        if self.held:
            self.wake_at = min((one.silent_at for one in self._members.values() if one.entered), default=math.inf)
        return out

    def _go_on(self, one: _Member, id: str) -> None:
        one.inside.add(id)
        self._inside[id] = one

    def _stays(self, one: _Member, rooms: _Rooms, cluster: Cluster, now: float) -> bool:
        """Tell whether a run that is in goes on; not if another one's turn has come, or the KV is too small."""
        turn = self._stretch * self._kv_seconds(one.model, cluster)
        if now - one.since >= turn and any(
            now - other.since >= turn for other in self.held.values() if other.model == one.model
        ):
            return False
        here = (other for other in self._members.values() if other.entered and other.home == one.home)
        return rooms.get(one.home, 0.0) + sum(other.tokens for other in here if other.stands > one.stands) >= 0.0

    def _kv_seconds(self, model: str, cluster: Cluster) -> float:
        """Return what it takes to compute all the KV of an engine."""
        kv = [_kv(one) for one in cluster.instances.values() if one.model == model]
        return self._runs.costs.prompt * sum(kv) / max(len(kv), 1)

    def _rooms(self, model: str, cluster: Cluster, now: float) -> _Rooms:
        """Return the room of each engine; inf where no run that is in has KV to lose.

        Taken by the runs that are in and not silent, and by others' requests that have begun.
        """
        self._members = {key: one for key, one in self._members.items() if not one.run.ended}
        mine, silence = [one for one in self._members.values() if one.model == model], self._kv_seconds(model, cluster)
        for one in mine:
            one.silent_at = one.ended + silence
            one.entered = one.entered and now < one.silent_at
        entered = [one for one in mine if one.entered and one.home in cluster.instances]
        backlog, codes = cluster.backlog, cluster.codes
        begun = backlog.live & backlog.sent & ~backlog.pending
        begun[np.array([backlog.row_of[id] for one in entered for id in one.inside], np.int64)] = False
        taken = np.bincount(backlog.instance[begun], backlog.tokens[begun], len(codes))
        np.add.at(taken, [codes[one.home] for one in entered], [one.tokens for one in entered])
        at_stake = {one.home for one in entered if one.reuses}
        return {
            name: _kv(one) - taken.item(codes[name]) if name in at_stake else math.inf
            for name, one in cluster.instances.items()
            if one.model == model
        }


def _kv(engine: Instance) -> int:
    return engine.blocks_total * engine.block_size


def _roomy(one: _Member, rooms: _Rooms) -> frozenset[str]:
    """Return the engines with room for a run."""
    return frozenset(name for name, room in rooms.items() if one.tokens <= room)
