"""Ranks of runs whose demand is known as a distribution (Hermes 3.3); the lowest rank goes first.

A demand is a row of sorted, equally likely samples of the seconds of service from some moment on, and the
service attained since. Samples that have been outlived are left out.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.policy.apps.demand import BUCKETS
from headway.types import Floats, Ints


@compiled
def gittins(samples: Floats, attained: Floats, rows: Ints) -> Floats:
    """Return the Gittins rank of these rows: seconds of service per run that ends, at the best budget.

    samples: shape (runs, n), each row ascending. attained: shape (runs,).

    Equation 1: the infimum over budgets D > 0 of E[min(X - a, D) | X > a] / P(X - a <= D | X > a). With
    samples the infimum is at a budget that just completes one of them; only budgets that complete a bucket,
    a tenth of the samples left, are looked at: of fewer, the infimum is noise, however many samples there are
    (of an exponential demand it would be anywhere from 0 to its mean). A run that has outlived all of its
    samples is expected to take as long again as it has taken.
    """
    ranks = np.empty(rows.size)
    n = samples.shape[1]
    for i in range(rows.size):
        row = rows[i]
        a = attained[row]
        first = np.searchsorted(samples[row], a, side="right")
        least = first + (n - first + BUCKETS - 1) // BUCKETS - 1
        best, spent = np.inf, 0.0
        for k in range(first, n):
            left = samples[row, k] - a
            spent += left
            if k >= least:
                best = min(best, (spent + (n - 1 - k) * left) / (k - first + 1))
        ranks[i] = best if first < n else a
    return ranks


@compiled
def mean_remaining(samples: Floats, attained: Floats, rows: Ints) -> Floats:
    """Return the mean demand minus what was attained: shortest remaining time by the mean (SRTF)."""
    ranks = np.empty(rows.size)
    for i in range(rows.size):
        ranks[i] = samples[rows[i]].mean() - attained[rows[i]]
    return ranks


@compiled
def latest_start(paths: Floats, attained: Floats, due: Floats, now: float, rows: Ints) -> Floats:
    """Return the instant by which each run must go on without a pause, in the worst case (Equation 2).

    paths, attained: as above, of the seconds that a run takes when it waits for nothing. due: instants, inf =
    no deadline.

    Worst-case slack is this instant minus now; the order is the same. NaN = not even in the best case can the
    run be in time: least slack would serve such runs before all others, and lose those, too.
    """
    ranks = np.empty(rows.size)
    for i in range(rows.size):
        row = rows[i]
        best = max(paths[row, 0] - attained[row], 0.0)
        worst = max(paths[row, -1] - attained[row], 0.0)
        ranks[i] = np.nan if now + best > due[row] else due[row] - worst
    return ranks
