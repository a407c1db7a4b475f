"""Counts of what ended in the last 24 hours, by class, tenant and bucket of time.

Memory is bounded by construction: for each window a ring of buckets, coarser for longer windows, and in each
bucket a row of counts and latency histograms for each pair of class and tenant that was seen.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway import clock
from headway.config.keys import OTHER
from headway.gateway.watch.label_values import FewValues
from headway.types import Floats

# Windows by name: (seconds, seconds of a bucket).
WINDOWS = {"10m": (600, 10), "1h": (3600, 60), "6h": (21_600, 300), "24h": (86_400, 1200)}
FINEST = "10m"
MOST_PAIRS = 128  # of class and tenant; further ones share a row
RATIO = 1.25  # of a histogram's neighbouring bounds: quantiles are off by 12 % at most
_LOG_RATIO = math.log(RATIO)
ANSWERED, FAILED, IN, CACHED, OUT, OWED, KEPT, _COUNTS = range(8)  # fields of a row of counts
# Histograms: the lowest bound in seconds, and the fields of their bins (to 268 s, to 3.8 s).
TTFT = 0.001, range(_COUNTS, _COUNTS + 56)
TPOT = 0.0005, range(TTFT[1].stop, TTFT[1].stop + 40)
_FIELDS = TPOT[1].stop

Counts = npt.NDArray[np.uint32]


class RatePair(NamedTuple):
    """A class and a tenant, whose requests are counted together. tenant: its label in `/metrics`."""

    tier: str
    tenant: str


_OTHERS = RatePair(OTHER, OTHER)


@dataclass(frozen=True, slots=True)
class HistoryView:
    """A viewer's choice of a window (of `WINDOWS`), a class and a tenant; None = all."""

    window: str = FINEST
    tier: str | None = None
    tenant: str | None = None

    @property
    def seconds(self) -> int:
        """Return how long the window is."""
        return WINDOWS[self.window][0]

    def shows(self, pair: RatePair) -> bool:
        """Return whether requests of a pair belong to it."""
        return self.tier in (None, pair.tier) and self.tenant in (None, pair.tenant)


class HistoryTable(NamedTuple):
    """Counts (pair, bucket, field), the oldest bucket first, and when each bucket begins and ends."""

    counts: npt.NDArray[np.int64]
    begins: Floats
    ends: Floats


class _Ring:
    """The buckets of a window; the newest is not over yet."""

    def __init__(self, seconds: int, step: int, now: float) -> None:
        self.step, self.size, self.newest = step, seconds // step, int(now // step)
        # Pages of memory that no pair has written to are not taken from the machine.
        self.counts: Counts = np.zeros((MOST_PAIRS + 1, self.size, _FIELDS), np.uint32)

    def add(self, row: int, counts: Counts) -> None:
        self.counts[row, self.newest % self.size] += counts

    def advance(self, now: float, rows: int) -> None:
        """Begin the bucket of this instant; the oldest ones are emptied for it."""
        newest = max(int(now // self.step), self.newest)
        for bucket in range(max(self.newest, newest - self.size) + 1, newest + 1):
            self.counts[:rows, bucket % self.size] = 0
        self.newest = newest

    def table(self, rows: Sequence[int], began: float, now: float) -> HistoryTable:
        """Return the counts of rows.

        Buckets that were over before the history began are left out. The newest is part of the one before it
        until it is old enough for a rate.
        """
        first = max(self.newest - self.size + 1, int(began // self.step))
        buckets = np.arange(first, self.newest + 1)
        counts = self.counts[np.ix_(np.array(rows, np.intp), buckets % self.size)].astype(np.int64)
        begins = np.maximum(buckets * self.step, began)
        if len(begins) > 1 and now - begins[-1] < self.step / 2:
            counts[:, -2] += counts[:, -1]
            counts, begins = counts[:, :-1], begins[:-1]
        return HistoryTable(counts, begins, np.append(begins[1:], now))


class History:
    """Counts what ends; `note` moves the counts into the buckets."""

    def __init__(self, now: float | None = None) -> None:
        self._began = clock.now() if now is None else now
        self.tenant = FewValues().of
        self._rows: dict[RatePair, int] = {}
        self.partial = set[str]()  # tenants with a pair that is counted among the others
        self._open: dict[RatePair, list[int]] = {}  # since the last `note`
        self._rings = {name: _Ring(*sizes, self._began) for name, sizes in WINDOWS.items()}

    @property
    def size(self) -> int:
        """Return the bytes of all buckets, which is the most that they take."""
        return sum(ring.counts.nbytes for ring in self._rings.values())

    async def run(self) -> None:
        """Move the counts into their buckets until cancelled, whenever the finest bucket is over."""
        step = WINDOWS[FINEST][1]
        while True:
            await asyncio.sleep(step - clock.now() % step)
            self.note(clock.now())

    # ---- what the request path reports

    def pair(self, tier: str, tenant: str) -> RatePair:
        """Return the pair that a request of a class and a tenant counts for."""
        pair = RatePair(tier, self.tenant(tenant))
        if pair not in self._rows:
            if len(self._rows) >= MOST_PAIRS:
                self.partial.add(pair.tenant)
                pair = _OTHERS
            self._rows.setdefault(pair, len(self._rows))
        return pair

    def answered(self, pair: RatePair, ttft: float, tpot: float, prompt: int, cached: int, output: int) -> None:
        """Count a complete answer. tpot: 0 where there was but one token. cached: tokens of the prompt."""
        counts = self._counts(pair)
        counts[ANSWERED] += 1
        counts[IN] += prompt
        counts[CACHED] += cached
        counts[OUT] += output
        counts[_bin(ttft, *TTFT)] += 1
        if tpot > 0:
            counts[_bin(tpot, *TPOT)] += 1

    def failed(self, pair: RatePair) -> None:
        """Count a request that was refused or failed."""
        self._counts(pair)[FAILED] += 1

    def judged(self, pair: RatePair, kept: bool) -> None:
        """Count a promise."""
        counts = self._counts(pair)
        counts[OWED] += 1
        counts[KEPT] += kept

    def _counts(self, pair: RatePair) -> list[int]:
        counts = self._open.get(pair)
        if counts is None:
            counts = self._open[pair] = [0] * _FIELDS
        return counts

    def note(self, now: float) -> None:
        """Add what ended since the last time to the buckets of that time, and begin those of now."""
        ready = [(self._rows[pair], np.array(counts, np.uint32)) for pair, counts in self._open.items()]
        self._open.clear()
        for ring in self._rings.values():
            for row, counts in ready:
                ring.add(row, counts)
            ring.advance(now, len(self._rows))

    # ---- what the dashboard asks for

    @property
    def tenants(self) -> list[str]:
        """Return the tenants that were seen."""
        return sorted({pair.tenant for pair in self._rows})

    def table(self, view: HistoryView, now: float) -> tuple[list[RatePair], HistoryTable]:
        """Return the pairs that a view shows and their counts, up to the last `note`."""
        rows = {pair: row for pair, row in self._rows.items() if view.shows(pair)}
        return list(rows), self._rings[view.window].table(list(rows.values()), self._began, now)


def _bin(seconds: float, lowest: float, bins: range) -> int:
    """Return the field of the bin that a latency falls into."""
    if seconds <= lowest:
        return bins.start
    return min(bins.start + int(math.log(seconds / lowest) / _LOG_RATIO), bins.stop - 1)


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
