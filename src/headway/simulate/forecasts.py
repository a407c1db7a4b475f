"""SIMULATED forecasts of output lengths, which read the answer's length in the workload.

An oracle, a predictor whose error is log-normal, set by an accuracy, and one whose errors have the shares
that EcoServe 2.3 reports. A learned predictor has the same interface.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from headway.errors import ConfigError
from headway.simulate.workload.traffic import Workload
from headway.types import Floats, Forecast, Ints, Request

_SHARES = 64  # samples of a forecast


@dataclass(frozen=True, slots=True)
class Oracle:
    """The true length of every answer. Requests are those of `workload`, by their id."""

    workload: Workload

    def forecast(self, request: Request) -> Forecast:
        """Return the answer's tokens as the only sample."""
        return Forecast(np.array([float(self.workload.output[self.workload.row_of(request.id)])]))

    def learn(self, request: Request, output_tokens: int) -> None:
        """Do nothing: the lengths are known."""


@dataclass(frozen=True, slots=True)
class Noisy:
    """A predictor that is off by a factor exp(sigma z), z normal, drawn once per request.

    `of` sets sigma so that a padding reaches a stated accuracy. The forecast is that distribution around the
    prediction, so its quantile at the accuracy is the prediction with that padding.
    """

    workload: Workload
    factors: Floats
    spread: Floats

    @classmethod
    def of(cls, workload: Workload, accuracy: float, padding: float, rng: np.random.Generator) -> Noisy:
        """Return a predictor whose answers are within (1 + padding) x the prediction with `accuracy`.

        ConfigError unless 0.5 < accuracy < 1 and padding > 0.
        """
        if not (0.5 < accuracy < 1 and padding > 0):
            raise ConfigError(
                f"No predictor has accuracy {accuracy:g} with padding {padding:g}.",
                "Give an accuracy between 0.5 and 1 and a padding above 0.",
            )
        return cls.spreading(workload, math.log1p(padding) / normal_quantile(accuracy), rng)

    @classmethod
    def spreading(cls, workload: Workload, sigma: float, rng: np.random.Generator) -> Noisy:
        """Return a predictor with this sigma; 0 = it is always right."""
        factors = np.exp(sigma * rng.standard_normal(len(workload)))
        shares = (np.arange(_SHARES) + 0.5) / _SHARES
        return cls(workload, factors, np.exp(sigma * np.array([normal_quantile(s) for s in shares])))

    def forecast(self, request: Request) -> Forecast:
        """Return the distribution of the answer's tokens around the prediction, each at least 1."""
        i = self.workload.row_of(request.id)
        return Forecast(np.maximum(self.workload.output[i] * self.factors[i] * self.spread, 1.0))

    def learn(self, request: Request, output_tokens: int) -> None:
        """Do nothing: the error is given."""


def normal_quantile(share: float) -> float:
    """Return z with P(Z <= z) = share for a standard normal Z; 0 < share < 1."""
    return NormalDist().inv_cdf(share)


@dataclass(frozen=True, slots=True)
class Provisioned:
    """Padded lengths whose errors have a paper's shares: EcoServe 2.3 (77.5 % and figure 5a, on Alpaca).

    lengths: the tokens that each answer of `workload` is allocated.
    """

    workload: Workload
    lengths: Ints

    @classmethod
    def of(
        cls, workload: Workload, accuracy: float, over: float, under: float, rng: np.random.Generator
    ) -> Provisioned:
        """Draw errors independently per request.

        accuracy: share of requests whose allocation suffices.
        over, under: unused and missing tokens as shares of the allocated ones, each the mean of all requests.

        Of what suffices an evenly distributed share is unused, of the rest an exponentially distributed one
        is missing: the papers give means only. Rounding to whole tokens can go below half a token of `over`
        for short answers, but not below `accuracy`. ConfigError unless 0 < accuracy < 1, 0 <= over <
        accuracy / 2 and under >= 0.
        """
        if not (0 < accuracy < 1 and 0 <= over < accuracy / 2 and under >= 0):
            raise ConfigError(
                f"No predictor has accuracy {accuracy:g} with {over:g} unused and {under:g} missing.",
                "Give shares: accuracy between 0 and 1, unused below half of it, missing from 0 on.",
            )
        size = len(workload)
        enough = rng.random(size) < accuracy
        unused = 2 * over / accuracy * rng.random(size)
        lacking = rng.exponential(under / (1 - accuracy), size)
        lengths = np.where(enough, workload.output / (1 - unused), workload.output / (1 + lacking))
        whole = np.where(enough, np.rint(lengths), np.floor(lengths))
        return cls(workload, np.maximum(whole, 1).astype(np.int64))

    def times(self, factor: float) -> Provisioned:
        """Return the same forecasts with another padding: all lengths times `factor`."""
        return replace(self, lengths=np.maximum(np.ceil(self.lengths * factor), 1).astype(np.int64))

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return which share of requests has enough, and the mean unused and missing shares, as in `of`."""
        apart = (self.lengths - self.workload.output) / self.lengths
        return (float((apart >= 0).mean()), float(np.maximum(apart, 0).mean()), float(-np.minimum(apart, 0).mean()))

    def forecast(self, request: Request) -> Forecast:
        """Return the allocated tokens as the only sample."""
        return Forecast(np.array([float(self.lengths[self.workload.row_of(request.id)])]))

    def learn(self, request: Request, output_tokens: int) -> None:
        """Do nothing: the errors are given."""
