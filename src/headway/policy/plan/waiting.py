"""The queue of waiting requests, kept in rank order as they come and go.

A `WaitingQueue` holds the requests that the same instances may serve, in heaps, so that an arrival or an end
costs the logarithm of the queue and a plan only looks at the head. Entries of requests that have left are
dropped when they reach the head.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from headway.policy.core.ranks import ATTAINABLE, BEST_EFFORT, FAR, LATE, ON_TIME, first_key, first_keys
from headway.types import Backlog, Ints

# (level, first key, arrival, serial, row): a rank of `policy/core/ranks.py` and the row that has it.
Entry = tuple[int, float, float, int, int]
_LEVELS = (ON_TIME, LATE, BEST_EFFORT, FAR)


class WaitingQueue:
    """Waiting requests in the order of a kind of rank (`policy/core/ranks.py`).

    far_s: requests that are due later than this are next only when no others wait.

    Attributes:
        head: the next request, as of the last `settle`.
    """

    def __init__(self, kind: int, far_s: float = np.inf) -> None:
        self._kind, self._far_s = kind, far_s
        on_time: list[Entry] = []
        self._heaps: tuple[list[Entry], ...] = (on_time, [], [], on_time)  # by level
        self._front: list[Entry] = []  # taken off the heaps while a plan walks along the head
        self.head: Entry | None = None

    def push(self, entry: Entry) -> None:
        """Add a request."""
        level = entry[0] if entry[0] != FAR else ON_TIME
        heapq.heappush(self._heaps[level], (level, *entry[1:]))

    def fill(self, entries: Iterable[Entry]) -> None:
        """Add many requests at once."""
        for entry in entries:
            self._heaps[entry[0]].append(entry)
        for heap in self._heaps:
            heapq.heapify(heap)

    def settle(self, backlog: Backlog, now: float) -> None:
        """Bring the head up to date: drop what has left the queue, move what has become late behind."""
        heaps, due = self._heaps, now if self._kind == ATTAINABLE else -np.inf
        for level in _LEVELS:
            heap = heaps[level]
            while heap:
                entry = heap[0]
                if not _waits(backlog, entry):
                    heapq.heappop(heap)
                elif level == ON_TIME and entry[1] < due:
                    heapq.heappop(heap)
                    heapq.heappush(heaps[LATE], (LATE, *entry[1:]))
                elif level == ON_TIME and entry[1] > now + self._far_s:
                    break
                else:
                    self.head = (level, *entry[1:])
                    return
        self.head = None

    def walk(self, backlog: Backlog, now: float) -> Iterator[Entry]:
        """Yield waiting requests in order, from the head on.

        One is taken off its heap when the next is asked for, and kept for other walks until `put_back`.
        """
        at = 0
        while True:
            if at < len(self._front):
                yield self._front[at]
            else:
                self.settle(backlog, now)
                if self.head is None:
                    return
                yield self.head
                if at == len(self._front):
                    self._front.append(heapq.heappop(self._heaps[self.head[0]]))
            at += 1

    def put_back(self, taken: set[int]) -> None:
        """Put back what was walked over, except the rows that were taken. Ends the walks."""
        if not self._front:
            return
        for entry in self._front:
            if entry[4] not in taken:
                self.push(entry)
        self._front.clear()


def _waits(backlog: Backlog, entry: Entry) -> bool:
    """Tell whether an entry's request is still queued; its row may be another request's by now."""
    row = entry[4]
    return bool(backlog.live[row] and not backlog.sent[row] and backlog.serial[row] == entry[3])


def entry_of(kind: int, backlog: Backlog, row: int) -> Entry:
    """Return the entry of a queued row. What is late is found out when it comes to the head."""
    arrival, serial, due = backlog.arrival.item(row), backlog.serial.item(row), backlog.due.item(row)
    level = BEST_EFFORT if kind == ATTAINABLE and due == np.inf else ON_TIME
    return level, first_key(kind, arrival, backlog.priority.item(row), due), arrival, serial, row


def entries_of(kind: int, backlog: Backlog, rows: Ints) -> Iterator[Entry]:
    """Yield the entries of many queued rows."""
    due, arrival = backlog.due[rows], backlog.arrival[rows]
    key = first_keys(kind, arrival, backlog.priority[rows], due)
    level = np.where(np.isinf(due), BEST_EFFORT, ON_TIME) if kind == ATTAINABLE else np.zeros(rows.size, int)
    columns = (level, key, arrival, backlog.serial[rows], rows)
    return zip(*(column.tolist() for column in columns), strict=True)
