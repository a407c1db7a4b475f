"""Output lengths per task: the last answers of a task are the forecast for the next (SLO-aware 4.2, QLM 6).

Until a task has answers, the forecast is a stated prior.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from headway.types import Floats, Forecast, Request

MOST_TASKS = 4096  # that are remembered; clients name them, so the one unused for longest is forgotten
TELLING = 8  # answers from which on a task's forecast is more than a guess


class TaskLengths:
    """Empirical distribution of output tokens per task, over its last `window` answers; `MOST_TASKS` tasks.

    Before the first answer the forecast is `prior` tokens; no forecast exceeds the request's max_tokens.
    """

    def __init__(self, window: int = 256, prior: int = 256) -> None:
        self.window, self.prior = window, prior
        # By task: a ring of the last answers. The order is that of use.
        self._seen: OrderedDict[str, Floats] = OrderedDict()
        self._count: dict[str, int] = {}  # answers so far
        self._sorted: dict[str, Forecast] = {}
        self._first = Forecast(np.array([prior], float), guess=True)

    @property
    def taught(self) -> bool:
        """Tell whether any answer has been learned from."""
        return bool(self._seen)

    def forecast(self, request: Request) -> Forecast:
        """Return the distribution of the answer's tokens, sorted, each in 1..max_tokens."""
        seen = self._forecast_of(request.task)
        if seen.samples[-1] <= request.max_tokens:
            return seen
        return Forecast(np.minimum(seen.samples, request.max_tokens), seen.guess)

    def learn(self, request: Request, output_tokens: int) -> None:
        """Add one answer's length; empty answers (aborted before the first token) teach nothing."""
        if output_tokens > 0:
            self.add(request.task, output_tokens)

    def add(self, task: str, output_tokens: int) -> None:
        """Add the length of one of a task's answers, at least 1 token."""
        if task not in self._seen:
            self._seen[task] = np.zeros(self.window)
        seen, count = self._seen[task], self._count.get(task, 0)
        seen[count % self.window] = output_tokens
        self._count[task] = count + 1
        self._sorted.pop(task, None)
        self._seen.move_to_end(task)
        if len(self._seen) > MOST_TASKS:
            oldest, _ = self._seen.popitem(last=False)
            del self._count[oldest]
            self._sorted.pop(oldest, None)

    def _forecast_of(self, task: str) -> Forecast:
        if task not in self._seen:
            return self._first
        self._seen.move_to_end(task)
        if task not in self._sorted:
            count = self._count[task]
            self._sorted[task] = Forecast(np.sort(self._seen[task][:count]), guess=count < TELLING)
        return self._sorted[task]


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
    """A normal distribution of output tokens per task (SLO-aware 4.2), over all of its answers; `MOST_TASKS` tasks.

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
