"""The recorder of a simulation: what every engine did in every iteration, and to which requests.

A request's state seldom changes from one iteration to the next (an answer in progress gets one token a
thousand times), so only changes are kept: a few rows per request instead of one per token. `Recording` has
every iteration with the tokens of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.engines.simulated.engine import Ran, SimulatedEngine
from headway.errors import ConfigError
from headway.simulate.outcome import Observer
from headway.types import Bools, Floats, Ints

Log = NDArray[Any]  # a structured array, one field per column
OUTSIDE = -1  # the instance of a request that is in the gateway's queue
_CHUNK = 1 << 14  # rows by which a log grows


class State(IntEnum):
    """What a request inside an engine did in an iteration."""

    WAITING = 0  # not admitted yet
    PREFILL = 1  # computed prompt
    RUNNING = 2  # made a token
    PAUSED = 3  # kept its KV and got no tokens
    EVICTED = 4  # lost its KV, waits to be admitted again
    SAVED = 5  # its KV is in host memory, waits to be admitted again
    RECOMPUTE = 6  # computed again what it had lost


COMPUTES = (State.PREFILL, State.RUNNING, State.RECOMPUTE)
# By state; the last place is that of -1, a row that has not been seen yet.
_RUNS = np.isin(np.arange(len(State) + 1), COMPUTES)
_HOLDS = np.isin(np.arange(len(State) + 1), [*COMPUTES, State.PAUSED])  # a slot and KV
_PAUSED = int(State.PAUSED)  # an enum's members are slow to look up

ITERATIONS = np.dtype(
    [
        ("instance", "i2"),
        ("start", "f8"),
        ("seconds", "f8"),
        ("decodes", "i4"),
        ("prefill", "i4"),
        ("recompute", "i4"),  # requests; prompt tokens; tokens again
        ("running", "i4"),
        ("paused", "i4"),
        ("waiting", "i4"),
        ("queued", "i4"),  # queued: outside
        ("admitted", "i4"),
        ("evicted", "i4"),
        ("saved", "i4"),
        ("blocks", "i4"),  # blocks: in use
    ]
)
CHANGES = np.dtype([("iteration", "i4"), ("request", "i4"), ("state", "i1"), ("tokens", "i4")])
TAKERS = np.dtype([("iteration", "i4"), ("request", "i4"), ("blocks", "i4"), ("slot", "?")])
MOVES = np.dtype([("time", "f8"), ("request", "i4"), ("instance", "i2"), ("found", "i4")])
LOGS = {"iterations": ITERATIONS, "changes": CHANGES, "takers": TAKERS, "moves": MOVES}


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recorded run. Requests are rows of the workload, instances their number in the fleet.

    iterations: one row each, in order of start, instances mixed; one of 0 seconds: the engine idles from then
        on.
    changes: from this iteration of its instance on, until its next change or its end, a request was in
        `state` and got `tokens` in each iteration.
    takers: of an iteration that took KV from a request, the requests that gained blocks; of one that paused a
        request or took its KV, the requests that were admitted (slot).
    moves: a request was sent to an instance, which held `found` tokens of its prompt, or came back (OUTSIDE); in order.
    """

    iterations: Log
    changes: Log
    takers: Log
    moves: Log


class Recorder(Observer):
    """An observer for `Simulation.run`; afterwards `recording()` is the run.

    megabytes: what it may keep in memory; a run that needs more ends in a ConfigError.
    """

    def __init__(self, megabytes: float = 1000.0) -> None:
        if megabytes <= 0:
            raise ConfigError(f"A recording of {megabytes:g} MB is empty.", "Give more megabytes.")
        self.megabytes = megabytes
        self._bytes_left = int(megabytes * 1e6)
        self._logs = {name: _Growing(dtype) for name, dtype in LOGS.items()}
        self._seen: dict[int, _Seen] = {}

    def sent(self, request: int, instance: int, now: float, found: int) -> None:
        """Record that a request was sent to an instance."""
        self._log("moves", [(now, request, instance, found)], now)

    def entered(self, request: int, instance: int, row: int) -> None:
        """Record which row of an instance's jobs a request is from now on."""
        self._seen.setdefault(instance, _Seen()).forget(row, request)

    def returned(self, request: int, now: float) -> None:
        """Record that a request came back from its instance unfinished."""
        self._log("moves", [(now, request, OUTSIDE, 0)], now)

    def iteration(self, instance: int, engine: SimulatedEngine, ran: Ran, seconds: float, queued: int) -> None:
        """Record an iteration right after it was decided; the jobs are as they were before it computes."""
        seen = self._seen.setdefault(instance, _Seen())
        now = seen.look(engine, ran)
        number = len(self._logs["iterations"])
        used = engine.blocks - engine.free
        line = (instance, ran.start, seconds, *now.counts(), queued, *now.moved(), used)
        self._log("iterations", [line], ran.start)
        self._log("changes", now.changes(number), ran.start)
        self._log("takers", now.takers(number), ran.start)
        seen.keep(now)

    def recording(self) -> Recording:
        """Return what was recorded so far."""
        return Recording(**{name: log.array() for name, log in self._logs.items()})

    def _log(self, name: str, rows: Sequence[tuple[Any, ...]] | Log, now: float) -> None:
        if not len(rows):
            return
        self._bytes_left -= self._logs[name].add(rows)
        if self._bytes_left < 0:
            raise ConfigError(
                f"The recording has filled its {self.megabytes:g} MB after {now:.0f} simulated seconds.",
                "Allow it more with --record-mb, simulate a shorter time, or leave --out away.",
            )


class _Growing:
    """Rows of one type in chunks, so that growing copies nothing."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._full: list[Log] = []
        self._last, self._used, self._before = np.empty(0, dtype), 0, 0

    def __len__(self) -> int:
        return self._before + self._used

    def add(self, rows: Sequence[tuple[Any, ...]] | Log) -> int:
        """Append rows; return the bytes that were newly allocated for them."""
        grown = 0
        if self._used + len(rows) > self._last.size:
            self._full.append(self._last[: self._used])
            self._before += self._used
            self._last, self._used = np.empty(max(_CHUNK, len(rows)), self._last.dtype), 0
            grown = self._last.nbytes
        self._last[self._used : self._used + len(rows)] = rows
        self._used += len(rows)
        return grown

    def array(self) -> Log:
        return np.concatenate([*self._full, self._last[: self._used]])


@dataclass(slots=True)
class _Seen:
    """The last state of each row of one engine's jobs; state -1 = not seen yet."""

    request: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    state: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    reach: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # most tokens ever computed
    blocks: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    evictions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def forget(self, row: int, request: int) -> None:
        """Begin a row anew for a request."""
        if row >= self.request.size:
            more = np.zeros(max(row + 1, 2 * self.request.size, 256) - self.request.size, np.int64)
            for name in _SEEN:
                setattr(self, name, np.concatenate([getattr(self, name), more]))
        for name in _SEEN:
            getattr(self, name)[row] = 0
        self.request[row], self.state[row] = request, -1

    def look(self, engine: SimulatedEngine, ran: Ran) -> _Look:
        """Return the state of all rows in this iteration."""
        jobs = engine.jobs
        rows = jobs.rows()
        scheduled = np.zeros(self.request.size, np.int64)
        scheduled[ran.rows] = ran.tokens
        tokens, computed, evictions = scheduled[rows], jobs.computed[rows], jobs.evictions[rows]
        state = np.where(
            jobs.running[rows],
            _PAUSED,
            np.where(jobs.saved[rows] > 0, State.SAVED, np.where(evictions > 0, State.EVICTED, State.WAITING)),
        )
        output_tokens = jobs.output_tokens[rows]
        # Tokens made in another engine are computed again, too: a swap of models gives requests back.
        again = (computed < self.reach[rows]) | (
            (output_tokens > 0) & (computed < jobs.prompt[rows] + output_tokens - 1)
        )
        fresh = np.where(output_tokens == 0, State.PREFILL, State.RUNNING)
        doing = np.where(again, State.RECOMPUTE, fresh)
        state = np.where(tokens > 0, doing, state)
        # What a prefix cache holds of a waiting row is neither its own nor computed by it.
        blocks = jobs.blocks[rows] - np.where(jobs.running[rows], 0, jobs.shared[rows])
        reached = np.where(tokens > 0, computed + tokens, 0)
        resumes = (state == State.RECOMPUTE) & (output_tokens == 0)
        beyond = np.maximum(computed + tokens - self.reach[rows], 0)
        return _Look(
            rows,
            self.request[rows],
            state,
            tokens,
            reached,
            blocks,
            evictions,
            self.state[rows],
            changed=(state != self.state[rows]) | (tokens != self.tokens[rows]),
            lost=(evictions > self.evictions[rows]) & (self.state[rows] >= 0),
            gained=blocks - self.blocks[rows],
            resumed=int(beyond[resumes].sum()),
        )

    def keep(self, look: _Look) -> None:
        """Keep a look as the last state."""
        rows = look.rows
        self.state[rows], self.tokens[rows], self.blocks[rows] = look.state, look.tokens, look.blocks
        self.evictions[rows], self.reach[rows] = look.evictions, np.maximum(self.reach[rows], look.reached)


_SEEN = ("request", "state", "tokens", "reach", "blocks", "evictions")


@dataclass(slots=True)
class _Look:
    """All rows of an engine in one iteration, aligned, beside the state they were in before it."""

    rows: Ints
    request: Ints
    state: Ints
    tokens: Ints
    reached: Ints
    blocks: Ints
    evictions: Ints
    before: Ints
    changed: Bools
    lost: Bools
    gained: Ints
    resumed: int  # prompt tokens computed for the first time by rows that first did again what they had lost

    def counts(self) -> tuple[int, ...]:
        """Return decodes, prompt tokens, tokens computed again; requests that ran, paused and waited."""
        many = np.bincount(self.state, minlength=len(State))
        tokens = np.bincount(self.state, self.tokens, len(State))
        ran = sum(int(many[state]) for state in COMPUTES)
        waiting = self.state.size - ran - int(many[State.PAUSED])
        prompt, again = int(tokens[State.PREFILL]), int(tokens[State.RECOMPUTE])
        return (
            int(many[State.RUNNING]),
            prompt + self.resumed,
            again - self.resumed,
            ran,
            int(many[State.PAUSED]),
            waiting,
        )

    def moved(self) -> tuple[int, int, int]:
        """Return how many were admitted, lost their KV, and had it saved."""
        saved = int(np.count_nonzero(self.lost & (self.state == State.SAVED)))
        return int(np.count_nonzero(self._came)), int(np.count_nonzero(self.lost)) - saved, saved

    def changes(self, iteration: int) -> Log:
        """Return the rows for CHANGES."""
        new = self.changed
        return _table(CHANGES, iteration, self.request[new], self.state[new], self.tokens[new])

    def takers(self, iteration: int) -> Log:
        """Return the rows for TAKERS: none when no request was paused or lost KV."""
        lost, ran = bool(self.lost.any()), _RUNS[self.before]
        if not lost and not ((self.state == _PAUSED) & ran).any():
            return np.empty(0, TAKERS)
        slot = (self.tokens > 0) & ~ran
        gained = np.maximum(self.gained, 0) if lost else np.zeros_like(self.gained)
        took = slot | (gained > 0)
        return _table(TAKERS, iteration, self.request[took], gained[took], slot[took])

    @property
    def _came(self) -> Bools:
        return np.asarray(_HOLDS[self.state] & ~_HOLDS[self.before])


def _table(dtype: np.dtype[Any], iteration: int, *columns: Ints | Bools | Floats) -> Log:
    rows = np.empty(columns[0].size, dtype)
    names = dtype.names or ()
    rows[names[0]] = iteration
    for name, column in zip(names[1:], columns, strict=True):
        rows[name] = column
    return rows
