"""The rows of a journal and their tables.

All instants are seconds since the epoch by the machine's clock. No row holds text of prompts or answers: the
only texts are ids and names that the operator or the client chose (tenant, class, model, application, run,
unit).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np

from headway.store.versions import Versions
from headway.types import Floats

APPLICATION = 0x48444A4C  # "HDJL": marks a journal's files among other programs' SQLite files
VERSION = 8  # of the tables below, in PRAGMA user_version
# Columns that files of older versions lack, as SQL. All others may be NULL, and are.
BEFORE = {"weight": "1.0", "line": "0", "key": "''", "paid_prompt": "0", "paid_cached": "0", "paid_output": "0"}
SHAPE = ("decodes", "context", "prefill", "prefill_context")  # columns of an iteration, as `types.Batch`
ITERATION = ("start", "seconds", *SHAPE, "blocks", "waiting")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request that has ended, as the gateway saw it. Missing instants and counts are None.

    kind: the endpoint. background: its client polls for the answer.
    arrival, queued, ended: instants; queued = stored, and in line for an engine.
    sent, resent: instants of the first and last sending to an engine. first: of its first token.
    prompt_tokens: of the longest prompt. output_tokens: of all answers. forecast: of output tokens,
        when it was last sent.
    ttft, tpot, e2e, itl: SLOs in seconds. weight: what one kept counts. soft: a soft target of its ttft, seconds.
    share: of its class's requests that is promised (`Slo.share`), None = all.
    line: 1 = its tpot counts from when the first token is due (`Slo.line`).
    gap: longest silence between two tokens of its stream, seconds.
    priority: lower is more urgent.
    instance: the last engine. found: tokens of its prompt that this one was known to hold when it was sent there.
    requeues: how often it came back from an engine.
    outcome: as `headway_requests` counts it: finished, refused, cancelled or failed.
    met: 1 = it kept its SLO, 0 = it did not, None = it had none or does not count (cancelled).
    reason: of an outcome that is not "finished", one word such as infeasible or engine_gone.
    overflow_late, overflow_cost: of a request that went to an overflow engine: seconds by which it would have been late
        elsewhere (inf = no other engine was up), and units that it cost.
    key: name of the API key that it came with. budget: soft budget that had no room for it, None = all had.
    paid_prompt, paid_cached, paid_output: tokens that its tenant pays for: of all its prompts, of these those that were
        in the engine's prefix cache, and of its answers. cost: of these, None = its model had no price.
    """

    id: str
    tenant: str
    tier: str
    model: str
    kind: str
    background: int
    arrival: float
    queued: float | None
    sent: float | None
    resent: float | None
    first: float | None
    ended: float
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    forecast: float | None
    ttft: float | None
    tpot: float | None
    e2e: float | None
    weight: float
    soft: float | None
    line: int
    priority: int
    instance: str | None
    found: int | None
    requeues: int
    app: str | None
    run: str | None
    unit: str | None
    outcome: str
    met: int | None
    reason: str | None
    overflow_late: float | None = None
    overflow_cost: float | None = None
    itl: float | None = None
    gap: float | None = None
    share: float | None = None
    key: str = ""
    budget: str | None = None
    paid_prompt: int = 0
    paid_cached: int = 0
    paid_output: int = 0
    cost: float | None = None

    @property
    def verdict(self) -> str:
        """Return met, missed, served (it had no SLO), dropped, cancelled or failed."""
        if self.outcome == "finished":
            return {None: "served", 1: "met"}.get(self.met, "missed")
        return "dropped" if self.outcome == "refused" else self.outcome


@dataclass(frozen=True, slots=True)
class RefusalRow:
    """Requests refused at the door, which have no `RequestRow`, counted over about a second."""

    at: float
    tenant: str
    tier: str
    model: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class StayRow:
    """A request's stay inside an engine, from the engine's log.

    entered, admitted, first, ended: instants; admitted = its first computation.
    stops: "from,to,kind;...", later spans without computation in seconds after `entered`: kind p = paused with
        its KV, e = evicted, without its KV.
    """

    id: str
    instance: str
    entered: float
    admitted: float | None
    first: float
    ended: float
    stops: str

    @property
    def spans(self) -> list[tuple[float, float, str]]:
        """Return `stops` as (from, to, kind) with instants."""
        parts = (stop.split(",") for stop in self.stops.split(";") if stop)
        return [(self.entered + float(low), self.entered + float(high), kind) for low, high, kind in parts]


@dataclass(frozen=True, slots=True)
class IterationsRow:
    """Iterations of one engine, packed by `packed` and read by `unpacked`."""

    instance: str
    start: float
    ended: float
    count: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine's description, valid from `at`: written at each start and change of model.

    blocks, block_size, token_budget: None without Headway's scheduler.
    down: instant since which it had been down or starting, None = it was up.
    """

    instance: str
    at: float
    model: str
    recipe: str
    max_running: int
    max_model_len: int
    token_budget: int | None
    blocks: int | None
    block_size: int | None
    down: float | None


Row = RequestRow | RefusalRow | StayRow | IterationsRow | EngineRow
TABLES: dict[type[Any], str] = {
    RequestRow: "requests",
    RefusalRow: "refusals",
    StayRow: "stays",
    IterationsRow: "iterations",
    EngineRow: "engines",
}
WHEN = {"requests": "ended", "refusals": "at", "stays": "ended", "iterations": "ended", "engines": None}
_VALUES = {kind: attrgetter(*(entry.name for entry in fields(kind))) for kind in TABLES}
_SQL = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bytes": "BLOB"}


def schema() -> str:
    """Return the statements that make the tables."""
    return "\n".join(
        f"CREATE TABLE {table} ({', '.join(_column(entry.name, str(entry.type)) for entry in fields(kind))});"
        for kind, table in TABLES.items()
    )


def insert(kind: type[Any]) -> str:
    """Return the statement that stores a row of this kind."""
    return f"INSERT INTO {TABLES[kind]} VALUES ({', '.join('?' * len(fields(kind)))})"


def values(row: Row) -> tuple[Any, ...]:
    """Return a row's columns in the order of its table."""
    columns: tuple[Any, ...] = _VALUES[type(row)](row)
    return columns


def _column(name: str, kind: str) -> str:
    bare = kind.removesuffix(" | None")
    return f'"{name}" {_SQL[bare]}' + (" NOT NULL" if bare == kind else "")


# A gateway begins a new file; those of older versions are read as they are.
VERSIONS = Versions(param="journal.dir", made=VERSION, script=schema(), steps={})


# ---- iterations


def packed(instance: str, rows: Sequence[Sequence[float]]) -> IterationsRow:
    """Return iterations (`ITERATION` each, in order of start) as one row, about a tenth of their size.

    Starts are kept to the microsecond, seconds to 7 digits, counts exactly.
    """
    table = np.array(rows, float)
    start = float(table[0, 0])
    micros = np.rint((table[:, 0] - start) * 1e6).astype(np.int64)
    columns = [np.diff(micros, prepend=0).astype("<i8").tobytes(), table[:, 1].astype("<f4").tobytes()]
    columns += [np.rint(table[:, i]).astype("<i8").tobytes() for i in range(2, len(ITERATION))]
    ended = float((table[:, 0] + table[:, 1]).max())
    return IterationsRow(instance, start, ended, len(table), zlib.compress(b"".join(columns), 6))


def unpacked(row: IterationsRow) -> Floats:
    """Return iterations as an array (count, ITERATION). ValueError for damaged data."""
    try:
        data, n = zlib.decompress(row.data), row.count
    except zlib.error as error:
        raise ValueError(f"iterations of {row.instance} are damaged: {error}") from error
    if len(data) != n * (8 + 4 + 8 * (len(ITERATION) - 2)):
        raise ValueError(f"iterations of {row.instance} are damaged: {len(data)} bytes for {n}")
    table = np.empty((n, len(ITERATION)))
    table[:, 0] = row.start + np.cumsum(np.frombuffer(data, "<i8", n)) / 1e6
    table[:, 1] = np.frombuffer(data, "<f4", n, 8 * n)
    table[:, 2:] = np.frombuffer(data, "<i8", offset=12 * n).reshape(-1, n).T
    return table


def stops_text(entered: float, stops: Iterable[tuple[float, float, str]]) -> str:
    """Return stretches (from, to, kind) with instants as the text of `StayRow.stops`."""
    return ";".join(f"{low - entered:.6f},{high - entered:.6f},{kind}" for low, high, kind in stops)
