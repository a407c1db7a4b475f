"""The block table of a KV pool whose blocks have two ends (BROS 5.1), as numpy arrays.

One real-time request fills a block from the left, one best-effort request from the right. `allocation.py`
decides which row gets which block, `checkpoint.py` moves KV to the host and back; both are compiled functions
over this table. Every KV operation that they need is appended to `TwoEndedTable.ops`, for the engine to carry
out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.types import Ints

NONE = -1  # no row, or no block
REAL_TIME, BEST_EFFORT = 1, 2  # kinds of a row; 0 = the row is not in the table
SAVE, LOAD, MOVE, MIRROR, FREE = 1, 2, 3, 4, 5  # kinds of a KV operation
_STATE = np.dtype(
    [
        ("block_size", int),
        ("num_empty", int),
        ("host_tokens", int),
        ("host_capacity", int),
        ("num_ops", int),
        ("copied_tokens", int),
        ("dropped_tokens", int),
        ("shared_blocks", int),
        ("last_entered", int),
        ("num_victims", int),
        ("next_tail", int),
        ("next_victim", int),
        ("decode_only", int),
        ("most_empty", int),
    ]
)
_OPS_PER_BLOCK = 8


class TwoEndedTable(NamedTuple):
    """All about the pool. Token j of a row lies in block `block_ids[row, j // size]`, in slot j % size for a
    real-time row and in slot size - 1 - j % size for a best-effort one.

    Per block:
        left_row, right_row: the rows at its ends, NONE = a free end.
        left_tokens, right_tokens: how many tokens of them belong to this block.
        saved_tokens: how many of the right row's, its last, are on the host; their slots may be the left
            row's.
        right_index: the index of this block among the right row's.
        mirrored: 0 while the right row has the block alone and may have filled it from the left, as engines
            do: token j in slot j % size. In a full block either order may hold.

    Per row:
        block_ids: its blocks, in order.
        num_blocks, num_tokens: blocks that it holds, tokens that they have.
        kind: REAL_TIME or BEST_EFFORT, 0 = the row is not in the table.
        host_tokens: tokens on the host.
        swapped_tokens: tokens of a row that is on the host as a whole.
        pinned: the row runs in this iteration, so its KV must not be overwritten.
        entered: serial number of its entry into the table.

    For the whole pool:
        empty_blocks: a stack of the blocks with two free ends.
        victims: BROS's preemption table, best-effort rows in the order in which they lose slots.
        ops: KV operations of this iteration, to be carried out one after another: kind, row, first token,
            tokens, block, source block, mirrored. SAVE and LOAD copy to and from the host, MOVE between
            blocks, MIRROR within a block (to the side that `mirrored` says); FREE drops the host's copy of
            these tokens.
        state: scalars, as an array of one record, which compiled calls unpack faster than the record itself:
            block_size: tokens per block.
            num_empty, num_ops, num_victims: lengths of the lists above; num_victims NONE = to be made.
            next_tail, next_victim: how far `find_preempt_block` has come in `victims`.
            host_tokens, host_capacity: tokens that the host has, and may have.
            copied_tokens: copied over the bus in this iteration.
            dropped_tokens, shared_blocks: totals so far; a block counts as shared whenever it gets a second
                owner.
            last_entered: the last `entered`.
            decode_only: 1 = the engine attends from the right to single tokens only, so a best-effort row
                that computes more of them has its last block to itself.
            most_empty: 1 = blocks are chosen by their empty slots alone, as the paper has it.
    """

    left_row: Ints
    right_row: Ints
    left_tokens: Ints
    right_tokens: Ints
    saved_tokens: Ints
    right_index: Ints
    mirrored: Ints
    block_ids: Ints
    num_blocks: Ints
    num_tokens: Ints
    kind: Ints
    host_tokens: Ints
    swapped_tokens: Ints
    pinned: Ints
    entered: Ints
    empty_blocks: Ints
    victims: Ints
    ops: Ints
    state: NDArray[np.void]


_PER_ROW = (
    "block_ids",
    "num_blocks",
    "num_tokens",
    "kind",
    "host_tokens",
    "swapped_tokens",
    "pinned",
    "entered",
    "victims",
)


def new(
    blocks: int, size: int, longest: int, host: int, rows: int, *, decode_only: bool = False, most_empty: bool = False
) -> TwoEndedTable:
    """Return the table of a free pool.

    longest: most tokens of a request.
    host: tokens that fit on the host.
    """
    ends = np.full((2, blocks), NONE)
    block = np.zeros((5, blocks), np.int64)
    row = np.zeros((8, rows), np.int64)
    state = np.zeros(1, _STATE)
    state["block_size"], state["num_empty"], state["host_capacity"] = size, blocks, host
    state["num_victims"], state["decode_only"], state["most_empty"] = NONE, decode_only, most_empty
    return TwoEndedTable(
        left_row=ends[0],
        right_row=ends[1],
        left_tokens=block[0],
        right_tokens=block[1],
        saved_tokens=block[2],
        right_index=block[3],
        mirrored=block[4],
        block_ids=np.full((rows, -(-longest // size) + 1), NONE),
        num_blocks=row[0],
        num_tokens=row[1],
        kind=row[2],
        host_tokens=row[3],
        swapped_tokens=row[4],
        pinned=row[5],
        entered=row[6],
        victims=row[7],
        empty_blocks=np.arange(blocks)[::-1].copy(),
        ops=np.zeros((_OPS_PER_BLOCK * blocks + 64, 7), np.int64),
        state=state,
    )


def resized(table: TwoEndedTable, rows: int) -> TwoEndedTable:
    """Return the table with capacity for more rows; its contents stay."""
    more: dict[str, Any] = {}
    for name in _PER_ROW:
        old = getattr(table, name)
        column = np.zeros((rows, *old.shape[1:]), np.int64)
        column[: old.shape[0]] = old
        more[name] = column
    return table._replace(**more)


@compiled
def pop_empty(table: TwoEndedTable) -> int:
    """Take a block with two free ends; NONE when there is none."""
    state = table.state[0]
    if state["num_empty"] == 0:
        return NONE
    state["num_empty"] -= 1
    return int(table.empty_blocks[state["num_empty"]])


@compiled
def push_if_empty(table: TwoEndedTable, block: int) -> None:
    """Push a block onto the stack of empty ones when both of its ends are free."""
    if table.left_row[block] == NONE and table.right_row[block] == NONE:
        table.empty_blocks[table.state[0]["num_empty"]] = block
        table.state[0]["num_empty"] += 1


@compiled
def resident(table: TwoEndedTable, block: int) -> int:
    """Return the slots of a block that the right row's KV occupies."""
    return int(table.right_tokens[block] - table.saved_tokens[block])


@compiled
def add_op(table: TwoEndedTable, kind: int, row: int, token: int, tokens: int, block: int, source: int) -> None:
    """Append a KV operation on `tokens` tokens of a row, from its `token`-th on."""
    entry = table.ops[table.state[0]["num_ops"]]
    entry[0], entry[1], entry[2], entry[3], entry[4], entry[5] = kind, row, token, tokens, block, source
    entry[6] = table.mirrored[block] if table.kind[row] == BEST_EFFORT else 0
    table.state[0]["num_ops"] += 1
    if kind in (SAVE, LOAD):  # a copy within the device costs a thousandth of it
        table.state[0]["copied_tokens"] += tokens


@compiled
def put_right(table: TwoEndedTable, row: int, k: int, block: int) -> None:
    """Give the right end of a block to a best-effort row, as its k-th block."""
    table.right_row[block], table.right_index[block] = row, k
    table.right_tokens[block], table.saved_tokens[block] = 0, 0
    table.block_ids[row, k] = block
    shared = table.left_row[block] != NONE
    table.mirrored[block] = shared
    table.state[0]["shared_blocks"] += shared


@compiled
def mirror(table: TwoEndedTable, block: int) -> None:
    """Move the right row's KV to the right: a real-time row has just taken the left end."""
    row, used = table.right_row[block], table.right_tokens[block]
    if row == NONE:
        return
    table.state[0]["shared_blocks"] += 1
    if table.mirrored[block]:
        return
    table.mirrored[block] = 1
    if 0 < used < table.state[0]["block_size"]:  # the tokens of a full block lie in any order
        add_op(table, MIRROR, row, table.right_index[block] * table.state[0]["block_size"], used, block, block)


@compiled
def clear_right(table: TwoEndedTable, block: int) -> None:
    """Free the right end of a block."""
    table.right_row[block], table.right_tokens[block], table.saved_tokens[block] = NONE, 0, 0
    push_if_empty(table, block)


@compiled
def clear_left(table: TwoEndedTable, block: int) -> None:
    """Free the left end of a block."""
    table.left_row[block], table.left_tokens[block] = NONE, 0
    push_if_empty(table, block)


@compiled
def move_right(table: TwoEndedTable, block: int, to: int) -> None:
    """Move the right row's part of a block into another block, out of the way of the left row."""
    row, k = table.right_row[block], table.right_index[block]
    used, saved = table.right_tokens[block], table.saved_tokens[block]
    put_right(table, row, k, to)
    table.right_tokens[to], table.saved_tokens[to], table.mirrored[to] = used, saved, table.mirrored[block]
    if used > saved:
        add_op(table, MOVE, row, k * table.state[0]["block_size"], used - saved, to, block)
    clear_right(table, block)
