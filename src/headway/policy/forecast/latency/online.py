"""The latency of an iteration, learned while serving by recursive least squares with forgetting.

Iteration time is additive in what the batch holds (BROS 4.1, SLO-aware 4.2; on vLLM too, a linear fit of
mixed batches holds within a few per cent), so five coefficients suffice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled, compiled_within
from headway.types import Batch, Floats, Ints, Jobs

# Typical magnitudes: features are divided by these so that one step size suits all of them.
_SCALE = np.array([1.0, 16.0, 16_000.0, 512.0, 512.0 * 512.0])
# Before anything is measured: a small model on a CPU. Wrong elsewhere for the first tens of steps only.
_PRIOR = np.array([0.010, 0.5e-3, 1.4e-6, 0.29e-3, 1.1e-7])
THETA_SIZE = _PRIOR.size
_SHORTEST = 1e-4  # seconds
TELLING = 32  # iterations from which on the fit says more about the engine than the prior does
# Of the measured over the forecast seconds of an iteration: the share that is below `slow`, by how much one more
# iteration moves it (so it tells of the last 2,000 or so), and its bound, which leaves half of a gap to iterations.
_SLOW_QUANTILE, _SLOW_STEP, _SLOWEST = 0.99, 0.05, 2.0


class OnlineLatency:
    """Iteration seconds = base + decodes, context, prefill and prefill x context, each times its coefficient.

    forget: in (0, 1], the weight of the past per step, so that a changed machine is learned anew.
    surprise: a step that took far longer than forecast, because another process had the core, moves the fit
        no more than this many times its forecast.
    theta: the five scaled coefficients, which compiled loops read in place.
    slow: 0.99 of the iterations take at most this many times their forecast, from 1 to 2.
    taught: iterations that it was taught by `learn`. It and `slow` are arrays of one, which compiled loops write in
        place.
    """

    def __init__(self, forget: float = 0.998, surprise: float = 2.0) -> None:
        self.forget, self.surprise = forget, surprise
        self.theta: Floats = _PRIOR * _SCALE
        self.cov: Floats = np.diag(np.square(self.theta) * 4e3)
        self.cap: Floats = np.diag(self.cov).copy()
        self.slow: Floats = np.ones(1)
        self.taught: Ints = np.zeros(1, np.int64)

    @property
    def steps(self) -> int:
        """Iterations that it was taught."""
        return int(self.taught[0])

    @property
    def telling(self) -> bool:
        """Tell whether enough was measured to judge requests by."""
        return self.steps >= TELLING

    def seconds(self, batch: Batch) -> float:
        """Return the forecast duration of one iteration of this shape, at least 0.1 ms."""
        shape = (batch.decodes, batch.context, batch.prefill, batch.prefill_context)
        return float(seconds_of(self.theta, *shape))

    def prefill_seconds(self, tokens: Floats) -> Floats:
        """Return forecast seconds to compute prompts of these lengths alone, elementwise."""
        per_token, per_pair = self.theta[3] / _SCALE[3], self.theta[4] / _SCALE[4]
        alone = self.theta[0] + per_token * tokens + per_pair * tokens**2 / 2
        return np.asarray(np.maximum(alone, _SHORTEST))

    def learn(self, batch: Batch, seconds: float) -> None:
        """Move the fit towards one measured iteration."""
        shape = (batch.decodes, batch.context, batch.prefill, batch.prefill_context)
        learn(self.theta, self.cov, self.cap, self.slow, self.taught, *shape, seconds, self.forget, self.surprise)


def batch_of(jobs: Jobs, rows: Ints, tokens: Ints) -> Batch:
    """Return the shape of the iteration that computes `tokens` (aligned with `rows`) from here."""
    return Batch(*shape(jobs.data, rows, tokens))


@compiled
def shape(jobs: NDArray[np.void], rows: Ints, tokens: Ints) -> tuple[int, int, int, int]:
    """Return the fields of the `Batch` of an iteration that computes `tokens` of `rows` from here."""
    decodes, context, prefill, pairs = 0, 0, 0, 0
    for i in range(rows.size):
        there, new = jobs["computed"][rows[i]], tokens[i]
        if new == 1:
            decodes, context = decodes + 1, context + there
        else:
            prefill, pairs = prefill + new, pairs + new * there + new * new // 2
    return decodes, context, prefill, pairs


@compiled_within
def seconds_of(theta: Floats, decodes: float, context: float, prefill: float, pairs: float) -> float:
    """Return the forecast seconds of one iteration, given scaled coefficients."""
    total = theta[0] + theta[1] * (decodes / _SCALE[1]) + theta[2] * (context / _SCALE[2])
    return float(max(total + theta[3] * (prefill / _SCALE[3]) + theta[4] * (pairs / _SCALE[4]), _SHORTEST))


@compiled_within
def prefill_of(theta: Floats, tokens: float) -> float:
    """Return the forecast seconds to compute one prompt alone."""
    return seconds_of(theta, 0.0, 0.0, tokens, tokens * tokens / 2)


@compiled
def learn(
    theta: Floats, cov: Floats, cap: Floats, slow: Floats, taught: Ints, decodes: float, context: float,
    prefill: float, pairs: float, seconds: float, forget: float, surprise: float,
) -> None:  # fmt: skip
    """Move theta and cov, in place, towards one measured iteration by recursive least squares, and count it.

    Errors count relative to the forecast: what disturbs an iteration is proportional to it, and short
    iterations (decodes only) matter as much as long ones. Once the fit is telling, `slow` follows its
    quantile by steps whose mean is 0 there (Robbins and Monro 1951).
    """
    x = np.array([1.0, decodes, context, prefill, pairs]) / _SCALE
    forecast = 0.0
    for i in range(5):
        forecast += theta[i] * x[i]
    expected = max(forecast, _SHORTEST)
    if taught[0] >= TELLING:  # (seconds > ...) is 1 in a hundredth of the iterations where `slow` is right
        step = _SLOW_STEP * ((seconds > slow[0] * expected) - (1.0 - _SLOW_QUANTILE))
        slow[0] = min(max(slow[0] + step, 1.0), _SLOWEST)
    taught[0] += 1
    error = (min(seconds, (1 + surprise) * expected) - forecast) / expected
    x = x / expected
    ahead = np.zeros(5)
    weight = forget
    for i in range(5):
        for j in range(5):
            ahead[i] += cov[i, j] * x[j]
        weight += x[i] * ahead[i]
    for i in range(5):
        for j in range(5):
            cov[i, j] = (cov[i, j] - ahead[i] * ahead[j] / weight) / forget
        theta[i] += ahead[i] * (error / weight)
    _keep_positive(theta, cov.copy())
    _bound(cov, cap)


@compiled
def _keep_positive(theta: Floats, cov: Floats) -> None:
    """Make theta the most likely fit without negative coefficients; cov is used up.

    What a coefficient held at 0 would have explained goes to the others as `cov` relates them. Cutting it
    off alone would leave each step's error standing, and the next corrections grow without end.
    """
    for _ in range(5):
        i = int(theta.argmin())
        if theta[i] >= 0 or cov[i, i] <= 0:
            break
        column, row = cov[:, i] / cov[i, i], cov[i].copy()
        theta -= column * theta[i]
        for j in range(5):
            for k in range(5):
                cov[j, k] -= column[j] * row[k]
        theta[i] = 0.0
    for i in range(5):
        theta[i] = max(theta[i], 0.0)


@compiled
def _bound(cov: Floats, cap: Floats) -> None:
    """Forgetting lets unexcited directions grow without end; hold them at their first uncertainty."""
    for i in range(5):
        if cov[i, i] > cap[i]:
            shrink = np.sqrt(cap[i] / cov[i, i])
            for j in range(5):
                cov[i, j] *= shrink
                cov[j, i] *= shrink
