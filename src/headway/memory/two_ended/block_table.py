"""Which slot of which block does each token's KV lie in? The book of a two-ended pool, as arrays.

A block has two ends: one real-time request fills it from the left, one best-effort request from the right
(BROS 5.1). `two_ended.py` decides who gets which block, `checkpoint.py` moves KV to the host and back; both
are compiled functions over this book, and every copy they need is written down as an order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.compiled import compiled
from headway.types import Ints

NOBODY = -1
REAL_TIME, BEST_EFFORT = 1, 2  # kinds of a row; 0 = not in the book
SAVE, LOAD, MOVE, MIRROR, FREE = 1, 2, 3, 4, 5  # kinds of an order
# Places in `TwoEndedTable.counts`.
SIZE, EMPTY, HOST, HOST_LIMIT, ORDERS, COPIED, DROPPED, STAMP, VICTIMS, TAIL, WHO = range(11)
SHARED, DECODE_ONLY = 11, 12
_ORDERS_PER_BLOCK = 8


class TwoEndedTable(NamedTuple):
    """All about the pool. Token j of a row lies in block table[row, j // size]; at slot j % size for a
    real-time row, at slot size - 1 - j % size for a best-effort one.

    Per block: left, right: the rows at its ends (NOBODY = free). used_left, used_right: tokens they have in
    it. saved: how many of the right one's, its last, are on the host; their slots may be the left one's.
    place: which of the right row's blocks this is. mirrored: 0 while the right row has it alone and may have
    filled it from the left, as engines do: token j at slot j % size. In a full block either may be true.
    Per row: table; held: blocks; stored: tokens; kind; host: tokens on the host; away: tokens of a row that
    is on the host as a whole; pinned: it runs in this iteration, so nobody may overwrite it; since: order of
    coming in.
    empty: a stack of blocks with two free ends. victims: the preemption table. orders: rows of (kind, row,
    first token, tokens, block, block it comes from, mirrored there), to be carried out one after another:
    SAVE and LOAD to and from the host, MOVE between blocks, MIRROR within one (to the side it says), FREE =
    what the host has of these tokens is not wanted any more.
    counts: SHARED: times that a block got a second owner. DECODE_ONLY = 1: the engine attends from the right
    to single tokens only, so a best-effort row that computes more of them has its last block to itself.
    """

    left: Ints
    right: Ints
    used_left: Ints
    used_right: Ints
    saved: Ints
    place: Ints
    mirrored: Ints
    table: Ints
    held: Ints
    stored: Ints
    kind: Ints
    host: Ints
    away: Ints
    pinned: Ints
    since: Ints
    empty: Ints
    victims: Ints
    orders: Ints
    counts: Ints


_PER_ROW = ("table", "held", "stored", "kind", "host", "away", "pinned", "since", "victims")


def new(
    blocks: int, size: int, longest: int, host: int, rows: int, *, decode_only: bool = False
) -> TwoEndedTable:
    """Return the book of a free pool. longest: tokens of a request at most; host: tokens the host holds."""
    ends = np.full((2, blocks), NOBODY)
    block = np.zeros((5, blocks), np.int64)
    row = np.zeros((8, rows), np.int64)
    counts = np.zeros(13, np.int64)
    counts[SIZE], counts[EMPTY], counts[HOST_LIMIT], counts[VICTIMS] = size, blocks, host, NOBODY
    counts[DECODE_ONLY] = decode_only
    return TwoEndedTable(
        left=ends[0], right=ends[1], used_left=block[0], used_right=block[1], saved=block[2], place=block[3],
        mirrored=block[4],
        table=np.full((rows, -(-longest // size) + 1), NOBODY), held=row[0], stored=row[1], kind=row[2],
        host=row[3], away=row[4], pinned=row[5], since=row[6], victims=row[7],
        empty=np.arange(blocks)[::-1].copy(),
        orders=np.zeros((_ORDERS_PER_BLOCK * blocks + 64, 7), np.int64), counts=counts,
    )  # fmt: skip


def grown(book: TwoEndedTable, rows: int) -> TwoEndedTable:
    """Return the book with room for more rows; what it says stays."""
    more = {}
    for name in _PER_ROW:
        old = getattr(book, name)
        column = np.zeros((rows, *old.shape[1:]), np.int64)
        column[: old.shape[0]] = old
        more[name] = column
    return book._replace(**more)


@compiled
def pop_empty(book: TwoEndedTable) -> int:
    """Take a block with two free ends; NOBODY when there is none."""
    if book.counts[EMPTY] == 0:
        return NOBODY
    book.counts[EMPTY] -= 1
    return int(book.empty[book.counts[EMPTY]])


@compiled
def push_if_empty(book: TwoEndedTable, block: int) -> None:
    """Note a block as empty when both of its ends are free."""
    if book.left[block] == NOBODY and book.right[block] == NOBODY:
        book.empty[book.counts[EMPTY]] = block
        book.counts[EMPTY] += 1


@compiled
def resident(book: TwoEndedTable, block: int) -> int:
    """Return the slots that the right end's KV occupies."""
    return int(book.used_right[block] - book.saved[block])


@compiled
def order(book: TwoEndedTable, kind: int, row: int, token: int, tokens: int, block: int, source: int) -> None:
    """Write down a copy of `tokens` tokens of a row from its `token`-th on."""
    entry = book.orders[book.counts[ORDERS]]
    entry[0], entry[1], entry[2], entry[3], entry[4], entry[5] = kind, row, token, tokens, block, source
    entry[6] = book.mirrored[block] if book.kind[row] == BEST_EFFORT else 0
    book.counts[ORDERS] += 1
    if kind in (SAVE, LOAD):  # within the device a copy costs a thousandth
        book.counts[COPIED] += tokens


@compiled
def put_right(book: TwoEndedTable, row: int, k: int, block: int) -> None:
    """Give the right end of a block to a best-effort row, as its k-th."""
    book.right[block], book.place[block] = row, k
    book.used_right[block], book.saved[block] = 0, 0
    book.table[row, k] = block
    shared = book.left[block] != NOBODY
    book.mirrored[block] = shared
    book.counts[SHARED] += shared


@compiled
def mirror(book: TwoEndedTable, block: int) -> None:
    """Let the right end's KV lie at the right: a real-time row has just taken the left end."""
    row, used = book.right[block], book.used_right[block]
    if row == NOBODY:
        return
    book.counts[SHARED] += 1
    if book.mirrored[block]:
        return
    book.mirrored[block] = 1
    if 0 < used < book.counts[SIZE]:  # the tokens of a full block lie in any order
        order(book, MIRROR, row, book.place[block] * book.counts[SIZE], used, block, block)


@compiled
def clear_right(book: TwoEndedTable, block: int) -> None:
    """Free the right end of a block."""
    book.right[block], book.used_right[block], book.saved[block] = NOBODY, 0, 0
    push_if_empty(book, block)


@compiled
def clear_left(book: TwoEndedTable, block: int) -> None:
    """Free the left end of a block."""
    book.left[block], book.used_left[block] = NOBODY, 0
    push_if_empty(book, block)


@compiled
def move_right(book: TwoEndedTable, block: int, to: int) -> None:
    """Move the right end's KV into another block, out of the way of the left end."""
    row, k, used, saved = book.right[block], book.place[block], book.used_right[block], book.saved[block]
    put_right(book, row, k, to)
    book.used_right[to], book.saved[to], book.mirrored[to] = used, saved, book.mirrored[block]
    if used > saved:
        order(book, MOVE, row, k * book.counts[SIZE], used - saved, to, block)
    clear_right(book, block)
