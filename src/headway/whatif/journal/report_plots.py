"""Pictures of `headway report`: attainment and latency by class, and the engines' use over time."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
from matplotlib.axes import Axes

from headway.store.journal.reader import JournalReader, columns
from headway.store.journal.rows import EngineRow
from headway.types import Floats
from headway.whatif.journal.served import SERVED, records_of
from headway.whatif.load import plots
from headway.whatif.output.plots import colour, line_legend, png, sheet

_BINS = 200


def draw(journal: JournalReader) -> dict[str, bytes]:
    """Return {name: PNG}, without empty pictures."""
    records = records_of(journal.requests)
    pictures = plots.draw({SERVED: (records, {})}) if any(record.ok for record in records) else {}
    known = [name for name in sorted(journal.iterations) if name in journal.engines]
    if known:
        figure, grid = sheet(len(known), 1, 7.2, 0.8 + 2.2 * len(known))
        for axes, name in zip(grid, known, strict=True):
            _engine(axes, journal.iterations[name], journal.engines[name])
        line_legend(figure, 4)
        pictures["engines"] = png(figure)
    return pictures


def _offset(instant: float) -> float:
    """Return the days by which local time is ahead of UTC."""
    return (datetime.fromtimestamp(instant).astimezone().utcoffset() or timedelta()) / timedelta(days=1)


def _engine(axes: Axes, table: Floats, engine: EngineRow) -> None:
    """Draw the engine's use over time, in means over equal bins that include idle time."""
    of = columns(table)
    edges = np.linspace(of["start"][0], of["start"][-1] + of["seconds"][-1], _BINS + 1)
    place = np.clip(np.searchsorted(edges, of["start"], "right") - 1, 0, _BINS - 1)
    width = edges[1] - edges[0]
    running = np.minimum(of["decodes"] + (of["prefill"] > 0), engine.max_running) / engine.max_running
    shares = {"computing": np.ones(len(table)), "batch": running}
    if engine.blocks:
        shares["KV"] = of["blocks"] / engine.blocks
    seconds = (edges[1:] + edges[:-1]) / 2
    when = seconds / 86400 + _offset(seconds[0])  # matplotlib's unit is days
    for number, (label, share) in enumerate(shares.items()):
        mean = np.bincount(place, share * of["seconds"], _BINS) / width
        axes.plot(when, 100 * np.minimum(mean, 1.0), label=label, color=colour(number), linewidth=1.3)
    axes.xaxis_date()
    axes.set(ylim=(0, 103), ylabel="in use, %", title=f"{engine.instance}: {engine.model}")
