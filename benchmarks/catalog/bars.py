"""Figures as bars: a group for each setting, a bar for each system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.whatif.output.plots import colours, legend, png, sheet
from headway.whatif.output.results import Row


def bars(rows: Sequence[Row], labels: Mapping[str, str]) -> bytes:
    """Return a picture with one plot for each id of `labels`, which names its axis."""
    chosen = [row for row in rows if row.id in labels]
    systems = list(dict.fromkeys(row.system for row in chosen))
    settings = list(dict.fromkeys(row.setting for row in chosen))
    figure, grid = sheet(len(labels), 1, 9.0, 3.0 * len(labels))
    width, shades = 0.8 / len(systems), colours(systems)
    for axes, (id, label) in zip(grid, labels.items(), strict=True):
        for number, system in enumerate(systems):
            values = {row.setting: row.ours for row in chosen if (row.id, row.system) == (id, system)}
            places = np.arange(len(settings)) + (number - (len(systems) - 1) / 2) * width
            axes.bar(places, [values.get(one) or 0.0 for one in settings], width, color=shades[system])
        ticks = [one.replace(", ", "\n") for one in settings]
        axes.set(xticks=range(len(settings)), xticklabels=ticks, ylabel=label)
    legend(figure, systems)
    return png(figure)
