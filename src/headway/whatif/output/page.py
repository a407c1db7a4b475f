"""The page of a result as one self-contained HTML file, and its table in Markdown.

The HTML embeds the plots and states the command, the seed and the versions behind the figures.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100%; display: block }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere } .note { color: #a04000 }
dt { font-weight: 600 } dd { margin: 0 0 .5rem }
"""


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page.

    command: command line that printed the figures
    lines: cells under `header`
    pictures: {name: PNG}
    facts: {name: value} shown below the figures, such as seed and versions
    """

    title: str
    workload: str
    command: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    pictures: Mapping[str, bytes]
    notes: Sequence[str]
    facts: Mapping[str, str]


def html(page: Page) -> str:
    """Return the page as one self-contained HTML document."""
    parts = [f"<h1>{escape(page.title)}</h1>", f"<p>{escape(page.workload)}</p>" if page.workload else ""]
    parts += [f'<p class="note">{escape(line)}</p>' for line in page.notes]
    parts += [_picture(name, png) for name, png in page.pictures.items()]
    parts += ["<h2>Figures</h2>", _table(page), "<h2>How to reproduce</h2>", _facts(page)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )


def markdown(title: str, workload: str, command: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return the title, the workload, the command and a table in Markdown."""
    rows = [header, ["---", *("---:" for _ in header[1:])], *lines]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n\n".join(filter(None, [f"# {title}", workload, f"`{command}`", table])) + "\n"


def _table(page: Page) -> str:
    lines = [_row("th", page.header), *(_row("td", line) for line in page.lines)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _facts(page: Page) -> str:
    command = f"<dt>command</dt><dd><code>{escape(page.command)}</code></dd>" if page.command else ""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items())
    return f"<dl>{command}{items}</dl>"


def _picture(name: str, png: bytes) -> str:
    return f'<img alt="{escape(name)}" src="data:image/png;base64,{b64encode(png).decode()}">'
