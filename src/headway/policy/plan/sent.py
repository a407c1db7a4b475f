"""The requests inside each instance by rank, and whether a queued one belongs inside.

The first requests of a virtual queue belong inside its instance. Where a queued request stands in that
queue follows from the ranks of what is inside: they are kept sorted per instance. Overdue requests inside
(their first tokens may be out) rank behind newcomers that can be on time; otherwise they would fill the
window in a long overload. So an instance can hold more than its window.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence
from math import ceil

import numpy as np

from headway.policy.core.cluster import Cluster
from headway.policy.core.ranks import FAR, LATE, ON_TIME
from headway.policy.plan.waiting import Entry
from headway.types import Backlog, Instance, Ints

Entries = Callable[[Backlog, Ints], Iterable[Entry]]
_NO_LIMIT = 1 << 60
_NONE: Entry = (-1, 0.0, 0.0, 0, 0)  # before all entries


class SentOrder:
    """The requests inside some instances, sorted by rank.

    entries: of the rows of a backlog. ahead: as in `Ordered`. far_s: as in `WaitingQueue`.

    Attributes:
        names: of the instances.
        window: their dispatch windows.
        load: places of the requests inside each.
        offered: how many requests of the present walk (`belongs`) belong inside each instance.
        changed: something came or went since this was last set to False.
    """

    def __init__(
        self,
        entries: Entries,
        instances: Sequence[Instance],
        cluster: Cluster,
        ahead: int | None = None,
        far_s: float = np.inf,
    ) -> None:
        self._far_s = far_s
        self.names = [instance.id for instance in instances]
        self.window = [instance.window + (ahead or 0) for instance in instances]
        self.load = [0] * len(instances)
        self.offered = [0] * len(instances)
        self.changed = True
        self._asked: Sequence[int] = ()  # instances in which all that were asked about belong
        self._place = {name: i for i, name in enumerate(self.names)}
        self._total = [kv_room(instance, ahead) for instance in instances]
        self._size = [instance.block_size for instance in instances]
        self._blocks = dict.fromkeys(self._size, 0)  # by their size: of the requests asked about
        self._inside: list[list[Entry]] = [[] for _ in instances]
        self._free, self._last = [*self.window], [_NONE] * len(instances)
        self._taken = [array("q") for _ in instances]  # blocks of each entry
        self._places = [array("q") for _ in instances]  # places of each entry
        self._before = 0  # places of the requests asked about
        self._filled = [0] * len(instances)  # blocks of all entries
        for name in self.names:
            rows = cluster.inside(name).rows
            for entry in entries(cluster.backlog, rows):
                self.add(name, entry, *size_of(cluster.backlog, entry[4]))

    def __contains__(self, name: object) -> bool:
        return name in self._place

    def add(self, name: str, entry: Entry, tokens: float, places: int) -> None:
        """Add a request to an instance; tokens: expected ones, prompts and answers."""
        i = self._place[name]
        blocks = ceil(tokens / self._size[i])
        self._insert(i, entry, blocks, places)
        self._note(i, blocks, places)

    def remove(self, name: str, entry: Entry) -> None:
        """Remove a request from an instance; one that is not in it is ignored."""
        i = self._place[name]
        inside = self._inside[i]
        for one in (entry, (LATE, *entry[1:]), (FAR, *entry[1:])):
            at = bisect_left(inside, one)
            if at < len(inside) and inside[at][3] == entry[3]:
                del inside[at]
                self._note(i, -self._taken[i].pop(at), -self._places[i].pop(at))
                return

    def settle(self, now: float) -> None:
        """Move what is overdue behind what can be on time, and what is due much later behind that."""
        for i, inside in enumerate(self._inside):
            while inside and inside[0][0] == ON_TIME and inside[0][1] < now:
                self._move(i, 0, LATE)
            while (at := bisect_left(inside, (FAR,))) < len(inside) and inside[at][1] <= now + self._far_s:
                self._move(i, at, ON_TIME)
            while (at := bisect_left(inside, (LATE,))) and inside[at - 1][1] > now + self._far_s:
                self._move(i, at - 1, FAR)

    def _move(self, i: int, at: int, level: int) -> None:
        """Move a request inside an instance to another level."""
        entry = (level, *self._inside[i].pop(at)[1:])
        self._insert(i, entry, self._taken[i].pop(at), self._places[i].pop(at))
        self._note(i, 0, 0)

    def _insert(self, i: int, entry: Entry, blocks: int, places: int) -> None:
        at = bisect_left(self._inside[i], entry)
        self._inside[i].insert(at, entry)
        self._taken[i].insert(at, blocks)
        self._places[i].insert(at, places)

    def _note(self, i: int, blocks: int, places: int) -> None:
        """Take note of a change of an instance, of what it takes there; negative = gives back."""
        inside = self._inside[i]
        self._filled[i] += blocks
        self.load[i] += places
        self._free[i] = self.window[i] - self.load[i]
        self._last[i] = inside[-1] if inside else _NONE
        self.changed = True

    def belongs(
        self, entry: Entry, tokens: float, places: int, before: int, displaces: bool, only: Container[str] | None = None
    ) -> bool:
        """Tell whether a queued request belongs inside an instance, and count it in `offered` of those.

        before: requests earlier in this walk; 0 starts a new one. It can only belong where all of them do.
        The first of a virtual queue always belongs inside: the engine itself refuses what can never fit.
        A request needs one free place: its other answers wait inside.
        displaces: it may go before what is inside.
        only: the instances that it may go to, None = all. If it belongs inside none of these, it is not counted.
        """
        if before == 0:
            self._before = 0
            self._asked, self.offered = range(len(self.names)), [0] * len(self.names)
            self._blocks = dict.fromkeys(self._size, 0)
        earlier = self._blocks
        self._blocks = {size: blocks + ceil(tokens / size) for size, blocks in earlier.items()}
        free, last = self._free, self._last
        if displaces:
            asked = [i for i in self._asked if free[i] > self._before or entry < last[i]]
        else:
            asked = [i for i in self._asked if free[i] > self._before]
        asked = [i for i in asked if self._fits(i, entry, displaces)]
        if not (asked if only is None else any(self.names[i] in only for i in asked)):
            self._blocks = earlier
            return False
        self._asked = asked
        self._before += places
        for i in asked:
            self.offered[i] = before + 1
        return True

    def _fits(self, i: int, entry: Entry, displaces: bool) -> bool:
        """Tell whether there is a slot for a request at its place in an instance, and blocks up to there."""
        slots = self.window[i] - self._before
        room = self._total[i] - self._blocks[self._size[i]]  # beside the requests asked about
        if self.load[i] < slots and self._filled[i] <= room:
            return True
        inside = self._inside[i]
        ahead = bisect_left(inside, entry) if displaces else len(inside)
        if ahead >= slots:  # each has a place or more
            return False
        if _first(self._places[i], ahead, self.load[i]) >= slots:
            return False
        return ahead + self._before == 0 or _first(self._taken[i], ahead, self._filled[i]) <= room


def _first(amounts: array[int], count: int, total: int) -> int:
    """Return the sum of the first amounts; total: of all."""
    return total if count == len(amounts) else int(np.frombuffer(amounts, np.int64)[:count].sum())


def size_of(backlog: Backlog, row: int) -> tuple[float, int]:
    """Return what a request takes of an instance: its expected tokens, and its places."""
    return backlog.tokens.item(row), backlog.places.item(row)


def kv_room(instance: Instance, ahead: int | None) -> int:
    """Return the KV blocks that requests inside an instance may be expected to take together."""
    return instance.blocks_total if ahead is None else _NO_LIMIT
