"""Which demands of a unit follow from what came before it in the run (Hermes 3.2, online refinement)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.policy.apps.graph import Record
from headway.types import Bools, Floats, Ints

BUCKETS = 10
_THRESHOLD = 0.5  # of Pearson's coefficient (Hermes 5.1)
UNKNOWN = -1  # the bucket of a value that is not known
# The columns that a record may be asked for: of the visit before it, then of its own.
BEFORE_PROMPT, BEFORE_OUTPUT, BEFORE_PARALLEL, PROMPT = range(4)
CONDITIONS = 4


@dataclass(frozen=True, slots=True)
class Correlation:
    """The correlations of one unit.

    masks: which of the five hold: input on input before, input on output before, output on output before,
        output on own input, parallelism on parallelism before.
    edges: per condition, the inner borders of its buckets of equal width, shape (CONDITIONS, BUCKETS - 1).
    buckets: of the unit's records, shape (records, CONDITIONS); `UNKNOWN` where a record has no visit before.
    """

    masks: tuple[bool, bool, bool, bool, bool]
    edges: Floats
    buckets: Ints

    @property
    def used(self) -> Bools:
        """Tell which conditions narrow down the unit's records, shape (CONDITIONS,)."""
        on_input, on_output, out_on_out, own, parallel = self.masks
        return np.array([on_input, on_output or out_on_out, parallel, own])


def correlation_of(records: Sequence[Record]) -> Correlation:
    """Return which correlations the records of a unit show, and their buckets."""
    mine = np.array([(r.visit.prompt, r.visit.output, r.visit.parallel) for r in records], float)
    before = np.array([_before(record) for record in records], float)
    masks = (
        _correlated(before[:, 0], mine[:, 0]),
        _correlated(before[:, 1], mine[:, 0]),
        _correlated(before[:, 1], mine[:, 1]),
        _correlated(mine[:, 0], mine[:, 1]),
        _correlated(before[:, 2], mine[:, 2]),
    )
    columns = np.column_stack([before, mine[:, 0]])
    edges = np.array([_edges(column) for column in columns.T])
    buckets = np.column_stack([bucket(column, edge) for column, edge in zip(columns.T, edges, strict=True)])
    return Correlation(masks, edges, buckets)


def bucket(values: Floats, edges: Floats) -> Ints:
    """Return the bucket of each value; values beyond the records' range fall into the outermost buckets."""
    return np.where(np.isnan(values), UNKNOWN, np.searchsorted(edges, values, side="right")).astype(np.int64)


def _before(record: Record) -> tuple[float, float, float]:
    visit = record.before
    if visit is None or not visit.parallel:
        return (np.nan, np.nan, np.nan)
    return (visit.prompt, visit.output, visit.parallel)


def _correlated(x: Floats, y: Floats) -> bool:
    """Tell whether Pearson's coefficient is above the threshold, where both are known."""
    known = ~(np.isnan(x) | np.isnan(y))
    x, y = x[known], y[known]
    if x.size < BUCKETS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return False
    return bool(np.corrcoef(x, y)[0, 1] > _THRESHOLD)


def _edges(column: Floats) -> Floats:
    known = column[~np.isnan(column)]
    low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
    return np.linspace(low, high, BUCKETS + 1)[1:-1]
