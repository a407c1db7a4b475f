"""The requests inside instances, in rank order, and whether a queued request belongs there, too.

The first requests of a virtual queue belong inside its instance. Where a queued request stands in that queue
follows from the ranks of what is inside: they are kept sorted per instance, so that one compiled call answers
for all instances, whatever they run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.core.cluster import Cluster
from headway.plan.waiting import Entry, entries_of
from headway.types import Bools, Instance, Ints

Ranks = NDArray[np.void]
_RANK = np.dtype([("level", int), ("key", float), ("arrival", float), ("serial", int), ("blocks", int)])


class SentOrder:
    """The requests inside some instances, sorted by a kind of rank (`core/ranks.py`).

    Attributes:
        names: of the instances.
        changed: something came or went since this was last set to False.
    """

    def __init__(self, kind: int, instances: Sequence[Instance], cluster: Cluster) -> None:
        self.names = [instance.id for instance in instances]
        self.changed = True
        self._place = {name: i for i, name in enumerate(self.names)}
        self._window: Ints = np.array([instance.window for instance in instances])
        self._total: Ints = np.array([instance.blocks_total for instance in instances])
        self._size: Ints = np.array([instance.block_size for instance in instances])
        self._count: Ints = np.zeros(len(instances), np.int64)
        self._ranks: Ranks = np.zeros((len(instances), 64), _RANK)
        for name in self.names:
            rows = cluster.inside(name).rows
            for entry in entries_of(kind, cluster.backlog, rows):
                self.add(name, entry, float(cluster.backlog.tokens[entry[4]]))

    def __contains__(self, name: object) -> bool:
        return name in self._place

    def add(self, name: str, entry: Entry, tokens: float) -> None:
        """Add a request of `tokens` expected tokens, prompt and answer, to an instance."""
        i = self._place[name]
        if self._count[i] == self._ranks.shape[1]:
            self._ranks = np.concatenate([self._ranks, np.zeros_like(self._ranks)], axis=1)
        _insert(self._ranks[i], self._count, i, entry[:4], int(np.ceil(tokens / self._size[i])))
        self.changed = True

    def remove(self, name: str, entry: Entry) -> None:
        """Remove a request from an instance; one that is not in it is ignored."""
        i = self._place[name]
        self.changed |= _remove(self._ranks[i], self._count, i, entry[:4])

    def everything(self) -> tuple[Bools, Ints]:
        """Return what `belongs` begins with: every instance, and no blocks of queued requests."""
        return np.ones(len(self.names), np.bool_), np.zeros(len(self.names), np.int64)

    def belongs(
        self, entry: Entry, tokens: float, before: int, among: Bools, blocks: Ints, displaces: bool
    ) -> bool:
        """Narrow `among` to the instances inside which a queued request belongs; tell whether any is left.

        before, blocks: how many queued requests go before it, and the KV blocks that they fill per instance,
        to which those of this request are added. The first of a virtual queue always belongs inside: the
        engine itself refuses what can never fit. displaces: it may go before what is inside.
        """
        limits = (self._window, self._total, self._size)
        left = _belongs(self._ranks, self._count, limits, entry[:4], tokens, before, among, blocks, displaces)
        return bool(left)


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
    ranks[at]["level"], ranks[at]["key"], ranks[at]["arrival"], ranks[at]["serial"] = rank
    ranks[at]["blocks"] = blocks
    count[i] += 1


@compiled
def _remove(ranks: Ranks, count: Ints, i: int, rank: tuple[int, float, float, int]) -> bool:
    at = _find(ranks, count[i], rank)
    if at == count[i] or ranks[at]["serial"] != rank[3]:
        return False
    for j in range(at, count[i] - 1):
        ranks[j] = ranks[j + 1]
    count[i] -= 1
    return True


@compiled
def _belongs(
    ranks: Ranks, count: Ints, limits: tuple[Ints, Ints, Ints], rank: tuple[int, float, float, int],
    tokens: float, before: int, among: Bools, blocks: Ints, displaces: bool,
) -> int:  # fmt: skip
    window, total, size = limits
    left = 0
    for i in range(among.size):
        if not among[i]:
            continue
        ahead = _find(ranks[i], count[i], rank) if displaces else count[i]
        need = int(np.ceil(tokens / size[i]))
        fits = ahead + before < window[i]
        if fits and ahead + before > 0:
            held = blocks[i] + need
            for j in range(ahead):
                held += ranks[i, j]["blocks"]
            fits = held <= total[i]
        among[i] = fits or ahead + before == 0
        blocks[i] += need
        left += among[i]
    return left
