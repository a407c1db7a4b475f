"""Plots of a load: attainment by class, latency against the SLO, attainment over time, and KV counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from headway.types import Floats
from headway.whatif.load import metrics
from headway.whatif.load.records import Record, Results
from headway.whatif.output.plots import colours, legend, png, sheet

_MEMORY = ("be.tokens_per_s", "preemptions", "recomputed_tokens", "kv.alloc_failures_pct", "kv.utilization")
_WINDOW = 20
_LONG = 10.0  # seconds from which an axis is in seconds: labels in milliseconds would overlap


def draw(results: Results, mark: str = "") -> dict[str, bytes]:
    """Return {name: PNG}: attainment, latency, timeline (if a class has an SLO), memory (with KV counters).

    mark: text on each picture, such as SIMULATED, which copies of the picture keep
    """
    pictures = {"attainment": _attainment(results), "latency": _latency(results)}
    if any(_with_slo(records) for records, _ in results.values()):
        pictures["timeline"] = _timeline(results)
    panels = _panels(results)
    if panels:
        pictures["memory"] = _memory(panels, list(results))
    return {name: png(figure, mark) for name, figure in pictures.items()}


def _attainment(results: Results) -> Figure:
    with_slo = set[str]().union(*(_with_slo(records) for records, _ in results.values()))
    settings = [*(tier for tier in _tiers(results) if tier in with_slo), metrics.ALL]
    figure, (axes,) = sheet(1, 1, 1.6 + 1.1 * len(settings) * max(1.0, 0.5 * len(results)), 3.4)
    width, shades = 0.8 / max(len(results), 1), colours(results)
    for number, (system, (records, _)) in enumerate(results.items()):
        parts = metrics.split(records)
        heights = [metrics.attainment(parts.get(name, [])) for name in settings]
        places = np.arange(len(settings)) + (number - (len(results) - 1) / 2) * width
        shade = shades[system]
        bars = axes.bar(places, [h or 0.0 for h in heights], width * 0.92, label=system, color=shade)
        axes.bar_label(bars, ["-" if h is None else f"{h:.0f}" for h in heights], padding=2, fontsize=9)
    axes.set(xticks=range(len(settings)), xticklabels=settings, ylim=(0, 112), yticks=range(0, 101, 25))
    axes.set(ylabel="requests on time, %", title="SLO attainment by class")
    axes.tick_params(axis="x", length=0)
    legend(figure, list(results))
    return figure


def _latency(results: Results) -> Figure:
    tiers = _tiers(results)
    names = ("ttft", "tpot", "e2el")
    figure, grid = sheet(len(names), max(len(tiers), 1), 1.2 + 3.6 * max(len(tiers), 1), 8.2)
    for place, axes in enumerate(grid):
        metric = names[place // max(len(tiers), 1)]
        if tiers:
            _cdf(axes, results, tiers[place % len(tiers)], metric)
    legend(figure, list(results))
    return figure


def _cdf(axes: Axes, results: Results, tier: str, metric: str) -> None:
    """Draw the share of all requests up to each latency; failed requests keep the curve below 100 %."""
    parts = [[record for record in records if record.tier == tier] for records, _ in results.values()]
    limit = _limit(results, tier, metric)
    longest = max((values.max(initial=0.0) for values in _values(parts, metric)), default=0.0)
    unit, times = ("s", 1.0) if longest >= _LONG else ("ms", 1000.0)
    seen = [np.sort(values) * times for values in _values(parts, metric)]
    edge = _axis(axes, np.concatenate(seen), None if limit is None else limit * times)
    for shade, part, points in zip(colours(results).values(), parts, seen, strict=True):
        total = max(points.size + sum(not record.ok for record in part), 1)
        shares = np.arange(1, points.size + 1) / total * 100
        # Extend the curve to the edge to show its final height.
        x, y = np.append(points, edge), np.append(shares, points.size / total * 100)
        axes.step(x, y, where="post", color=shade, linewidth=1.8)
    axes.set(ylim=(0, 103), title=f"{tier}: {metric}", xlabel=unit, ylabel="requests, %")
    if limit is not None:
        _line(axes, limit * times, f"SLO {limit * 1000:g} ms")


def _values(parts: Sequence[Sequence[Record]], metric: str) -> list[Floats]:
    return [metrics.values(part, metric) for part in parts]


def _axis(axes: Axes, seen: Floats, limit: float | None) -> float:
    """Scale the axis to its values, logarithmically for long tails; return its end."""
    points = np.append(seen, limit) if limit is not None else seen
    edge = float(points.max()) * 1.05 if points.size and points.max() > 0 else 1.0
    low = float(points.min()) if points.size else 0.0
    if low > 0 and edge > 20 * low and edge > 8 * float(np.median(points)):
        axes.set_xscale("log")
        axes.set_xlim(low / 1.2, edge)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", labelsize=8)
    else:
        axes.set_xlim(0, edge)
    return edge


def _line(axes: Axes, limit: float, label: str) -> None:
    """Mark the SLO, with its label on the wider side."""
    axes.axvline(limit, color="#444444", linestyle="--", linewidth=1)
    left = axes.transAxes.inverted().transform(axes.transData.transform((limit, 0)))[0] > 0.5
    axes.annotate(
        label,
        (limit, 4),
        xytext=(-4 if left else 4, 0),
        textcoords="offset points",
        rotation=90,
        ha="right" if left else "left",
        va="bottom",
        fontsize=8,
        color="#444444",
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
    )


def _timeline(results: Results) -> Figure:
    tiers = [tier for tier in _tiers(results) if any(tier in _with_slo(r) for r, _ in results.values())]
    figure, grid = sheet(len(tiers), 1, 7.2, 1.0 + 2.4 * len(tiers))
    for axes, tier in zip(grid, tiers, strict=True):
        for shade, (records, _) in zip(colours(results).values(), results.values(), strict=True):
            times, shares = running([record for record in records if record.tier == tier])
            axes.plot(times, shares, color=shade, linewidth=1.8)
        axes.set(ylim=(-3, 105), xlabel="planned arrival, s", ylabel="on time, %")
        axes.set_title(f"{tier}: attainment of the last {_WINDOW} arrivals")
    legend(figure, list(results))
    return figure


def _panels(results: Results) -> dict[str, list[float | None]]:
    """Return {title: value per system} of each KV figure that any system has."""
    if not any(metrics.memory(counters, 1) for _, counters in results.values()):
        return {}
    rows = {(row.id, row.system): row for row in metrics.figures(results) if row.setting == metrics.ALL}
    units = {id: row.unit for (id, _), row in rows.items()}
    return {
        f"{id}, %" if units[id] == "%" else id: [
            rows[id, system].ours if (id, system) in rows else None for system in results
        ]
        for id in _MEMORY
        if id in units
    }


def _memory(panels: dict[str, list[float | None]], systems: Sequence[str]) -> Figure:
    """Draw one bar per system, and a dash for a missing value."""
    figure, grid = sheet(1, len(panels), 1.0 + 2.3 * len(panels), 3.0)
    shades = list(colours(systems).values())
    for axes, (title, heights) in zip(grid, panels.items(), strict=True):
        bars = axes.bar(range(len(systems)), [h or 0.0 for h in heights], 0.8, color=shades)
        axes.bar_label(bars, ["-" if h is None else f"{h:,.0f}" for h in heights], padding=2, fontsize=8)
        axes.set(xticks=[], ylim=(0, 1.15 * max((h or 0.0 for h in heights), default=0.0) or 1.0))
        axes.set_title(title, fontsize=9)
    legend(figure, systems)
    return figure


def running(records: Sequence[Record], window: int = _WINDOW) -> tuple[Floats, Floats]:
    """Return planned arrivals in order and, at each, the percentage of the last `window` that was on time."""
    ordered = sorted(records, key=lambda record: record.at)
    met = np.concatenate([[0.0], np.cumsum([float(record.met) for record in ordered])])
    ends = np.arange(1, len(ordered) + 1)
    starts = np.maximum(ends - window, 0)
    shares = 100 * (met[ends] - met[starts]) / (ends - starts)
    return np.array([record.at for record in ordered], float), np.asarray(shares, float)


def _tiers(results: Results) -> list[str]:
    return metrics.tiers([record for records, _ in results.values() for record in records])


def _with_slo(records: Sequence[Record]) -> set[str]:
    return {record.tier for record in metrics.promised(records)}


def _limit(results: Results, tier: str, metric: str) -> float | None:
    """Return the SLO of a class for ttft, tpot or e2el in seconds; None unless it has exactly one."""
    name = "e2e" if metric == "e2el" else metric
    mine = {getattr(r.slo, name) for records, _ in results.values() for r in records if r.tier == tier}
    return next(iter(mine)) if len(mine) == 1 else None
