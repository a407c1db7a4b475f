"""What a request costs on each engine, and which engine gets it.

One rule for all planners that let a request go to several engines. On an engine a request costs, in seconds,

    what must be computed for it: the tokens of its prompt that are not in the prefix cache, on the fastest engine
    + delay x the time until its first token: the prompts before it, its own, and until there is room for it
    + ANSWER x the time of its answer at the pace of those in progress there

and the lowest goes; of equal ones, the engine with the fewest places taken, then one that keeps streams able to go on
elsewhere (`Instance.continues`). The busier the engines, the more a second
of computing counts beside a second of waiting, because all later requests on that engine wait for it: delay is 1 while
they have nothing to do, and `BUSY_DELAY` while prompts wait on all of them. A prefix in the cache is worth the seconds
that it saves and no more: once an engine is so far behind that another one has computed the prefix anew by then, the
request goes there, and both hold it. One more cached token never makes an engine cost more. What is inside an engine
and due in a long time (a batch due tomorrow) counts only for requests like it: all others go before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from headway.policy.forecast.latency.online import OnlineLatency
from headway.policy.placement.index import PrefixIndex
from headway.types import Backlog, Batch, Bools, Floats, Instance, Ints, Request, Slo

BUSY_DELAY, ANSWER = 0.05, 0.05
_CHUNK = 2048  # prompt tokens of an iteration
_MOST_ANSWERS = 0.9  # of an engine's time that answers take from prompts, at most, as far as forecasts go
Latency = Callable[[Batch], float]


class Cost(NamedTuple):
    """What a request costs on one engine.

    seconds: as the rule adds them up. load: places taken there, as a share of the dispatch window.
    bound: a stream that begins there cannot go on elsewhere if the engine dies.
    found: tokens of its prompt in the cache. own: seconds to compute the rest. first: seconds until its first token.
    """

    seconds: float
    load: float
    bound: bool
    found: int
    own: float
    first: float


class Engine(NamedTuple):
    """An engine that a request may go to.

    code: as in `Backlog.instance`. sent: seconds of prompts that go there before the request and are not inside yet.
    """

    instance: Instance
    code: int
    sent: float = 0.0


@dataclass(slots=True)
class _Room:
    """The room that requests take in an engine.

    kv: expected tokens, less what was cached before. output: of their answers. places: in the batch.
    """

    count: int = 0
    kv: float = 0.0
    output: float = 0.0
    places: int = 0

    def change(self, one: _Inside, sign: int) -> None:
        """Add (1) or take out (-1) a request."""
        self.count += sign
        self.kv += sign * (one.tokens - one.found)
        self.output += sign * (one.tokens - one.prompt)
        self.places += sign * one.places

    def seconds(self, instance: Instance, pace: float, tokens: float, places: int = 1) -> float:
        """Return the seconds until so many of these requests have ended that there is room for another one.

        pace: seconds per token of answers. tokens, places: of that one; 0 = it is one of these.
        """
        if not self.count:
            return 0.0
        kv = (self.kv + tokens - instance.blocks_total * instance.block_size) / max(self.kv, 1.0)
        slots = (self.places + places - instance.max_running) / self.places
        ends = max(kv, slots, 0.0)  # share of them that must end first
        return ends * self.output / self.count * pace


@dataclass(slots=True)
class _Load:
    """What is inside one engine.

    room: that all requests take. firm: that those take which a request with a promise does not displace: these that
        have one, too, or all where the engine keeps vLLM's order.
    waiting: requests without a first token, in the order of sending. answers, context: number and tokens of the others.
        rate: sum of the tokens per second that these were promised.
    since: instant from which the engine computes the first of its prompts. known: its latency is its own.
    urgent: the load without requests that are due in a long time, which wait for all others; None = this is it.
    """

    instance: Instance
    latency: Latency
    known: bool = False
    room: _Room = field(default_factory=_Room)
    firm: _Room = field(default_factory=_Room)
    waiting: dict[str, _Inside] = field(default_factory=dict)
    answers: int = 0
    context: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    urgent: _Load | None = None
    _pace: tuple[float, float] | None = None
    _chunk: float | None = None  # seconds of an iteration of `_CHUNK` prompt tokens

    def prompt_seconds(self, tokens: int, found: int) -> float:
        """Return what it takes to compute a prompt of which so many tokens are in the cache."""
        new = tokens - found
        return self.latency(Batch(0, 0, new, new * found + new * new // 2))

    def pace(self) -> tuple[float, float]:
        """Return the seconds of an iteration of the answers, and the factor by which they slow prompts down.

        Answers that were promised a tpot leave what is left of it; others run along with each chunk.
        """
        if self._pace is None:
            alone = self.latency(Batch(self.answers, int(self.context), 0)) if self.answers else 0.0
            if self._chunk is None:
                self._chunk = self.prompt_seconds(_CHUNK, 0)
            slower = 1 + alone / self._chunk
            if self.answers:
                taken = min(alone * self.rate / self.answers, _MOST_ANSWERS)
                slower = max(slower, 1 / (1 - taken))
            self._pace = alone, slower
        return self._pace

    @property
    def free(self) -> float:
        """Share of its time that the engine could give to prompts and does not."""
        return 0.0 if self.waiting else 1 / self.pace()[1]

    def token_seconds(self, tokens: float) -> float:
        """Return the seconds per token of the answers, with one more of so many tokens and its prompt."""
        return self.latency(Batch(self.answers + 1, int(self.context + tokens), 0))

    def change(self, id: str, one: _Inside, sign: int) -> None:
        """Add (1) or take out (-1) a request."""
        if self.urgent is not None and not one.distant:
            self.urgent.change(id, one, sign)
        self.room.change(one, sign)
        if one.promised or self.instance.own_order:
            self.firm.change(one, sign)
        if one.started:
            self._change_answers(one, sign)
        elif sign > 0:
            self.waiting[id] = one
        else:
            del self.waiting[id]

    def start(self, id: str, now: float) -> None:
        """Take note of a first token."""
        if self.urgent is not None and id in self.urgent.waiting:
            self.urgent.start(id, now)
        one = self.waiting.pop(id)
        one.started, self.since = True, now
        self._change_answers(one, 1)

    def settle(self, backlog: Backlog, now: float) -> None:
        """Count requests as begun that have had twice the time for their prompts, and a second.

        The first token of an answer that is not streamed is not seen before its end.
        """
        while self.waiting:
            id, one = next(iter(self.waiting.items()))
            begun = self.since + 2 * one.work * self.pace()[1] + 1.0
            if now < begun:
                break
            backlog.pending[one.row] = False
            self.start(id, begun)

    def _change_answers(self, one: _Inside, sign: int) -> None:
        self.answers += sign
        self.context += sign * (one.tokens + one.prompt) / 2
        self.rate += sign * one.rate
        self._pace = None

    def learn(self, latency: Latency) -> None:
        """Take note of what the engine has learned."""
        self.latency, self._pace, self._chunk = latency, None, None
        if self.urgent is not None:
            self.urgent.learn(latency)

    def expects(self, now: float) -> None:
        """Take note that a request comes now."""
        if not self.waiting:
            self.since = now
        if self.urgent is not None:
            self.urgent.expects(now)


@dataclass(slots=True)
class _Inside:
    """A request inside an engine.

    load: of that engine, None = it is not up as far as is known. row: in the backlog.
    tokens: expected ones, prompt and answer. found: of its prompt, in the cache when it was sent.
    work: seconds that the rest of its prompt takes. rate: tokens per second that it was promised.
    promised: it has a promise. distant: it is due in a long time.
    """

    name: str
    load: _Load | None
    row: int
    tokens: float
    prompt: int
    found: int
    work: float
    places: int
    rate: float
    promised: bool
    distant: bool
    started: bool = False


@dataclass(slots=True)
class Placement:
    """The engines' caches and loads, and the cost of a request on each; the controller keeps it current.

    index: of prefix caches. forecasts: `lateness` is asked for, of a single engine, too.
    distant_s: a request whose deadline is further away counts only for requests like it; inf = all count.
    """

    index: PrefixIndex = field(default_factory=PrefixIndex)
    forecasts: bool = False
    distant_s: float = math.inf
    _loads: dict[str, _Load] = field(default_factory=dict)
    _keys: dict[str, bytes] = field(default_factory=dict)  # of prompts, by id
    _rates: dict[str, float] = field(default_factory=dict)  # promised tokens per second, by id
    _planned: dict[str, tuple[str, int, bool]] = field(default_factory=dict)  # engine, `found` and `moved`, by id
    _inside: dict[str, _Inside] = field(default_factory=dict)
    _nears: list[tuple[float, str]] = field(default_factory=list)  # when distant requests inside no longer are, by id

    # ---- what happens

    def up(self, instance: Instance) -> None:
        """Add an engine, or what replaces it; what was inside it still is, until it is said to have left."""
        alike = (one.latency for one in self._loads.values() if one.known and one.instance.model == instance.model)
        latency = instance.latency or next(alike, OnlineLatency().seconds)
        known = instance.latency is not None
        load = self._loads[instance.id] = _Load(instance, latency, known, urgent=_Load(instance, latency, known))
        self.index.forget(instance.id)
        if instance.prefix_caching:
            self.index.add(instance.id, instance.blocks_total, instance.block_size)
        for id, one in self._inside.items():
            if one.name == instance.id:
                one.load = load
                load.change(id, one, 1)
                self._expect(id, instance.id)

    def down(self, name: str) -> None:
        """Forget an engine; what was inside it comes back request by request."""
        self._loads.pop(name, None)
        self.index.forget(name)
        for one in self._inside.values():
            if one.name == name:
                one.load = None

    def learned(self, name: str, theta: Floats) -> None:
        """Take note of an engine's latency, unless a profile says it; engines that know nothing yet count as alike."""
        load = self._loads.get(name)
        if load is None or load.instance.latency is not None:
            return
        latency, load.known = OnlineLatency(), True
        latency.theta = theta
        for one in self._loads.values():
            if one is load or (not one.known and one.instance.model == load.instance.model):
                one.learn(latency.seconds)

    def came(self, request: Request, keys: bytes) -> None:
        """Take note of a request. keys: of its prompt."""
        if keys:
            self._keys[request.id] = keys
        if (per_token := request.slo.per_token) is not None:
            self._rates[request.id] = 1 / per_token

    def sent(self, backlog: Backlog, row: int, name: str, now: float) -> None:
        """Take note of a request that goes to an engine, whether that is up or not."""
        id, prompt, load = str(backlog.keys[row]), backlog.prompt.item(row), self._loads.get(name)
        found, work = self.found(id, name, prompt), 0.0
        self._planned.pop(id, None)
        if load is not None and (self.forecasts or len(self._loads) > 1):  # else nothing asks for it
            work = load.prompt_seconds(prompt, found)
        backlog.work[row], backlog.pending[row] = work, True
        tokens, places, rate = backlog.tokens.item(row), backlog.places.item(row), self._rates.get(id, 0.0)
        promised = rate > 0 or backlog.due.item(row) < math.inf
        distant = self._is_distant(backlog, row, now)
        one = self._inside[id] = _Inside(name, load, row, tokens, prompt, found, work, places, rate, promised, distant)
        if distant:
            heappush(self._nears, (backlog.due.item(row) - self.distant_s, id))
        if load is not None:
            load.expects(now)
            load.change(id, one, 1)
        self._expect(id, name)

    def _settle_distant(self, now: float) -> None:
        """Count requests like all others from when their deadlines are near."""
        while self._nears and self._nears[0][0] <= now:
            id = heappop(self._nears)[1]
            one = self._inside.get(id)
            if one is None or not one.distant:
                continue
            one.distant = False
            if one.load is not None and one.load.urgent is not None:
                one.load.urgent.change(id, one, 1)

    def _is_distant(self, backlog: Backlog, row: int, now: float) -> bool:
        """Tell whether a request is due in a long time, so that all others go before it."""
        rate = self._rates.get(str(backlog.keys[row]), 0.0)
        return bool(rate == 0.0 and self.distant_s < backlog.due.item(row) - now < math.inf)

    def planned(self, id: str, name: str, found: int, *, moved: bool) -> None:
        """Let requests that are placed after this one in the same plan find its prompt; `sent` follows.

        found: tokens of its prompt that the engine holds without it. moved: as in `Send`.
        """
        self._planned[id] = name, found, moved
        self._expect(id, name)

    def _expect(self, id: str, name: str) -> None:
        """Count a request's prompt as held by an engine, which it is or will be sent to."""
        if keys := self.keys(id):
            self.index.sent(id, name, np.frombuffer(keys, np.int64))

    def started(self, backlog: Backlog, id: str, now: float) -> None:
        """Take note of a first token."""
        one = self._inside.get(id)
        if one is None or one.started:
            return
        backlog.pending[one.row] = False
        if one.load is None:
            one.started = True
        else:
            one.load.start(id, now)

    def left(self, backlog: Backlog, id: str) -> None:
        """Take note of a request that is not inside its engine any more; unknown ones are ignored."""
        one = self._inside.pop(id, None)
        if one is not None:
            backlog.pending[one.row] = False
            if one.load is not None:
                one.load.change(id, one, -1)
            self.index.ended(id)

    def ended(self, backlog: Backlog, id: str) -> None:
        """Forget a request."""
        self.left(backlog, id)
        self.index.ended(id)  # it may have been planned alone
        self._planned.pop(id, None)
        self._keys.pop(id, None)
        self._rates.pop(id, None)

    # ---- the rule

    def keys(self, id: str) -> bytes:
        """Return the keys of a request's prompt, as in `Arrived`."""
        return self._keys.get(id, b"")

    def found(self, id: str, name: str, prompt: int, keys: bytes = b"") -> int:
        """Return the tokens of a request's prompt that an engine holds, or held when the request went there.

        The last one is always computed. keys: of its prompt, if it has not come yet.
        """
        if (planned := self._planned.get(id)) is not None and planned[0] == name:
            return planned[1]
        if (one := self._inside.get(id)) is not None and one.name == name:
            return one.found
        return self._cached(name, prompt, np.frombuffer(keys or self.keys(id), np.int64))

    def _cached(self, name: str, prompt: int, keys: Ints) -> int:
        """Return the tokens of a prompt that an engine holds; the last one is always computed."""
        return min(self.index.tokens(name, keys) if keys.size else 0, prompt - 1)

    def computed(self, id: str, request: Request) -> int:
        """Return the prompt tokens of a request inside an engine that its cache did not hold."""
        one = self._inside.get(id)
        return request.prompt_tokens - (one.found if one is not None else 0)

    def moved(self, id: str, name: str) -> bool:
        """Return `Send.moved` for a request that was planned for an engine; False for others."""
        planned = self._planned.get(id)
        return planned is not None and planned[0] == name and planned[2]

    def costs(self, backlog: Backlog, row: int, engines: Sequence[Engine], now: float) -> list[Cost]:
        """Return what a queued request costs on each of these engines."""
        id, prompt, tokens = str(backlog.keys[row]), backlog.prompt.item(row), backlog.tokens.item(row)
        loads = [self._load(instance) for instance, *_ in engines]
        queued = id not in self._planned and id not in self._inside
        keys = np.frombuffer(self.keys(id), np.int64)
        known = dict[tuple[Latency, int], float]()  # engines of one profile share its latency

        def seconds_on(load: _Load, found: int) -> float:
            if (key := (load.latency, found)) not in known:
                known[key] = load.prompt_seconds(prompt, found)
            return known[key]

        kinds = dict[Latency, _Load]()
        self._settle_distant(now)
        for load in loads:
            load.settle(backlog, now)
            kinds.setdefault(load.latency, load)
        if not self._is_distant(backlog, row, now):
            loads = [load if load.instance.own_order else load.urgent or load for load in loads]
        fastest = min(kinds.values(), key=lambda load: seconds_on(load, 0))
        ahead, out = self._ahead(backlog, row, engines, now), list[Cost]()
        free = sum(load.free for load in loads) / len(loads)
        delay = BUSY_DELAY + (1 - BUSY_DELAY) * free
        for (instance, code, sent), load in zip(engines, loads, strict=True):
            found = self._cached(instance.id, prompt, keys) if queued else self.found(id, instance.id, prompt)
            pace, slower = load.pace()
            own = seconds_on(load, found)
            waits = float(ahead[code]) if code < ahead.size else 0.0
            waits = max(waits * slower - max(now - load.since, 0.0), 0.0)
            first = waits + (sent + own) * slower + load.room.seconds(instance, pace, tokens - found)
            seconds = seconds_on(fastest, found) + delay * first + ANSWER * pace * (tokens - prompt)
            taken = load.room.places / instance.window
            out.append(Cost(seconds, taken, not instance.continues, found, own, first))
        return out

    def lateness(self, backlog: Backlog, row: int, slo: Slo, engines: Sequence[Engine], now: float) -> float:
        """Return by how many seconds a request misses its promises on the engine that comes nearest to them.

        Promises of a first token and of the whole answer count; negative = they are kept, also for all that is known
        (an engine has learned nothing); inf = there is no engine.
        engines: those that it could go to, or the one that it is inside of without a token.
        """
        loads, late = [self._load(one.instance) for one in engines], math.inf
        if not all(load.known for load in loads):
            return -math.inf
        tokens, age = backlog.tokens.item(row), now - backlog.arrival.item(row)
        answer = (tokens - backlog.prompt.item(row)) / backlog.places.item(row)
        for load, (_, code, _) in zip(loads, engines, strict=True):
            load.settle(backlog, now)
            first = self._first(backlog, row, load, code, now, len(engines))
            finish = first + load.token_seconds(tokens) * answer
            missed = [age + took - target for target, took in ((slo.ttft, first), (slo.e2e, finish)) if target]
            late = min(late, max(missed, default=-math.inf))
        return late

    def _first(self, backlog: Backlog, row: int, load: _Load, code: int, now: float, share: int) -> float:
        """Return the seconds to a promised request's first token on an engine, which it may be inside of.

        Promises that are due before it go first, or all that came before it where the engine keeps vLLM's order; of
        what is queued, one of `share` parts.
        """
        id, instance, (pace, slower) = str(backlog.keys[row]), load.instance, load.pace()
        tokens, prompt, there = backlog.tokens.item(row), backlog.prompt.item(row), id in load.waiting
        found = self.found(id, instance.id, prompt)
        key, own = (backlog.serial if instance.own_order else backlog.due), load.prompt_seconds(prompt, found)
        before = (key < key[row]) & (instance.own_order | (backlog.due >= now)) & (backlog.model == backlog.model[row])
        inside = float(backlog.work[before & backlog.pending & (backlog.instance == code)].sum())
        passed = max(now - load.since, 0.0)
        if there:
            return max((inside + own) * slower - passed, 0.0) + load.firm.seconds(instance, pace, 0.0, 0)
        queued = float(backlog.prompt[before & backlog.live & ~backlog.sent].sum()) / _CHUNK / share
        work = own + queued * load.prompt_seconds(_CHUNK, 0)
        room = load.firm.seconds(instance, pace, tokens - found)
        return max(inside * slower - passed, 0.0) + work * slower + room

    def _load(self, instance: Instance) -> _Load:
        if instance.id not in self._loads:
            self.up(instance)
        return self._loads[instance.id]

    def _ahead(self, backlog: Backlog, row: int, engines: Sequence[Engine], now: float) -> Floats:
        """Return the seconds of prompts inside the engines that go before a queued request, by code of an engine.

        Those that are due before it and not overdue; without a deadline, the soft target counts. All of them in an
        engine that keeps vLLM's own order.
        """
        rows = np.flatnonzero(backlog.pending)
        both = np.append(rows, row)
        due, soft = backlog.due[both], backlog.arrival[both] + backlog.soft[both]
        due = np.where(np.isinf(due), soft, due)
        before: Bools = (due[:-1] <= due[-1]) & (due[:-1] >= now)
        if in_order := [code for instance, code, _ in engines if instance.own_order]:
            before |= np.isin(backlog.instance[rows], in_order)
        return np.asarray(np.bincount(backlog.instance[rows[before]], backlog.work[rows[before]]), float)


def least(costs: Sequence[Cost]) -> int:
    """Return the index of the lowest cost, the first of equal ones."""
    return min(range(len(costs)), key=lambda i: costs[i][:3])
