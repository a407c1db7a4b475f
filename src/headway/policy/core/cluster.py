"""The state of the slow loop: the instances, and every request that is accepted and not finished."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from headway.policy.core.ranks import DISTANT_S
from headway.policy.placement.cost import Placement
from headway.types import Backlog, Instance, Ints


class RowSet:
    """A set of rows as one array, for compiled loops: adding and removing a row is O(1).

    version: changes with every row that comes or goes.
    """

    __slots__ = ("_place", "_rows", "version")

    def __init__(self) -> None:
        self._rows: Ints = np.empty(64, np.int64)
        self._place: dict[int, int] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, row: object) -> bool:
        return row in self._place

    @property
    def rows(self) -> Ints:
        """The rows, in no order: a view, valid until the set changes."""
        return self._rows[: len(self._place)]

    def add(self, row: int) -> None:
        """Add a row that is not in the set."""
        size = len(self._place)
        if size == self._rows.size:
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[size], self._place[row] = row, size
        self.version += 1

    def discard(self, row: int) -> None:
        """Remove a row if it is there."""
        place = self._place.pop(row, None)
        if place is None:
            return
        size = len(self._place)
        last = int(self._rows[size])
        if last != row:
            self._rows[place], self._place[last] = last, place
        self.version += 1

    def copy(self) -> RowSet:
        """Return a set of the same rows that changes on its own."""
        other = RowSet()
        other._rows, other._place, other.version = self._rows.copy(), dict(self._place), self.version
        return other


@dataclass(slots=True)
class Cluster:
    """All the slow loop knows. `Controller` is its only writer; planners read it.

    Attributes:
        instances: those that take work.
        backlog: the requests, queued and sent.
        codes: names of models, instances and tenants -> their number in the backlog's columns.
        loading: instances in a model swap, as they were, and the model that they load.
        warming: instance -> the model on its way into that instance's host memory.
        sent: code of an instance -> the rows inside it. sent_count: all of them.
        only: row -> the instances that it may go to, of requests that may not go to all (`Request.engines`).
        version: number of events so far; a plan says with it what it was based on.
        fleet_version: changes whenever `instances` or `loading` does.
    """

    instances: dict[str, Instance] = field(default_factory=dict)
    backlog: Backlog = field(default_factory=Backlog)
    codes: dict[str, int] = field(default_factory=dict)
    loading: dict[str, tuple[Instance, str]] = field(default_factory=dict)
    warming: dict[str, str] = field(default_factory=dict)
    sent: defaultdict[int, RowSet] = field(default_factory=lambda: defaultdict(RowSet))
    sent_count: int = 0
    only: dict[int, frozenset[str]] = field(default_factory=dict)
    placement: Placement = field(default_factory=lambda: Placement(distant_s=DISTANT_S))
    version: int = 0
    fleet_version: int = 0

    def code(self, name: str) -> int:
        """Return the number that stands for a model, an instance or a tenant in the backlog's columns."""
        return self.codes.setdefault(name, len(self.codes))

    def inside(self, name: str) -> RowSet:
        """Return the rows that were sent to an instance and have neither ended nor come back."""
        return self.sent[self.code(name)]

    def may(self, row: int, name: str) -> bool:
        """Tell whether a request may go to an instance."""
        return row not in self.only or name in self.only[row]

    def send(self, row: int, name: str) -> None:
        """Note that a queued row goes to an instance."""
        code = self.code(name)
        self.backlog.sent[row], self.backlog.instance[row] = True, code
        self.sent[code].add(row)
        self.sent_count += 1

    def unsend(self, row: int) -> None:
        """Note that a sent row is queued again."""
        self.sent[int(self.backlog.instance[row])].discard(row)
        self.backlog.sent[row] = False
        self.sent_count -= 1

    def remove(self, id: str) -> None:
        """Forget a request that has ended."""
        row = self.backlog.row_of[id]
        if self.backlog.sent[row]:
            self.sent[int(self.backlog.instance[row])].discard(row)
            self.sent_count -= 1
        self.only.pop(row, None)
        self.backlog.remove(id)

    def snapshot(self) -> Cluster:
        """Return a copy that another thread may read while this one changes, with an empty placement; O(requests)."""
        sent = defaultdict(RowSet, {code: rows.copy() for code, rows in self.sent.items()})
        return replace(
            self,
            instances=dict(self.instances),
            backlog=self.backlog.copy(),
            codes=dict(self.codes),
            loading=dict(self.loading),
            warming=dict(self.warming),
            sent=sent,
            only=dict(self.only),
            placement=Placement(distant_s=DISTANT_S),
        )
