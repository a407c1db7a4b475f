"""How many promises were kept over the last minutes: a sample of the totals every few seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway import clock
from headway.serve.metrics import Metrics

EVERY_S, _SAMPLES = 5.0, 121  # ten minutes


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals since the start. by_class: class -> (promises kept, promises owed)."""

    at: float
    requests: int
    tokens: int
    by_class: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Attained:
    """Promises of a class over the last minutes. series: shares kept in %, None where nothing was owed."""

    kept: int
    owed: int
    series: list[float | None]


class History:
    """Samples of the totals."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque([self._sample()], maxlen=_SAMPLES)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self._samples.append(self._sample())

    def _sample(self) -> Sample:
        found = self._metrics.totals()
        return Sample(clock.now(), found.requests, found.tokens, found.by_class)

    def rates(self) -> tuple[float, float]:
        """Return requests and tokens that ended per second, since the last sample but one."""
        before, now = self._samples[max(len(self._samples) - 2, 0)], self._sample()
        seconds = max(now.at - before.at, 1e-3)
        return (now.requests - before.requests) / seconds, (now.tokens - before.tokens) / seconds

    def attained(self) -> dict[str, Attained]:
        """Return what was kept of each class."""
        samples = [*self._samples, self._sample()]
        return {name: _attained(name, samples) for name in sorted(samples[-1].by_class)}


def _attained(name: str, samples: Sequence[Sample]) -> Attained:
    seen = [sample.by_class.get(name, (0, 0)) for sample in samples]
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen)]
    series = [100.0 * kept / owed if owed else None for kept, owed in steps]
    return Attained(seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1], series)
