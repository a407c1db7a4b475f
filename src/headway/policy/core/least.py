"""Things in the order of a number each, the least first; O(log n) for each change."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Least(Generic[_T]):
    """Things by the numbers that each was put at last; of equal ones, by when that was."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float | str, int, _T]] = []  # with entries that no longer hold
        self._entries: dict[_T, tuple[float, float | str, int, _T]] = {}
        self._serial = count()

    def __contains__(self, one: object) -> bool:
        return one in self._entries

    def __iter__(self) -> Iterator[_T]:
        return iter([*self._entries])

    @property
    def at(self) -> float:
        """The least number, inf = nothing is here."""
        return self.first()[0] if self._entries else math.inf

    def put(self, one: _T, at: float, then: float | str = 0.0) -> None:
        """Add a thing, or move it. then: decides between equal numbers; all numbers, or all text."""
        entry = self._entries[one] = (at, then, next(self._serial), one)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:  # most entries no longer hold
            self._heap = sorted(self._entries.values())

    def drop(self, one: _T) -> None:
        """Remove a thing; an unknown one is ignored."""
        self._entries.pop(one, None)

    def first(self) -> tuple[float, _T]:
        """Return the least number and its thing; IndexError: nothing is here."""
        while self._entries.get(self._heap[0][3]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0], self._heap[0][3]
