"""Which slots are copied where, before the next forward pass? The book's orders, as arrays of slot numbers.

`memory/two_ended/block_table.py` says which tokens of which row move; here that becomes slots of vLLM's blocks and of a host
pool whose slots are handed out token by token (BROS 5.2: only what is about to be overwritten is saved).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.memory.two_ended.block_table import FREE, LOAD, MIRROR, SAVE, TwoEndedTable
from headway.types import Ints

OUT, IN, WITHIN = range(3)  # device to host, host to device, device to device


class Copy(NamedTuple):
    """Slots to read and slots to write, aligned. All are read before the first is written."""

    way: int
    source: Ints
    target: Ints


class HostSlots:
    """Which slot of the host pool has which token: given out when a token is saved, free when it is back."""

    def __init__(self, width: int) -> None:
        """width: tokens of a row at most."""
        self.width = width
        self.most = 0  # slots that were ever used
        self._freed: Ints = np.empty(0, np.int64)
        self._at: dict[int, Ints] = {}  # row -> slot per token, -1 = none

    def put(self, row: int, tokens: Ints) -> Ints:
        """Return a free slot for each token."""
        at = self._at.setdefault(row, np.full(self.width, -1))
        slots, self._freed = self._freed[: tokens.size], self._freed[tokens.size :]
        fresh = np.arange(self.most, self.most + tokens.size - slots.size)
        self.most += fresh.size
        at[tokens] = np.concatenate([slots, fresh])
        return at[tokens]

    def pop(self, row: int, tokens: Ints) -> Ints:
        """Return the slots of tokens, which are free from now on."""
        slots = self._at[row][tokens]
        assert (slots >= 0).all(), "read back without having been saved"
        self._at[row][tokens] = -1
        self._freed = np.concatenate([self._freed, slots])
        return slots

    def drop(self, row: int, first: int = 0, end: int | None = None) -> None:
        """Free what a row has of the tokens from `first` to `end`."""
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
    """Return vLLM's slots of a block's tokens; its block 0 is nobody's, so ours are one further."""
    at = tokens % size
    return (block + 1) * size + (size - 1 - at if mirrored else at)


def copies_of(book: TwoEndedTable, host: HostSlots) -> list[Copy]:
    """Return this iteration's copies, in order; neighbours that go the same way over the host are one.

    Unless both write a slot: one that was freed in between has a new owner, whose KV must come last.
    """
    done: list[Copy] = []
    for entry in book.ops[: book.state[0]["num_ops"]].tolist():
        output_tokens = _copy(entry, int(book.state[0]["block_size"]), host)
        if output_tokens is None:
            continue
        if (
            done
            and output_tokens.way != WITHIN
            and done[-1].way == output_tokens.way
            and _apart(done[-1], output_tokens)
        ):
            last = done.pop()
            source, target = (np.concatenate(pair) for pair in zip(last[1:], output_tokens[1:], strict=True))
            output_tokens = Copy(output_tokens.way, source, target)
        done.append(output_tokens)
    return done


def _apart(one: Copy, other: Copy) -> bool:
    return not np.isin(other.target, one.target).any()


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
