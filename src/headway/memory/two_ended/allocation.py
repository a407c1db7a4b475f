"""Whose block may a request grow into? One block, two ends (BROS 5.1 and 5.2).

A real-time request takes an empty block, else the free end of one whose best-effort owner does not run now:
first where slots are free anyway, then where the owner has lost most already, from its end. What it is about
to overwrite goes to the host first (`checkpoint.py`). A best-effort request takes an empty block, else the
free end of a real-time request's, and moves away when the two meet.

The paper gives the layout, FindBlock and FindPreemptBlock by name. Assumed here: empty blocks go first (they
cost no copy); of equals in the preemption table the last come goes first; two running requests may share a
block, and when they meet the best-effort one moves to an empty block, or stops running if there is none.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.memory.budget import KvBudget
from headway.memory.two_ended import block_table, checkpoint
from headway.memory.two_ended.block_table import (
    BEST_EFFORT,
    DECODE_ONLY,
    DROPPED,
    EMPTY,
    HOST,
    HOST_LIMIT,
    MIRROR,
    NOBODY,
    ORDERS,
    REAL_TIME,
    SIZE,
    STAMP,
    TAIL,
    VICTIMS,
    WHO,
    TwoEndedTable,
    clear_left,
    clear_right,
    mirror,
    move_right,
    order,
    pop_empty,
    put_right,
    resident,
)  # fmt: skip
from headway.types import Ints

_NEVER = 1 << 40  # more than any serial of coming in


# ---- FindBlock


@compiled
def find_block(book: TwoEndedTable) -> int:
    """Return a block whose left end is free for a real-time request, NOBODY when there is none."""
    block = pop_empty(book)
    return block if block != NOBODY else find_preempt_block(book)


@compiled
def find_preempt_block(book: TwoEndedTable) -> int:
    """Return a block of a best-effort request whose left end is free, by the preemption table.

    First the last blocks that have a slot free (nothing is lost there yet), then all of them from the end of
    the first victim on, then last blocks with room of those that run.
    """
    if book.counts[VICTIMS] == NOBODY:
        _table(book)
    while book.counts[TAIL] < book.counts[VICTIMS]:
        row = book.victims[book.counts[TAIL]]
        book.counts[TAIL] += 1
        block = _tail(book, row)
        if block != NOBODY and resident(book, block) < book.counts[SIZE]:
            return block
    while book.counts[WHO] < book.counts[VICTIMS]:
        row = book.victims[book.counts[WHO]]
        for k in range(book.held[row] - 1, -1, -1):
            if book.left[book.table[row, k]] == NOBODY:
                return int(book.table[row, k])
        book.counts[WHO] += 1
    return _beside_running(book)


@compiled
def _table(book: TwoEndedTable) -> None:
    """Make the preemption table: best-effort rows that do not run, by tokens on the host, last come first."""
    size, rows = 0, book.kind.size
    keys = np.empty(rows, np.int64)
    for row in range(rows):
        if book.kind[row] == BEST_EFFORT and book.held[row] > 0 and book.pinned[row] == 0:
            book.victims[size], keys[size] = row, -book.host[row] * _NEVER - book.since[row]
            size += 1
    ranked = book.victims[:size][np.argsort(keys[:size], kind="mergesort")]
    book.victims[:size] = ranked
    book.counts[VICTIMS], book.counts[TAIL], book.counts[WHO] = size, 0, 0


@compiled
def _tail(book: TwoEndedTable, row: int) -> int:
    """Return a row's last block when its left end is free, else NOBODY."""
    if book.held[row] == 0:
        return NOBODY
    block = book.table[row, book.held[row] - 1]
    return int(block) if book.left[block] == NOBODY else NOBODY


@compiled
def _beside_running(book: TwoEndedTable) -> int:
    """Return the last block, with room for both to grow, of a best-effort row that runs."""
    for row in range(book.kind.size):
        if book.kind[row] == BEST_EFFORT and book.pinned[row] == 1:
            block = _tail(book, row)
            if block != NOBODY and resident(book, block) + 2 <= book.counts[SIZE]:
                return block
    return NOBODY


@compiled
def find_shared_block(book: TwoEndedTable, tokens: int) -> int:
    """Return a block for `tokens` of a best-effort row: an empty one, else one beside a real-time row."""
    block = pop_empty(book)
    if block != NOBODY:
        return block
    for row in range(book.kind.size):
        if book.kind[row] == REAL_TIME and book.held[row] > 0:
            last = book.table[row, book.held[row] - 1]
            if book.right[last] == NOBODY and book.used_left[last] + tokens < book.counts[SIZE]:
                return int(last)
    return NOBODY


# ---- growing


@compiled
def begin(book: TwoEndedTable) -> None:
    """Begin an iteration: no orders, nobody pinned, the preemption table is made anew when it is needed."""
    book.counts[ORDERS], book.counts[block_table.COPIED], book.counts[VICTIMS] = 0, 0, NOBODY
    book.pinned[:] = 0


@compiled
def enter(book: TwoEndedTable, row: int, kind: int) -> None:
    """Let a row into the book; it holds nothing yet."""
    book.counts[STAMP] += 1
    book.kind[row], book.since[row] = kind, book.counts[STAMP]
    book.held[row], book.stored[row], book.host[row], book.away[row], book.pinned[row] = 0, 0, 0, 0, 0


@compiled
def grow(book: TwoEndedTable, row: int, tokens: int) -> bool:
    """Give a row the slots of its next `tokens`; False, and nothing is given, when there is no memory.

    A best-effort row must have been read back (`checkpoint.restore`).
    """
    before = book.stored[row]
    done = _grow_left(book, row, tokens) if book.kind[row] == REAL_TIME else _grow_right(book, row, tokens)
    if not done:
        trim(book, row, before)
    return done


@compiled
def _grow_left(book: TwoEndedTable, row: int, tokens: int) -> bool:
    size, at, end = book.counts[SIZE], book.stored[row], book.stored[row] + tokens
    while at < end:
        k = at // size
        if k >= book.held[row]:
            block = find_block(book)
            if block == NOBODY:
                return False
            book.left[block], book.used_left[block] = row, 0
            book.table[row, k], book.held[row] = block, k + 1
            mirror(book, block)
        block, upto = book.table[row, k], min(end, (k + 1) * size)
        vacate(book, block, upto - k * size)
        book.used_left[block], book.stored[row], at = upto - k * size, upto, upto
    return True


@compiled
def vacate(book: TwoEndedTable, block: int, used: int) -> None:
    """Make the first `used` slots of a block free for its left end."""
    row = book.right[block]
    over = resident(book, block) + used - book.counts[SIZE]
    if row == NOBODY or over <= 0:
        return
    if book.pinned[row]:
        to = pop_empty(book)
        if to != NOBODY:
            move_right(book, block, to)
            return
        book.pinned[row] = 0  # it cannot run now
    checkpoint.save_slots(book, block, over)


@compiled
def _grow_right(book: TwoEndedTable, row: int, tokens: int) -> bool:
    size, at, end = book.counts[SIZE], book.stored[row], book.stored[row] + tokens
    alone = tokens > 1 and book.counts[DECODE_ONLY] == 1
    if alone and not _straighten(book, row):
        return False
    while at < end:
        k = at // size
        upto = min(end, (k + 1) * size)
        if k >= book.held[row]:
            block = pop_empty(book) if alone else find_shared_block(book, upto - at)
            if block == NOBODY:
                return False
            put_right(book, row, k, block)
            book.held[row] = k + 1
        block = book.table[row, k]
        if upto - k * size + book.used_left[block] > size:  # the two meet
            to = pop_empty(book)
            if to == NOBODY:
                return False
            move_right(book, block, to)
            block = to
        book.used_right[block], book.stored[row], at = upto - k * size, upto, upto
    return True


@compiled
def _straighten(book: TwoEndedTable, row: int) -> bool:
    """Give a best-effort row its last block alone, filled from the left; False when there is no memory."""
    k, size = book.held[row] - 1, book.counts[SIZE]
    if k < 0:
        return True
    block = book.table[row, k]
    if not book.mirrored[block] or book.used_right[block] == size:
        return True
    if book.left[block] != NOBODY:
        to = pop_empty(book)
        if to == NOBODY:
            return False
        move_right(book, block, to)
        block = to
    book.mirrored[block] = 0
    order(book, MIRROR, row, k * size, book.used_right[block], block, block)
    return True


@compiled
def turn_back(book: TwoEndedTable, row: int) -> None:
    """Let a row that has its last block alone again, and decodes, fill it from the left: that is attended to
    at once. Its newest token is not written yet."""
    k, size = book.held[row] - 1, book.counts[SIZE]
    block = book.table[row, k]
    used = book.used_right[block]
    if not book.mirrored[block] or book.left[block] != NOBODY or used == size:
        return
    book.mirrored[block] = 0
    if used > 1:
        order(book, MIRROR, row, k * size, used - 1, block, block)


@compiled
def trim(book: TwoEndedTable, row: int, tokens: int) -> None:
    """Take a row's tokens beyond the first `tokens`, which are not on the host, and the blocks they had."""
    size = book.counts[SIZE]
    keep = -(-tokens // size)
    for k in range(book.held[row] - 1, keep - 1, -1):
        if book.kind[row] == REAL_TIME:
            clear_left(book, book.table[row, k])
        else:
            clear_right(book, book.table[row, k])
    book.held[row], book.stored[row] = min(book.held[row], keep), tokens
    if tokens > 0 and book.held[row] == keep:
        last = book.table[row, keep - 1]
        if book.kind[row] == REAL_TIME:
            book.used_left[last] = tokens - (keep - 1) * size
        else:
            book.used_right[last] = tokens - (keep - 1) * size


@compiled
def come_back(book: TwoEndedTable, row: int) -> bool:
    """Give blocks to a row that is on the host as a whole, and read it back; False when there are too few."""
    if not grow(book, row, book.away[row]):
        return False
    checkpoint.back(book, row)
    return True


# ---- the account as packers and tests see it


class TwoEndedBudget(KvBudget):
    """The balance of a two-ended pool: `free` are the blocks with two free ends.

    moves: per row of the jobs' table, empty blocks that it needs to be read back.
    """

    moves: Ints

    def __new__(cls, total: int, free: int, size: int, slots: int, moves: Ints) -> TwoEndedBudget:
        self = super().__new__(cls, total, free, size, slots)
        self.moves = moves
        return self


def check_integrity(book: TwoEndedTable) -> None:
    """Raise AssertionError unless every slot has one owner and every count is what the blocks add up to."""
    size = int(book.counts[SIZE])
    left, right = book.left != NOBODY, book.right != NOBODY
    there = book.used_right - book.saved
    assert (book.used_left + there <= size).all(), "a slot has two owners"
    assert (there >= 0).all()
    astray = left & right & (book.mirrored == 0) & (book.used_right < size)
    assert not astray.any(), "two rows fill a block from the same side"
    assert (book.saved >= 0).all()
    assert not book.used_left[~left].any()
    assert not book.used_right[~right].any()
    stack = book.empty[: book.counts[EMPTY]]
    assert sorted(stack.tolist()) == np.flatnonzero(~left & ~right).tolist(), "the stack of empty blocks"
    for row in range(book.kind.size):
        _check_row(book, row, size)
    blocks = book.held[book.kind == REAL_TIME].sum(), book.held[book.kind == BEST_EFFORT].sum()
    assert blocks == (left.sum(), right.sum()), "a block has an owner who does not know"
    assert book.counts[HOST] == book.host.sum() <= book.counts[HOST_LIMIT], "the host's account"
    assert book.counts[DROPPED] >= 0


def _check_row(book: TwoEndedTable, row: int, size: int) -> None:
    blocks, tokens = book.table[row, : book.held[row]], int(book.stored[row])
    assert blocks.size == -(-tokens // size), "blocks are as many as tokens need"
    assert len(set(blocks.tolist())) == blocks.size, "a row has a block twice"
    mine = np.minimum(tokens - np.arange(blocks.size) * size, size)
    if book.kind[row] == REAL_TIME:
        assert (book.left[blocks] == row).all()
        assert (book.used_left[blocks] == mine).all()
        assert book.host[row] == book.away[row]
    elif book.kind[row] == BEST_EFFORT:
        assert (book.right[blocks] == row).all()
        assert (book.used_right[blocks] == mine).all()
        assert (book.place[blocks] == np.arange(blocks.size)).all()
        assert book.host[row] == book.saved[blocks].sum() + book.away[row]
    else:
        assert not tokens
        assert not book.host[row]
        assert not book.away[row]
