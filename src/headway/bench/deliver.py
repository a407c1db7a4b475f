"""How does a benchmark hand over its rows? As one JSON object or a table, and as files in a folder."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headway.bench.measures import Row
from headway.bench.page import About, Host, Page, contract, save

_HEADER = ("id", "system", "setting", "paper", "ours", "unit")


def deliver(
    rows: Sequence[Row], *, bench: str, host: Host, title: str, seconds: float, seed: int, workload: str,
    as_json: bool, out: Path | None, pictures: Mapping[str, bytes] | None = None, notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the rows by the JSON contract or as a table; write report.json, PNGs and report.html to `out`."""
    result = contract(rows, bench=bench, host=host, seconds=seconds)
    about = About(shlex.join(["headway", *sys.argv[1:]]), seed, workload)
    lines = [[row.id, row.system, row.setting, show(row.paper), show(row.ours), row.unit] for row in rows]
    if out is not None:
        save(out, result, Page(title, _HEADER, lines, pictures or {}, notes), about)
        Console(stderr=True).print(f"written: {out}/report.html")
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    table = Table(title=title, caption=workload, caption_justify="left")
    for name in _HEADER:
        table.add_column(name, justify="right" if name in ("paper", "ours") else "left")
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    for note in notes:
        console.print(f"[dim]{note}[/]")


def show(value: float | None) -> str:
    """Return a figure as people read it; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
