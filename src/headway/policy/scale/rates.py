"""A forecast of arrivals, learned from counts while they come: level, trend, time of day, and how wrong it was.

Several simple forecasts run side by side: exponential means of the counts with memories from seconds to hours, and the
same with a trend. They are mixed by how likely they made each count since, with Herbster and Warmuth's fixed share
(1998), so that a slow one is left within seconds of a jump and comes back after it. Beside this mixture stands the mean
of earlier days at the time asked for, times how far today is above them. How far each of the two is believed is learned
in the same way, but from forecasts as far ahead: the next seconds say little about who will be right in ten minutes.
What the two missed as far ahead is kept as ratios, the forecast's distribution.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from headway.types import Floats

STEP_S = 5.0  # seconds that arrivals are counted over
DAY_S = 86_400.0
_SLOTS = 288  # parts of a day that are told apart: of 5 minutes
_MEMORIES = STEP_S * 2.0 ** np.arange(1, 10)  # seconds, 10 to 2560
_KEPT = 4096  # errors: of some hours
_HORIZONS = 4  # the last ones asked for: a scaler has two, and others when the seconds of a start have changed


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals per second over a stretch of time to come.

    rate: as expected, per second. ratios: equally likely multiples of it.
    known: as long a stretch has been seen.
    """

    rate: float
    ratios: Floats
    known: bool


class _Levels:
    """Exponential means of counts per second and of their slope, one of each memory, without the zeros before them."""

    def __init__(self) -> None:
        self._keep = np.exp(-STEP_S / _MEMORIES)
        self._mass, self._steps = np.zeros(_MEMORIES.size), 0
        self._sums = np.zeros((4, _MEMORIES.size))  # weighted sums of count, age x count, age, and age squared

    def add(self, rate: float) -> None:
        """Take in the rate of one more step."""
        self._steps += 1
        count, lag, age, square = self._sums
        # All that is there becomes one step older: (a + 1)^2 = a^2 + 2a + 1.
        square = self._keep * (square + 2 * age + self._mass)
        age, lag = self._keep * (age + self._mass), self._keep * (lag + count)
        self._mass = self._keep * self._mass + 1
        self._sums = np.array([self._keep * count + rate, lag, age, square])

    def at(self, ahead: float) -> Floats:
        """Return the forecast rates `ahead` steps from now: levels, then trends; none is below 0.

        A trend says nothing about times farther away than it was learned over.
        """
        count, lag, age, square = self._sums / np.maximum(self._mass, 1e-9)
        spread = np.maximum(square - age * age, 1e-9)
        known = (self._mass > 3) & (ahead * STEP_S <= _MEMORIES) & (self._steps >= ahead)
        slope = np.where(known, (age * count - lag) / spread, 0.0)
        return np.asarray(np.maximum(np.concatenate([count, count + slope * (age + ahead)]), 0.0))


class _Days:
    """The mean rate of each part of the day, the newest day counting as much as all before it."""

    def __init__(self, day_s: float) -> None:
        self._day_s = day_s
        self._mean = np.full(_SLOTS, np.nan)
        self._slot, self._sum, self._steps = -1, 0.0, 0

    def add(self, rate: float, now: float) -> None:
        """Take in the rate of the step that ends now."""
        slot = int(self._place(now - STEP_S / 2))
        if slot != self._slot:
            if self._steps:
                new, old = self._sum / self._steps, self._mean[self._slot]
                self._mean[self._slot] = new if np.isnan(old) else (new + old) / 2
            self._slot, self._sum, self._steps = slot, 0.0, 0
        self._sum, self._steps = self._sum + rate, self._steps + 1

    def at(self, when: float, seconds: float) -> float:
        """Return the mean rate of a stretch that begins at an instant, NaN = that time of day was never seen."""
        first = self._place(when)
        return float(self._mean[np.arange(int(first), int(first + seconds / self._day_s * _SLOTS) + 1) % _SLOTS].mean())

    def _place(self, when: float) -> float:
        return when % self._day_s / self._day_s * _SLOTS


@dataclass(slots=True)
class _Horizon:
    """Forecasts of stretches that begin `ahead` steps from now and last `length`, each by today's level and by the day.

    weights: how far each of the two is believed. made: forecasts of stretches that have not ended, with the step.
    seen: of those that have, what came and what was forecast.
    """

    ahead: int
    length: int
    weights: Floats = field(default_factory=lambda: np.full(2, 0.5))
    made: deque[tuple[int, Floats]] = field(default_factory=deque)
    seen: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _compared: int = 0

    def ratios(self) -> Floats:
        """Return the ratios of what came to what was expected, or would have been with these weights."""
        came, *expected = np.array(self.seen).reshape(-1, 3).T
        return np.asarray((came + 0.5) / (self.weights @ np.array(expected) + 0.5))

    def compare(self, steps: int, count: int, excess: float) -> None:
        """Compare the forecasts of the stretch that has ended now with what came in it."""
        while self.made and self.made[0][0] + self.ahead + self.length <= steps:
            expected = self.made.popleft()[1] * self.length * STEP_S
            self.seen.append((count, *expected.tolist()))
            # Each step is in `length` stretches, and counts once.
            self._compared += 1
            self.weights = _shared(self.weights, expected, count, excess * self.length, self._compared + self.length)


def _shared(weights: Floats, expected: Floats, count: float, excess: float, steps: int) -> Floats:
    """Return the weights of forecasts after one more count (fixed share). excess: its variance, 1 = Poisson's."""
    expected = np.maximum(expected, 0.1 / steps)
    likely = (count * np.log(expected) - expected) / excess
    weights = weights * np.exp(likely - likely.max())
    return np.asarray((1 - 1 / steps) * weights / weights.sum() + 1 / steps / weights.size)


@dataclass(slots=True)
class Rates:
    """Arrivals of one model. Its time only goes forward.

    day_s: seconds after which the traffic's day begins again. began: when counting began; None = nothing has come yet.
    """

    day_s: float = DAY_S
    began: float | None = None
    _count: int = 0
    _steps: int = 0
    _levels: _Levels = field(default_factory=_Levels)
    _days: _Days = field(init=False)
    _weights: Floats = field(default_factory=lambda: np.full(2 * _MEMORIES.size, 0.5 / _MEMORIES.size))
    _excess: float = 1.0  # the variance of counts over what Poisson's process has
    _past: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _horizons: dict[tuple[int, int], _Horizon] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._days = _Days(self.day_s)

    def arrived(self, now: float) -> None:
        """Count an arrival."""
        self.advance(now)
        self._count += 1

    def advance(self, now: float) -> None:
        """Close the steps that have ended by now."""
        if self.began is None:
            self.began = now
        while self.began + (self._steps + 1) * STEP_S <= now:
            self._close()

    def begun(self, now: float) -> float:
        """Return when counting began, at the latest now."""
        self.advance(now)
        return now if self.began is None else self.began

    def expect(self, ahead_s: float, seconds: float) -> Arrivals:
        """Return the arrivals expected in a stretch of `seconds` that begins `ahead_s` from now.

        How good such forecasts are is learned from the first call on.
        """
        ahead, length = max(round(ahead_s / STEP_S), 0), max(round(seconds / STEP_S), 1)
        horizon = self._horizons.pop((ahead, length), None) or _Horizon(ahead, length)
        self._horizons[ahead, length] = horizon
        if len(self._horizons) > _HORIZONS:
            del self._horizons[next(iter(self._horizons))]
        rate = float(horizon.weights @ self._each(ahead, length))
        return Arrivals(rate, self._told(horizon.ratios(), ahead + 2 * length, length), self._steps >= length)

    def _each(self, ahead: int, length: int) -> Floats:
        """Return the mean rates of the steps from `ahead` on by today's level, and by the day.

        The day's is as much above or below the days before as the last stretch was.
        """
        level = float(self._weights @ self._levels.at(ahead + length / 2))
        now, seconds = (self.began or 0.0) + self._steps * STEP_S, length * STEP_S
        before, later = self._days.at(now - seconds, seconds), self._days.at(now + ahead * STEP_S, seconds)
        ratio = self._came(length) / (before * seconds) if before > 0 else np.nan
        return np.array([level, level if np.isnan(later * ratio) else later * ratio])

    def _came(self, length: int) -> int:
        """Return how many came in the last steps."""
        return sum(islice(reversed(self._past), length))

    def _close(self) -> None:
        count, self._count = self._count, 0
        if self._steps:
            rates = self._levels.at(0.5) * STEP_S
            expected = max(float(self._weights @ rates), 0.1 / self._steps)
            self._excess += ((count - expected) ** 2 / expected - self._excess) / min(self._steps, _KEPT)
            self._weights = _shared(self._weights, rates, count, max(self._excess, 1.0), self._steps + 1)
        self._steps += 1
        self._levels.add(count / STEP_S)
        self._days.add(count / STEP_S, (self.began or 0.0) + self._steps * STEP_S)
        self._past.append(count)
        for one in self._horizons.values():
            one.compare(self._steps, self._came(one.length), max(self._excess, 1.0))
            # What was expected before a stretch as long had been seen says nothing about later forecasts.
            if self._steps >= one.length:
                one.made.append((self._steps, self._each(one.ahead, one.length)))

    def _told(self, ratios: Floats, span: int, length: int) -> Floats:
        """Return the ratios without the largest of them and the noise of counting.

        A jump is in all the forecasts of stretches that it lies in or before, and in those made until it is believed:
        of a `span` of steps. How often jumps come is not known from a single one, so that the
        `span` largest ratios are left out. A replay of requests has the noise of counting in it anyway.
        """
        if ratios.size <= span:
            return np.ones(1)
        ratios = np.sort(ratios)[:-span]
        counted = max(float(np.mean(list(self._past)[-length:])) * length, 1.0)
        spread = float(ratios.var())
        shrink = np.sqrt(max(1 - 1 / counted / spread, 0.0)) if spread > 0 else 0.0
        return np.asarray(1 + (ratios - 1) * shrink)
