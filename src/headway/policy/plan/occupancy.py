"""The requests inside one instance by urgency, so that a planner knows what is ahead of a queued one."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from headway.policy.plan.groups import Kind


@dataclass(slots=True)
class SentRequest:
    """A request inside an instance.

    rank: its place among the groups of that instance's virtual queue. urgency: its `Jobs.urgency` there.
    blocks: KV blocks that it may be expected to fill.
    due: its deadline; inf = best effort. sent: when it was sent.
    full: the batch was full when it was sent. places: as in `Request`.
    """

    id: str
    serial: int
    instance: str
    kind: Kind
    rank: float
    urgency: float
    blocks: int
    due: float
    sent: float
    full: bool = False
    places: int = 1


class Occupancy:
    """What is inside one instance.

    blocks: KV blocks that it may be expected to fill. places: of its requests.
    """

    def __init__(self) -> None:
        self._order: list[tuple[float, int]] = []
        self._requests: dict[int, SentRequest] = {}  # by serial
        self.blocks = self.places = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[SentRequest]:
        return iter(self._requests.values())

    @property
    def highest(self) -> float:
        """The last rank; there must be a request."""
        return max(request.rank for request in self)

    def add(self, request: SentRequest) -> None:
        """Add a request that is sent."""
        insort(self._order, (request.urgency, request.serial))
        self._requests[request.serial] = request
        self.blocks += request.blocks
        self.places += request.places

    def remove(self, request: SentRequest) -> None:
        """Remove a request that has ended or come back."""
        if self._requests.pop(request.serial, None) is not None:
            del self._order[bisect_right(self._order, (request.urgency, request.serial)) - 1]
            self.blocks -= request.blocks
            self.places -= request.places

    def change(self, request: SentRequest, urgency: float) -> None:
        """Change the urgency of a request that is inside."""
        self.remove(request)
        request.urgency = urgency
        self.add(request)

    def ahead(self, urgency: float) -> tuple[int, int]:
        """Return the places of the requests that go before a queued one of this urgency, and their KV blocks."""
        if not self._order or self._order[-1][0] <= urgency:
            return self.places, self.blocks
        before = self.before(urgency)
        return sum(one.places for one in before), sum(one.blocks for one in before)

    def before(self, urgency: float) -> list[SentRequest]:
        """Return the requests that go before a queued one of this urgency, in their order."""
        return [self._requests[serial] for _, serial in self._order[: bisect_right(self._order, (urgency, 1 << 62))]]
