"""Overflow: promises that would be lost go to engines that cost money, within a budget.

Such an engine (`Instance.overflow`) is in no planner's fleet. At the last instant at which it could still keep the
promise of a request, the forecast for the other engines decides: only what would be late there goes, and what is
inside one of them without a token is taken back first. Nothing waits for that instant while no other engine is up, or
before the overflow engine has shown its pace. (Deciding at arrival sent twice as many, most of them on time without.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.events import Arrived, Event, Finished, InstanceDown, InstanceUp, Returned, Started
from headway.policy.core.cluster import Cluster
from headway.policy.core.drops import Checks
from headway.policy.placement.cost import Engine
from headway.types import Instance, Overflowed, OverflowTerms, Recall, Request, Send

HOUR = 3600.0  # seconds for which what was spent counts against the budget
_LEAD = 0.05  # seconds before the last instant at which a request is looked at, for its way there
_TRIAL = 60.0  # seconds after which a pace that nothing confirms may be wrong, and one request finds out
_GAIN, _SPREAD_GAIN, _SPREADS = 1 / 8, 1 / 4, 4.0  # of the estimate of TCP's round trip, RFC 6298
_WHOLE = 1e-4  # seconds per token below which an answer came in one piece


@dataclass(slots=True)
class Account:
    """What an overflow engine costs in any hour: what is reserved for open requests, and what ended ones took.

    spent: units that count at the moment.
    """

    spent: float = 0.0
    _entries: deque[tuple[float, str]] = field(default_factory=deque)  # instants and ids, oldest first
    _units: dict[str, tuple[float, float]] = field(default_factory=dict)  # instants and units, by id

    def reserve(self, id: str, units: float, now: float) -> None:
        """Set units aside for a request; they count for an hour, with what it has cost already."""
        self._entries.append((now, id))
        _, before = self._units.get(id, (now, 0.0))
        self._units[id] = now, before + units
        self.spent += units

    def settle(self, id: str, units: float) -> None:
        """Replace what was reserved by what the request took; nothing where its hour is over."""
        if id in self._units:
            instant, before = self._units[id]
            self._units[id] = instant, units
            self.spent += units - before

    def expire(self, now: float) -> None:
        """Forget what is older than an hour."""
        while self._entries and self._entries[0][0] <= now - HOUR:
            _, id = self._entries.popleft()
            if id in self._units and self._units[id][0] <= now - HOUR:
                self.spent -= self._units.pop(id)[1]
        if not self._units:
            self.spent = 0.0  # without the rounding errors of sums


@dataclass(slots=True)
class _Seconds:
    """A duration that is learned, and what it takes at most but for rare cases; 0 before anything is known."""

    mean: float | None = None
    spread: float = 0.0

    @property
    def most(self) -> float:
        return 0.0 if self.mean is None else self.mean + _SPREADS * self.spread

    def learn(self, seconds: float) -> None:
        if self.mean is None:
            self.mean, self.spread = seconds, seconds / 2
            return
        self.spread += _SPREAD_GAIN * (abs(seconds - self.mean) - self.spread)
        self.mean += _GAIN * (seconds - self.mean)


@dataclass(slots=True)
class _Remote:
    """What is known of an overflow engine, also while it is down.

    first: seconds to a first token. token: seconds per token after it.
    places: of the requests there. aside_until: instant until which it gets none, because it refused one.
    trial_at: instant from which its pace is taken to be unknown.
    """

    account: Account = field(default_factory=Account)
    first: _Seconds = field(default_factory=_Seconds)
    token: _Seconds = field(default_factory=_Seconds)
    places: int = 0
    aside_until: float = -math.inf
    trial_at: float = -math.inf

    @property
    def learned(self) -> bool:
        """Tell whether it has answered anything."""
        return self.first.mean is not None

    def last(self, request: Request, answer: float, *, sure: bool = True) -> float:
        """Return the last instant at which a request can come here and be on time; -inf = it never could.

        answer: expected tokens. sure: by the pace that was learned; otherwise it may answer at once.
        """
        slo, first, token = request.slo, self.first.most * sure, self.token.most * sure
        if slo.per_token is not None and token > slo.per_token:
            return -math.inf
        needs = ((slo.ttft, first), (slo.e2e, first + answer * token))
        return request.arrival + min(target - took for target, took in needs if target is not None)

    def learn(self, first: float, rest: float, tokens: int, now: float) -> None:
        """Take note of an answer: seconds to its first token and of the others, and how many it had."""
        self.trial_at = now + _TRIAL
        self.first.learn(first)
        if tokens > 1 and rest > _WHOLE * (tokens - 1):  # else no token was seen before the last one
            self.token.learn(rest / (tokens - 1))


class _There(NamedTuple):
    """A request at an overflow engine. first: instant of its first token, None before it."""

    name: str
    terms: OverflowTerms
    request: Request
    sent: float
    first: float | None = None


@dataclass(slots=True)
class Overflow(Checks):
    """The overflow engines, what they cost, and the requests that may go there; the controller keeps it current.

    instances: those that are up, by id. places: of the requests at them.
    """

    instances: dict[str, Instance] = field(default_factory=dict)
    places: int = 0
    _remotes: dict[str, _Remote] = field(default_factory=dict)
    _new: dict[str, None] = field(default_factory=dict)  # requests to look at as soon as possible
    _there: dict[str, _There] = field(default_factory=dict)
    _refused: dict[str, set[str]] = field(default_factory=dict)  # request -> engines that have had it
    _begun: set[str] = field(default_factory=set)  # requests that came back with tokens, and go on at a vLLM

    def spent(self, name: str, now: float) -> float:
        """Return the units that an engine has cost in the last hour, with those reserved for open requests."""
        account = self._remotes[name].account
        account.expire(now)
        return account.spent

    # ---- what happens

    def note(self, event: Event, requests: Mapping[str, Request], now: float) -> bool:
        """Take note of an event; tell whether it is about one of these engines alone.

        requests: all that have not ended, by id.
        """
        match event:
            case InstanceUp(instance) if instance.overflow is not None:
                self.instances[instance.id] = instance
                self._remotes.setdefault(instance.id, _Remote())
                for request in requests.values():
                    self._came(request)
                return True
            case InstanceDown(id) if id in self.instances:
                del self.instances[id]
                return True
            case Arrived(request):
                self._came(request)
            case Started(id):
                self.discard(id)
                if id in self._there:
                    self._there[id] = self._there[id]._replace(first=now)
            case Returned(id, output_tokens, aside_s) if id in requests:
                self._returned(id, output_tokens, aside_s, now)
                if output_tokens:
                    self._begun.add(id)
                self._came(requests[id])
            case Finished(id) if id in self._there:
                self._finished(event, self._there[id], now)
        return False

    def _came(self, request: Request) -> None:
        """Take note of a request that is queued."""
        if any(self._may(request, instance) for instance in self.instances.values()):
            self._new[request.id] = None

    def sent(self, request: Request, name: str, now: float) -> None:
        """Take note of a request that goes to one of the engines; what it may cost is reserved."""
        remote, terms = self._remotes[name], _terms(self.instances[name])
        remote.account.reserve(request.id, _most_units(request, terms), now)
        remote.trial_at = now + _TRIAL
        self._there[request.id] = _There(name, terms, request, now)
        self._refused.setdefault(request.id, set()).add(name)
        self._count(request, name, 1)

    def _finished(self, event: Finished, there: _There, now: float) -> None:
        """Take note of an answer, and of what it cost."""
        remote, request = self._remotes[there.name], there.request
        prompt_tokens = event.prompt_tokens or request.prompt_tokens
        remote.account.settle(event.id, there.terms.units(prompt_tokens, event.output_tokens))
        first = now if there.first is None else there.first
        remote.learn(first - there.sent, now - first, request.per_answer(event.output_tokens), now)

    def _returned(self, id: str, output_tokens: int, aside_s: float, now: float) -> None:
        """Take note of a request that an engine refused, so that it costs nothing, or lost after some tokens."""
        if (there := self._there.pop(id, None)) is None:
            return
        remote = self._remotes[there.name]
        if not output_tokens:
            remote.account.settle(id, 0.0)
        remote.aside_until = max(remote.aside_until, now + aside_s)
        self._count(there.request, there.name, -1)

    def ended(self, id: str) -> None:
        """Forget a request; if it is there and has no answer, what was reserved for it counts as spent."""
        self.discard(id)
        self._new.pop(id, None)
        self._refused.pop(id, None)
        self._begun.discard(id)
        if (there := self._there.pop(id, None)) is not None:
            self._count(there.request, there.name, -1)

    def _count(self, request: Request, name: str, sign: int) -> None:
        self._remotes[name].places += sign * request.places
        self.places += sign * request.places

    # ---- the rule

    def take(self, now: float) -> list[str]:
        """Return the requests to look at now: those that have come, and those at their last instant."""
        new, self._new = list(self._new), {}
        return [*new, *self.due(now)]

    def look(self, request: Request, cluster: Cluster, now: float) -> Send | Recall | None:
        """Return what becomes of a request: it goes to one of the engines, or is taken back so that it can.

        None = it stays where it is: its promise is kept there, or no engine may take it, or its last instant comes.
        """
        backlog, row = cluster.backlog, cluster.backlog.row_of[request.id]
        inside, code = bool(backlog.sent[row]), int(backlog.instance[row])
        if (inside and not backlog.pending[row]) or request.id in self._there or request.id in self._begun:
            return None
        if backlog.expendable[row]:  # nothing is paid for what its class can spare
            return None
        fleet = [Engine(one, cluster.code(name)) for name, one in cluster.instances.items()]
        mine = [one for one in fleet if (one.code == code if inside else _could_hold(request, one.instance))]
        answer = (backlog.tokens.item(row) - backlog.prompt.item(row)) / request.places
        if inside and not mine:  # its engine has gone down: it is on its way back
            return None
        late = cluster.placement.lateness(backlog, row, request.slo, mine, now)
        if late < math.inf and self._watch_last(request, answer, now):
            return None
        best = min(self._able(request, answer, now), default=None) if late > 0 else None
        if best is None:
            return None
        if inside:
            return Recall(request.id, mine[0].instance.id)
        units, name = best
        return Send(request.id, name, overflow=Overflowed(late, units, _terms(self.instances[name])))

    def _able(self, request: Request, answer: float, now: float) -> Iterator[tuple[float, str]]:
        """Yield the engines that would keep a request's promises and have room for it, with what it may cost."""
        for name, instance in self.instances.items():
            if not self._may(request, instance):
                continue
            remote, terms = self._remotes[name], _terms(instance)
            units = _most_units(request, terms)
            room = remote.places + request.places <= instance.max_running and now >= remote.aside_until
            keeps = remote.last(request, answer, sure=now < remote.trial_at) >= now
            if room and keeps and self.spent(name, now) + units <= terms.budget:
                yield units, name

    def _may(self, request: Request, instance: Instance) -> bool:
        """Tell whether an engine may get a request: it has a promise, and its class and tenant may leave."""
        terms, slo = _terms(instance), request.slo
        return (
            (slo.ttft is not None or slo.e2e is not None)
            and request.tier in terms.tiers
            and (not terms.tenants or request.tenant in terms.tenants)
            and request.model == instance.model
            and request.adapter is None
            and (terms.vllm or not request.vllm_only)
            and _could_hold(request, instance)
            and instance.id not in self._refused.get(request.id, ())
        )

    def _watch_last(self, request: Request, answer: float, now: float) -> bool:
        """Look at a request at the last instant at which an engine could keep its promises, unless that has passed."""
        remotes = (self._remotes[name] for name, one in self.instances.items() if self._may(request, one))
        last = max((one.last(request, answer) for one in remotes if one.learned), default=-math.inf)
        if last - _LEAD > now:
            self.watch(request.id, last - _LEAD)
            return True
        return False


def _terms(instance: Instance) -> OverflowTerms:
    assert instance.overflow is not None, f"{instance.id} is no overflow engine"
    return instance.overflow


def _most_units(request: Request, terms: OverflowTerms) -> float:
    """Return what a request may cost."""
    return terms.units(request.prompt_tokens, request.max_tokens * request.places)


def _could_hold(request: Request, instance: Instance) -> bool:
    """Tell whether an instance of its model has the context for a request, as far as it says."""
    fits = request.context + request.max_tokens <= instance.limit or "max_model_len" in instance.assumed
    return request.model == instance.model and fits and request.may(instance.id)
