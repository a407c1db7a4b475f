"""Which best-effort runs are in: no more than the KV holds, so that they do not evict each other between requests.

An agent whose prompts continue each other comes back for its KV after each tool call. Where such runs fill the KV of
the engines, others wait until one of these has ended, or has been silent for as long as computing all the KV of an
engine takes: from then on, keeping its KV has cost the others more than computing it again. When those on an engine
grow too large together, the one that stands last goes out (ThunderAgent, arXiv 2602.13692, pauses programs likewise).

None waits for ever: a run that has waited for a turn goes in before the others, whatever KV requests outside runs take,
and those that have been in for a turn go out before their next request. A turn is `stretch` times what it takes to
compute all the KV of an engine, so exchanging all runs once in a turn costs 1/`stretch` of the engines' time.

Requests with a promise never wait here, nor those that cannot come back for their KV: outside runs, of runs whose
prompts do not continue each other, without keys (one engine), or restricted to some engines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from headway.events import Event, Failed, Finished, Returned, Started
from headway.policy.apps.run import Key, Run
from headway.policy.apps.runs import Runs
from headway.policy.core.cluster import Cluster
from headway.policy.core.least import Least
from headway.policy.plan.dispatch import cheapest
from headway.types import Request

_KEY = 8  # bytes
_Order = Least["_Member"]


@dataclass(slots=True)
class _Engine:
    """kv: its tokens. taken, others: those of runs that are in, and of requests outside these that have begun."""

    name: str
    kv: int = 0
    limit: int = 0
    taken: int = 0
    others: int = 0
    last: _Order = field(default_factory=Least)  # the runs that are in, the one that stands last first


@dataclass(slots=True)
class _Group:
    """The engines of a model, and the runs that use it. kv: tokens of an engine, mean.

    silent: runs that are in without requests in progress, by the instant from which they count as silent.
    waiting: the others that have requests, those first that have waited for a turn. fresh: those that have not.
    """

    engines: list[_Engine] = field(default_factory=list)
    kv: float = 0.0
    silent: _Order = field(default_factory=Least)
    waiting: _Order = field(default_factory=Least)
    fresh: _Order = field(default_factory=Least)


@dataclass(slots=True, eq=False)
class _Member:
    """A live run with best-effort requests to a model.

    tokens, stands: of its newest request: with its answer, and where it does. longest: as in `Backlog`, of those held.
    prompt: bytes of its newest prompt's keys, and the last one.
    reuses: a prompt of it continued the one before; None = it had only one.
    home: where it is in, None = it is not. counted: tokens that it takes there.
    since: instant from which it is in, or waits.
    inside, held: tokens of its requests in progress that have gone on, and of the others, by id.
    """

    group: _Group
    tokens: int = 0
    stands: float = 0.0
    longest: int = 0
    prompt: tuple[int, bytes] | None = None
    reuses: bool | None = None
    home: _Engine | None = None
    counted: int = 0
    since: float = 0.0
    inside: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Tell whether its held requests wait; others are new."""
        return self in self.group.waiting

    def able(self) -> list[_Engine]:
        """Return the engines to which its held requests may go now; one that is in and does not wait stays in."""
        group, longest = self.group, min(self.longest, max((one.limit for one in self.group.engines), default=0))
        size, beside = sum((self.inside | self.held).values()), not self.waits or self in group.fresh
        return [
            one
            for one in ([self.home] if self.home is not None and self.inside else group.engines)
            if one.limit >= longest
            and (
                (one is self.home and not self.waits)
                or one.taken - self.counted * (one is self.home) + min(size, one.kv) + beside * one.others <= one.kv
            )
        ]

    def count(self) -> None:
        """Count what it takes where it is in; while it waits, that is what is inside."""
        if self.waits and not self.inside:
            self.out()
        elif self.home is not None:
            asks = self.inside if self.waits else self.inside | self.held
            size = min(sum(asks.values()) or self.tokens, self.home.kv)
            self.home.taken += size - self.counted
            self.counted = size
            self.home.last.put(self, -self.stands)

    def out(self) -> None:
        """Let it be in no more."""
        self.group.silent.drop(self)
        if self.home is not None:
            self.home.taken -= self.counted
            self.home.last.drop(self)
        self.home, self.counted = None, 0

    def go(self) -> None:
        """Let it wait no more."""
        self.group.waiting.drop(self)
        self.group.fresh.drop(self)


class RunAdmission:
    """Lets best-effort runs in.

    runs: the live ones. stretch: turns' length.

    Attributes:
        held: requests that wait, by id.
        bound: the engine of each request that has gone on and was not sent yet, by id; others go to any.
        wake_at: instant at which the next run counts as silent or has waited for a turn, of models for which one waits.
        by_stands: runs that have waited for a turn go in as they stand, not as they came.
    """

    def __init__(self, runs: Runs, stretch: float) -> None:
        self.held: dict[str, _Member] = {}
        self.bound: dict[str, frozenset[str]] = {}
        self.wake_at, self.by_stands = math.inf, False
        self._runs, self._stretch, runs.closed = runs, stretch, self._close
        self._members: dict[Key, dict[str, _Member]] = {}  # by run and model
        self._inside: dict[str, _Member] = {}  # by id of a request
        self._asked: dict[_Member, None] = {}  # those with new requests
        self._begun: dict[str, tuple[_Engine, int]] = {}  # requests of others, by id
        self._groups = defaultdict[str, _Group](_Group)
        self._engines: dict[tuple[int, int], _Engine] = {}  # by codes of instance and model
        self._version, self._changed = -1, False

    def came(self, request: Request, stands: float, cluster: Cluster) -> None:
        """Hold a best-effort request of a run until `enter`, if it may come back for its KV."""
        id, model, stage, backlog = request.id, request.model, request.stage, cluster.backlog
        keys, models = cluster.placement.keys(id), self._members.get(key := self._runs.run_of(id).key, {})
        if stage is None or not stage.run or (stage.final and model not in models) or request.engines or not keys:
            return
        one = self._members.setdefault(key, models).setdefault(model, _Member(self._groups[model]))
        if one.prompt is not None:
            one.reuses = one.reuses or keys[one.prompt[0] - _KEY : one.prompt[0]] == one.prompt[1]
        one.prompt, one.tokens, one.stands = (len(keys), keys[-_KEY:]), _tokens(id, cluster), stands
        one.longest = max(one.longest if one.held else 0, backlog.longest.item(backlog.row_of[id]))
        one.held[id], self.held[id] = one.tokens, one
        if one.reuses is False:
            one.go()
        if one in one.group.fresh:
            one.group.waiting.put(one, 1.0, stands)
        self._ask(one)

    def note(self, event: Event, cluster: Cluster, now: float) -> None:
        """Take note of what happens to a request that has come."""
        match event:
            case Started(id) if id in cluster.backlog and not (id in self._inside or id in self.held):
                self._follow(cluster)
                engine, tokens = self._engine(id, cluster), _tokens(id, cluster)
                if engine is not None and id not in self._begun:
                    self._begun[id] = engine, tokens
                    engine.others += tokens
            case Returned(id, engines=None) if id in self._inside:
                self._hold(id)
            case Returned(id) | Finished(id) | Failed(id):
                self._left(id, now)

    def sent(self, id: str) -> None:
        """Take note that a request has gone to its engine; others are ignored."""
        self.bound.pop(id, None)

    def enter(self, cluster: Cluster, now: float) -> list[str]:
        """Let runs in, in their order, as long as the KV holds them; return their requests that go on."""
        self._follow(cluster)
        if not self._changed and now < self.wake_at:
            return []
        out, costs, asked, self._asked = list[str](), defaultdict[str, float](float), self._asked, {}
        for group in self._groups.values():
            self._settle(group, now)
        for one in asked:
            self._take_placed(one, cluster, now)
            if one.held and not one.waits:
                if one.reuses is False or self._stays(one, now):
                    out += self._go_on(one, cluster, now, costs)
                else:
                    one.since = now
                    one.group.fresh.put(one, now)
                    one.group.waiting.put(one, 1.0, one.stands)
                    one.count()
        self.wake_at, self._changed = math.inf, False
        for group in (one for one in self._groups.values() if one.engines):
            while group.waiting.at < math.inf:
                one = group.waiting.first()[1]
                self._take_placed(one, cluster, now)
                if one.waits and not one.able():
                    self.wake_at = min(self.wake_at, group.silent.at, group.fresh.at + self._turn(group))
                    break
                if one.waits:
                    out += self._go_on(one, cluster, now, costs)
        return out

    def _settle(self, group: _Group, now: float) -> None:
        """Let out the silent runs, and find those that have waited for a turn."""
        while group.silent.at <= now:
            group.silent.first()[1].out()
        while group.fresh.at + self._turn(group) <= now:
            since, one = group.fresh.first()
            group.fresh.drop(one)
            group.waiting.put(one, 0.0, one.stands if self.by_stands else since)

    def _stays(self, one: _Member, now: float) -> bool:
        """Tell whether a run that is in goes on; not if another one's turn has come, or the KV is too small."""
        group, home = one.group, one.home
        turn_is_over = group.waiting.at == 0.0 and one.since + self._turn(group) <= now
        if home is None or turn_is_over or home not in one.able():
            return False
        while home.taken + home.others > home.kv:
            last = home.last.first()[1]
            if last.inside or last.held:
                return last is not one  # it waits before its next request
            last.out()
        return True

    def _go_on(self, one: _Member, cluster: Cluster, now: float, costs: dict[str, float]) -> list[str]:
        """Let a run's requests go on to the engine where they cost least, those of runs that reuse nothing to any."""
        ids, home, entered = [*one.held], None, one.waits or one.home is None
        if one.reuses is not False:
            names = {engine.name: engine for engine in one.able()}
            home = names[name := cheapest(cluster.backlog.row_of[ids[0]], [*names], cluster, now, costs)]
            self.bound |= dict.fromkeys(ids, frozenset({name}))
        for id in ids:
            one.inside[id], self._inside[id] = one.held.pop(id), self.held.pop(id)
        one.go()
        if home is not one.home:
            one.out()
        one.home, one.since = home, now if entered else one.since
        one.count()
        return ids

    def _turn(self, group: _Group) -> float:
        return self._stretch * self._runs.costs.prompt * group.kv

    def _take_placed(self, one: _Member, cluster: Cluster, now: float) -> None:
        """Take note of held requests that another controller has sent, wherever they are."""
        for id in [id for id in one.held if cluster.backlog.sent[cluster.backlog.row_of[id]]]:
            one.inside[id], self._inside[id] = one.held.pop(id), self.held.pop(id)
            if one.home is None:
                one.home, one.since = self._engine(id, cluster), now
            if not one.held:
                one.go()
            one.count()

    def _engine(self, id: str, cluster: Cluster) -> _Engine | None:
        row = cluster.backlog.row_of[id]
        return self._engines.get((cluster.backlog.instance.item(row), cluster.backlog.model.item(row)))

    def _ask(self, one: _Member) -> None:
        one.group.silent.drop(one)
        one.count()
        self._asked[one], self._changed = None, True

    def _hold(self, id: str) -> None:
        """Hold a request again that had gone on."""
        one = self.held[id] = self._inside.pop(id)
        one.held[id] = one.inside.pop(id)
        self.bound.pop(id, None)
        self._ask(one)

    def _left(self, id: str, now: float) -> None:
        if id in self._begun:
            engine, tokens = self._begun.pop(id)
            engine.others -= tokens
            self._changed = True
        one = self._inside.pop(id, None) or self.held.pop(id, None)
        self.bound.pop(id, None)
        if one is None:
            return
        one.inside.pop(id, None)
        one.held.pop(id, None)
        self._changed = True
        if not one.held:
            one.go()
        one.count()
        if one.home is not None and not one.inside and not one.held:
            one.group.silent.put(one, now + self._turn(one.group) / self._stretch)

    def _close(self, run: Run) -> None:
        """Forget a run that has ended."""
        for one in self._members.pop(run.key, {}).values():
            one.out()
            one.go()
            self._asked.pop(one, None)
            for id in (*one.inside, *one.held):
                for table in (self._inside, self.held, self.bound):
                    table.pop(id, None)
            one.inside, one.held, self._changed = {}, {}, True

    def _follow(self, cluster: Cluster) -> None:
        """Follow the fleet; runs whose engine is gone are not in any more, and what was not sent there waits again."""
        if cluster.fleet_version == self._version:
            return
        gone, self._engines = self._engines, {}
        self._version, self._changed = cluster.fleet_version, True
        for group in self._groups.values():
            group.engines = []
        for name, instance in cluster.instances.items():
            key, group = (cluster.code(name), cluster.code(instance.model)), self._groups[instance.model]
            engine = self._engines[key] = gone.pop(key) if key in gone else _Engine(name)
            engine.kv, engine.limit = instance.blocks_total * instance.block_size, instance.limit
            group.engines.append(engine)
        for group in self._groups.values():
            group.kv = sum(one.kv for one in group.engines) / max(len(group.engines), 1)
        for one in (one for engine in gone.values() for one in engine.last):
            one.out()
            for id in [id for id in one.inside if id in self.bound]:
                self._hold(id)


def _tokens(id: str, cluster: Cluster) -> int:
    """Return the expected tokens of a request; whole ones, so that their sums are exact."""
    return math.ceil(float(cluster.backlog.tokens[cluster.backlog.row_of[id]]))
