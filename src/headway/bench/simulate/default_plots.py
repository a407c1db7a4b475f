"""Plots of `headway bench default`: the matrix of cells and recipes, and the curves of wrong forecasts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from headway.bench.output.plots import colour, png, sheet
from headway.bench.output.results import SIMULATED, Row

_WRONG = re.compile(r"^(.*), (lengths off by|latency learned x) ?([\d.]+)x?$")


def matrix(rows: Sequence[Row]) -> bytes:
    """Return a PNG: a line per ground and load, a column per recipe, coloured by the share of the bound."""
    everywhere = {
        row.system for row in rows if row.id == "be.tokens_per_s"
    }  # a search is for some cells only
    shares = [row for row in rows if row.id == "share_of_bound" and row.system in everywhere]
    kept = {(row.setting, row.system): row.ours for row in rows if row.id == "attainment.promised"}
    settings = list(dict.fromkeys(row.setting for row in shares))
    systems = list(dict.fromkeys(row.system for row in shares))
    values = np.full((len(settings), len(systems)), np.nan)
    for row in shares:
        values[settings.index(row.setting), systems.index(row.system)] = row.ours
    figure, (axes,) = sheet(1, 1, 2.2 + 0.62 * len(systems), 1.2 + 0.2 * len(settings))
    shown = axes.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0, vmax=100)
    axes.grid(visible=False)  # its lines would go through the figures
    axes.set_xticks(range(len(systems)), systems, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(settings)), settings, fontsize=7)
    for y, setting in enumerate(settings):
        for x, system in enumerate(systems):
            axes.text(x, y, f"{kept[setting, system]:.0f}", ha="center", va="center", fontsize=6.5)
    figure.colorbar(shown, ax=axes, shrink=0.5, label="share of the bound, %")
    axes.set_title("promises kept, % (colour: as a share of the bound)", fontsize=9)
    return png(figure, SIMULATED)


def errors(rows: Sequence[Row]) -> bytes | None:
    """Return a PNG of attainment against the error of forecasts; None when none was simulated."""
    found = [(match, row) for row in rows if (match := _WRONG.match(row.setting))]
    found = [(match, row) for match, row in found if row.id == "attainment.promised"]
    if not found:
        return None
    figure, panels = sheet(1, 2, 11, 4)
    right = {(row.setting, row.system): row.ours for row in rows if row.id == "attainment.promised"}
    for axes, kind in zip(panels, ("lengths off by", "latency learned x"), strict=True):
        mine = [(match, row) for match, row in found if match[2] == kind]
        for number, ground in enumerate(dict.fromkeys(match[1] for match, _ in mine)):
            for system, line in (("headway", "-"), ("slack", ":")):
                points = [(float(m[3]), r.ours) for m, r in mine if (m[1], r.system) == (ground, system)]
                if kind == "latency learned x":
                    points.append((1.0, right[ground, system]))
                x, y = zip(*sorted(points), strict=True)
                axes.plot(x, y, line, color=colour(number), marker="o", ms=3, label=f"{ground}: {system}")
        axes.set(xlabel=kind, ylabel="promises kept, %", ylim=(0, 103))
        axes.legend(fontsize=6.5)
    return png(figure, SIMULATED)
