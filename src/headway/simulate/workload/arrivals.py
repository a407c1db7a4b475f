"""Arrival processes: sorted float64 arrays of seconds from the start, drawn by an explicit generator.

The same seed gives the same arrivals. Terms and meaning are those of `vllm bench serve` (--request-rate,
--burstiness). A recorded trace (`traces.py`) is the same kind of array and is rescaled to a rate here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from headway.errors import ConfigError
from headway.simulate.workload.traces import Trace, read
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
    positive("request rate", rate)
    positive("duration", duration)
    positive("burstiness", burstiness, endless=True)
    size = int(rate * duration * 1.1) + 16
    drawn, end = [np.empty(0)], 0.0
    while end < duration:
        times = end + np.cumsum(_gaps(rate, burstiness, size, rng))
        drawn.append(times)
        end = float(times[-1])
    times = np.concatenate(drawn)
    return times[times < duration]


def bursty(rate: float, burstiness: float, duration: float, rng: np.random.Generator) -> Floats:
    """Draw round(rate * duration) arrivals, at least one, in [0, duration) seconds, with gamma's gaps.

    The gaps are scaled to fill the duration, as in `vllm bench serve`: with a few clumps at random, the load
    of a short run could be far from `rate`. Raises ConfigError as `gamma`.
    """
    positive("request rate", rate)
    positive("duration", duration)
    positive("burstiness", burstiness, endless=True)
    gaps = _gaps(rate, burstiness, max(round(rate * duration), 1) + 1, rng)
    ends = np.cumsum(gaps)
    return np.asarray(ends[:-1] * (duration / ends[-1]), float)


def phases(rates: Sequence[float], seconds: float, rng: np.random.Generator) -> Floats:
    """Draw Poisson arrivals in phases of `seconds` each, one after the other at these rates (requests/s).

    Raises ConfigError for a rate or a length that is not positive and finite.
    """
    return np.concatenate([np.empty(0), *(k * seconds + poisson(rate, seconds, rng) for k, rate in enumerate(rates))])


def diurnal(mean_rate: float, peak_to_mean: float, period: float, duration: float, rng: np.random.Generator) -> Floats:
    """Draw Poisson arrivals in [0, duration) seconds whose rate swings as a cosine, from night to night.

    The rate at t is mean_rate * (1 - (peak_to_mean - 1) * cos(2 pi t / period)) requests/s: least at 0, most
    half a period later, mean_rate on average over whole periods. Raises ConfigError for a rate, period or
    duration that is not positive and finite, or a peak_to_mean outside 1..2 (a rate cannot be negative).
    """
    positive("request rate", mean_rate)
    positive("period", period)
    if not 1 <= peak_to_mean <= 2:
        raise ConfigError(f"The peak is {peak_to_mean} times the mean.", "Give a peak_to_mean from 1 to 2.")
    # Thinning (Lewis and Shedler): draw at the peak's rate, keep each with its share of the peak.
    times = poisson(mean_rate * peak_to_mean, duration, rng)
    rate = 1 - (peak_to_mean - 1) * np.cos(2 * np.pi * times / period)
    return times[rng.random(times.size) * peak_to_mean < rate]


def burst(n: int) -> Floats:
    """Return n arrivals at 0: everybody at once. Raises ConfigError unless n is 1 or more."""
    if n < 1:
        raise ConfigError(f"A burst of {n} requests is none.", "Give 1 or more.")
    return np.zeros(n)


def recorded(
    path: str | Path, *, rate: float | None = None, limit: int | None = None, rng: np.random.Generator | None = None
) -> Trace:
    """Read the first `limit` requests of a trace, brought to `rate` requests/s (None = as recorded).

    With rng, requests that share a recorded instant are spread first (`spread`). Lengths stay with their
    places in the line. Raises ConfigError as `traces.read` and `rescale`.
    """
    trace = read(path, limit=limit)
    at = trace.at if rng is None else spread(trace.at, rng)
    return replace(trace, at=at if rate is None else rescale(at, rate))


def rescale(times: Floats, rate: float) -> Floats:
    """Stretch or squeeze arrivals to a mean of `rate` requests/s, first one at 0; the shape stays.

    The mean rate is (n - 1) / (last - first). Raises ConfigError when all arrivals are one instant.
    """
    positive("request rate", rate)
    if times.size < 2 or times[-1] == times[0]:
        raise ConfigError(
            f"{times.size} arrivals at one instant have no rate to change.",
            "Use a longer trace (a larger limit), or draw arrivals from a rate instead.",
        )
    return np.asarray((times - times[0]) * ((times.size - 1) / (times[-1] - times[0]) / rate), float)


def spread(times: Floats, rng: np.random.Generator) -> Floats:
    """Spread arrivals that share one recorded instant evenly at random up to the next instant.

    For traces with coarse clocks (Mooncake: about 10 requests per 3 s step), which would otherwise be
    bursts that did not occur. The last step is taken to be as long as the median one.
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


def positive(what: str, value: float, *, endless: bool = False) -> None:
    """Refuse a value that is not above 0, or not finite unless endless, with a ConfigError that names it."""
    if not value > 0 or (math.isinf(value) and not endless):
        raise ConfigError(f"The {what} is {value}.", f"Give a {what} above 0.")
