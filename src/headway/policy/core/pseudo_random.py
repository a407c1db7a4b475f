"""A generator of pseudo-random numbers for compiled searches: Marsaglia's xorshift.

A search that draws hundreds of thousands of numbers needs them to be cheap, and the same on every machine:
the state is an array that starts from a seed, and nothing else is random.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled, compiled_inline

State = NDArray[np.uint64]


@compiled
def seeded(seed: int) -> State:
    """Return the state of a new generator; seeds from 0 on."""
    return np.array([seed + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@compiled_inline
def uniform(state: State) -> float:
    """Return a number in (0, 1), and move the state on."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return (np.float64(x >> np.uint64(12)) + 0.5) / 4503599627370496.0


@compiled_inline
def below(state: State, size: int) -> int:
    """Return a whole number from 0 to `size` - 1."""
    return int(uniform(state) * size)
