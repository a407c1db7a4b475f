"""What does losing KV cost? Failed allocations, preemptions, tokens computed twice, tokens copied.

Kept for every recipe alike, stock order included, so that runs can be compared: vLLM's own metrics count
preemptions only.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus


class Tally:
    """Counts over one scheduler's life; it watches `manager.allocate_slots`.

    alloc_failures: allocations that a running request asked for and did not get at once, however often stock
    asked again within the step. preempted: requests whose KV stock took for that. recomputed: tokens computed
    that had been computed before. swapped_tokens: tokens copied to the host. loans: of KV, where it is lent.
    """

    def __init__(self, manager: Any) -> None:
        self.counts = {"alloc_failures": 0, "preempted": 0, "recomputed": 0, "swapped_tokens": 0, "loans": 0}
        self._allocate = manager.allocate_slots
        self._failed: set[str] = set()  # within this step
        self._reached: dict[str, int] = {}  # tokens that a request had when its KV was lost
        manager.allocate_slots = self.allocate

    def allocate(self, request: Any, *args: Any, **options: Any) -> Any:
        """Do as `allocate_slots`; note when it fails for a running request."""
        made = self._allocate(request, *args, **options)
        if made is None and request.status == RequestStatus.RUNNING:
            self._failed.add(request.request_id)
        return made

    def lose(self, id: str, computed: int) -> None:
        """A request loses the KV of so many tokens for good."""
        self._reached[id] = max(self._reached.get(id, 0), computed)

    def swap(self, tokens: int) -> None:
        """So many tokens are copied to the host."""
        self.counts["swapped_tokens"] += tokens

    def leave(self, id: str) -> None:
        """A request has ended."""
        self._reached.pop(id, None)

    def ran(self, ran: dict[str, int], requests: dict[str, Any], preempted: int) -> None:
        """Stock has scheduled a step (request id -> tokens), for which it preempted so many."""
        for id in self._reached.keys() & ran.keys():
            end = requests[id].num_computed_tokens  # stock counts a step's tokens as it schedules them
            self.counts["recomputed"] += max(min(end, self._reached[id]) - (end - ran[id]), 0)
        self.counts["preempted"] += preempted
        self.counts["alloc_failures"] += len(self._failed)
        self._failed.clear()
