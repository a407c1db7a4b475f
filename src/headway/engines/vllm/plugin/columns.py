"""The columns of `Jobs` that follow vLLM's running requests. Compiled: this runs before every iteration."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.policy.pack.kernels import missing_of
from headway.types import Ints, Jobs

_ID, _OUT, _COMPUTED, _DRAFTS = map(
    attrgetter, ("request_id", "num_output_tokens", "num_computed_tokens", "spec_token_ids")
)


class RunningRows:
    """The running requests of a scheduler and their rows in its `Jobs`, in stock's order.

    scheduler: the hook, whose table it keeps.

    Attributes:
        ids: of the requests.
        rows: as a list; array: the same.
        missing: tokens until each of them has its next token out, in all.
    """

    def __init__(self, scheduler: Any) -> None:
        self._jobs: Jobs = scheduler.jobs
        self._size, self._lookahead = int(scheduler.block_size), int(scheduler.num_lookahead_tokens)
        self._drafts = int(scheduler.num_spec_tokens)
        self._requests: list[Any] = []
        self.ids: list[str] = []
        self.rows: list[int] = []
        self.array = np.empty(0, np.int64)
        self.missing = 0
        self.refresh([], 0.0)  # compiles it

    def refresh(self, running: list[Any], now: float) -> None:
        """Update the table; running: stock's list."""
        jobs, size = self._jobs, len(running)
        if running != self._requests:  # identical objects are equal, so this is quick
            self._requests, self.ids = list(running), list(map(_ID, running))
            self.rows = list(map(jobs.row_of.__getitem__, self.ids))
            self.array = np.array(self.rows, np.int64)
        output_tokens = np.fromiter(map(_OUT, running), np.int64, size)
        computed = np.fromiter(map(_COMPUTED, running), np.int64, size)
        self.missing = follow(jobs.data, self.array, output_tokens, computed, self._size, now)
        if self._drafts:
            jobs.drafts[self.array] = np.fromiter(map(len, map(_DRAFTS, running)), np.int64, size)
            # vLLM pads a resumed answer with drafts when no prompt runs in the same iteration.
            jobs.lookahead[:] = np.where(jobs.output_tokens > 0, self._drafts, 0)
            jobs.lookahead[self.array] = self._lookahead


@compiled
def follow(jobs: NDArray[np.void], rows: Ints, output_tokens: Ints, computed: Ints, size: int, now: float) -> int:
    """Set what running rows have made and hold; all others hold nothing and are not held back.

    output_tokens, computed: by row of `rows`. size: tokens of a block. now: the instant of tokens that were
    not there before. Returns the tokens that the rows miss.
    """
    missing = 0
    for row in range(jobs.size):
        jobs["running"][row] = jobs["held"][row] = False
        jobs["computed"][row] = jobs["blocks"][row] = jobs["shared"][row] = jobs["saved"][row] = 0
        jobs["drafts"][row] = jobs["lookahead"][row] = 0
    for i in range(rows.size):
        row, before = rows[i], jobs["output_tokens"][rows[i]]
        if output_tokens[i] > before:
            if before == 0:
                jobs["first"][row] = now
            else:
                jobs["gap"][row] = max(jobs["gap"][row], now - jobs["last"][row])
            jobs["last"][row] = now
        jobs["tokens_left"][row] = max(jobs["tokens_left"][row] - (output_tokens[i] - before), 1.0)
        jobs["running"][row], jobs["output_tokens"][row] = True, output_tokens[i]
        jobs["computed"][row], jobs["blocks"][row] = computed[i], -(-computed[i] // size)
        missing += missing_of(jobs, row)
    return missing


@compiled
def cut(jobs: NDArray[np.void], order: Ints, tokens: Ints) -> Ints:
    """Return the places in `order` of rows that get fewer tokens than they miss."""
    places, count = np.empty(order.size, np.int64), 0
    for i in range(order.size):
        if tokens[i] < missing_of(jobs, order[i]):
            places[count] = i
            count += 1
    return places[:count]
