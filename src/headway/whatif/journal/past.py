"""Turns a journal into a recorded run, so that the same code explains real and simulated requests.

Missing data are not guessed: time in an engine that did not report the request (an agent's, one without Headway's
scheduler, one that died) is `unseen`. Tokens of other requests are attributed in proportion to time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from headway.simulate.outcome import Outcome
from headway.simulate.record.recorder import CHANGES, ITERATIONS, MOVES, TAKERS, Log, Recording
from headway.simulate.record.run_folder import Header, Machine, Run
from headway.simulate.record.timeline import OUT, STARTING, TRANSIT, UNSEEN, WORKS, Share, Span, Timeline
from headway.simulate.workload.traffic import Workload
from headway.store.journal.reader import JournalReader
from headway.store.journal.rows import ITERATION, RequestRow, StayRow
from headway.types import Floats, Ints

_Change = tuple[float, str, int]  # instant, new state, instance
_STOPS = {"p": "paused", "e": "evicted"}
_ENDINGS = {"dropped": "was refused ({})", "failed": "failed ({})", "cancelled": "was given up by its client ({})"}


@dataclass(frozen=True, eq=False)
class Past:
    """A journal whose requests can be explained. Seconds count from the first arrival."""

    journal: JournalReader
    run: Run

    @classmethod
    def of(cls, journal: JournalReader, command: str) -> Past:
        """Return the run in a journal. ConfigError when it has no requests."""
        rows = journal.requests
        if not rows:
            raise journal.nothing()
        began = rows[0].arrival
        instances = _instances(journal)
        header = Header(_recipes(journal), tuple(_machine(journal, name) for name in instances), 0, command)
        iterations = _iterations(journal, instances, began)
        none = (np.empty(0, kind) for kind in (CHANGES, TAKERS, MOVES))
        endings = {i: _ending(row) for i, row in enumerate(rows) if row.outcome != "finished"}
        run = Run(
            header, workload_of(rows), _outcome(rows, instances, began), Recording(iterations, *none), began, endings
        )
        return cls(journal, run)

    def timeline(self, request: int) -> Timeline:
        """Return the timeline of the request in this row of the workload."""
        row, began = self.journal.requests[request], self.run.began or 0.0
        arrival, end = row.arrival - began, row.ended - began
        spans = tuple(self._explained(request, span) for span in self.spans(row))
        first = float(self.run.outcome.first[request])
        finished = row.outcome == "finished"
        overflow = None if row.overflow_late is None else (row.overflow_late, row.overflow_cost or 0.0)
        crowded = self._crowded(spans)
        return Timeline(request, spans, arrival, first, end, finished, crowded, row.found, overflow, row.budget)

    # ---- states of a request

    def spans(self, row: RequestRow) -> list[Span]:
        """Return a request's states in order, without gaps and with equal neighbours merged."""
        began = self.run.began or 0.0
        sent = [(row.arrival, OUT, -1), *self._changes(row), (row.ended, "", -1)]
        changes = [one for now, then in pairwise(sent) for one in (now, *self._starting(row, now, then[0]))]
        changes.append(sent[-1])
        spans: list[Span] = []
        for (start, state, instance), (end, _, _) in pairwise(changes):
            low, high = (min(max(at, row.arrival), row.ended) - began for at in (start, end))
            if spans:
                low = max(low, spans[-1].end)
            if high <= low:
                continue
            if spans and (spans[-1].state, spans[-1].instance) == (state, instance):
                spans[-1] = replace(spans[-1], end=high)
            else:
                spans.append(Span(state, low, high, instance))
        return spans

    def _starting(self, row: RequestRow, out: _Change, end: float) -> list[_Change]:
        """Return the changes of state within a time outside, while all engines of its model were starting."""
        start, state, _ = out
        names = [name for name, engine in self.journal.engines.items() if engine.model == row.model]
        if state != OUT or not names:
            return []
        starts = [(up, down, name) for name in names for down, up in self.journal.starts.get(name, ())]
        last = {name: (up, down, name) for up, down, name in sorted(starts) if down < end and up > start}
        if len(last) < len(names):
            return []  # one was up
        (up, _, first), down = min(last.values()), max(down for _, down, _ in last.values())
        low, high = max(down, start), min(up, end)
        return [(low, STARTING, self._number(first)), (high, OUT, -1)] if low < high else []

    def _changes(self, row: RequestRow) -> list[_Change]:
        """Return a request's changes of state: (time, new state, instance)."""
        stays = sorted(self._stays.get(row.id, []), key=lambda stay: stay.entered)
        sends = [at for at in dict.fromkeys((row.sent, row.resent)) if at is not None]
        changes = []
        for at, until in pairwise([*sends, math.inf]):
            known = [stay for stay in stays if stay.ended >= at and stay.entered < until]
            name = known[0].instance if known else row.instance if until == math.inf else None
            changes.append((at, TRANSIT if known else UNSEEN, self._number(name)))
        last = max((stay.ended for stay in stays), default=0.0)
        for stay in stays:
            changes += self._inside(stay)
            if row.resent is not None and stay.ended < row.resent:
                changes.append((stay.ended, OUT, -1))  # back in the queue
            elif stay.ended == last:
                changes.append((stay.ended, TRANSIT, self._number(stay.instance)))
        return sorted(changes, key=lambda change: change[0])

    def _inside(self, stay: StayRow) -> list[_Change]:
        """Return the changes of state inside one engine."""
        number = self._number(stay.instance)
        changes = [(stay.entered, "waiting", number)]
        if stay.admitted is None:
            return changes
        changes.append((stay.admitted, "prefill", number))
        spans = stay.spans
        stopped = [low for low, high, _ in spans if low <= stay.first < high]
        changes += [(stay.first, "running", number)] if not stopped else []
        for low, high, kind in spans:
            changes.append((low, _STOPS[kind], number))
            changes.append((high, "running" if high >= stay.first else "prefill", number))
        return changes

    def _number(self, instance: str | None) -> int:
        return next((i for i, one in enumerate(self.run.header.fleet) if one.id == instance), -1)

    @cached_property
    def _stays(self) -> dict[str, list[StayRow]]:
        found: dict[str, list[StayRow]] = {}
        for stay in self.journal.stays:
            found.setdefault(stay.id, []).append(stay)
        return found

    # ---- requests served meanwhile

    def _explained(self, request: int, span: Span) -> Span:
        if span.state in ("running", UNSEEN, TRANSIT, STARTING):
            return span
        if span.state == OUT:
            return replace(span, behind=self._sent(request, span))
        return replace(span, behind=self._served(request, span))

    def _sent(self, request: int, span: Span) -> tuple[Share, ...]:
        """Return the requests for its model that were sent during a span outside the engines."""
        work, sent = self.run.workload, self._sends
        there = (sent >= span.start) & (sent < span.end) & (work.model == work.model[request])
        there[request] = False
        others = np.flatnonzero(there)
        return self._shares(request, others, (work.prompt + work.output)[others].astype(float))

    def _served(self, request: int, span: Span) -> tuple[Share, ...]:
        """Return the other requests that were computed in its engine meanwhile."""
        rows, table = self._inner
        if not rows.size:
            return ()
        instance, admitted, first, ended = table.T
        work = self.run.workload
        prompts = _overlap(admitted, first, span) * work.prompt[rows]
        answers = _overlap(first, ended, span) * work.output[rows]
        mine = (instance == span.instance) & (rows != request) & (prompts + answers > 0)
        return self._shares(request, rows[mine], (prompts + answers)[mine])

    @cached_property
    def _sends(self) -> Floats:
        began = self.run.began or 0.0
        return np.array([np.nan if row.sent is None else row.sent - began for row in self.journal.requests])

    @cached_property
    def _inner(self) -> tuple[Ints, Floats]:
        """Return the requests that were in an engine: their rows, and (instance, admitted, first, ended) of each."""
        work, began = self.run.workload, self.run.began or 0.0
        rows, table = list[int](), list[tuple[float, ...]]()
        for id, stays in self._stays.items():
            try:
                row = work.row_of(id)
            except KeyError:  # the gateway has not ended it yet
                continue
            for stay in stays:
                if stay.admitted is not None:
                    times = (at - began for at in (stay.admitted, stay.first, stay.ended))
                    rows.append(row)
                    table.append((float(self._number(stay.instance)), *times))
        return np.array(rows, np.int64), np.array(table, float).reshape(-1, 4)

    def _shares(self, request: int, others: Ints, tokens: Floats) -> tuple[Share, ...]:
        """Return the sums by class, most tokens first."""
        work = self.run.workload
        tier, later = work.tier[others], work.arrival[others] > work.arrival[request]
        shares = [
            Share(
                work.tiers[code],
                np.unique(others[mine]).size,
                round(float(tokens[mine].sum())),
                np.unique(others[mine & later]).size,
            )
            for code in np.unique(tier).tolist()
            for mine in [tier == code]
        ]
        return tuple(sorted(shares, key=lambda share: -share.tokens))

    def _crowded(self, spans: Iterable[Span]) -> float:
        """Return the seconds of `running` in iterations with prompts, NaN = no iterations are logged."""
        lines, seconds = self.run.recording.iterations, list[float]()
        for span in spans:
            if span.state == WORKS[1]:
                inside = (lines["start"] >= span.start) & (lines["start"] < span.end)
                mine = lines[inside & (lines["instance"] == span.instance)]
                seconds += np.where(mine["prefill"] > 0, mine["seconds"], 0.0).tolist()
        return sum(seconds) if seconds else math.nan


def workload_of(rows: Sequence[RequestRow], outputs: Ints | None = None) -> Workload:
    """Return requests as a workload; seconds count from the first arrival. Cancelled requests have no SLO.

    outputs: tokens of the answers; None = the real ones, at least 1.
    """
    output = np.array([row.output_tokens for row in rows], np.int64) if outputs is None else outputs
    output = np.maximum(output, 1)
    counted = [row.outcome != "cancelled" for row in rows]
    columns: dict[str, Any] = {
        name: np.array([getattr(row, name) or np.inf for row in rows]) for name in ("ttft", "tpot", "e2e", "itl")
    }
    for target in columns.values():
        target[~np.array(counted)] = np.inf
    columns["weight"] = np.array([row.weight for row in rows])
    columns["share"] = np.array([row.share or 1.0 for row in rows])
    columns["line"] = np.array([row.line for row in rows]) * np.array(counted)
    columns["soft"] = np.array([row.soft or 0.0 for row in rows])
    names = {
        name: [str(getattr(row, name) or "") for row in rows]
        for name in ("tier", "model", "tenant", "app", "run", "unit")
    }
    for name, values in names.items():
        known = dict.fromkeys(["", *values] if name in ("app", "run", "unit") else values)
        place = {value: code for code, value in enumerate(known)}
        columns[name] = np.array([place[value] for value in values], np.int64)
        columns[f"{name}s"] = tuple(known)
    arrival = np.array([row.arrival for row in rows]) - rows[0].arrival
    most = np.maximum([row.max_tokens for row in rows], output)
    return Workload(
        arrival=arrival,
        prompt=np.maximum([row.prompt_tokens for row in rows], 1),
        output=output,
        max_tokens=most,
        priority=np.array([row.priority for row in rows], np.int64),
        ids=tuple(row.id for row in rows),
        **columns,
    )


def _outcome(rows: Sequence[RequestRow], instances: Sequence[str], began: float) -> Outcome:
    outcome = Outcome.of(len(rows))
    for i, row in enumerate(rows):
        if row.first is not None:
            outcome.first[i] = row.first - began
        if row.outcome == "finished":
            outcome.end[i], outcome.gap[i] = row.ended - began, row.gap or 0.0
        if row.instance in instances:
            outcome.instance[i] = instances.index(row.instance)
    return outcome


def _ending(row: RequestRow) -> str:
    return _ENDINGS[row.verdict].format(row.reason or "no reason is known")


def _instances(journal: JournalReader) -> list[str]:
    names = {row.instance for row in journal.requests if row.instance} | set(journal.iterations)
    return sorted(names | {stay.instance for stay in journal.stays} | set(journal.engines))


def _recipes(journal: JournalReader) -> str:
    return ", ".join(sorted({engine.recipe for engine in journal.engines.values()})) or "unknown"


def _machine(journal: JournalReader, name: str) -> Machine:
    """Return an engine as it last reported itself; 0 = unknown."""
    engine = journal.engines.get(name)
    if engine is None:
        return Machine(name, "", 0, 0, 0, 0, 0)
    return Machine(
        name,
        engine.model,
        engine.blocks or 0,
        engine.block_size or 0,
        engine.max_running,
        engine.max_running,
        engine.token_budget or 0,
    )


def _iterations(journal: JournalReader, instances: Sequence[str], began: float) -> Log:
    parts = []
    for name, table in journal.iterations.items():
        part = np.zeros(len(table), ITERATIONS)
        part["instance"] = instances.index(name)
        for field in ("start", "seconds", "decodes", "prefill", "blocks", "waiting"):
            part[field] = table[:, ITERATION.index(field)]
        part["start"] -= began
        parts.append(part)
    whole = np.concatenate([np.empty(0, ITERATIONS), *parts])
    return whole[np.argsort(whole["start"], kind="stable")]


def _overlap(low: Floats, high: Floats, span: Span) -> Floats:
    """Return the share of [low, high] that lies within a span."""
    inside = np.minimum(high, span.end) - np.maximum(low, span.start)
    return np.asarray(np.clip(inside, 0.0, None) / np.maximum(high - low, 1e-9))
