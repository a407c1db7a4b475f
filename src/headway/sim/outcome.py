"""What went wrong in a simulation by plan, and what became of its requests?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headway.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies at an instant and stands there again `seconds` later (inf = never)."""

    instance: str
    at: float
    seconds: float = math.inf


@dataclass(slots=True)
class Outcome:
    """What became of each request of the workload, by its index; instants are NaN for what never came.

    first, end: instants of the first token and of the end. node: index of its (last) instance. evictions: per
    request. iterations, busy: of all instances together, count and seconds. shed: requests that the planner
    refused after they had come, failed: those no instance could hold when they got there; both have no end.
    swaps: models loaded in place of others. planning: virtual seconds that the planner took.
    """

    first: Floats
    end: Floats
    node: Ints
    evictions: Ints
    iterations: int = 0
    busy: float = 0.0
    preempted: int = 0
    paused: int = 0
    shed: int = 0
    failed: int = 0
    swaps: int = 0
    planning: float = 0.0

    @classmethod
    def of(cls, size: int) -> Outcome:
        """Return the outcome of `size` requests that nothing has happened to."""
        never = np.full(size, np.nan)
        return cls(never, never.copy(), np.full(size, -1), np.zeros(size, np.int64))
