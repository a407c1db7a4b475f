"""Lazy checkpoints of best-effort KV: only slots about to be overwritten are copied to the host (BROS 5.2).

A best-effort request that waits keeps its KV on the device. Only the slots that a real-time request is about
to take are copied to the host, and only these are read back when the request is scheduled again. When the
host is full, the request's KV is dropped from the end, block by block, so that as little as possible is
recomputed.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.policy.memory.two_ended.block_table import (
    BEST_EFFORT,
    FREE,
    LOAD,
    NONE,
    REAL_TIME,
    SAVE,
    TwoEndedTable,
    add_op,
    clear_left,
    clear_right,
    move_right,
    pop_empty,
)
from headway.types import Ints


@compiled
def save_slots(table: TwoEndedTable, block: int, tokens: int) -> None:
    """Free slots of a block: copy the last `tokens` that its right row still has there to the host.

    Where the host is full, the row loses blocks from its end instead, until the tokens fit or this block is
    dropped too (progressive dropping).
    """
    row, k, size = table.right_row[block], table.right_index[block], table.state[0]["block_size"]
    while table.state[0]["host_tokens"] + tokens > table.state[0]["host_capacity"]:
        drop_tail(table, row)
        if table.num_blocks[row] <= k:
            return
    first = k * size + table.right_tokens[block] - table.saved_tokens[block] - tokens
    add_op(table, SAVE, row, first, tokens, block, block)
    table.saved_tokens[block] += tokens
    _count_host(table, row, tokens)


@compiled
def drop_tail(table: TwoEndedTable, row: int) -> None:
    """Drop the last block of a best-effort row, and its copy on the host; its tokens are recomputed."""
    k, size = table.num_blocks[row] - 1, table.state[0]["block_size"]
    block = table.block_ids[row, k]
    saved = table.saved_tokens[block]
    if saved > 0:
        add_op(table, FREE, row, k * size + table.right_tokens[block] - saved, saved, block, block)
    _count_host(table, row, -saved)
    table.state[0]["dropped_tokens"] += table.num_tokens[row] - k * size
    table.num_blocks[row], table.num_tokens[row] = k, k * size
    clear_right(table, block)


@compiled
def restore(table: TwoEndedTable, row: int) -> bool:
    """Read back what a best-effort row has on the host; False when that needs a block and none is empty.

    Tokens return to their slots where these are free again; where a real-time request has taken them, the
    row's part of the block moves to an empty one.
    """
    if table.host_tokens[row] == 0:
        return True
    size = table.state[0]["block_size"]
    for k in range(table.num_blocks[row]):
        block = table.block_ids[row, k]
        saved = table.saved_tokens[block]
        if saved == 0:
            continue
        if table.right_tokens[block] + table.left_tokens[block] > size:
            to = pop_empty(table)
            if to == NONE:
                return False
            move_right(table, block, to)
            block = to
        add_op(table, LOAD, row, k * size + table.right_tokens[block] - saved, saved, block, block)
        table.saved_tokens[block] = 0
        _count_host(table, row, -saved)
    return True


@compiled
def blocks_to_restore(table: TwoEndedTable, rows: Ints) -> Ints:
    """Return how many empty blocks each row needs to be read back, since its slots have another owner."""
    needed = np.zeros(rows.size, np.int64)
    for i in range(rows.size):
        row = rows[i]
        if table.host_tokens[row] == 0 or table.kind[row] != BEST_EFFORT:
            continue
        for k in range(table.num_blocks[row]):
            block = table.block_ids[row, k]
            overlap = table.right_tokens[block] + table.left_tokens[block] > table.state[0]["block_size"]
            needed[i] += overlap and table.saved_tokens[block] > 0
    return needed


@compiled
def swap_out(table: TwoEndedTable, row: int) -> bool:
    """Copy all of a row's KV to the host and free its blocks; False, without effect, when it does not fit."""
    tokens = table.num_tokens[row]
    if table.state[0]["host_tokens"] + tokens - table.host_tokens[row] > table.state[0]["host_capacity"]:
        return False
    size = table.state[0]["block_size"]
    for k in range(table.num_blocks[row]):
        block = table.block_ids[row, k]
        resident = min(tokens - k * size, size)
        resident -= table.saved_tokens[block] * (table.kind[row] == BEST_EFFORT)
        if resident > 0:
            add_op(table, SAVE, row, k * size, resident, block, block)
    _count_host(table, row, tokens - table.host_tokens[row])
    _free_blocks(table, row)
    table.swapped_tokens[row] = tokens
    return True


@compiled
def load_row(table: TwoEndedTable, row: int) -> None:
    """Read a row that was swapped out into the blocks that it has been given for all its tokens."""
    tokens, size = table.swapped_tokens[row], table.state[0]["block_size"]
    for k in range(table.num_blocks[row]):
        block = table.block_ids[row, k]
        add_op(table, LOAD, row, k * size, min(tokens - k * size, size), block, block)
    _count_host(table, row, -table.host_tokens[row])
    table.swapped_tokens[row] = 0


@compiled
def free_row(table: TwoEndedTable, row: int) -> None:
    """Free all KV of a row, on the device and on the host."""
    _count_host(table, row, -table.host_tokens[row])
    _free_blocks(table, row)
    table.swapped_tokens[row], table.pinned[row] = 0, 0


@compiled
def _free_blocks(table: TwoEndedTable, row: int) -> None:
    for k in range(table.num_blocks[row]):
        if table.kind[row] == REAL_TIME:
            clear_left(table, table.block_ids[row, k])
        else:
            clear_right(table, table.block_ids[row, k])
    table.num_blocks[row], table.num_tokens[row] = 0, 0


@compiled
def _count_host(table: TwoEndedTable, row: int, tokens: int) -> None:
    table.host_tokens[row] += tokens
    table.state[0]["host_tokens"] += tokens
