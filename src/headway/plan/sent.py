"""The requests inside instances, in rank order, and whether a queued request belongs there, too.

The first requests of a virtual queue belong inside its instance. Where a queued request stands in that queue
follows from the ranks of what is inside: they are kept sorted per instance, so that one compiled call answers
for all instances, whatever they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.core.cluster import Cluster
from headway.plan.waiting import Entry
from headway.types import Backlog, Instance, Ints

Ranks = NDArray[np.void]
Entries = Callable[[Backlog, Ints], Iterable[Entry]]
# filled: the KV blocks of this request and of all before it.
_RANK = np.dtype([("level", int), ("key", float), ("arrival", float), ("serial", int), ("filled", int)])
_NO_LIMIT = 1 << 60


class SentOrder:
    """The requests inside some instances, sorted by rank.

    entries: of the rows of a backlog. ahead: as in `Ordered`.

    Attributes:
        names: of the instances.
        window: their dispatch windows.
        load: requests inside each.
        offered: of the queued requests asked about (`belongs`), how many belong inside each instance.
        changed: something came or went since this was last set to False.
    """

    def __init__(
        self, entries: Entries, instances: Sequence[Instance], cluster: Cluster, ahead: int | None = None
    ) -> None:
        self.names = [instance.id for instance in instances]
        self.window: Ints = np.array([instance.window + (ahead or 0) for instance in instances])
        self.load: Ints = np.zeros(len(instances), np.int64)
        self.offered: Ints = np.zeros(len(instances), np.int64)
        self.changed = True
        self._blocks: Ints = np.zeros(len(instances), np.int64)  # of the queued requests asked about
        self._place = {name: i for i, name in enumerate(self.names)}
        self._total: Ints = np.array([kv_room(instance, ahead) for instance in instances])
        self._size: Ints = np.array([instance.block_size for instance in instances])
        self._ranks: Ranks = np.zeros((len(instances), 64), _RANK)
        for name in self.names:
            rows = cluster.inside(name).rows
            for entry in entries(cluster.backlog, rows):
                self.add(name, entry, float(cluster.backlog.tokens[entry[4]]))

    def __contains__(self, name: object) -> bool:
        return name in self._place

    def add(self, name: str, entry: Entry, tokens: float) -> None:
        """Add a request of `tokens` expected tokens, prompt and answer, to an instance."""
        i = self._place[name]
        if self.load[i] == self._ranks.shape[1]:
            self._ranks = np.concatenate([self._ranks, np.zeros_like(self._ranks)], axis=1)
        _insert(self._ranks[i], self.load, i, entry[:4], int(np.ceil(tokens / self._size[i])))
        self.changed = True

    def remove(self, name: str, entry: Entry) -> None:
        """Remove a request from an instance; one that is not in it is ignored."""
        i = self._place[name]
        self.changed |= _remove(self._ranks[i], self.load, i, entry[:4])

    def belongs(self, entry: Entry, tokens: float, before: int, displaces: bool) -> bool:
        """Tell whether a queued request belongs inside an instance, and count it in `offered` of those.

        before: how many queued requests, asked about just before this one, go before it; 0 begins anew. It
        can only belong where all of them do. The first of a virtual queue always belongs inside: the engine
        itself refuses what can never fit. displaces: it may go before what is inside.
        """
        limits, asked = (self.window, self._total, self._size), (self.offered, self._blocks)
        return bool(_belongs(self._ranks, self.load, limits, entry[:4], tokens, before, asked, displaces))


def kv_room(instance: Instance, ahead: int | None) -> int:
    """Return the KV blocks that requests inside an instance may be expected to take together."""
    return instance.blocks_total if ahead is None else _NO_LIMIT


@compiled
def _find(ranks: Ranks, count: int, rank: tuple[int, float, float, int]) -> int:
    """Return how many of the sorted ranks go before a rank."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        other = ranks[middle]
        if (other["level"], other["key"], other["arrival"], other["serial"]) < rank:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(ranks: Ranks, count: Ints, i: int, rank: tuple[int, float, float, int], blocks: int) -> None:
    at = _find(ranks, count[i], rank)
    for j in range(count[i], at, -1):
        ranks[j] = ranks[j - 1]
        ranks[j]["filled"] += blocks
    ranks[at]["level"], ranks[at]["key"], ranks[at]["arrival"], ranks[at]["serial"] = rank
    ranks[at]["filled"] = blocks + (ranks[at - 1]["filled"] if at > 0 else 0)
    count[i] += 1


@compiled
def _remove(ranks: Ranks, count: Ints, i: int, rank: tuple[int, float, float, int]) -> bool:
    at = _find(ranks, count[i], rank)
    if at == count[i] or ranks[at]["serial"] != rank[3]:
        return False
    blocks = ranks[at]["filled"] - (ranks[at - 1]["filled"] if at > 0 else 0)
    for j in range(at, count[i] - 1):
        ranks[j] = ranks[j + 1]
        ranks[j]["filled"] -= blocks
    count[i] -= 1
    return True


@compiled
def _belongs(
    ranks: Ranks, count: Ints, limits: tuple[Ints, Ints, Ints], rank: tuple[int, float, float, int],
    tokens: float, before: int, asked: tuple[Ints, Ints], displaces: bool,
) -> int:  # fmt: skip
    window, total, size = limits
    offered, blocks = asked
    if before == 0:
        offered[:] = 0
        blocks[:] = 0
    instances = 0
    for i in range(offered.size):
        if offered[i] < before:
            continue
        ahead = _find(ranks[i], count[i], rank) if displaces else count[i]
        blocks[i] += int(np.ceil(tokens / size[i]))
        filled = ranks[i, ahead - 1]["filled"] if ahead > 0 else 0
        fits = ahead + before < window[i] and filled + blocks[i] <= total[i]
        if fits or ahead + before == 0:
            offered[i] = before + 1
            instances += 1
    return instances
