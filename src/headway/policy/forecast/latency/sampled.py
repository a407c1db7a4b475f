"""The law of SLO-aware scheduling, fitted to samples of any latency model (4.2, equations 14 and 15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from headway.policy.forecast.latency.laws import Shapes, SloAware
from headway.types import Batch

# Table 2 of the paper, in seconds: Qwen2.5-7B on two V100s.
PUBLISHED = SloAware(1e-4, 5.7e-3, 1e-5, 43.67e-3, 2e-7, 0.275e-3, 8.8e-7, 15.85e-3)
_LENGTHS = (32, 128, 512, 1024, 2048)  # the law holds below 2k tokens


def sampled(latency: Callable[[Batch], float], max_running: int) -> SloAware:
    """Return the law that is nearest to a latency model in batches of up to `max_running` requests.

    latency: forecast seconds of an iteration.
    """
    batches = list(_batches(max_running))
    seconds = np.array([latency(batch) for batch in batches])
    return SloAware.fit(Shapes.of(batches), seconds)


def _batches(max_running: int) -> Iterator[Batch]:
    """Yield batches of equal prompts, and of answers with equal context."""
    for size in sorted({1, 2, max(max_running // 2, 1), max_running}):
        for length in _LENGTHS:
            yield Batch(0, 0, size * length, size * length * length // 2)
            yield Batch(size, size * length, 0)
