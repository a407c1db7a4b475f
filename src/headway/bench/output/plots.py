"""Figures as PNG: one style of axes, colours and legends for every benchmark.

Drawn with matplotlib's Figure objects alone: no display, no global state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's palette: colour-blind readers can tell the colours apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")


def sheet(
    rows: int, columns: int, width: float, height: float, *, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, row by row.

    width, height: of the figure, in inches
    widths: relative widths of the columns
    """
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, list(grid.flat)


def legend(figure: Figure, systems: Sequence[str]) -> None:
    """Name the systems, in their colours, below the axes; one system needs no legend."""
    if len(systems) < 2:
        return
    patches = [Patch(color=colour(number), label=system) for number, system in enumerate(systems)]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(systems), 4), frameon=False)


def line_legend(figure: Figure, columns: int) -> None:
    """Name the labelled lines of the first axes below all axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def colour(number: int) -> str:
    """Return the colour of the system with this number."""
    return COLOURS[number % len(COLOURS)]


def png(figure: Figure, mark: str = "") -> bytes:
    """Return the figure as PNG, with `mark` (such as SIMULATED) in its upper right corner."""
    if mark:
        figure.suptitle(mark, x=0.995, ha="right", fontsize=8, color="#a04000", fontweight="bold")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
