"""`headway report`: the figures of a gateway's requests and engines, from its journal.

Attainment, latencies and throughput by class and by tenant are those of `whatif/load`. Cancelled requests are
only counted, as in /metrics.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headway.simulate.record.timeline import OUT, STARTING, TRANSIT, UNSEEN, WORKS
from headway.store.journal.reader import JournalReader, read
from headway.store.journal.rows import ITERATION, EngineRow, RequestRow
from headway.types import Floats
from headway.whatif.journal.past import Past
from headway.whatif.journal.served import SERVED, records_of
from headway.whatif.load import metrics
from headway.whatif.output.results import About, Grid, Line, Pictures, Report, Row, deliver, show

_MINUTE = 60.0
_FIGURES = ("requests", "failed", "attainment", "ttft.p50", "ttft.p99", "tpot.p99", "e2el.p50", "e2el.p99")
# Part of an answer's time -> the timeline's states in it.
_SPENT = {
    "queued": (OUT, STARTING),
    "waiting": ("waiting",),
    "computing": WORKS,
    "paused": ("paused", "evicted"),
    "unseen": (UNSEEN, TRANSIT),
}
_LATENCIES = (
    "Latencies are the gateway's, in ms, from the arrival on. Queued is in Headway, waiting is inside an engine before "
    "the first computation, paused is after that; unseen is in transit, or in an engine that does not report it. "
)
_NOTE = _LATENCIES + (
    "An engine's batch and KV are means over the time in which it computed; headroom is the free share of its "
    "batch limit or KV, the scarcer one, in the busiest minute (idle time counts as free). It does not cover "
    "SLOs: see headway advise."
)
_NO_ENGINES = _LATENCIES + (
    "This journal does not have the engines' use: only engines with Headway's scheduler under headway serve "
    "report it, not those of an agent."
)


def main(folder: Path, *, since: float | None, until: float | None, as_json: bool, out: Path | None) -> None:
    """Print the report on requests that ended in [since, until), and write it to a folder."""
    began = time.perf_counter()
    journal = read(folder, since=since, until=until)
    if not journal.requests and not journal.refusals:
        raise journal.nothing()
    rows = [*of_requests(journal), *of_times(journal), *_refusals(journal), *of_engines(journal)]
    about = About(_about(journal))
    report = Report(
        "report",
        "vllm",
        "Requests served",
        rows,
        time.perf_counter() - began,
        about,
        _grid(rows),
        notes=[*_facts(rows), *journal.left_out()],
    )
    deliver(report, as_json=as_json, out=out, pictures=lambda: _pictures(journal))


def _about(journal: JournalReader) -> str:
    rows = journal.requests
    if not rows:
        return "no request was accepted"
    low, high = rows[0].arrival, max(row.ended for row in rows)
    shown = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (low, high))
    recipes = ", ".join(sorted({engine.recipe for engine in journal.engines.values()})) or "unknown"
    return f"{len(rows):,} requests from {' to '.join(shown)}, recipe {recipes}"


# ---- requests


def of_requests(journal: JournalReader) -> list[Row]:
    """Return the figures of the requests by class, of all, and by tenant if there are several."""
    records = records_of(journal.requests)
    rows = [row for row in metrics.figures({SERVED: (records, {})}) if _is_known(row.id)]
    tenants = records_of(journal.requests, by_tenant=True)
    if len({record.tier for record in tenants}) > 1:
        found = metrics.figures({SERVED: (tenants, {})})
        found = [row for row in found if row.setting != metrics.ALL and row.id != "promised_share"]  # that is a class's
        rows += [_of_tenant(row) for row in found if _is_known(row.id)]
    cancelled = sum(row.outcome == "cancelled" for row in journal.requests)
    rows.append(Row("cancelled", SERVED, metrics.ALL, float(cancelled), "count"))
    return rows + list(_shares(journal.requests))


def _is_known(id: str) -> bool:
    """Tell whether the journal has the data of a figure."""
    return not id.startswith(("itl.", "lateness.", "preemptions"))


def _of_tenant(row: Row) -> Row:
    id = "attainment.tenant" if row.id.startswith("attainment.") else row.id
    return replace(row, id=id, setting=f"tenant {row.setting}")


def _shares(rows: Sequence[RequestRow]) -> Iterator[Row]:
    """Yield the share of each class and tenant in all tokens."""
    total = sum(row.prompt_tokens + row.output_tokens for row in rows)
    tokens = Counter[str]()
    for row in rows:
        amount = row.prompt_tokens + row.output_tokens
        tokens[row.tier] += amount
        tokens[f"tenant {row.tenant}"] += amount
    several = len({row.tenant for row in rows}) > 1
    for setting, amount in sorted(tokens.items()):
        if several or not setting.startswith("tenant "):
            yield Row("tokens.share_pct", SERVED, setting, 100 * amount / total if total else None, "%")


def of_times(journal: JournalReader) -> Iterator[Row]:
    """Yield the mean time of complete answers in each part of `_SPENT`, by class; they add up to the mean e2el."""
    rows = [row for row in journal.requests if row.outcome == "finished"]
    if not rows:
        return
    past, seconds = Past.of(journal, ""), defaultdict[tuple[str, str], float](float)
    counts = Counter(setting for row in rows for setting in {row.tier, metrics.ALL})
    for row in rows:
        for span in past.spans(row):
            for setting in {row.tier, metrics.ALL}:
                seconds[setting, span.state] += span.seconds
    for setting, count in sorted(counts.items()):
        for name, states in _SPENT.items():
            spent = sum(seconds[setting, state] for state in states)
            yield Row(f"spent.{name}", SERVED, setting, 1000 * spent / count, "ms")


def _refusals(journal: JournalReader) -> list[Row]:
    """Return the numbers of refused and of failed requests, by reason."""
    counts = Counter[str]()
    for refusal in journal.refusals:
        counts[refusal.reason] += refusal.count
    for row in journal.requests:
        if row.verdict == "dropped":
            counts[row.reason or "unknown"] += 1
    failed = Counter(row.reason or "unknown" for row in journal.requests if row.verdict == "failed")
    return [
        *(Row("dropped", SERVED, reason, float(n), "count") for reason, n in sorted(counts.items())),
        *(Row("failures", SERVED, reason, float(n), "count") for reason, n in sorted(failed.items())),
    ]


# ---- engines


@dataclass(frozen=True, slots=True)
class Use:
    """The use of an engine, as shares between 0 and 1.

    busy: share of the time with iterations. batch, kv: means over that time; None = the KV's size is unknown.
    waiting: mean number of waiting requests over that time.
    peak: use of batch or KV, the scarcer one, in the busiest minute.
    """

    busy: float
    batch: float
    kv: float | None
    waiting: float
    peak: float


def use_of(table: Floats, engine: EngineRow) -> Use:
    """Return an engine's use by its iterations, an array of `ITERATION` columns with at least one row."""
    start, seconds, decodes, _, prefill, _, blocks, waiting = table.T
    assert len(ITERATION) == 8, "the line above names its columns"
    running = np.minimum(decodes + (prefill > 0), engine.max_running) / engine.max_running
    held = blocks / engine.blocks if engine.blocks else None
    total = max(float(seconds.sum()), 1e-9)
    span = max(float(start[-1] + seconds[-1] - start[0]), 1e-9)
    scarce = running if held is None else np.maximum(running, held)
    minute = ((start - start[0]) // _MINUTE).astype(np.int64)
    peak = np.bincount(minute, scarce * seconds).max() / min(_MINUTE, span)
    return Use(
        min(total / span, 1.0),
        float(running @ seconds) / total,
        None if held is None else float(held @ seconds) / total,
        float(waiting @ seconds) / total,
        min(float(peak), 1.0),
    )


def of_engines(journal: JournalReader) -> list[Row]:
    """Return the figures of the engines that log iterations."""
    rows: list[Row] = []
    for name, table in sorted(journal.iterations.items()):
        engine = journal.engines.get(name)
        if engine is None or not len(table):
            continue
        use = use_of(table, engine)
        figures = {
            "engine.busy_pct": use.busy,
            "engine.batch_pct": use.batch,
            "engine.kv_pct": use.kv,
            "engine.headroom_pct": 1 - use.peak,
        }
        rows += [Row(id, SERVED, name, None if v is None else 100 * v, "%") for id, v in figures.items()]
        rows.append(Row("engine.waiting", SERVED, name, use.waiting, "requests"))
    return rows


# ---- table and pictures


def _grid(rows: Sequence[Row]) -> Grid:
    """Return a line per class, tenant and engine."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        kind = "attainment" if row.id.startswith("attainment.") else row.id
        found.setdefault(row.setting, {})[kind] = row
    served = {setting: kinds for setting, kinds in found.items() if "requests" in kinds}
    lines: list[Line] = [
        [setting, *(_cell(kinds.get(name)) for name in (*_FIGURES, "tokens.share_pct"))]
        for setting, kinds in served.items()
    ]
    header = ("", "requests", "failed", "on time, %", "ttft p50", "ttft p99", "tpot p99", "e2e p50", "e2e p99")
    return Grid((*header, "tokens, %"), [lines])


def _facts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences on figures without a column: other endings of requests, and the use of each engine."""
    for id in ("cancelled", "dropped", "failures"):
        counts = [f"{show(row.ours)} ({row.setting})" for row in rows if row.id == id and row.ours]
        if counts:
            yield f"{id.capitalize()}: {', '.join(counts)}."
    spent: dict[str, list[str]] = {}
    for row in rows:
        if row.id.startswith("spent."):
            spent.setdefault(row.setting, []).append(f"{show(row.ours)} {row.id.removeprefix('spent.')}")
    for setting, parts in spent.items():
        yield f"Mean time of an answer ({setting}), ms: {', '.join(parts)}."
    engines: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.id.startswith("engine."):
            engines.setdefault(row.setting, {})[row.id] = show(row.ours)
    for name, of in engines.items():
        yield (
            f"{name}: computing {of['engine.busy_pct']} % of the time, batch {of['engine.batch_pct']} % and "
            f"KV {of['engine.kv_pct']} % in use, headroom {of['engine.headroom_pct']} %, "
            f"{of['engine.waiting']} requests waiting."
        )
    yield _NOTE if engines else _NO_ENGINES


def _cell(row: Row | None) -> str:
    return show(row.ours) if row else "-"


def _pictures(journal: JournalReader) -> Pictures:
    from headway.whatif.journal.report_plots import draw

    return draw(journal)
