"""When did what happen inside the engine? One short row per iteration and per request.

The hook tells this diary what it does anyway; simulation is measured by it. Two times matter of an iteration:
`seconds` from the decision to the model's output, which the pace learns, and `interval` from one decision to
the next, which is what a request waits for: it holds the output's way out and whoever else has the core too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple

from headway.types import Batch

_KEPT = 65_536  # rows of each kind: half an hour of a small model
Row = list[float | None]


class IterationLog:
    """The last iterations and requests, as rows that travel in JSON.

    iterations: [start, seconds, interval, decodes, context, prefill, prefill_context], times in seconds, the
    last four as in `types.Batch`; None = not over yet. requests: (id, entered, first, last): when the
    scheduler got it, and the decisions that followed its first and its last token. Instants are the hook's.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self.iterations: deque[Row] = deque(maxlen=kept)
        self.requests: deque[tuple[str, float, float, float]] = deque(maxlen=kept)
        self._entered: dict[str, float] = {}
        self._open: Row | None = None

    def enter(self, key: str, now: float) -> None:
        """Note that the scheduler got a request."""
        self._entered[key] = now

    def decide(self, now: float) -> None:
        """Note that the next decision begins: the iteration before, if any, was this long in all."""
        if self._open is not None and self._open[0] is not None:
            self._open[2] = now - self._open[0]
            self._open = None

    def begin(self, start: float, batch: Batch) -> Row:
        """Note an iteration that has been decided; return its row, which is filled in later."""
        row: Row = [start, None, None, *astuple(batch)]
        self.iterations.append(row)
        self._open = row
        return row

    def output(self, seconds: float) -> None:
        """Note that the model's output is there, `seconds` after the decision was made."""
        if self._open is not None:
            self._open[1] = seconds

    def leave(self, key: str, id: str, first: float, now: float) -> None:
        """Note that a request has ended. first: 0 when its first token came with its last."""
        entered = self._entered.pop(key, None)
        if entered is not None:
            self.requests.append((id, entered, first or now, now))
