"""When do requests come?

Arrivals are sorted float64 arrays of seconds from the start, drawn by an explicit generator: the same seed
gives the same arrivals. Words and meaning are those of `vllm bench serve` (--request-rate,
--burstiness); a recorded trace (`traces.py`) is the same kind of array and is brought to a rate here.
"""

from __future__ import annotations

import math

import numpy as np

from headway.errors import ConfigError
from headway.types import Floats


def poisson(rate: float, duration: float, rng: np.random.Generator) -> Floats:
    """Draw the arrivals of a Poisson process of `rate` requests/s in [0, duration) seconds.

    Raises ConfigError unless both are positive and finite.
    """
    return gamma(rate, 1.0, duration, rng)


def gamma(rate: float, burstiness: float, duration: float, rng: np.random.Generator) -> Floats:
    """Draw arrivals in [0, duration) seconds whose gaps are gamma distributed with mean 1/rate.

    burstiness is the shape: 1 = Poisson, below 1 burstier, above 1 more even, inf = constant gaps
    (the coefficient of variation of the gaps is burstiness ** -0.5). Raises ConfigError for a rate or
    duration that is not positive and finite, or a burstiness that is not positive.
    """
    _positive("request rate", rate)
    _positive("duration", duration)
    _positive("burstiness", burstiness, endless=True)
    size = int(rate * duration * 1.1) + 16
    drawn, end = [np.empty(0)], 0.0
    while end < duration:
        times = end + np.cumsum(_gaps(rate, burstiness, size, rng))
        drawn.append(times)
        end = float(times[-1])
    times = np.concatenate(drawn)
    return times[times < duration]


def rescale(times: Floats, rate: float) -> Floats:
    """Stretch or squeeze arrivals to a mean of `rate` requests/s, first one at 0; the shape stays.

    The mean rate is (n - 1) / (last - first). Raises ConfigError when all arrivals are one instant.
    """
    _positive("request rate", rate)
    if times.size < 2 or times[-1] == times[0]:
        raise ConfigError(
            f"{times.size} arrivals at one instant have no rate to change.",
            "Use a longer trace (a larger limit), or draw arrivals from a rate instead.",
        )
    return np.asarray((times - times[0]) * ((times.size - 1) / (times[-1] - times[0]) / rate), float)


def spread(times: Floats, rng: np.random.Generator) -> Floats:
    """Spread arrivals that share one recorded instant evenly at random up to the next instant.

    For traces with coarse clocks (Mooncake: about 10 requests per 3 s step), which would otherwise be
    bursts that nobody sent. The last step is taken to be as long as the median one.
    """
    instants, step_of = np.unique(times, return_inverse=True)
    if instants.size < 2:
        return times
    lengths = np.diff(instants)
    lengths = np.append(lengths, np.median(lengths))
    return np.sort(times + rng.random(times.size) * lengths[step_of])


def _gaps(rate: float, burstiness: float, size: int, rng: np.random.Generator) -> Floats:
    if math.isinf(burstiness):
        return np.full(size, 1.0 / rate)
    return rng.gamma(burstiness, 1.0 / (rate * burstiness), size)


def _positive(what: str, value: float, *, endless: bool = False) -> None:
    if not value > 0 or (math.isinf(value) and not endless):
        raise ConfigError(f"The {what} is {value}.", f"Give a {what} above 0.")
