"""Draws a demand graph: units from left to right, arrows as thick as their share of the visits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from headway.policy.apps.graph import END, LLM, Graph
from headway.whatif.output import plots

_LEAST = 0.05  # share of a unit's visits below which an arrow is left out
_WIDTH, _HEIGHT = 2.6, 1.5  # inches per unit

Place = tuple[float, float]


def picture(graph: Graph) -> bytes:
    """Return a graph as PNG: LLM units in blue, others in orange, with the shares of next units in percent."""
    edges = {name: unit.next_units for name, unit in graph.units.items()}
    places = _layout(list(graph.first_units), edges)
    columns = 1 + max(x for x, _ in places.values())
    rows = 1 + 2 * max(abs(y) for _, y in places.values())
    figure, (axes,) = plots.sheet(1, 1, max(_WIDTH * columns, 5.0), max(_HEIGHT * rows, 3.0))
    for name, nexts in edges.items():
        for other, share in nexts.items():
            if share >= _LEAST:
                _arrow(axes, places[name], places[other], share)
    for name, place in places.items():
        _node(axes, place, "end" if name == END else name, _colour(graph, name))
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(-rows / 2 - 0.2, rows / 2 + 0.2)
    axes.set_axis_off()
    axes.set_title(f"{graph.app}: {graph.runs} runs (without arrows below {_LEAST:.0%})", loc="left", fontsize=10)
    return plots.png(figure)


def _layout(starts: list[str], edges: Mapping[str, Mapping[str, float]]) -> dict[str, Place]:
    """Return each unit's place: x is its distance from the first units, and the end is last."""
    depth = dict.fromkeys(starts, 0)
    ahead = list(starts)
    for name in ahead:
        for other in edges.get(name, {}):
            if other != END and other not in depth:
                depth[other] = depth[name] + 1
                ahead.append(other)
    for name in edges:
        depth.setdefault(name, 0)
    columns: dict[int, list[str]] = {}
    for name, column in depth.items():
        columns.setdefault(column, []).append(name)
    places = {
        name: (float(column), (len(names) - 1) / 2 - row)
        for column, names in columns.items()
        for row, name in enumerate(names)
    }
    return places | {END: (1.0 + max(columns, default=0), 0.0)}


def _colour(graph: Graph, name: str) -> str:
    if name == END:
        return "#bbbbbb"
    return plots.colour(0 if graph.units[name].backend == LLM else 1)


def _node(axes: Axes, place: Place, name: str, colour: str) -> None:
    shown = name if len(name) <= 24 else f"{name[:22]} …"
    box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour, "linewidth": 2.0}
    axes.text(*place, shown, ha="center", va="center", fontsize=8, bbox=box, zorder=3)


def _arrow(axes: Axes, start: Place, end: Place, share: float) -> None:
    """Draw an arrow, straight to the next column, otherwise curved around other units."""
    width = 0.8 + 2.2 * share
    if start == end:
        axes.annotate(
            "",
            (end[0] + 0.12, end[1] + 0.14),
            (start[0] - 0.12, start[1] + 0.14),
            arrowprops={"arrowstyle": "->", "linewidth": width, "color": "#666666", "connectionstyle": "arc3,rad=-1.6"},
        )
        axes.text(start[0], start[1] + 0.42, f"{share:.0%}", ha="center", fontsize=7)
        return
    bend = 0.0 if end[0] - start[0] == 1 else 0.35
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "->",
            "linewidth": width,
            "color": "#666666",
            "shrinkA": 26,
            "shrinkB": 26,
            "connectionstyle": f"arc3,rad={bend}",
        },
    )
    middle = (np.array(start) + np.array(end)) / 2
    across = np.array([end[1] - start[1], start[0] - end[0]]) * bend / 2
    label = middle + across / (1 + 0.1 * math.hypot(*across))
    axes.text(label[0], label[1] + 0.08, f"{share:.0%}", ha="center", fontsize=7)
