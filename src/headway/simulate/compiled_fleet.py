"""Iterations of a fleet's engines between two events outside them, as one compiled call.

`loop.py` says up to when, and gets first tokens and ends. An engine takes part whose packer has `params`
and whose latency model is compiled; `tests/simulate/test_compiled_fleet.py` requires the outcome of the
readable loop, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba.typed import List

from headway.compiled import compiled
from headway.engines.simulated import caching, iteration, prefix_blocks
from headway.engines.simulated.caching import CachingEngine
from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.engines.simulated.iteration import CLOCK, TOTALS, EngineState
from headway.engines.simulated.kernels import Rows
from headway.engines.simulated.prefix_blocks import PrefixBlocks
from headway.engines.simulated.two_ended import HostPoolEngine
from headway.policy.forecast.latency.profiles import FixedLatency
from headway.policy.memory.preemption_cost import are_swapped
from headway.policy.pack.kernels import PROMISES
from headway.policy.pack.promises.outlook import in_sight
from headway.simulate.instance import SimulatedInstance
from headway.simulate.outcome import Outcome

_MOST = 4096  # news that are noted before they are told
_NONE = np.empty(0, np.int64)
# A first token, or the end of a request: its instant, engine and row.
_NEWS = np.dtype([("at", float), ("engine", int), ("row", int), ("ended", bool)])


class _Engine(NamedTuple):
    """An engine of a fleet.

    pool: its prefix cache, if it is `cached`; follows: as in `CachingEngine`. host_blocks: of its host pool.
    """

    state: EngineState
    pool: PrefixBlocks
    cached: bool
    follows: bool
    host_blocks: int


class End(NamedTuple):
    """What became of a request: as in `engine.Done`."""

    first: float
    evictions: int
    gap: float


class News(NamedTuple):
    """A request has its first token, or has ended. number: of its engine."""

    at: float
    number: int
    id: str
    end: End | None


class CompiledFleet:
    """The engines of a fleet as compiled loops take them.

    totals: one record of `TOTALS`, of all engines. clocks: `CLOCK`, by engine.
    """

    def __init__(self, instances: Sequence[SimulatedInstance], engines: list[_Engine], clocks: Rows) -> None:
        self.totals, self.clocks = np.zeros(1, TOTALS), clocks
        self.instances, self._known = instances, engines
        self._news = np.zeros(0, _NEWS)
        self._engines: Any = _list(engines[0], len(engines))  # numba's list
        for number, engine in enumerate(engines):
            self._put(number, engine)

    @classmethod
    def of(cls, instances: Sequence[SimulatedInstance]) -> CompiledFleet | None:
        """Return a fleet whose engines are idle, None = one of them cannot be compiled."""
        clocks = np.zeros(len(instances), CLOCK)
        engines = [_engine_of(one, clocks[i : i + 1]) for i, one in enumerate(instances)]
        known = [engine for engine in engines if engine is not None]
        return cls(instances, known, clocks) if len(known) == len(engines) else None

    @property
    def runs(self) -> bool:
        """Tell whether an iteration is in progress."""
        return bool(np.isfinite(self.clocks["end"]).any())

    @property
    def now(self) -> float:
        """The instant up to which they have gone on."""
        return float(self.totals["now"][0])

    def admit(self, number: int) -> bool:
        """Take requests that were submitted into an engine; tell whether an iteration is in progress there."""
        instance = self.instances[number]
        instance.admit()
        if (
            instance.engine.jobs.data is not self._known[number].state.jobs
        ):  # they have grown, or another engine is here
            clock = self.clocks[number : number + 1]
            before, engine = clock.copy(), _engine_of(instance, clock)
            assert engine is not None, "an engine cannot be compiled any more"
            rows = before["rows"][0]  # 0 = another engine is here, which may have other slots
            clock[:] = before
            engine.state.iteration[:, :rows] = self._known[number].state.iteration[:, :rows]
            self._put(number, engine)
        return bool(self.clocks["rows"][number])

    def _put(self, number: int, engine: _Engine) -> None:
        """Take an engine in the place of that number; the news have room for two of each of its slots."""
        self._known[number] = engine
        _put(self._engines, number, engine)
        if self._news.size < (size := _MOST + 2 * engine.state.limits.slots):
            self._news = np.zeros(size, _NEWS)

    def begin(self, number: int, now: float) -> None:
        """Start the next iteration of an engine that is idle, if there is anything to compute."""
        self.admit(number)
        self.totals["now"] = now
        advance(self._engines, self.clocks, self.totals, self._news, number, 0.0, 0, 0.0, False)

    def advance(self, limit: tuple[float, int], until: float, *, eager: bool) -> list[News] | None:
        """End and begin iterations up to an instant and a place in it, or one that ends after `until`.

        eager: stop at the first news. Returns the news; None if no iteration has ended.
        """
        size = advance(self._engines, self.clocks, self.totals, self._news, -1, *limit, until, eager)
        return [self._told(*one) for one in self._news[:size].tolist()] if size >= 0 else None

    def _told(self, at: float, number: int, row: int, ended: bool) -> News:
        """Return one of the news; a request that has ended leaves its engine's table."""
        jobs = self.instances[number].engine.jobs
        id = str(jobs.keys[row])
        if not ended:
            return News(at, number, id, None)
        jobs.remove(id)
        return News(at, number, id, End(jobs.first.item(row), jobs.evictions.item(row), jobs.gap.item(row)))

    def take(self, number: int) -> tuple[float, int, Ran] | None:
        """Hand out an engine's iteration in progress: its end, its place in it, what it computes; None = it is idle."""
        clock, state = self.clocks[number], self._known[number].state
        if not clock["rows"]:
            return None
        rows, tokens = state.iteration[:, : clock["rows"]].copy()
        taken = float(clock["end"]), int(clock["serial"]), Ran(self.now, rows, tokens, _NONE, _NONE, 0, 0)
        clock["end"], clock["rows"] = np.inf, 0
        return taken

    def count(self, outcome: Outcome) -> None:
        """Put the totals into an outcome."""
        total = self.totals[0]
        outcome.iterations, outcome.busy = int(total["iterations"]), float(total["busy"])
        outcome.preempted, outcome.paused = int(total["preempted"]), int(total["paused"])
        outcome.queried, outcome.hits = int(total["queried"]), int(total["hits"])


def _engine_of(instance: SimulatedInstance, clock: Rows) -> _Engine | None:
    """Return an engine that is idle; None when a part of it is known to Python only."""
    engine, latency = instance.engine, instance.variant.latency
    params = engine.packer.params if type(engine) in (SimulatedEngine, HostPoolEngine, CachingEngine) else None
    if params is None or not isinstance(latency, FixedLatency) or instance.spec.interruption:
        return None
    state = iteration.state_of(
        clock, engine.jobs.data, engine.target, engine.account, instance.learned, latency, params, engine.limits,
        engine.blocks, instance.spec.latency_error, learns=True,
    )  # fmt: skip
    if not isinstance(engine, CachingEngine):
        return _Engine(state, prefix_blocks.new(0, 0, 0), False, False, 0)
    engine.defers = True
    return _Engine(state, engine.pool, True, engine.follows, params.host // engine.size)


@compiled
def _list(engine: _Engine, size: int) -> Any:
    engines = List()
    for _ in range(size):
        engines.append(engine)
    return engines


@compiled
def _put(engines: Any, number: int, engine: _Engine) -> None:
    engines[number] = engine


@compiled
def advance(
    engines: Any,
    clocks: Rows,
    totals: Rows,
    news: Rows,
    start: int,
    limit: float,
    place: int,
    until: float,
    eager: bool,
) -> int:
    """Begin an iteration of engine `start`; if that is -1, advance all as `CompiledFleet.advance` says.

    Returns the number of news, -1 = no iteration has ended.
    """
    total, size = totals[0], -1
    if start >= 0:
        _begin(engines[start], total["now"], totals)
        return size
    while total["now"] < until:
        number = _next(clocks)
        clock = clocks[number]
        if clock["end"] > limit or (clock["end"] == limit and clock["serial"] > place) or clock["rows"] == 0:
            break
        size = max(size, 0)
        if size + 2 * clock["rows"] > news.size or (eager and size):
            break
        total["now"] = clock["end"]
        size = _end(engines[number], number, total["now"], news, size)
        _begin(engines[number], total["now"], totals)
    return size


@compiled
def _next(clocks: Rows) -> int:
    """Return the engine whose iteration ends first."""
    first = 0
    for i in range(1, clocks.size):
        one, other = clocks[i], clocks[first]
        if one["end"] < other["end"] or (one["end"] == other["end"] and one["serial"] < other["serial"]):
            first = i
    return first


@compiled
def _begin(one: _Engine, now: float, totals: Rows) -> None:
    """Start the next iteration of an engine if there is anything to compute."""
    engine, pool = one.state, one.pool
    jobs, packer, usage, total, cache = engine.jobs, engine.packer, engine.account[0], totals[0], pool.state[0]
    rows = np.flatnonzero(jobs["live"])
    if rows.size == 0:
        return
    if one.cached:
        caching.prepare(jobs, pool, engine.limits, rows, one.follows)
    if packer.kind == PROMISES:
        rows = in_sight(packer.keep, jobs, rows, now)
    step = iteration.decide(engine, rows, cache["free"] if one.cached else usage["free_blocks"], now)
    if one.cached:
        save = np.zeros(step.evict.size, np.bool_)
        if packer.host:
            save = are_swapped(jobs["computed"][step.evict], engine.theta, packer.copy_seconds)
        queries, hits = cache["queries"], cache["hits"]
        most, budget = packer.max_running, packer.budget if packer.budget else engine.limits.budget
        ran, copied, paused = caching.account(
            jobs, pool, usage, engine.limits, step, save, one.host_blocks, most, budget, one.follows
        )
        total["queried"] += cache["queries"] - queries
        total["hits"] += cache["hits"] - hits
    else:
        ran, copied, paused = iteration.account(engine, step)
    iteration.start(engine, ran, copied, paused, now, totals)


@compiled
def _end(one: _Engine, number: int, now: float, news: Rows, size: int) -> int:
    """End an engine's iteration; note first tokens, then ends. Returns the number of news."""
    engine = one.state
    jobs, count = engine.jobs, engine.clock[0]["rows"]
    done = iteration.complete(engine, now)
    if one.cached:
        prefix_blocks.end_all(one.pool, done)
    for row in engine.iteration[0, :count]:
        if jobs["live"][row] and jobs["first"][row] == now:
            size = _note(news, size, now, number, row, False)
    for row in done:
        size = _note(news, size, now, number, row, True)
    return size


@compiled
def _note(news: Rows, size: int, at: float, number: int, row: int, ended: bool) -> int:
    one = news[size]
    one["at"], one["engine"], one["row"], one["ended"] = at, number, row, ended
    return size + 1
