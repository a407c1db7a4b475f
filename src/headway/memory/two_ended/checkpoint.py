"""What must be saved before it is overwritten? Lazily, slot by slot, and read back when it is wanted again.

A best-effort request that waits keeps its KV where it is. Only the slots that a real-time request is about to
take are copied to the host, and only these come back when the request is scheduled again (BROS 5.2). When the
host is full its KV is dropped from the end, block by block, so that no more is computed again than must be.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.memory.two_ended.block_table import (
    BEST_EFFORT,
    DROPPED,
    FREE,
    HOST,
    HOST_LIMIT,
    LOAD,
    NOBODY,
    REAL_TIME,
    SAVE,
    SIZE,
    TwoEndedTable,
    clear_left,
    clear_right,
    move_right,
    order,
    pop_empty,
)  # fmt: skip
from headway.types import Ints


@compiled
def save_slots(book: TwoEndedTable, block: int, tokens: int) -> None:
    """Copy the last `tokens` that the right end still has in a block to the host; their slots are free then.

    Where the host is full, the row loses blocks from its end instead, until there is room or this block is
    not its own any more (progressive dropping).
    """
    row, k, size = book.right[block], book.place[block], book.counts[SIZE]
    while book.counts[HOST] + tokens > book.counts[HOST_LIMIT]:
        drop_tail(book, row)
        if book.held[row] <= k:
            return
    first = k * size + book.used_right[block] - book.saved[block] - tokens
    order(book, SAVE, row, first, tokens, block, block)
    book.saved[block] += tokens
    _host(book, row, tokens)


@compiled
def drop_tail(book: TwoEndedTable, row: int) -> None:
    """Take the last block of a best-effort row, on the host too; its tokens are computed again."""
    k, size = book.held[row] - 1, book.counts[SIZE]
    block = book.table[row, k]
    saved = book.saved[block]
    if saved > 0:
        order(book, FREE, row, k * size + book.used_right[block] - saved, saved, block, block)
    _host(book, row, -saved)
    book.counts[DROPPED] += book.stored[row] - k * size
    book.held[row], book.stored[row] = k, k * size
    clear_right(book, block)


@compiled
def restore(book: TwoEndedTable, row: int) -> bool:
    """Read back what a best-effort row has on the host; False when that needs a block and none is empty.

    Into its own slots where they are free again; where a real-time request has them, its part of the block
    moves to an empty one.
    """
    if book.host[row] == 0:
        return True
    size = book.counts[SIZE]
    for k in range(book.held[row]):
        block = book.table[row, k]
        saved = book.saved[block]
        if saved == 0:
            continue
        if book.used_right[block] + book.used_left[block] > size:
            to = pop_empty(book)
            if to == NOBODY:
                return False
            move_right(book, block, to)
            block = to
        order(book, LOAD, row, k * size + book.used_right[block] - saved, saved, block, block)
        book.saved[block] = 0
        _host(book, row, -saved)
    return True


@compiled
def lost_places(book: TwoEndedTable, rows: Ints) -> Ints:
    """Return for each row how many empty blocks it needs to be read back: its slots have another owner."""
    lost = np.zeros(rows.size, np.int64)
    for i in range(rows.size):
        row = rows[i]
        if book.host[row] == 0 or book.kind[row] != BEST_EFFORT:
            continue
        for k in range(book.held[row]):
            block = book.table[row, k]
            clash = book.used_right[block] + book.used_left[block] > book.counts[SIZE]
            lost[i] += clash and book.saved[block] > 0
    return lost


@compiled
def away(book: TwoEndedTable, row: int) -> bool:
    """Move all of a row's KV to the host and free its blocks; False (nothing happens) when it has no room."""
    tokens = book.stored[row]
    if book.counts[HOST] + tokens - book.host[row] > book.counts[HOST_LIMIT]:
        return False
    size = book.counts[SIZE]
    for k in range(book.held[row]):
        block = book.table[row, k]
        there = min(tokens - k * size, size) - book.saved[block] * (book.kind[row] == BEST_EFFORT)
        if there > 0:
            order(book, SAVE, row, k * size, there, block, block)
    _host(book, row, tokens - book.host[row])
    _leave_blocks(book, row)
    book.away[row] = tokens
    return True


@compiled
def back(book: TwoEndedTable, row: int) -> None:
    """Read a row that was away into the blocks it has been given (stored = away)."""
    tokens, size = book.away[row], book.counts[SIZE]
    for k in range(book.held[row]):
        block = book.table[row, k]
        order(book, LOAD, row, k * size, min(tokens - k * size, size), block, block)
    _host(book, row, -book.host[row])
    book.away[row] = 0


@compiled
def forget(book: TwoEndedTable, row: int) -> None:
    """Free all that a row has, here and on the host."""
    _host(book, row, -book.host[row])
    _leave_blocks(book, row)
    book.away[row], book.pinned[row] = 0, 0


@compiled
def _leave_blocks(book: TwoEndedTable, row: int) -> None:
    for k in range(book.held[row]):
        if book.kind[row] == REAL_TIME:
            clear_left(book, book.table[row, k])
        else:
            clear_right(book, book.table[row, k])
    book.held[row], book.stored[row] = 0, 0


@compiled
def _host(book: TwoEndedTable, row: int, tokens: int) -> None:
    book.host[row] += tokens
    book.counts[HOST] += tokens
