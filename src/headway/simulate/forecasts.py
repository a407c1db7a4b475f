"""SIMULATED forecasts of output lengths, which read the answer's length in the workload.

An oracle, and a predictor whose error is log-normal, set by an accuracy. A learned predictor has the same interface.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from headway.errors import ConfigError
from headway.simulate.workload.traffic import Workload
from headway.types import Floats, Forecast, Request

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
