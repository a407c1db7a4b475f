"""The columns of `Jobs` that follow vLLM's running requests. Compiled: this runs before every iteration."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.pack.kernels import missing_of
from headway.types import Ints


@compiled
def follow(
    jobs: NDArray[np.void], rows: Ints, output_tokens: Ints, computed: Ints, size: int, now: float
) -> None:
    """Set what running rows have made and hold; all others hold nothing and are not held back.

    output_tokens, computed: by row of `rows`. size: tokens of a block. now: the instant of first tokens that
    were not there before.
    """
    for row in range(jobs.size):
        jobs["running"][row] = jobs["held"][row] = False
        jobs["computed"][row] = jobs["blocks"][row] = jobs["shared"][row] = jobs["saved"][row] = 0
    for i in range(rows.size):
        row, before = rows[i], jobs["output_tokens"][rows[i]]
        if before == 0 and output_tokens[i] > 0:
            jobs["first"][row] = now
        jobs["tokens_left"][row] = max(jobs["tokens_left"][row] - (output_tokens[i] - before), 1.0)
        jobs["running"][row], jobs["output_tokens"][row] = True, output_tokens[i]
        jobs["computed"][row], jobs["blocks"][row] = computed[i], -(-computed[i] // size)


@compiled
def cut(jobs: NDArray[np.void], order: Ints, tokens: Ints) -> Ints:
    """Return the places in `order` of rows that get fewer tokens than they miss."""
    places, count = np.empty(order.size, np.int64), 0
    for i in range(order.size):
        if tokens[i] < missing_of(jobs, order[i]):
            places[count] = i
            count += 1
    return places[:count]
