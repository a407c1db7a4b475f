"""How do people read it?

The same figures as a table for the terminal, as JSON for programs, and as one HTML page that needs nothing
else. One system is shown by class; several are shown side by side with their ratios to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from headway.bench.load import metrics
from headway.bench.load.metrics import ALL, Row, figures
from headway.bench.load.records import Results
from headway.bench.output.page import About, Host, Page, contract, save, versions

__all__ = ["About", "figures", "notes", "table", "to_json", "versions", "write"]

SIMULATED = "SIMULATED"  # on every picture of a simulation
_LATE = 0.05  # seconds of p99 lateness above which the generator itself is worth a warning
_HEADLINES = (
    "requests", "failed", "attainment", "goodput.req_per_s", "throughput.tokens_per_s", "ttft.p50",
    "ttft.p99", "tpot.p50", "tpot.p99", "e2el.p99", "be.tokens_per_s", "preemptions", "recomputed_tokens",
    "kv.alloc_failures_pct", "kv.utilization",
)  # fmt: skip


def notes(results: Results) -> list[str]:
    """Say what a reader of the figures must know: failures by kind, a late generator, counted tokens."""
    lines = []
    for system, (records, _) in results.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in metrics.failures(records).items())
        if kinds:
            lines.append(f"{system}: not completed: {kinds}.")
        late = float(np.quantile(metrics.lateness(records), 0.99)) if records else 0.0
        if late > _LATE:
            lines.append(
                f"{system}: the generator was late itself, p99 {late * 1000:.0f} ms (ttft counts it)."
            )
        counted = sum(record.counted for record in records)
        if counted:
            lines.append(f"{system}: {counted} answers came without usage: tokens are counted as chunks.")
    return lines


# ---- the terminal


def table(results: Results, about: About | None = None, *, title: str = "Was it on time?") -> Table:
    """Return a rich table: a column per class for one system, else a column per system with its ratio."""
    rows = figures(results)
    lines = [*([about.workload] if about and about.workload else []), *notes(results)]
    output_tokens = Table(title=title, caption=escape("\n".join(lines)) or None, caption_justify="left")
    output_tokens.add_column("figure", no_wrap=True)
    header, cells = _by_class(rows) if len(results) == 1 else _by_system(rows, list(results))
    for name in header:
        output_tokens.add_column(escape(name), justify="right", no_wrap=True)
    for line, following in zip(cells, [*cells[1:], None], strict=True):
        ends = following is not None and line.section != following.section
        output_tokens.add_row(line.label, *line.cells, end_section=ends)
    return output_tokens


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a table; a rule is drawn where the section changes."""

    section: str
    label: str
    cells: list[str]


Lines = tuple[list[str], list[_Line]]


def _by_class(rows: Sequence[Row]) -> Lines:
    settings = list(dict.fromkeys(row.setting for row in rows))
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_kind(row), {})[row.setting] = row
    lines = []
    for kind, line in found.items():
        cells = [_show(line[name]) if name in line else "" for name in settings]
        section = kind.partition(".")[0] if line[ALL].unit == "ms" else ""
        lines.append(_Line(section, _label(line[ALL]), cells))
    return settings, lines


def _by_system(rows: Sequence[Row], systems: Sequence[str], only: Sequence[str] | None = _HEADLINES) -> Lines:
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        if only is None or _kind(row) in only:
            found.setdefault(row.setting, {}).setdefault(_kind(row), {})[row.system] = row
    found[ALL] = found.pop(ALL, {})  # last, also when a class is first met in a later system
    lines = []
    for setting, kinds in found.items():
        for line in kinds.values():
            label = f"{setting}: {_label(next(iter(line.values())))}"
            lines.append(_Line(setting, label, _compare(line, systems)))
    return list(systems), lines


def _compare(line: dict[str, Row], systems: Sequence[str]) -> list[str]:
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
    return f"{_kind(row)} {row.unit}" if row.unit in ("ms", "%") else _kind(row)  # else the id says it


def _show(row: Row) -> str:
    if row.ours is None:
        return "-"
    digits = (
        0 if row.unit in ("count", "tokens") or abs(row.ours) >= 1000 else 3 if row.unit == "req/s" else 1
    )
    return f"{row.ours:.{digits}f}"


# ---- files


def to_json(results: Results, *, bench: str, host: Host, seconds: float) -> dict[str, Any]:
    """Return the figures by the JSON contract (`page.contract`)."""
    return contract(figures(results), bench=bench, host=host, seconds=seconds)


def write(
    folder: str | Path,
    results: Results,
    *,
    bench: str,
    host: Host,
    seconds: float,
    about: About | None = None,
    more: Mapping[str, bytes] | None = None,
) -> list[Path]:
    """Write report.json, the plots as PNG, report.html and report.md into a folder; return what was written.

    report.md has the table of the terminal. more: further pictures {name: PNG} for the same page. Raises
    OSError when the folder cannot be written.
    """
    from headway.bench.output import (
        plots,  # matplotlib takes a while: only those who write reports wait for it
    )

    rows = figures(results)
    header, lines = _by_class(rows) if len(results) == 1 else _by_system(rows, list(results), None)
    page = Page(
        f"{bench} ({SIMULATED})" if host == "sim" else f"{bench} on vLLM",
        ["figure", *header],
        [[line.label, *line.cells] for line in lines],
        {**plots.draw(results, SIMULATED if host == "sim" else ""), **(more or {})},
        notes(results),
    )
    saved = save(folder, contract(rows, bench=bench, host=host, seconds=seconds), page, about or About())
    shown = (header, lines) if len(results) == 1 else _by_system(rows, list(results))
    return [*saved, _markdown(Path(folder) / "report.md", page.title, shown, about)]


def _markdown(file: Path, title: str, lines: Lines, about: About | None) -> Path:
    header, body = lines
    table = [["figure", *header], ["---", *("---:" for _ in header)], *([x.label, *x.cells] for x in body)]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    where = [about.workload, f"`{about.command}`"] if about is not None else []
    file.write_text("\n\n".join([f"# {title}", *filter(None, where), "\n".join(text)]) + "\n")
    return file
