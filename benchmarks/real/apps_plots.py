"""The plots of `headway bench apps`: completion times of runs and their distribution."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.real.app_load import APPS
from benchmarks.real.apps import ALL, Served, completion_times
from headway.types import Floats
from headway.whatif.output.plots import colours, legend, line_legend, png, sheet
from headway.whatif.output.results import show


def draw(results: Mapping[str, Served]) -> dict[str, bytes]:
    """Return {name: PNG}: completion times by application and system, and their distribution."""
    return {"act": _bars(results), "act-cdf": _distribution(results)}


def _bars(results: Mapping[str, Served]) -> bytes:
    figure, grid = sheet(1, 2, 11, 4)
    settings, shades = (ALL, *APPS), list(colours(results).values())
    for axes, title, p in zip(grid, ("mean", "P95"), (None, 0.95), strict=True):
        for number, (shade, served) in enumerate(zip(shades, results.values(), strict=True)):
            times = [completion_times(served.runs, setting) for setting in settings]
            heights = [_of(seconds, p) for seconds in times]
            at = np.arange(len(settings)) + (number - (len(results) - 1) / 2) * 0.8 / len(results)
            bars = axes.bar(at, heights, 0.75 / len(results), color=shade)
            labels = [show(height if seconds.size else None) for height, seconds in zip(heights, times, strict=True)]
            axes.bar_label(bars, labels, padding=2, fontsize=7)
        axes.set_xticks(range(len(settings)), settings)
        axes.set(ylabel="application completion time, s", title=title)
    legend(figure, list(results))
    return png(figure)


def _of(seconds: Floats, p: float | None) -> float:
    if not seconds.size:
        return 0.0
    return float(seconds.mean() if p is None else np.quantile(seconds, p))


def _distribution(results: Mapping[str, Served]) -> bytes:
    """Draw the share of all runs up to a completion time; lost runs keep the curve below 100 %."""
    figure, (axes,) = sheet(1, 1, 7, 4)
    shades = colours(results)
    for name, served in results.items():
        seconds = np.sort(completion_times(served.runs))
        share = 100 * np.arange(1, seconds.size + 1) / max(len(served.runs), 1)
        axes.step(seconds, share, where="post", color=shades[name], label=name)
    axes.set(xlabel="application completion time, s", ylabel="runs, %", xscale="log", ylim=(0, 103))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    line_legend(figure, 4)
    return png(figure)
