"""A bounded log of the engine's iterations and requests, by which the simulator is validated.

Two times of an iteration differ: `seconds`, from the decision to the model's output, which the latency model
learns; and `interval`, from one decision to the next, which a request waits for. The interval includes the
processing of the output and other work on the same CPU core.
"""

from __future__ import annotations

from collections import deque

from headway.types import Batch

_KEPT = 65_536  # rows of each kind: half an hour of a small model
Row = list[float | None]


class IterationLog:
    """The last iterations and requests, as rows for JSON; instants are those of the hook's clock.

    iterations: [start, seconds, interval, decodes, context, prefill, prefill_context], times in seconds, the
        last four as in `types.Batch`; None = not over yet.
    requests: (id, entered, first, last): the instants at which the scheduler got the request and at which it
        decided after the request's first and last token.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self.iterations: deque[Row] = deque(maxlen=kept)
        self.requests: deque[tuple[str, float, float, float]] = deque(maxlen=kept)
        self._entered: dict[str, float] = {}
        self._open: Row | None = None

    def enter(self, key: str, now: float) -> None:
        """Log that the scheduler got a request."""
        self._entered[key] = now

    def decide(self, now: float) -> None:
        """Log that the next decision begins, which ends the interval of the iteration before."""
        if self._open is not None and self._open[0] is not None:
            self._open[2] = now - self._open[0]
            self._open = None

    def begin(self, start: float, batch: Batch) -> Row:
        """Log an iteration that has been decided; return its row, whose seconds the caller sets later."""
        shape = batch.decodes, batch.context, batch.prefill, batch.prefill_context
        row: Row = [start, None, None, *shape]
        self.iterations.append(row)
        self._open = row
        return row

    def leave(self, key: str, id: str, first: float, now: float) -> None:
        """Log that a request has ended. first: 0 when its first token came with its last."""
        entered = self._entered.pop(key, None)
        if entered is not None:
            self.requests.append((id, entered, first or now, now))
