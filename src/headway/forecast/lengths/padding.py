"""How much padding pays? The sweet spot between reserving too much and too little (EcoServe 3.2.2).

Each finished answer tells what every share of its forecast would have cost: tokens reserved for nothing, or
tokens that were missing. The cheapest share over the last answers is the padding for the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.forecast.lengths.padded import SHARE, Padded
from headway.ports import Lengths
from headway.types import Floats, Forecast, Request

SHARES = tuple(np.round(np.arange(0.5, 0.96, 0.025), 3).tolist())


@dataclass(frozen=True, slots=True)
class Costs:
    """What a wrong length costs, in tokens of KV: per token reserved for nothing, per token missing, and once
    for an answer that outgrew its length and must be grouped again.

    The cheapest share of a true forecast is under / (under + over) when regroup is 0 (the newsvendor's
    critical ratio). The defaults put it at the paper's accuracy, 77.5 %: what is adapted is by how much
    forecasts are off, not what that is worth.
    """

    over: float = 1.0
    under: float = SHARE / (1 - SHARE)
    regroup: float = 0.0

    def of(self, length: Floats, output_tokens: float) -> Floats:
        """Return the costs of having planned with each length when the answer had `made` tokens."""
        missing = output_tokens - length
        late = self.under * missing + self.regroup
        return np.where(missing > 0, late, -self.over * missing)


class PaddingTuner:
    """The share with the least mean cost over the last `window` answers.

    It stays where it is until `least` answers are known and another share is cheaper by more than `margin`
    (a fraction), so that noise does not move it.
    """

    def __init__(
        self, costs: Costs | None = None, shares: tuple[float, ...] = SHARES, start: float = SHARE,
        window: int = 512, least: int = 64, margin: float = 0.02,
    ) -> None:  # fmt: skip
        self.costs = costs or Costs()
        self._shares = np.array(sorted({*shares, start}))
        self._at = int(np.searchsorted(self._shares, start))
        self._least, self._margin = least, margin
        self._ring = np.zeros((window, len(self._shares)))
        self._sum = np.zeros(len(self._shares))
        self._count = 0

    @property
    def share(self) -> float:
        """The share of the forecast to plan with."""
        return float(self._shares[self._at])

    def learn(self, forecast: Forecast, output_tokens: int) -> None:
        """Count what each share of this forecast would have cost."""
        row = self._count % len(self._ring)
        costs = self.costs.of(np.ceil(np.quantile(forecast.samples, self._shares)), output_tokens)
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
    """`inner`'s forecast padded to `spot`'s share, as a certain one (`Padded`), and the share learned."""

    inner: Lengths
    spot: PaddingTuner

    def forecast(self, request: Request) -> Forecast:
        """Return the padded length, in whole tokens, as the only sample."""
        return Padded(self.inner, self.spot.share).forecast(request)

    def learn(self, request: Request, output_tokens: int) -> None:
        """Teach the share by what `inner` forecast, then `inner` itself; empty answers teach nothing."""
        if output_tokens > 0:
            self.spot.learn(self.inner.forecast(request), output_tokens)
        self.inner.learn(request, output_tokens)
