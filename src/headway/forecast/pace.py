"""How long does an iteration take?

Iteration time is additive in what the batch holds (BROS 4.1, SLO-aware 4.2; measured again on vLLM, where a
linear fit of mixed batches holds within a few per cent). So five coefficients are enough, and they are
learned while serving by recursive least squares with forgetting.
"""

from __future__ import annotations

import numpy as np

from headway.types import Batch, Floats

# Typical magnitudes: features are divided by these so that one step size suits all of them.
_SCALE = np.array([1.0, 16.0, 16_000.0, 512.0, 512.0 * 512.0])
# Before anything is measured: a small model on a CPU. Wrong elsewhere for the first tens of steps only.
_PRIOR = np.array([0.010, 0.5e-3, 1.4e-6, 0.29e-3, 1.1e-7])


class OnlinePace:
    """Iteration seconds = base + decodes, context, prefill and prefill x context, each times its coefficient.

    `forget` in (0, 1]: weight of the past per step, so that a changed machine is learned anew. A step that
    took far longer than forecast (another process had the core) moves the fit no more than `surprise` times
    its forecast.
    """

    def __init__(self, forget: float = 0.998, surprise: float = 2.0) -> None:
        self._forget, self._surprise = forget, surprise
        self._theta: Floats = _PRIOR * _SCALE
        self._cov = np.diag(np.square(self._theta) * 4e3)
        self._cap = np.diag(self._cov).copy()

    def seconds(self, batch: Batch) -> float:
        """Return the forecast duration of one iteration of this shape, at least 0.1 ms."""
        return max(float(self._theta @ _features(batch)), 1e-4)

    def prefill_seconds(self, tokens: Floats) -> Floats:
        """Return forecast seconds to compute prompts of these lengths alone, elementwise."""
        per_token, per_pair = self._theta[3] / _SCALE[3], self._theta[4] / _SCALE[4]
        return np.asarray(np.maximum(self._theta[0] + per_token * tokens + per_pair * tokens**2 / 2, 1e-4))

    def learn(self, batch: Batch, seconds: float) -> None:
        """Move the fit towards one measured iteration.

        Errors count relative to the forecast: what disturbs an iteration is proportional to it, and short
        iterations (decodes only) matter as much as long ones.
        """
        x = _features(batch)
        expected = max(float(self._theta @ x), 1e-4)
        error = (min(seconds, (1 + self._surprise) * expected) - float(self._theta @ x)) / expected
        x = x / expected
        ahead = self._cov @ x
        weight = self._forget + float(x @ ahead)
        self._cov = (self._cov - np.outer(ahead, ahead) / weight) / self._forget
        self._theta = _nonnegative(self._theta + ahead * (error / weight), self._cov)
        self._bound()

    def _bound(self) -> None:
        """Forgetting lets unexcited directions grow without end; hold them at their first uncertainty."""
        over = np.diag(self._cov) > self._cap
        if over.any():
            shrink = np.where(over, np.sqrt(self._cap / np.diag(self._cov)), 1.0)
            self._cov *= np.outer(shrink, shrink)


def _nonnegative(theta: Floats, cov: Floats) -> Floats:
    """Return the most likely fit without negative coefficients.

    What a coefficient held at 0 would have explained goes to the others as `cov` relates them. Cutting it
    off alone would leave each step's error standing, and the next corrections grow without end.
    """
    for _ in range(theta.size):
        i = int(theta.argmin())
        if theta[i] >= 0 or cov[i, i] <= 0:
            break
        column = cov[:, i] / cov[i, i]
        theta, cov = theta - column * theta[i], cov - np.outer(column, cov[i])
        theta[i] = 0.0
    return np.maximum(theta, 0.0)


def _features(batch: Batch) -> Floats:
    shape = (1.0, batch.decodes, batch.context, batch.prefill, batch.prefill_context)
    return np.asarray(np.array(shape) / _SCALE, float)
