"""How does a benchmark hand over its rows? As one JSON object or a table, and as files in a folder.

`deliver` does all of it for rows that stand one below the other; a benchmark with a table of its own shape
uses `tabulate` and `hand_over`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.bench.load.metrics import Row
from headway.bench.output.page import About, Host, Page, contract, save

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
    table = tabulate(title, _HEADER, [lines], caption=workload, numbers=("paper", "ours"))
    hand_over(result, lambda: table, as_json=as_json, out=out)
    if not as_json:
        for note in notes:
            Console().print(f"[dim]{escape(note)}[/]")


def tabulate(
    title: str, header: Sequence[str], groups: Iterable[Sequence[Sequence[str]]], *, caption: str = "",
    numbers: Collection[str] | None = None, wrap: bool = True,
) -> Table:  # fmt: skip
    """Return a rich table with a rule after each group of lines; its text is shown as it is, not as markup.

    numbers: the columns of figures, to the right; None = all but the first. wrap: they may be broken.
    """
    table = Table(title=escape(title), caption=escape(caption) or None, caption_justify="left")
    wanted = header[1:] if numbers is None else numbers
    for name in header:
        right = name in wanted
        table.add_column(escape(name), justify="right" if right else "left", no_wrap=right and not wrap)
    for group in groups:
        for line in group:
            table.add_row(*map(escape, line))
        table.add_section()
    return table


def hand_over(
    result: Mapping[str, Any], table: Callable[[], Table], *, as_json: bool, out: Path | None
) -> None:
    """Print the JSON contract or the table, and say where the page is when one was written to `out`."""
    if out is not None:
        Console(stderr=True, soft_wrap=True).print(f"written: {out}/report.html")
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        Console().print(table())


def show(value: float | None) -> str:
    """Return a figure as people read it; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
