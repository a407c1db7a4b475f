"""Plots a recorded run over virtual time: computed tokens, batch, KV in use, waiting requests.

It averages iterations over equal bins of time, because a run has far more iterations than a plot has pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway.simulate.record.recorder import Log
from headway.simulate.record.run_folder import Run
from headway.types import Floats
from headway.whatif.output.plots import colour, png, sheet
from headway.whatif.output.results import SIMULATED

_BINS = 240
_SOLID, _AREA = 1.4, 0.35


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run in equal bins of time, over all instances together.

    edges: edges of the bins, one more than bins
    prefill, recompute: prompt tokens per second
    decodes, paused, waiting: mean requests over time while the engines ran
    kv: mean share of all blocks in use, %
    queued: mean requests outside the engines
    evicted: number of evictions
    """

    edges: Floats
    prefill: Floats
    recompute: Floats
    decodes: Floats
    paused: Floats
    waiting: Floats
    kv: Floats
    queued: Floats
    evicted: Floats


def timeline(run: Run, bins: int = _BINS) -> Timeline:
    """Return the run in `bins` equal bins from 0 to its end."""
    lines = run.recording.iterations
    ends = lines["start"] + lines["seconds"]
    edges = np.linspace(0.0, max(float(ends.max(initial=0.0)), 1e-9), bins + 1)
    blocks = sum(machine.blocks for machine in run.header.fleet)
    place = np.clip(np.searchsorted(edges, lines["start"], "right") - 1, 0, bins - 1)

    def mean(name: str) -> Floats:
        return _mean(lines, lines[name].astype(float), edges)

    return Timeline(
        edges,
        _mean(lines, _rate(lines, "prefill"), edges),
        _mean(lines, _rate(lines, "recompute"), edges),
        mean("decodes"),
        mean("paused"),
        mean("waiting"),
        100 * mean("blocks") / blocks,
        _queue(run, edges),
        np.bincount(place, lines["evicted"] + lines["saved"], bins).astype(float),
    )


def draw(run: Run) -> bytes:
    """Return the picture as PNG."""
    seen = timeline(run)
    figure, (tokens, batch, memory, queue) = sheet(4, 1, 8.6, 9.2)
    _prompts(tokens, seen)
    _batch(batch, run, seen)
    _memory(memory, seen)
    _waiting(queue, seen)
    for axes in (tokens, batch, memory, queue):
        axes.set_xlim(0, seen.edges[-1])
        axes.set_ylim(bottom=0)
        axes.margins(y=0.08)
    queue.set_xlabel("simulated time, s")
    _title(figure, run)
    return png(figure, SIMULATED)


def _title(figure: Figure, run: Run) -> None:
    count = len(run.header.fleet)
    figure.axes[0].set_title(
        f"{run.header.recipe}: {count} instance{'s' if count > 1 else ''}", loc="left", fontweight="bold"
    )


def _prompts(axes: Axes, seen: Timeline) -> None:
    axes.stairs(seen.prefill, seen.edges, fill=True, color=colour(1), alpha=0.8, label="prompts")
    if seen.recompute.any():
        both = seen.prefill + seen.recompute
        axes.stairs(
            both,
            seen.edges,
            baseline=seen.prefill,
            fill=True,
            color=colour(4),
            alpha=0.8,
            label="recomputed after eviction",
        )
    axes.set_ylabel("prompt tokens/s")
    _beside(axes)


def _batch(axes: Axes, run: Run, seen: Timeline) -> None:
    limit = sum(machine.max_running for machine in run.header.fleet)
    axes.stairs(seen.decodes, seen.edges, color=colour(0), linewidth=_SOLID, label="decoding")
    if seen.paused.max(initial=0.0) > limit / 100:  # fewer would not be visible
        axes.stairs(seen.paused, seen.edges, color=colour(3), linewidth=_SOLID, label="paused")
    if seen.decodes.max(initial=0.0) > limit / 2:
        axes.axhline(limit, color="#444444", linestyle="--", linewidth=1, label=f"batch limit {limit}")
    axes.set_ylabel("requests per iteration")
    _beside(axes)


def _memory(axes: Axes, seen: Timeline) -> None:
    axes.stairs(seen.kv, seen.edges, fill=True, color=colour(2), alpha=_AREA)
    axes.stairs(seen.kv, seen.edges, color=colour(2), linewidth=_SOLID, label="KV in use")
    axes.set(ylabel="KV blocks in use, %", ylim=(0, 104))
    if seen.evicted.any():
        other = axes.twinx()
        other.spines["top"].set_visible(False)
        other.stairs(seen.evicted, seen.edges, fill=True, color=colour(4), label="evictions (right)")
        other.set_ylabel(f"evictions per {seen.edges[1]:.2g} s")
        other.set_ylim(0, max(seen.evicted.max() * 3, 4))
        handles = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
        _beside(axes, handles, x=1.1)


def _waiting(axes: Axes, seen: Timeline) -> None:
    axes.stairs(seen.queued, seen.edges, color=colour(0), linewidth=_SOLID, label="outside")
    axes.stairs(seen.waiting, seen.edges, color=colour(1), linewidth=_SOLID, label="inside an engine")
    axes.set_ylabel("requests waiting")
    _beside(axes)


def _beside(axes: Axes, handles: list[Any] | None = None, x: float = 1.01) -> None:
    """Put the legend beside the axes, so that it does not cover a curve."""
    shown = handles or axes.get_legend_handles_labels()[0]
    axes.legend(handles=shown, loc="upper left", bbox_to_anchor=(x, 1.02), frameon=False, fontsize=8)


def _rate(lines: Log, name: str) -> Floats:
    seconds = lines["seconds"]
    rate = np.divide(lines[name], seconds, out=np.zeros(lines.size), where=seconds > 0)
    return np.asarray(rate, float)


def _mean(lines: Log, values: Floats, edges: Floats) -> Floats:
    """Return the mean over time of a value that is constant during each iteration, and 0 between iterations.

    The mean of a bin is the difference of the integral at its edges. The integral is the sum over all iterations
    before the edge, plus part of an iteration that crosses it, for each instance.
    """
    total = np.zeros(edges.size)
    for instance in np.unique(lines["instance"]):
        mine = lines["instance"] == instance
        start, seconds = lines["start"][mine], lines["seconds"][mine]
        knots = np.column_stack([start, start + seconds]).ravel()
        gains = np.column_stack([np.zeros(start.size), values[mine] * seconds]).ravel()
        total += np.interp(edges, knots, np.cumsum(gains))
    return np.asarray(np.diff(total) / np.diff(edges))


def _queue(run: Run, edges: Floats) -> Floats:
    """Return the mean number of requests outside the engines: arrived minus inside, over time."""
    moves = run.recording.moves
    inside = np.where(moves["instance"] >= 0, -1, 1)
    when = np.concatenate([run.workload.arrival, moves["time"]])
    change = np.concatenate([np.ones(len(run.workload)), inside])
    order = np.argsort(when, kind="stable")
    times, level = when[order], np.cumsum(change[order])
    knots = np.concatenate([[0.0], times, [max(edges[-1], times.max(initial=0.0))]])
    area = np.concatenate([[0.0, 0.0], np.cumsum(level * np.diff(knots)[1:])])
    return np.asarray(np.diff(np.interp(edges, knots, area)) / np.diff(edges))
