"""When to look at which request again; O(log n) for each."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Checks:
    """Requests by the instant at which they are to be looked at."""

    _heap: list[tuple[float, str]] = field(default_factory=list, init=False)  # with entries that no longer hold
    _checks: dict[str, float] = field(default_factory=dict, init=False)  # request -> the entry that holds

    def __contains__(self, id: str) -> bool:
        return id in self._checks

    @property
    def next_check(self) -> float:
        """The first instant at which a request is to be looked at, inf = none."""
        heap = self._heap
        while heap and self._checks.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def watch(self, id: str, last: float) -> None:
        """Look at a request right after the instant `last`, and not before; inf = never."""
        if math.isinf(last):
            return
        check = math.nextafter(last, math.inf)  # at `last` itself it can still start
        self._checks[id] = check
        heapq.heappush(self._heap, (check, id))
        if len(self._heap) > 2 * len(self._checks) + 64:  # most entries no longer hold
            self._heap = [(check, id) for id, check in self._checks.items()]
            heapq.heapify(self._heap)

    def discard(self, id: str) -> None:
        """Forget a request, because it has a token or its end; unknown ids are ignored."""
        self._checks.pop(id, None)

    def due(self, now: float) -> list[str]:
        """Return the requests to look at by now, earliest first, and forget them."""
        found = []
        while self.next_check <= now:
            _, id = heapq.heappop(self._heap)
            del self._checks[id]
            found.append(id)
        return found
