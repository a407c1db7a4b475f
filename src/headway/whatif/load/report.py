"""The report of a load: figures of `load/metrics.py`, by class for one system, side by side for several.

The first of several systems is the baseline: cells of the others also show the ratio to its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from headway.whatif.load import metrics
from headway.whatif.load.metrics import ALL
from headway.whatif.load.records import Results
from headway.whatif.output.results import SIMULATED, About, Grid, Host, Report, Row

_LATE = 0.05  # seconds of p99 lateness from which the generator itself distorts the figures
_RATES = (
    "Rates (goodput, throughput) divide by the seconds from the first arrival to the last completion, including "
    "those after the last arrival."
)
_HEADLINES = (
    "requests",
    "failed",
    "attainment",
    "promised_share",
    "goodput.req_per_s",
    "throughput.tokens_per_s",
    "ttft.p50",
    "ttft.p99",
    "tpot.p50",
    "tpot.p99",
    "e2el.p99",
    "be.tokens_per_s",
    "preemptions",
    "prompt.hit_pct",
    "engine_hours",
    "recomputed_tokens",
    "kv.alloc_failures_pct",
    "kv.utilization",
)


def build(
    results: Results,
    *,
    bench: str,
    host: Host,
    seconds: float,
    about: About,
    notes: Iterable[str] = (),
    variant: str = "",
) -> Report:
    """Return the report of the results; the terminal shows headlines, the page every figure.

    notes: lines after those of `warnings`
    variant: variant of the load, such as "burstiness 0.1"; it follows the class in each row's setting
    """
    rows = metrics.figures(results)
    if len(results) == 1:
        grid, whole = _by_class(rows), None
    else:
        grid, whole = _by_system(rows, list(results), _HEADLINES), _by_system(rows, list(results))
    title = f"{bench} ({SIMULATED})" if host == "sim" else f"{bench} on vLLM"
    said = [*warnings(results), *notes, _RATES]
    if variant:
        rows = [replace(row, setting=f"{row.setting}, {variant}") for row in rows]
    return Report(bench, host, title, rows, seconds, about, grid, whole, said)


def warnings(results: Results) -> list[str]:
    """Return warnings about the figures: failed requests by kind, a late generator, counted chunks."""
    lines = []
    for system, (records, _) in results.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in metrics.failures(records).items())
        if kinds:
            lines.append(f"{system}: not completed: {kinds}.")
        late = float(np.quantile(metrics.lateness(records), 0.99)) if records else 0.0
        if late > _LATE:
            lines.append(f"{system}: the generator sent requests late, p99 {late * 1000:.0f} ms (included in ttft).")
        counted = sum(record.counted for record in records)
        if counted:
            lines.append(f"{system}: {counted} responses had no usage: their tokens are counted as chunks.")
    return lines


@dataclass(frozen=True, slots=True)
class _ReportLine:
    """A line of the table, in a section that rules separate from others."""

    section: str
    label: str
    cells: list[str]


def _grid(header: Sequence[str], lines: Iterable[_ReportLine]) -> Grid:
    groups = [[[line.label, *line.cells] for line in group] for _, group in groupby(lines, lambda x: x.section)]
    return Grid(["figure", *header], groups)


def _by_class(rows: Sequence[Row]) -> Grid:
    settings = list(dict.fromkeys(row.setting for row in rows))
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_kind(row), {})[row.setting] = row
    lines = []
    for kind, line in found.items():
        cells = [_show(line[name]) if name in line else "" for name in settings]
        row = next(iter(line.values()))
        section = kind.partition(".")[0] if row.unit == "ms" else ""
        lines.append(_ReportLine(section, _label(row), cells))
    return _grid(settings, lines)


def _by_system(rows: Sequence[Row], systems: Sequence[str], only: Sequence[str] | None = None) -> Grid:
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        if only is None or _kind(row) in only:
            found.setdefault(row.setting, {}).setdefault(_kind(row), {})[row.system] = row
    found[ALL] = found.pop(ALL, {})  # last, even if only a later system has some class
    lines = [
        _ReportLine(setting, f"{setting}: {_label(next(iter(line.values())))}", _compare(line, systems))
        for setting, kinds in found.items()
        for line in kinds.values()
    ]
    return _grid(systems, lines)


def _compare(line: Mapping[str, Row], systems: Sequence[str]) -> list[str]:
    base = line[systems[0]].ours if systems[0] in line else None
    return [_ratio(line.get(system), base, first=system == systems[0]) for system in systems]


def _ratio(row: Row | None, base: float | None, *, first: bool) -> str:
    if row is None:
        return "-"
    if first or not base or row.ours is None or row.id in ("requests", "failed"):
        return _show(row)
    return f"{_show(row)} (×{row.ours / base:.2f})"


def _kind(row: Row) -> str:
    return "attainment" if row.id.startswith("attainment.") else row.id


def _label(row: Row) -> str:
    return f"{_kind(row)} {row.unit}" if row.unit in ("ms", "%") else _kind(row)  # other ids name the unit


def _show(row: Row) -> str:
    if row.ours is None:
        return "-"
    whole = row.unit in ("count", "tokens") or abs(row.ours) >= 1000
    digits = 0 if whole else 3 if row.unit == "req/s" else 1
    return f"{row.ours:.{digits}f}"
