"""Plots of a sweep: attainment, latency and throughput against the rate.

Each recipe has a curve, the mean over seeds, with a band from the smallest to the largest value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from headway.types import Floats
from headway.whatif.load.metrics import ALL
from headway.whatif.output.plots import colours, legend, png, sheet
from headway.whatif.output.results import SIMULATED
from headway.whatif.sweep import Curves

_LATENCIES = ("ttft.p50", "ttft.p99", "tpot.p99")
_WIDE, _HIGH = 3.5, 2.5  # inches of a panel
_STEEP = 20.0  # ratio of the largest to the smallest value from which an axis is logarithmic


def draw(curves: Curves) -> dict[str, bytes]:
    """Return {name: PNG}."""
    pictures: dict[str, Callable[[Curves], Figure]] = {
        "attainment-rate": _attainment,
        "latency-rate": _latency,
        "throughput-rate": _throughput,
    }
    return {name: png(make(curves), SIMULATED) for name, make in pictures.items()}


def _attainment(curves: Curves) -> Figure:
    tiers = [tier for tier in curves.classes if tier == ALL or curves.has_slo(tier)]
    figure, panels = sheet(1, len(tiers), 1.0 + _WIDE * len(tiers), 3.2)
    for axes, tier in zip(panels, tiers, strict=True):
        _curves(axes, curves, tier, "attainment")
        axes.set(ylim=(-3, 103), title=f"{tier}: attainment", ylabel="requests on time, %")
    legend(figure, curves.recipes)
    return figure


def _latency(curves: Curves) -> Figure:
    tiers = [tier for tier in curves.classes if tier != ALL] or [ALL]
    figure, panels = sheet(len(_LATENCIES), len(tiers), 1.0 + _WIDE * len(tiers), 0.7 + _HIGH * len(_LATENCIES))
    for place, axes in enumerate(panels):
        metric, tier = _LATENCIES[place // len(tiers)], tiers[place % len(tiers)]
        seen = _curves(axes, curves, tier, metric, 1e-3)
        limit = getattr(curves.slo, metric.partition(".")[0]) if tier == "chat" else None
        _seconds(axes, np.append(seen, limit) if limit else seen)
        if limit:
            axes.axhline(limit, color="#444444", linestyle="--", linewidth=1)
            axes.annotate(
                f"SLO {limit * 1000:g} ms",
                (0.01, limit),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=8,
                color="#444444",
            )
        axes.set(title=f"{tier}: {metric}", ylabel="s")
    legend(figure, curves.recipes)
    return figure


def _throughput(curves: Curves) -> Figure:
    figure, panels = sheet(1, 2, 1.0 + _WIDE * 2, 3.2)
    titles = {"throughput.tokens_per_s": "tokens/s (in and out)", "goodput.req_per_s": "requests/s on time"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        _curves(axes, curves, ALL, name)
        axes.set(title=f"all: {name.partition('.')[0]}", ylabel=title)
        axes.set_ylim(bottom=0)
    legend(figure, curves.recipes)
    return figure


def _curves(axes: Axes, curves: Curves, tier: str, figure: str, scale: float = 1.0) -> Floats:
    """Draw a curve with its band per recipe; return all drawn values."""
    seen = [np.empty(0)]
    for recipe, shade in colours(curves.recipes).items():
        points = sorted(curves.of(recipe, tier, figure).items())
        known = [(rate, p.mean, p.low, p.high) for rate, p in points if p.mean is not None]
        if not known:
            continue
        rate, mean, low, high = np.array(known, float).T
        axes.plot(rate, mean * scale, color=shade, marker="o", markersize=3.5, linewidth=1.8)
        axes.fill_between(rate, low * scale, high * scale, color=shade, alpha=0.18, linewidth=0)
        seen += [low * scale, high * scale]
    axes.set_xlabel("requests/s")
    axes.set_xlim(*_edges(curves))
    return np.concatenate(seen)


def _edges(curves: Curves) -> tuple[float, float]:
    low, high = curves.rates[0], curves.rates[-1]
    edge = 0.04 * (high - low) or 0.5 * low
    return low - edge, high + edge


def _seconds(axes: Axes, seen: Floats) -> None:
    """Scale an axis of seconds, logarithmically when it spans more than a factor of `_STEEP`."""
    above = seen[seen > 0]
    if above.size and above.max() > _STEEP * above.min():
        axes.set_yscale("log")
        many = above.max() > 300 * above.min()
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if many else (1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.08 * float(seen.max(initial=0.0)) or 1.0)
