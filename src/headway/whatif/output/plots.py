"""Figures as PNG, with one style of axes, colours and legends for all benchmarks.

It uses only matplotlib's Figure objects, without a display or global state.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's palette: colour-blind readers can tell the colours apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")

# A system's colour in every picture, unless another system there has it already.
_PREFERRED = {
    "headway": 0,
    "edf": 1,
    "edf-model-swap": 1,
    "parrot": 1,
    "slack": 2,
    "vtc": 2,
    "qlm": 3,
    "ecoserve": 3,
    "bros": 4,
    "shepherd": 4,
    "hermes": 5,
    "anneal": 5,
    "vllm-priority": 6,
    "srtf": 6,
    "vllm": 7,
    "vllm-fcfs": 7,
    "vllm-model-swap": 7,
}


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
    """Name the systems with their colours below the axes, if there are several."""
    if len(systems) < 2:
        return
    patches = [Patch(color=shade, label=system) for system, shade in colours(systems).items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(systems), 4), frameon=False)


def line_legend(figure: Figure, columns: int) -> None:
    """Put the legend of the first axes below all axes."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def colours(systems: Iterable[str]) -> dict[str, str]:
    """Return the colour of each system of a picture: its preferred one, else the first unused one."""
    names = list(dict.fromkeys(systems))
    taken: dict[str, int] = {}
    for name in names:
        if name in _PREFERRED and _PREFERRED[name] not in taken.values():
            taken[name] = _PREFERRED[name]
    unused = [number for number in range(len(_COLOURS)) if number not in taken.values()]
    others = [name for name in names if name not in taken]
    taken |= dict(zip(others, cycle(unused or range(len(_COLOURS)))))
    return {name: colour(taken[name]) for name in names}


def colour(number: int) -> str:
    """Return the colour with this number, in turn."""
    return _COLOURS[number % len(_COLOURS)]


def png(figure: Figure, mark: str = "") -> bytes:
    """Return the figure as PNG, with `mark` (such as SIMULATED) in its upper right corner."""
    if mark:
        figure.suptitle(mark, x=0.995, ha="right", fontsize=8, color="#a04000", fontweight="bold")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
