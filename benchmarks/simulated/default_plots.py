"""Plots of `headway bench default`: promises by cell and recipe, how all are served, wrong forecasts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from benchmarks.simulated.default_figures import BOUND
from benchmarks.simulated.default_rows import MEASURES
from headway.types import Floats
from headway.whatif.output.plots import colour, png, sheet
from headway.whatif.output.results import SIMULATED, Row, show

_WRONG = re.compile(r"^(.*), (lengths off by|latency learned x) ?([\d.]+)x?$")
_RATIOS = ("mean_wait.weighted", "unpromised.e2el.p99", "worst_wait")
_PANELS = {
    "tokens_per_s": "tokens/s, x stock",
    "mean_wait.weighted": "mean wait by work, x stock",
    "unpromised.e2el.p99": "unpromised e2e p99, x stock",
    "gap.over_1s": "streams silent for over 1 s, %",
    "tardiness.p99": "p99 of seconds late",
    "worst_wait": "longest wait, x stock",
}
_RATIO_TICKS = (0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8, 16)
_TICKS = (0, 1, 10, 100, 1000)  # of seconds and %


def matrix(rows: Sequence[Row]) -> bytes:
    """Return a PNG: a line per ground and load, a column per recipe, coloured by the share of the bound."""
    everywhere = {row.system for row in rows if row.id == "be.tokens_per_s"}  # a search is for some cells only
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
            if (setting, system) in kept:
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


def measures(rows: Sequence[Row]) -> bytes | None:
    """Return a PNG of how the default recipe serves all: a line per ground and load, a column per measure.

    Green is better than stock or as short as can be, red is worse; tokens/s are beside their bound.
    """
    at = {(row.id, row.system, row.setting): row.ours for row in rows}
    settings = [row.setting for row in rows if row.id == "bound.tokens_per_s"]
    if not settings:
        return None
    found = [[at.get((id, system, name)) for _, id, system in MEASURES] for name in settings]
    values = np.array(found, float)  # None becomes NaN
    bound = np.array([at["bound.tokens_per_s", BOUND, name] for name in settings], float)
    shades = np.column_stack([_shades(id, values[:, x], bound) for x, (_, id, _) in enumerate(MEASURES)])
    figure, (axes,) = sheet(1, 1, 2.6 + 0.72 * len(MEASURES), 1.6 + 0.2 * len(settings))
    axes.imshow(shades, aspect="auto", cmap="RdYlGn", vmin=-1.4, vmax=1.4)
    axes.grid(visible=False)
    axes.set_xticks(range(len(MEASURES)), [heading for heading, _, _ in MEASURES], rotation=40, ha="right")
    axes.set_yticks(range(len(settings)), settings, fontsize=7)
    axes.tick_params(axis="x", labelsize=8)
    for y, x in zip(*np.nonzero(~np.isnan(values)), strict=True):
        axes.text(x, y, show(float(values[y, x])), ha="center", va="center", fontsize=6.5)
    axes.set_title("headway: how all are served (ratios to stock vLLM's)", fontsize=9)
    return png(figure, SIMULATED)


def _shades(id: str, values: Floats, bound: Floats) -> Floats:
    """Return the figures of a measure as -1 (worst) to 1 (best), on a logarithmic scale."""
    least = np.maximum(values, 0.01)
    if id == "bound.tokens_per_s":
        shades = np.zeros_like(values)
    elif id == "tokens_per_s":
        shades = 3 * np.log2(least / bound)
    elif id in _RATIOS:
        shades = -np.log2(least) / 2
    else:  # 0.1, 1 and 10 seconds or %
        shades = -np.log10(least)
    return np.asarray(np.clip(shades, -1, 1), float)


def spread(rows: Sequence[Row]) -> bytes | None:
    """Return a PNG with a panel per measure: a dot per ground and load for each recipe, and their mean."""
    settings = {row.setting for row in rows if row.id == "bound.tokens_per_s"}
    seen = [row for row in rows if row.setting in settings]
    systems = list(dict.fromkeys(row.system for row in seen if row.id == "tokens_per_s"))
    if not systems:
        return None
    figure, panels = sheet(2, 3, max(4.0 + 0.75 * len(systems), 11.0), 7.5)
    for axes, (id, title) in zip(panels, _PANELS.items(), strict=True):
        for x, system in enumerate(systems):
            column = [row.ours for row in seen if (row.id, row.system) == (id, system)]
            values = [value for value in column if value is not None]
            axes.plot([x] * len(values), values, "o", color=colour(0), ms=2.5, alpha=0.4)
            if values:
                axes.plot([x], [np.mean(values)], "_", color="black", ms=14, mew=2)
        _scale(axes, _RATIO_TICKS if title.endswith("stock") else _TICKS)
        axes.set_xticks(range(len(systems)), systems, rotation=40, ha="right", fontsize=7)
        axes.set_title(title, fontsize=9)
    return png(figure, SIMULATED)


def _scale(axes: Axes, ticks: Sequence[float]) -> None:
    """Give the axes a logarithmic scale, linear below 1 where 0 is a tick."""
    low, high = axes.get_ylim()
    if 0 in ticks:
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_ylim(-0.1, max(high, 1.5))
    else:
        axes.set_yscale("log")
        axes.set_ylim(max(low, 0.15), high)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
    bottom, top = axes.get_ylim()
    shown = [tick for tick in ticks if bottom <= tick <= top]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_yticks([], minor=True)
