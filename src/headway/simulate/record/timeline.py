"""The timeline of one request, and the other requests that caused it.

A recording keeps changes of state; a `Reader` turns them into spans of time. A timeline covers every moment
from the arrival to the end exactly once, so its seconds add up to the latency. It names the requests that
were served in the meantime: those sent before it, those that computed while it waited, those that got what
was taken from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headway.simulate.record.recorder import COMPUTES, OUTSIDE, Log, State
from headway.simulate.record.run_folder import Run
from headway.types import Bools, Floats, Ints

OUT = "outside"  # queued and not inside an engine; the other states are `recorder.State`'s names
# Of a real request: in an engine that told nothing of it, between the gateway and the engine's scheduler, and
# queued while all engines of its model were starting.
UNSEEN, TRANSIT, STARTING = "unseen", "transit", "starting"
STATES = (OUT, *(state.name.lower() for state in State), UNSEEN, TRANSIT, STARTING)
WORKS = tuple(state.name.lower() for state in COMPUTES)


@dataclass(frozen=True, slots=True)
class Share:
    """What one class of other requests got in the meantime.

    requests: outside, those that were sent; inside, those that computed in the same engine.
    tokens: outside, all tokens of these requests; inside, the tokens that they computed.
    later: how many of them had arrived later.
    """

    tier: str
    requests: int
    tokens: int
    later: int


@dataclass(frozen=True, slots=True)
class Taker:
    """A request that got KV blocks or a slot in the iteration in which they were taken away."""

    request: int
    tier: str
    blocks: int
    slot: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time in one state.

    instance: number in the fleet, -1 outside.
    iteration: the one (of the run) that it begins with, -1 = none.
    behind: other requests that were served in the meantime (empty while it makes tokens itself).
    takers: of what it lost at the start.
    """

    state: str
    start: float
    end: float
    instance: int
    iteration: int = -1
    behind: tuple[Share, ...] = ()
    takers: tuple[Taker, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request from its arrival to its end, or to where the run ended without it (finished is False).

    first: instant of the first token, NaN when there was none.
    crowded: seconds of `running` in iterations that computed prompts as well, NaN = no log of them.
    found: tokens of its prompt that the last engine was known to hold when it was sent there, None = it was not sent.
    overflow: seconds by which it would have been late without an overflow engine, and the units that it cost there;
        None = it went to none, as far as is recorded.
    budget: soft budget of its tenant that had no room for it, so that it was promised nothing; None = all had.
    """

    request: int
    spans: tuple[Span, ...]
    arrival: float
    first: float
    end: float
    finished: bool
    crowded: float
    found: int | None
    overflow: tuple[float, float] | None = None
    budget: str | None = None

    def seconds(self, start: float | None = None, end: float | None = None) -> dict[str, float]:
        """Return seconds per state between two instants (default: all), states without any left out."""
        low = self.arrival if start is None else start
        high = self.end if end is None else end
        total = dict.fromkeys(STATES, 0.0)
        for span in self.spans:
            total[span.state] += max(min(span.end, high) - max(span.start, low), 0.0)
        return {state: seconds for state, seconds in total.items() if seconds > 0}


class Reader:
    """Reads timelines out of one run. Building it sorts the recording once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        record = run.recording
        self.starts, self.numbers, self.local = _by_instance(record.iterations, len(run.header.fleet))
        self.last = _last(run)
        self.stays = _stays(record.moves, np.where(np.isnan(run.outcome.end), self.last, run.outcome.end))
        self.held = _held(record.iterations, record.changes, self.stays, self.local, self.starts)

    def iteration(self, number: int) -> Log:
        """Return request, state and tokens of all inside the instance in an iteration (of the run)."""
        instance, at = int(self.run.recording.iterations["instance"][number]), int(self.local[number])
        held = self.held
        there = (held["instance"] == instance) & (held["low"] <= at) & (at < held["high"])
        return np.asarray(held[there][["request", "state", "tokens"]])

    def timeline(self, request: int) -> Timeline:
        """Return what happened to a request (its row in the workload)."""
        arrival, end = float(self.run.workload.arrival[request]), float(self.run.outcome.end[request])
        finished = bool(np.isfinite(end))
        end = end if finished else max(self.last, arrival)
        spans = tuple(self._explained(request, span) for span in self._spans(request, arrival, end))
        first = float(self.run.outcome.first[request])
        return Timeline(request, spans, arrival, first, end, finished, self._crowded(spans), self._found(request))

    def _found(self, request: int) -> int | None:
        """Return what its last engine held of its prompt, None = it was not sent."""
        own = self.stays[_rows(self.stays["request"], request)]
        sent = own["position"][own["instance"] != OUTSIDE]
        return int(self.run.recording.moves["found"][sent[-1]]) if sent.size else None

    def _spans(self, request: int, arrival: float, end: float) -> list[Span]:
        """Return its spans, each beginning where the one before it ends, equal neighbours as one."""
        current = Span(OUT, arrival, arrival, OUTSIDE)
        spans: list[Span] = []
        for turn in [*self._turns(request), Span("", end, end, OUTSIDE)]:
            if (turn.state, turn.instance) == (current.state, current.instance):
                continue
            start = max(turn.start, current.start)
            if start > current.start:
                spans.append(replace(current, end=start))
            current = replace(turn, start=start)
        return spans

    def _turns(self, request: int) -> Iterator[Span]:
        """Yield the turns its state takes, as spans whose end is not known yet."""
        held = self.held[_rows(self.held["request"], request)]
        for stay in self.stays[_rows(self.stays["request"], request)]:
            instance, came = int(stay["instance"]), float(stay["start"])
            yield Span(OUT if instance == OUTSIDE else _name(State.WAITING), came, came, instance)
            for row in held[held["stay"] == stay["number"]]:
                start, number = float(self.starts[instance][row["low"]]), self.numbers[instance][row["low"]]
                yield Span(_name(row["state"]), start, start, instance, int(number))

    def _explained(self, request: int, span: Span) -> Span:
        """Return the span with the requests served in the meantime and those that took what it lost."""
        if span.state == _name(State.RUNNING):
            return span
        if span.state == OUT:
            return replace(span, behind=self._sent(request, span))
        takers = () if span.state in WORKS else self._takers(request, span)
        return replace(span, behind=self._served(request, span), takers=takers)

    def _sent(self, request: int, span: Span) -> tuple[Share, ...]:
        """Return the requests that were sent while it was outside, up to its own turn."""
        moves, own = self.run.recording.moves, self.stays[_rows(self.stays["request"], request)]
        low = int(np.searchsorted(moves["time"], span.start, "left"))
        turn = own["position"][(own["start"] == span.end) & (own["instance"] != OUTSIDE)]
        high = int(turn[0]) if turn.size else int(np.searchsorted(moves["time"], span.end, "right"))
        part = moves[low:high]
        sent = (part["request"] != request) & (part["instance"] != OUTSIDE)
        others = np.unique(part["request"][sent].astype(np.int64))
        work = self.run.workload
        return self._shares(request, others, (work.prompt + work.output)[others])

    def _served(self, request: int, span: Span) -> tuple[Share, ...]:
        """Return the other requests that computed in its engine, from its submission on."""
        starts, held = self.starts[span.instance], self.held
        low = max(int(np.searchsorted(starts, span.start, "right")) - 1, 0)
        high = int(np.searchsorted(starts, span.end, "left"))
        there = (held["instance"] == span.instance) & (held["low"] < high) & (held["high"] > low)
        rows = held[there & (held["tokens"] > 0) & (held["request"] != request)]
        tokens = (np.minimum(rows["high"], high) - np.maximum(rows["low"], low)) * rows["tokens"]
        others, place = np.unique(rows["request"], return_inverse=True)
        return self._shares(request, others, np.bincount(place, tokens, others.size).astype(np.int64))

    def _shares(self, request: int, others: Ints, tokens: Ints) -> tuple[Share, ...]:
        """Sum up by class, the class that got most first."""
        work = self.run.workload
        tier, later = work.tier[others], work.arrival[others] > work.arrival[request]
        shares = [
            Share(work.tiers[code], int(mine.sum()), int(tokens[mine].sum()), int(later[mine].sum()))
            for code in np.unique(tier).tolist()
            for mine in [tier == code]
        ]
        return tuple(sorted(shares, key=lambda share: -share.tokens))

    def _takers(self, request: int, span: Span) -> tuple[Taker, ...]:
        """Return the requests that gained in the iteration in which the span begins, most blocks first."""
        takers, work = self.run.recording.takers, self.run.workload
        rows = takers[_rows(takers["iteration"], span.iteration)]
        found = [
            Taker(other, work.tiers[work.tier[other]], int(row["blocks"]), bool(row["slot"]))
            for row in rows
            for other in [int(row["request"])]
            if other != request
        ]
        return tuple(sorted(found, key=lambda taker: (-taker.blocks, taker.request)))

    def _crowded(self, spans: tuple[Span, ...]) -> float:
        record, total = self.run.recording.iterations, 0.0
        busy = (record["prefill"] > 0) | (record["recompute"] > 0)
        for span in spans:
            if span.state == _name(State.RUNNING):
                inside = (record["start"] >= span.start) & (record["start"] < span.end)
                mine = inside & (record["instance"] == span.instance) & busy
                total += float(record["seconds"][mine].sum())
        return total


def _name(state: int) -> str:
    return STATES[1 + state]


def _rows(column: Ints, value: int) -> slice:
    """Return where a sorted column has this value."""
    low, high = np.searchsorted(column, [value, value + 1])
    return slice(int(low), int(high))


def _by_instance(iterations: Log, count: int) -> tuple[list[Floats], list[Ints], Ints]:
    """Return each instance's starts and numbers of iterations, and each one's place in its instance."""
    numbers = [np.flatnonzero(iterations["instance"] == instance) for instance in range(count)]
    local = np.zeros(iterations.size, np.int64)
    for mine in numbers:
        local[mine] = np.arange(mine.size)
    return [iterations["start"][mine] for mine in numbers], numbers, local


def _last(run: Run) -> float:
    """Return the instant until which anything is known."""
    record = run.recording.iterations
    ends = [record["start"] + record["seconds"], run.outcome.end[np.isfinite(run.outcome.end)]]
    return float(np.concatenate([*ends, run.workload.arrival]).max(initial=0.0))


def _stays(moves: Log, end: Floats) -> Log:
    """Return the moves by request, each with the instant of the next one or of the request's end."""
    order = np.argsort(moves["request"], kind="stable")
    whole = ("number", "position", "request", "instance")
    stays = np.zeros(moves.size, [*((name, "i8") for name in whole), ("start", "f8"), ("end", "f8")])
    stays["number"], stays["position"] = np.arange(moves.size), order
    stays["request"], stays["instance"] = moves["request"][order], moves["instance"][order]
    stays["start"] = moves["time"][order]
    stays["end"] = end[stays["request"]]
    again = np.flatnonzero(stays["request"][1:] == stays["request"][:-1])
    stays["end"][again] = stays["start"][again + 1]
    return stays


def _held(iterations: Log, changes: Log, stays: Log, local: Ints, starts: list[Floats]) -> Log:
    """Return the changes by request, each with the iterations [low, high) of its instance it holds for."""
    order = np.lexsort((changes["iteration"], changes["request"]))
    changes = changes[order]
    instance = iterations["instance"][changes["iteration"]].astype(np.int64)
    stay = _stay_of(changes["request"], iterations["start"][changes["iteration"]], stays)
    columns = {
        "request": changes["request"].astype(np.int64),
        "instance": instance,
        "stay": stay,
        "low": local[changes["iteration"]],
        "state": changes["state"].astype(np.int64),
        "tokens": changes["tokens"].astype(np.int64),
    }
    held = np.zeros(changes.size, [(name, "i8") for name in (*columns, "high")])
    for name, column in columns.items():
        held[name] = column
    for number, mine in enumerate(starts):
        here = instance == number
        held["high"][here] = np.searchsorted(mine, stays["end"][stay[here]], "left")
    goes_on: Bools = held["stay"][1:] == held["stay"][:-1]
    held["high"][:-1][goes_on] = held["low"][1:][goes_on]
    return held


def _stay_of(request: Ints, start: Floats, stays: Log) -> Ints:
    """Return for each (request, instant) the number of the stay it falls into: the last that had begun."""
    both = np.concatenate([stays["request"], request])
    times = np.concatenate([stays["start"], start])
    change = np.arange(both.size) >= stays.size
    order = np.lexsort((change, times, both))
    numbers = np.where(change, -1, np.arange(both.size))[order]
    found = np.empty(both.size, np.int64)
    found[order] = np.maximum.accumulate(numbers)
    return found[stays.size :]
