"""Output lengths per task as a normal distribution (SLO-aware 4.2, 5.1): its mean and deviation, learned.

The paper draws one whole number from it for each request: with a generator (`draws`) that is the forecast. Without one
the forecast is the distribution's quantiles, so that planners take its mean.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from headway.policy.forecast.lengths.task import MOST_TASKS, TELLING
from headway.types import Floats, Forecast, Request

_SHARES = 64  # samples of a forecast


@dataclass(slots=True)
class _Moments:
    """Count, mean and sum of squared deviations of the answers so far (Welford's updates)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        off = value - self.mean
        self.mean += off / self.count
        self.squares += off * (value - self.mean)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class GaussianLengths:
    """A normal distribution of output tokens per task, over all of its answers; `MOST_TASKS` tasks.

    Before the first answer the forecast is `prior` tokens; none is below 1 or above the request's max_tokens.
    draws: a forecast is one draw by this generator, instead of the distribution.
    """

    def __init__(self, prior: int = 256, draws: np.random.Generator | None = None) -> None:
        self._prior, self._draws = prior, draws
        self._tasks: OrderedDict[str, _Moments] = OrderedDict()  # in the order of their answers

    def forecast(self, request: Request) -> Forecast:
        """Return the distribution of the answer's tokens, sorted, or one draw from it."""
        known = self._tasks.get(request.task)
        if self._draws is not None:
            samples = np.array([float(min(self.draw(request.task, self._draws), request.max_tokens))])
        else:
            mean, deviation = self.profile(request.task)
            samples = np.clip(mean + deviation * _NORMAL, 1.0, request.max_tokens)
        return Forecast(samples, guess=known is None or known.count < TELLING)

    def learn(self, request: Request, output_tokens: int) -> None:
        """Add one answer's length; empty answers (aborted before the first token) teach nothing."""
        if output_tokens > 0:
            self.add(request.task, output_tokens)

    def add(self, task: str, output_tokens: int) -> None:
        """Add the length of one of a task's answers, at least 1 token."""
        self._tasks.setdefault(task, _Moments()).add(output_tokens)
        self._tasks.move_to_end(task)
        if len(self._tasks) > MOST_TASKS:
            self._tasks.popitem(last=False)

    def profile(self, task: str) -> tuple[float, float]:
        """Return mean and standard deviation of a task's answers, in tokens."""
        known = self._tasks.get(task)
        return (float(self._prior), 0.0) if known is None else (known.mean, known.deviation)

    def draw(self, task: str, rng: np.random.Generator) -> int:
        """Draw the length of an answer, at least 1 token."""
        return max(round(rng.normal(*self.profile(task))), 1)


def _quantiles() -> Floats:
    shares = (np.arange(_SHARES) + 0.5) / _SHARES
    return np.array([NormalDist().inv_cdf(share) for share in shares])


_NORMAL = _quantiles()
