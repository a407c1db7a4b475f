"""The future of a simulation: callbacks by the instant at which they are due.

Callbacks of one instant run in the order in which they were scheduled, so equal inputs give equal runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from headway.types import Ints

Callback = Callable[[float], None]  # is called with the instant


class Timer:
    """A scheduled callback. A cancelled one does nothing at its instant."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        """Drop the callback; without effect when it has run already."""
        self._callback = None

    def fire(self, now: float) -> None:
        """Run the callback unless it was cancelled."""
        if self._callback is not None:
            self._callback(now)


class EventQueue:
    """A heap of (instant, serial, timer). serial: an array of one, the next serial.

    A cancelled timer stays in the heap until its instant: simulated time stops there all the same.
    """

    def __init__(self, serial: Ints | None = None) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._serial = np.zeros(1, np.int64) if serial is None else serial

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """The earliest instant at which a timer is due, inf = the queue is empty."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def head(self) -> tuple[float, int]:
        """The earliest timer's instant and serial."""
        return self._heap[0][:2] if self._heap else (math.inf, 0)

    def at(self, when: float, callback: Callback, serial: int | None = None) -> Timer:
        """Schedule a callback. serial: its place among those of one instant, None = behind them."""
        timer = Timer(callback)
        if serial is None:
            serial = int(self._serial[0])
            self._serial[0] += 1
        heapq.heappush(self._heap, (when, serial, timer))
        return timer

    def run_next(self) -> float:
        """Run the earliest callback; return its instant."""
        when, _, timer = heapq.heappop(self._heap)
        timer.fire(when)
        return when
