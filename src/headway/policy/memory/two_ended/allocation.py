"""Allocation of blocks with two ends (BROS 5.1 and 5.2).

A real-time request takes an empty block; failing that, the free end of a block whose best-effort owner does
not run in
this iteration: first blocks with free slots, then the blocks of the owner that has lost most already, from
its end. The slots that it is about to overwrite are saved first (`checkpoint.py`). A best-effort request
takes an empty block; failing that, the free end of a real-time request's, from which it moves away when the
two meet.

The paper names the layout, FindBlock and FindPreemptBlock. Assumed here: empty blocks go first, as they cost
no copy; among equals in the preemption table the one that came last goes first; two running requests may
share a block, and when they meet, the best-effort one moves to an empty block, or stops running if there is
none.

With `most_empty` blocks are chosen as in 5.2, by their empty slots alone: an empty block has most; a
real-time request takes the best-effort block with most (of equals the first), a best-effort one
that of a real-time request with most.
"""

from __future__ import annotations

import numpy as np

from headway.compiled import compiled
from headway.policy.memory.budget import KvBudget
from headway.policy.memory.two_ended import checkpoint
from headway.policy.memory.two_ended.block_table import (
    BEST_EFFORT,
    MIRROR,
    NONE,
    REAL_TIME,
    TwoEndedTable,
    add_op,
    clear_left,
    clear_right,
    mirror,
    move_right,
    pop_empty,
    put_right,
    resident,
)
from headway.types import UNLIMITED, Ints

_TOKEN_WEIGHT = 1 << 40  # more than any `entered`


# ---- FindBlock


@compiled
def find_block(table: TwoEndedTable) -> int:
    """Return a block whose left end is free for a real-time request, NONE when there is none."""
    block = pop_empty(table)
    return block if block != NONE else find_preempt_block(table)


@compiled
def find_preempt_block(table: TwoEndedTable) -> int:
    """Return a block of a best-effort request whose left end is free, by the preemption table.

    In this order: last blocks with a free slot, where nothing needs saving yet; all blocks, from the end of
    the first victim on; last blocks with free slots of requests that run.
    """
    state = table.state[0]
    if state["most_empty"]:
        block = _emptiest_block(table)
        return block if block != NONE else _block_of_running(table)
    if state["num_victims"] == NONE:
        _rank_victims(table)
    while state["next_tail"] < state["num_victims"]:
        row = table.victims[state["next_tail"]]
        state["next_tail"] += 1
        block = _open_last_block(table, row)
        if block != NONE and resident(table, block) < state["block_size"]:
            return block
    while state["next_victim"] < state["num_victims"]:
        row = table.victims[state["next_victim"]]
        for k in range(table.num_blocks[row] - 1, -1, -1):
            if table.left_row[table.block_ids[row, k]] == NONE:
                return int(table.block_ids[row, k])
        state["next_victim"] += 1
    return _block_of_running(table)


@compiled
def _emptiest_block(table: TwoEndedTable) -> int:
    """Return the block of a paused best-effort row, free on the left, with most empty slots; or NONE."""
    emptiest, least = NONE, table.state[0]["block_size"] + 1
    for block in range(table.right_row.size):
        row = table.right_row[block]
        if row == NONE or table.left_row[block] != NONE or table.pinned[row]:
            continue
        used = resident(table, block)
        if used < least:
            emptiest, least = block, used
    return int(emptiest)


@compiled
def _rank_victims(table: TwoEndedTable) -> None:
    """Make the preemption table: best-effort rows that do not run, most tokens on the host first, then
    latest."""
    size, rows = 0, table.kind.size
    keys = np.empty(rows, np.int64)
    for row in range(rows):
        if table.kind[row] == BEST_EFFORT and table.num_blocks[row] > 0 and table.pinned[row] == 0:
            table.victims[size], keys[size] = (row, -table.host_tokens[row] * _TOKEN_WEIGHT - table.entered[row])
            size += 1
    ranked = table.victims[:size][np.argsort(keys[:size], kind="mergesort")]
    table.victims[:size] = ranked
    table.state[0]["num_victims"], table.state[0]["next_tail"], table.state[0]["next_victim"] = size, 0, 0


@compiled
def _open_last_block(table: TwoEndedTable, row: int) -> int:
    """Return a row's last block when its left end is free, else NONE."""
    if table.num_blocks[row] == 0:
        return NONE
    block = table.block_ids[row, table.num_blocks[row] - 1]
    return int(block) if table.left_row[block] == NONE else NONE


@compiled
def _block_of_running(table: TwoEndedTable) -> int:
    """Return the last block of a best-effort row that runs, if it has slots for both rows to grow."""
    for row in range(table.kind.size):
        if table.kind[row] == BEST_EFFORT and table.pinned[row] == 1:
            block = _open_last_block(table, row)
            if block != NONE and resident(table, block) + 2 <= table.state[0]["block_size"]:
                return block
    return NONE


@compiled
def find_shared_block(table: TwoEndedTable, tokens: int) -> int:
    """Return a block for `tokens` of a best-effort row: an empty one, else one beside a real-time row."""
    block = pop_empty(table)
    if block != NONE:
        return block
    best, most = NONE, table.state[0]["block_size"] - tokens  # it leaves the real-time row a slot at least
    for row in range(table.kind.size):
        if table.kind[row] == REAL_TIME and table.num_blocks[row] > 0:
            last = table.block_ids[row, table.num_blocks[row] - 1]
            if table.right_row[last] == NONE and table.left_tokens[last] < most:
                best, most = last, table.left_tokens[last]
                if not table.state[0]["most_empty"]:
                    break
    return int(best)


# ---- growth


@compiled
def begin_iteration(table: TwoEndedTable) -> None:
    """Begin an iteration: no operations, no row pinned, the preemption table is made when it is needed."""
    table.state[0]["num_ops"], table.state[0]["copied_tokens"], table.state[0]["num_victims"] = 0, 0, NONE
    table.pinned[:] = 0


@compiled
def add_row(table: TwoEndedTable, row: int, kind: int) -> None:
    """Add a row, which holds nothing yet, to the table."""
    table.state[0]["last_entered"] += 1
    table.kind[row], table.entered[row] = kind, table.state[0]["last_entered"]
    table.num_blocks[row], table.num_tokens[row], table.pinned[row] = 0, 0, 0
    table.host_tokens[row], table.swapped_tokens[row] = 0, 0


@compiled
def grow(table: TwoEndedTable, row: int, tokens: int) -> bool:
    """Give a row the slots of its next `tokens`; False, without effect, when there is no memory.

    A best-effort row must have been read back (`checkpoint.restore`).
    """
    before = table.num_tokens[row]
    done = _grow_left(table, row, tokens) if table.kind[row] == REAL_TIME else _grow_right(table, row, tokens)
    if not done:
        trim(table, row, before)
    return done


@compiled
def _grow_left(table: TwoEndedTable, row: int, tokens: int) -> bool:
    size, at, end = table.state[0]["block_size"], table.num_tokens[row], table.num_tokens[row] + tokens
    while at < end:
        k = at // size
        if k >= table.num_blocks[row]:
            block = find_block(table)
            if block == NONE:
                return False
            table.left_row[block], table.left_tokens[block] = row, 0
            table.block_ids[row, k], table.num_blocks[row] = block, k + 1
            mirror(table, block)
        block, upto = table.block_ids[row, k], min(end, (k + 1) * size)
        vacate(table, block, upto - k * size)
        table.left_tokens[block], table.num_tokens[row], at = upto - k * size, upto, upto
    return True


@compiled
def vacate(table: TwoEndedTable, block: int, used: int) -> None:
    """Free the first `used` slots of a block for its left row."""
    row = table.right_row[block]
    over = resident(table, block) + used - table.state[0]["block_size"]
    if row == NONE or over <= 0:
        return
    if table.pinned[row]:
        to = pop_empty(table)
        if to != NONE:
            move_right(table, block, to)
            return
        table.pinned[row] = 0  # it cannot run in this iteration
    checkpoint.save_slots(table, block, over)


@compiled
def _grow_right(table: TwoEndedTable, row: int, tokens: int) -> bool:
    size, at, end = table.state[0]["block_size"], table.num_tokens[row], table.num_tokens[row] + tokens
    unshared = tokens > 1 and table.state[0]["decode_only"] == 1
    if unshared and not _unshare_last_block(table, row):
        return False
    while at < end:
        k = at // size
        upto = min(end, (k + 1) * size)
        if k >= table.num_blocks[row]:
            block = pop_empty(table) if unshared else find_shared_block(table, upto - at)
            if block == NONE:
                return False
            put_right(table, row, k, block)
            table.num_blocks[row] = k + 1
        block = table.block_ids[row, k]
        if upto - k * size + table.left_tokens[block] > size:  # the two meet
            to = pop_empty(table)
            if to == NONE:
                return False
            move_right(table, block, to)
            block = to
        table.right_tokens[block], table.num_tokens[row], at = upto - k * size, upto, upto
    return True


@compiled
def _unshare_last_block(table: TwoEndedTable, row: int) -> bool:
    """Make a best-effort row the only owner of its last block, filled from the left; False without memory."""
    k, size = table.num_blocks[row] - 1, table.state[0]["block_size"]
    if k < 0:
        return True
    block = table.block_ids[row, k]
    if not table.mirrored[block] or table.right_tokens[block] == size:
        return True
    if table.left_row[block] != NONE:
        to = pop_empty(table)
        if to == NONE:
            return False
        move_right(table, block, to)
        block = to
    table.mirrored[block] = 0
    add_op(table, MIRROR, row, k * size, table.right_tokens[block], block, block)
    return True


@compiled
def refill_from_left(table: TwoEndedTable, row: int) -> None:
    """Turn the last block of a decoding row round, if it is its only owner again: attention from the left is
    cheaper.

    Its newest token is not written yet.
    """
    k, size = table.num_blocks[row] - 1, table.state[0]["block_size"]
    block = table.block_ids[row, k]
    used = table.right_tokens[block]
    if not table.mirrored[block] or table.left_row[block] != NONE or used == size:
        return
    table.mirrored[block] = 0
    if used > 1:
        add_op(table, MIRROR, row, k * size, used - 1, block, block)


@compiled
def trim(table: TwoEndedTable, row: int, tokens: int) -> None:
    """Free a row's slots beyond its first `tokens` tokens; none of these may be on the host."""
    size = table.state[0]["block_size"]
    keep = -(-tokens // size)
    for k in range(table.num_blocks[row] - 1, keep - 1, -1):
        if table.kind[row] == REAL_TIME:
            clear_left(table, table.block_ids[row, k])
        else:
            clear_right(table, table.block_ids[row, k])
    table.num_blocks[row], table.num_tokens[row] = min(table.num_blocks[row], keep), tokens
    if tokens > 0 and table.num_blocks[row] == keep:
        last = table.block_ids[row, keep - 1]
        if table.kind[row] == REAL_TIME:
            table.left_tokens[last] = tokens - (keep - 1) * size
        else:
            table.right_tokens[last] = tokens - (keep - 1) * size


@compiled
def swap_in(table: TwoEndedTable, row: int) -> bool:
    """Allocate blocks for a row that was swapped out and read it back; False when there are too few."""
    if not grow(table, row, table.swapped_tokens[row]):
        return False
    checkpoint.load_row(table, row)
    return True


# ---- the budget that packers see, and checks


class TwoEndedBudget(KvBudget):
    """The balance of a two-ended pool; `free` counts the blocks with two free ends.

    moves: per row of the `Jobs`, the empty blocks that it needs to be read back.
    """

    moves: Ints

    def __new__(
        cls, total: int, free: int, size: int, slots: int, moves: Ints, row_chunk: int = UNLIMITED
    ) -> TwoEndedBudget:
        self = super().__new__(cls, total, free, size, slots, row_chunk)
        self.moves = moves
        return self


def check_integrity(table: TwoEndedTable) -> None:
    """Raise AssertionError unless every slot has one owner and every count is what the blocks add up to."""
    size = int(table.state[0]["block_size"])
    left, right = table.left_row != NONE, table.right_row != NONE
    right_slots = table.right_tokens - table.saved_tokens
    assert (table.left_tokens + right_slots <= size).all(), "a slot has two owners"
    assert (right_slots >= 0).all()
    clash = left & right & (table.mirrored == 0) & (table.right_tokens < size)
    assert not clash.any(), "two rows fill a block from the same side"
    assert (table.saved_tokens >= 0).all()
    assert not table.left_tokens[~left].any()
    assert not table.right_tokens[~right].any()
    stack = table.empty_blocks[: table.state[0]["num_empty"]]
    assert sorted(stack.tolist()) == np.flatnonzero(~left & ~right).tolist(), "the stack does not list the empty blocks"
    for row in range(table.kind.size):
        _check_row(table, row, size)
    held = [table.num_blocks[table.kind == kind].sum() for kind in (REAL_TIME, BEST_EFFORT)]
    assert held == [left.sum(), right.sum()], "a block has an owner that does not list it"
    state = table.state[0]
    assert state["host_tokens"] == table.host_tokens.sum() <= state["host_capacity"], "tokens on the host"
    assert state["dropped_tokens"] >= 0


def _check_row(table: TwoEndedTable, row: int, size: int) -> None:
    blocks, tokens = table.block_ids[row, : table.num_blocks[row]], int(table.num_tokens[row])
    assert blocks.size == -(-tokens // size), "blocks are as many as tokens need"
    assert len(set(blocks.tolist())) == blocks.size, "a row has a block twice"
    used = np.minimum(tokens - np.arange(blocks.size) * size, size)
    if table.kind[row] == REAL_TIME:
        assert (table.left_row[blocks] == row).all()
        assert (table.left_tokens[blocks] == used).all()
        assert table.host_tokens[row] == table.swapped_tokens[row]
    elif table.kind[row] == BEST_EFFORT:
        assert (table.right_row[blocks] == row).all()
        assert (table.right_tokens[blocks] == used).all()
        assert (table.right_index[blocks] == np.arange(blocks.size)).all()
        assert table.host_tokens[row] == table.saved_tokens[blocks].sum() + table.swapped_tokens[row]
    else:
        assert not tokens
        assert not table.host_tokens[row]
        assert not table.swapped_tokens[row]
