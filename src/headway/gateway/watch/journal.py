"""The gateway's journal: ended requests and the engines' iterations, written off the event loop.

A request only appends a row to a list. What cannot be written (a full disk) waits in memory up to a limit,
then the oldest rows are lost: counted and logged, and no request notices.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sqlite3
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as Count

from headway import clock
from headway.config import Journal
from headway.engines.vllm.process.connection import EngineGone
from headway.engines.vllm.process.view import EngineView
from headway.errors import EngineError
from headway.gateway.in_flight import InFlightRequest, Outcome
from headway.gateway.watch.ends import Ended, Observer, Refused
from headway.store.journal.rows import (
    EngineRow,
    IterationsRow,
    RefusalRow,
    RequestRow,
    Row,
    StayRow,
    packed,
    stops_text,
)
from headway.store.journal.writer import MIB, Writer
from headway.types import Request

_EVERY_S = 1.0  # between two writes, and two questions to an engine
_PENDING = 20_000  # rows that wait for a disk
_KINDS_OF_REFUSALS = 1_000  # that are counted apart within `_EVERY_S`; further ones have no tenant
_AT_ONCE = MIB // 2  # bytes of a transaction, more or less
_NAME = 200  # characters of a name that are kept
_RARELY_S = 30.0  # between two questions to an engine that reports no iterations
_ITERATIONS, _STAYS = 4096, 2048  # rows that one answer of an engine has at most
_WORD = re.compile(r"[a-z_]{1,40}")
log = logging.getLogger("headway.gateway")


class JournalKeeper(Observer):
    """Takes rows and writes them; without a folder it does nothing.

    lost: rows that no disk took in time. Instants of rows are by the machine's clock as it was set when the
    gateway started.
    """

    def __init__(self, folder: Path | None, settings: Journal, registry: CollectorRegistry) -> None:
        self.on = folder is not None
        size, seconds = settings.max_mib * MIB, settings.days * 86400
        self._writer = None if folder is None else Writer(folder, size, seconds)
        self._rows: deque[Row] = deque()
        self._refusals = Counter[tuple[str, str, str, str]]()
        self._offset = clock.shown(0.0)
        self._failing = False
        # One thread: two writes never overlap. It begins with the first one.
        self._thread = ThreadPoolExecutor(1, "headway-journal")
        self._written = Count("headway_journal_rows", "Rows written to the journal.", registry=registry)
        self.lost = Count("headway_journal_lost", "Rows that the journal lost.", registry=registry)
        self._bytes = Gauge("headway_journal_bytes", "Bytes of the journal's files.", registry=registry)

    # ---- what the request path reports

    def ended(self, end: Ended) -> None:
        """Note a request that ended here."""
        if not self.on:
            return
        if end.outcome == "finished":
            self._finished(end)
        elif end.here:
            self._failed(end)

    def _finished(self, end: Ended) -> None:
        in_flight, ttft = end.in_flight, end.ttft
        request, e2e = in_flight.request, end.at - in_flight.request.arrival
        tpot = request.tpot(ttft, e2e, end.output_tokens)
        promised = request.slo.objective != "best_effort"
        met = int(request.slo.met(ttft, tpot, e2e, in_flight.silence or 0.0)) if promised else None
        first = request.arrival + ttft
        self._put(_paid(self._row(request, in_flight, end.at, "finished", met, None, first, end.output_tokens), end))

    def _failed(self, end: Ended) -> None:
        """Note a request without a complete answer.

        Of the reason only its first word is kept: an engine's error may quote the prompt.
        """
        in_flight, request = end.in_flight, end.in_flight.request
        counts = end.outcome != "cancelled" and request.slo.objective != "best_effort"
        word = end.reason.partition(":")[0]
        if word == "dropped" and in_flight.refusal is not None:
            word = in_flight.refusal.code or word
        row = self._row(
            request,
            in_flight,
            end.at,
            end.outcome,
            0 if counts else None,
            word if _WORD.fullmatch(word) else "other",
            in_flight.first_token,
            0,
        )
        self._put(_paid(row, end))

    def refused(self, refusal: Refused) -> None:
        """Note a request that could not be on time; count one without room in the queue or in its minute."""
        if not self.on:
            return
        request, tenant, reason = refusal.request, refusal.tenant, refusal.reason
        if reason == "infeasible" and request is not None:
            met = None if request.slo.objective == "best_effort" else 0
            self._put(self._row(request, None, clock.now(), "refused", met, reason, None, 0))
            return
        key = (
            (tenant[:_NAME], request.tier[:_NAME], request.model[:_NAME], reason)
            if request
            else (tenant[:_NAME], "", "", reason)
        )
        if key not in self._refusals and len(self._refusals) >= _KINDS_OF_REFUSALS:
            key = ("", "", "", reason)
        self._refusals[key] += 1

    def _row(
        self, request: Request, in_flight: InFlightRequest | None, ended: float, outcome: Outcome,
        met: int | None, reason: str | None, first: float | None, output_tokens: int,
    ) -> RequestRow:  # fmt: skip
        sends = in_flight.sends if in_flight else ()
        stage, slo = request.stage, request.slo
        return RequestRow(
            request.id, request.tenant[:_NAME], request.tier[:_NAME], request.model[:_NAME],
            str(in_flight.kind) if in_flight else "", int(in_flight.background) if in_flight else 0,
            self._wall(request.arrival), self._when(in_flight.queued if in_flight else None),
            self._when(sends[0][0] if sends else None), self._when(sends[-1][0] if sends else None),
            self._when(first), self._wall(ended), request.context, request.max_tokens, output_tokens,
            in_flight.forecast if in_flight else None, slo.ttft, slo.tpot, slo.e2e, slo.weight, slo.soft,
            int(slo.line), request.priority, sends[-1][1] if sends else None,
            in_flight.found if in_flight and sends and in_flight.keys else None, max(len(sends) - 1, 0),
            stage.app[:_NAME] if stage else None, stage.run[:_NAME] if stage else None,
            stage.unit[:_NAME] if stage else None, outcome, met, reason,
            in_flight.overflow.late if in_flight and in_flight.overflow else None,
            in_flight.spent(outcome, output_tokens) if in_flight else None,
            slo.itl, in_flight.silence if in_flight else None, slo.share,
        )  # fmt: skip

    def _wall(self, instant: float) -> float:
        return instant + self._offset

    def _when(self, instant: float | None) -> float | None:
        return None if instant is None else instant + self._offset

    def _put(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) > _PENDING:
            self._rows.popleft()
            self.lost.inc()

    # ---- writing

    async def run(self) -> None:
        """Write every second until cancelled."""
        while self.on:
            await asyncio.sleep(_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what there is; what the disk refuses is kept."""
        at = self._wall(clock.now())
        refusals, self._refusals = self._refusals, Counter()
        for key, count in refusals.items():
            self._put(RefusalRow(at, *key, count))
        if self._rows:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._write))

    def _write(self) -> None:
        """Write all rows, on the journal's thread; at the first error the rest waits for the next time."""
        writer = self._writer
        assert writer is not None, "rows are taken only if there is a folder"
        while rows := self._next_rows():
            try:
                writer.write(rows)
            except (sqlite3.Error, OSError) as error:
                self._rows.extendleft(reversed(rows))
                if not self._failing:
                    log.error("the journal cannot be written: %s", error)
                self._failing = True
                return
            self._written.inc(len(rows))
            if self._failing:
                log.info("the journal is written again; headway_journal_lost counts the rows that were lost")
            self._failing = False
        self._bytes.set(writer.size)

    def _next_rows(self) -> list[Row]:
        """Take the rows of one transaction."""
        rows, size = list[Row](), 0
        while self._rows and size < _AT_ONCE:
            row = self._rows.popleft()
            size += 1000 + (len(row.data) if isinstance(row, IterationsRow) else 0)
            rows.append(row)
        return rows

    async def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is None:
            return
        await self.flush()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
        self._thread.shutdown(wait=False)

    # ---- engines

    async def follow(self, recipe: str, engine: EngineView) -> None:
        """Ask one engine for its iterations and its requests until cancelled.

        An engine without Headway's scheduler has none; after a restart it may have.
        """
        if not self.on:
            return
        began = self._wall(clock.now())  # what an attached engine did before is another gateway's
        last, described, down = (began, began), "", None
        while True:
            if not engine.up.is_set():
                down = down or self._wall(clock.now())
            await engine.up.wait()
            message = {
                "op": "state",
                "jobs": False,
                "iterations": _ITERATIONS,
                "requests": _STAYS,
                "since": [instant - self._offset for instant in last],
            }
            try:
                state = await engine.control(message)
            except EngineGone:
                await asyncio.sleep(_EVERY_S)
                continue
            except EngineError as error:
                log.debug("engine %s reports no iterations: %s", engine.id, error)
                state = {}
            if described != engine.models.current or down is not None:
                described = engine.models.current
                self._put(_description(engine, recipe, state, self._wall(clock.now()), down))
                down = None
            last, full = self._note(engine.id, state, last)
            if not full:
                await asyncio.sleep(_EVERY_S if "iterations" in state else _RARELY_S)

    def _note(
        self, engine: str, state: Mapping[str, Any], last: tuple[float, float]
    ) -> tuple[tuple[float, float], bool]:
        """Keep an engine's rows; return the instants of the last ones, and whether there are more."""
        try:
            rows, stays = _iterations(state["iterations"]), _stays(state["requests"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            log.debug("engine %s reports iterations that cannot be read: %r", engine, error)
            return last, False
        if rows:
            shifted = [[row[0] + self._offset, *row[1:]] for row in rows]
            self._put(packed(engine, shifted))
            last = shifted[-1][0], last[1]
        for id, entered, first, ended, admitted, stops in stays:
            self._put(
                StayRow(
                    id[:_NAME],
                    engine,
                    self._wall(entered),
                    self._when(admitted),
                    self._wall(first),
                    self._wall(ended),
                    stops_text(entered, stops),
                )
            )
            last = last[0], self._wall(ended)
        return last, len(rows) == _ITERATIONS or len(stays) == _STAYS


def _paid(row: RequestRow, end: Ended) -> RequestRow:
    """Return the row of a request that ended with what its tenant pays."""
    bill, used = end.in_flight.bill, end.in_flight.used(end.outcome, end.output_tokens)
    return replace(
        row,
        key=bill.key[:_NAME],
        budget=bill.beyond,
        paid_prompt=used.prompt,
        paid_cached=used.cached,
        paid_output=used.answer,
        cost=bill.cost(used),
    )


def _iterations(rows: Iterable[Sequence[Any]]) -> list[list[float]]:
    """Return rows of an engine's log as `ITERATION` columns; ValueError for anything else."""
    parsed = [[float(row[0]), float(row[1]), *map(float, row[3:9])] for row in rows]
    if not all(len(row) == 8 and all(map(math.isfinite, row)) for row in parsed):
        raise ValueError("not a log of iterations")
    return parsed


def _stays(
    rows: Iterable[Sequence[Any]],
) -> list[tuple[str, float, float, float, float | None, list[tuple[float, float, str]]]]:
    """Return an engine's requests; ValueError for anything else."""
    parsed = [
        (
            str(row[0]),
            float(row[1]),
            float(row[2]),
            float(row[3]),
            None if row[4] is None else float(row[4]),
            [(float(low), float(high), "e" if kind == "e" else "p") for low, high, kind in row[5]],
        )
        for row in rows
    ]
    if not all(math.isfinite(row[1] + row[2] + row[3] + (row[4] or 0.0)) for row in parsed):
        raise ValueError("not a log of requests")
    return parsed


def _description(engine: EngineView, recipe: str, state: Mapping[str, Any], at: float, down: float | None) -> EngineRow:
    """Return what an engine is; what only Headway's scheduler reports is None without it."""

    def positive(name: str) -> int | None:
        value = state.get(name)
        return value if isinstance(value, int) and value > 0 else None

    instance = engine.instance
    return EngineRow(
        engine.id,
        at,
        engine.models.current,
        recipe,
        positive("max_running") or instance.max_running,
        instance.max_model_len,
        positive("token_budget"),
        positive("blocks_total"),
        positive("block_size"),
        down,
    )
