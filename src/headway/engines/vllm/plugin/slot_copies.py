"""KV copies of two-ended blocks as arrays of slot numbers (BROS 5.2: save only what will be overwritten).

`policy/memory/two_ended/block_table.py` orders copies in tokens of rows; here they become slots of vLLM's
blocks and of a host pool whose slots are given out token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.policy.memory.two_ended.block_table import FREE, LOAD, MIRROR, SAVE, TwoEndedTable
from headway.types import Ints

OUT, IN, WITHIN = range(3)  # device to host, host to device, device to device


class Copy(NamedTuple):
    """Slots to read and slots to write, aligned; all are read before the first is written.

    way: OUT, IN or WITHIN.
    """

    way: int
    source: Ints
    target: Ints


class HostSlots:
    """The slots of the host pool by token: taken when a token is saved, free when it is read back."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: of one row."""
        self.max_tokens = max_tokens
        self.most = 0  # slots that were ever used
        self._freed: Ints = np.empty(0, np.int64)
        self._at: dict[int, Ints] = {}  # row -> slot per token, -1 = none

    def put(self, row: int, tokens: Ints) -> Ints:
        """Return a free slot for each token."""
        at = self._at.setdefault(row, np.full(self.max_tokens, -1))
        slots, self._freed = self._freed[: tokens.size], self._freed[tokens.size :]
        fresh = np.arange(self.most, self.most + tokens.size - slots.size)
        self.most += fresh.size
        at[tokens] = np.concatenate([slots, fresh])
        return at[tokens]

    def pop(self, row: int, tokens: Ints) -> Ints:
        """Return the slots of tokens, which are free from now on."""
        slots = self._at[row][tokens]
        assert (slots >= 0).all(), "a token is read back that was not saved"
        self._at[row][tokens] = -1
        self._freed = np.concatenate([self._freed, slots])
        return slots

    def drop(self, row: int, first: int = 0, end: int | None = None) -> None:
        """Free the slots of a row's tokens from `first` to `end`."""
        if row in self._at:
            at = self._at[row]
            there = first + np.flatnonzero(at[first:end] >= 0)
            self.pop(row, there)
            if not (at >= 0).any():
                del self._at[row]

    def held(self) -> int:
        """Return how many slots are in use."""
        return self.most - self._freed.size


def slots_of(tokens: Ints, block: int, size: int, mirrored: int) -> Ints:
    """Return vLLM's slots of a block's tokens; vLLM's block 0 is the null block, so block b is its b + 1."""
    at = tokens % size
    return (block + 1) * size + (size - 1 - at if mirrored else at)


def copies_of(kv: TwoEndedTable, host: HostSlots) -> list[Copy]:
    """Return this iteration's copies in order; neighbours in the same direction are merged.

    Copies that write the same slot stay apart: a slot freed in between has a new owner, whose KV comes last.
    """
    copies: list[Copy] = []
    for entry in kv.ops[: kv.state[0]["num_ops"]].tolist():
        copy = _copy(entry, int(kv.state[0]["block_size"]), host)
        if copy is None:
            continue
        if copies and _mergeable(copies[-1], copy):
            last = copies.pop()
            source, target = (np.concatenate(pair) for pair in zip(last[1:], copy[1:], strict=True))
            copy = Copy(copy.way, source, target)
        copies.append(copy)
    return copies


def _mergeable(one: Copy, other: Copy) -> bool:
    return other.way == one.way != WITHIN and not np.isin(other.target, one.target).any()


def _copy(entry: list[int], size: int, host: HostSlots) -> Copy | None:
    kind, row, first, count, block, source, mirrored = entry
    if kind == FREE:
        host.drop(row, first, first + count)
        return None
    tokens = np.arange(first, first + count)
    here = slots_of(tokens, block, size, mirrored)
    if kind == SAVE:
        return Copy(OUT, here, host.put(row, tokens))
    if kind == LOAD:
        return Copy(IN, host.pop(row, tokens), here)
    before = 1 - mirrored if kind == MIRROR else mirrored
    return Copy(WITHIN, slots_of(tokens, source, size, before), here)
