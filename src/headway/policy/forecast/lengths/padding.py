"""Padded length forecasts, and the padding tuned to what wrong lengths cost (EcoServe 3.2.2).

A prediction that is too short costs more than one that is too long, so packers plan with a quantile of the
forecast instead of its mean. Each finished answer tells what every quantile of its forecast would have cost
in tokens, reserved for nothing or missing; the cheapest quantile over the last answers is the padding of the
next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.ports import Lengths
from headway.types import Floats, Forecast, Request

QUANTILE = 0.775  # as often as the paper's predictor is within its padded length (EcoServe 2.3)
QUANTILES = tuple(np.round(np.arange(0.5, 0.96, 0.025), 3).tolist())


@dataclass(frozen=True, slots=True)
class Padded:
    """A quantile of `inner`'s forecast as its only sample: the length that packers plan with."""

    inner: Lengths
    quantile: float

    def forecast(self, request: Request) -> Forecast:
        """Return the padded length, in whole tokens, as the only sample."""
        return Forecast(np.array([float(np.ceil(self.inner.forecast(request).quantile(self.quantile)))]))

    def learn(self, request: Request, output_tokens: int) -> None:
        """Teach `inner`."""
        self.inner.learn(request, output_tokens)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a wrong length costs, in tokens of KV.

    over: per token reserved for nothing.
    under: per missing token.
    regroup: once per answer that outgrew its length and must be grouped again.

    The cheapest quantile of a true forecast is under / (under + over) when regroup is 0 (the newsvendor's
    critical ratio). The defaults put it at the paper's accuracy, 77.5 %: what is adapted is by how much
    forecasts are off, not what that is worth.
    """

    over: float = 1.0
    under: float = QUANTILE / (1 - QUANTILE)
    regroup: float = 0.0

    def of(self, length: Floats, output_tokens: float) -> Floats:
        """Return the costs of having planned with each length when the answer had `output_tokens`."""
        missing = output_tokens - length
        late = self.under * missing + self.regroup
        return np.where(missing > 0, late, -self.over * missing)


class PaddingTuner:
    """The quantile with the least mean cost over the last `window` answers.

    It stays where it is until `least` answers are known and another quantile is cheaper by more than `margin`
    (a fraction), so that noise does not move it.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        quantiles: tuple[float, ...] = QUANTILES,
        start: float = QUANTILE,
        window: int = 512,
        least: int = 64,
        margin: float = 0.02,
    ) -> None:
        self.costs = costs or Costs()
        self._quantiles = np.array(sorted({*quantiles, start}))
        self._at = int(np.searchsorted(self._quantiles, start))
        self._least, self._margin = least, margin
        self._ring = np.zeros((window, len(self._quantiles)))
        self._sum = np.zeros(len(self._quantiles))
        self._count = 0

    @property
    def quantile(self) -> float:
        """The quantile of the forecast to plan with."""
        return float(self._quantiles[self._at])

    def learn(self, forecast: Forecast, output_tokens: int) -> None:
        """Count what each quantile of this forecast would have cost."""
        row = self._count % len(self._ring)
        costs = self.costs.of(np.ceil(np.quantile(forecast.samples, self._quantiles)), output_tokens)
        self._sum += costs - self._ring[row]
        self._ring[row] = costs
        self._count += 1
        if row == 0:
            self._sum = self._ring.sum(0)  # else rounding would add up over days
        if self._count >= self._least:
            self._move()

    def _move(self) -> None:
        best = int(self._sum.argmin())
        if self._sum[best] < self._sum[self._at] * (1 - self._margin):
            self._at = best


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`inner`'s forecast padded to the tuner's quantile (`Padded`), which every answer tunes."""

    inner: Lengths
    tuner: PaddingTuner

    def forecast(self, request: Request) -> Forecast:
        """Return the padded length, in whole tokens, as the only sample."""
        return Padded(self.inner, self.tuner.quantile).forecast(request)

    def learn(self, request: Request, output_tokens: int) -> None:
        """Teach the tuner what `inner` forecast, then `inner` itself; empty answers teach nothing."""
        if output_tokens > 0:
            self.tuner.learn(self.inner.forecast(request), output_tokens)
        self.inner.learn(request, output_tokens)
