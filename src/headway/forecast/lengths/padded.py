"""How much longer than predicted should we expect an answer to be? (EcoServe 3.2.2, padding.)

A prediction that is too short costs more than one that is too long, so memory is given for a quantile of the
forecast instead of its mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.ports import Lengths
from headway.types import Forecast, Request

SHARE = 0.775  # as often as the paper's predictor is within its padded length (EcoServe 2.3)


@dataclass(frozen=True, slots=True)
class Padded:
    """`inner`'s forecast at probability `share`, as a certain one: the length that packers plan with."""

    inner: Lengths
    share: float

    def forecast(self, request: Request) -> Forecast:
        """Return the padded length, in whole tokens, as the only sample."""
        return Forecast(np.array([float(np.ceil(self.inner.forecast(request).quantile(self.share)))]))

    def learn(self, request: Request, output_tokens: int) -> None:
        """Teach `inner`."""
        self.inner.learn(request, output_tokens)
