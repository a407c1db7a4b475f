"""The history's figures for one view of the dashboard: shares, quantiles and rates, for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.gateway.watch.history import (
    ANSWERED,
    CACHED,
    FAILED,
    FINEST,
    IN,
    KEPT,
    OUT,
    OWED,
    RATIO,
    TPOT,
    TTFT,
    History,
    HistoryTable,
    HistoryView,
)
from headway.types import Floats

Series = list[float | None]  # a value for each bucket, None where there is none
_PERCENTILES = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Attained:
    """Promises of a class. series: shares kept in %."""

    kept: int
    owed: int
    series: Series


def figures(history: History, view: HistoryView, now: float) -> dict[str, Any]:
    """Return the figures of a view. Instants are those of `headway.clock`."""
    pairs, table = history.table(view, now)
    recent = history.table(HistoryView(FINEST, view.tier, view.tenant), now)[1]
    whole = table.counts.sum(axis=0)
    tiers = sorted({pair.tier for pair in pairs})
    by_class = {tier: attained(table.counts[[pair.tier == tier for pair in pairs]].sum(axis=0)) for tier in tiers}
    return {
        "window_s": view.seconds,
        "ends": table.ends.tolist(),
        "requests_per_s": _latest(recent, [ANSWERED]),
        "tokens_per_s": _latest(recent, [IN, OUT]),
        "answered": int(whole[:, ANSWERED].sum()),
        "failed": int(whole[:, FAILED].sum()),
        "cached": int(whole[:, CACHED].sum()) / max(int(whole[:, IN].sum()), 1),
        "attained": {tier: one for tier, one in by_class.items() if one.owed},
        "ttft": _quantiles(whole, TTFT),
        "tpot": _quantiles(whole, TPOT),
        "tokens": {"in": _rate(table, IN), "out": _rate(table, OUT)},
    }


def attained(counts: npt.NDArray[np.int64]) -> Attained:
    """Return what was kept of the promises in counts (bucket, field)."""
    kept, owed = counts[:, KEPT].tolist(), counts[:, OWED].tolist()
    series = [100.0 * some / all if all else None for some, all in zip(kept, owed, strict=True)]
    return Attained(sum(kept), sum(owed), series)


def _latest(table: HistoryTable, fields: list[int]) -> float:
    """Return the rate in the newest two buckets."""
    return float(table.counts[:, -2:, fields].sum() / max(table.ends[-1] - table.begins[-2:][0], 1.0))


def _rate(table: HistoryTable, field: int) -> list[float]:
    """Return a rate per second for each bucket."""
    seconds = np.maximum(table.ends - table.begins, 1.0)
    return [float(rate) for rate in table.counts[:, :, field].sum(axis=0) / seconds]


def _quantiles(whole: npt.NDArray[np.int64], histogram: tuple[float, range]) -> dict[str, Any]:
    """Return percentiles in seconds: of each bucket, and of the whole window under `all`."""
    lowest, bins = histogram
    counts = whole[:, bins.start : bins.stop]
    each = np.vstack([counts, counts.sum(axis=0)])
    found = {name: quantile(each, share, lowest) for name, share in _PERCENTILES.items()}
    return {"all": {name: series[-1] for name, series in found.items()}} | {
        name: series[:-1] for name, series in found.items()
    }


def quantile(counts: npt.NDArray[np.int64], share: float, lowest: float) -> Series:
    """Return a quantile of each row of a histogram, None for an empty one: the middle of its bin."""
    total, below = counts.sum(axis=1), counts.cumsum(axis=1)
    bins = (below >= np.ceil(share * total)[:, None]).argmax(axis=1)
    middle: Floats = lowest * RATIO ** (bins + 0.5)
    return [float(value) if some else None for value, some in zip(middle, total, strict=True)]
