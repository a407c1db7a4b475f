"""KV reservations and loans between them: exact allocation and KVC pipelining (EcoServe 3.2 and 3.4).

Exact allocation: a request reserves at once the blocks for its prompt and its predicted answer, so no
allocation fails halfway. A small share of the memory, the reserved pool, is exempt: there prompts wait for
their generation to begin, and answers that outgrow their prediction continue.

KVC pipelining: an answer of l tokens fills its reservation from the front, one token per iteration, so the
second half stays idle for l/2 iterations. A request that needs at most that long, less a buffer b, borrows
this tail and is gone in time. The part in front of it is halved again (l/4 - b, l/8 - b, ...), and a borrower
lends its own tail in the same way.

Blocks of a row are counted from its first: its own `blocks`, then the `loan_blocks` that it borrows. A row's
tail is lent from the end downwards, so all that it has lent begins at `first_lent_block`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.types import Ints

Rows = NDArray[np.void]


# ---- exact allocation


@compiled
def blocks_of(tokens: int, size: int) -> int:
    """Return the blocks that tokens occupy."""
    return -(-tokens // size)


@compiled
def allocatable(free: int, reserve: int, queued: int) -> int:
    """Return the blocks that an exact allocation may take.

    free: blocks without an owner.
    reserve: blocks of the reserved pool; what is unused of it stays free for prompts.
    queued: blocks of the pool that prompts hold whose generation has not begun.
    """
    return free - max(reserve - queued, 0)


@compiled
def tokens_to_reserve(prompt: int, left: float, most: int) -> int:
    """Return the tokens of KV to reserve for a request with `left` predicted tokens, at most `most`."""
    return min(prompt + max(math.ceil(left), 1), most)


def pool_blocks(total: int, share: float) -> int:
    """Return the size of a reserved pool that is `share` of the memory, at least one block."""
    return max(int(total * share), 1)


# ---- loans


class Tail(NamedTuple):
    """A part of a reservation that could be lent.

    start: its first block.
    stop: the block behind its last.
    iterations: until its owner reaches it.
    """

    start: int
    stop: int
    iterations: int


@compiled
def capacity_of(jobs: Rows, row: int) -> int:
    """Return the blocks that a row may fill: its own and those it borrows."""
    return int(jobs["blocks"][row] + jobs["loan_blocks"][row])


@compiled
def lendable_end(jobs: Rows, row: int) -> int:
    """Return the block before which the lendable part of a row ends: the first block that it has lent."""
    first_lent = jobs["first_lent_block"][row]
    return int(first_lent) if first_lent else capacity_of(jobs, row)


@compiled
def lendable_start(jobs: Rows, row: int) -> int:
    """Return the first block that a row may lend; a borrower keeps the first block of its loan."""
    return int(jobs["blocks"][row] + 1) if jobs["loan_blocks"][row] else 1


@compiled
def filled_tokens(jobs: Rows, row: int) -> int:
    """Return the tokens of a row whose KV is written or about to be; a prompt counts as a whole."""
    return int(max(jobs["computed"][row], jobs["prompt"][row] + jobs["output_tokens"][row]))


@compiled
def tail_of(filled: int, stop: int, least: int, size: int) -> Tail:
    """Return the second half of the way from token `filled` to block `stop`, not before block `least`.

    The tail is empty when that is less than a block.
    """
    half = filled + max(stop * size - filled, 0) // 2
    start = max(-(-half // size), least)
    return Tail(start, max(stop, start), start * size - filled)


@compiled
def begin_loans(jobs: Rows, borrower: Ints, lender: Ints, start: Ints, blocks: Ints) -> None:
    """Begin loans (aligned arrays). Each must lie in its lender's tail, before what that has lent already."""
    for i in range(borrower.size):
        row, owner = borrower[i], lender[i]
        assert row != owner, "a row cannot borrow from itself"
        assert blocks[i] > 0, "a loan has at least one block"
        assert jobs["loan_blocks"][row] == 0, "a row has at most one loan"
        assert jobs["first_lent_block"][row] == 0, "a new borrower has lent nothing yet"
        assert start[i] > 0, "a lender keeps its first block"
        assert start[i] + blocks[i] <= lendable_end(jobs, owner), "a loan lies in its lender's tail"
        assert jobs["loan_blocks"][owner] == 0 or start[i] > jobs["blocks"][owner], (
            "a borrower lends from its loan only"
        )
        jobs["lender"][row], jobs["loan_start"][row], jobs["loan_blocks"][row] = owner, start[i], blocks[i]
        jobs["first_lent_block"][owner] = start[i]


@compiled
def end_loans(jobs: Rows, row: int) -> int:
    """End all loans of a row that leaves; return the blocks of its own that its borrowers keep.

    What an owner has lent becomes the borrowers' own. Borrowers of a borrower stay where they are and borrow
    from its lender, to which the rest of the loan returns.
    """
    kept, lender, blocks = 0, jobs["lender"][row], jobs["loan_blocks"][row]
    if jobs["first_lent_block"][row]:
        for other in range(jobs.size):
            if jobs["loan_blocks"][other] and jobs["lender"][other] == row:
                if blocks:
                    jobs["lender"][other] = lender
                    jobs["loan_start"][other] += jobs["loan_start"][row] - jobs["blocks"][row]
                else:
                    kept += _take_over(jobs, other)
    jobs["first_lent_block"][row] = 0
    if blocks:
        jobs["lender"][row], jobs["loan_start"][row], jobs["loan_blocks"][row] = 0, 0, 0
        jobs["first_lent_block"][lender] = _first_lent(jobs, lender)
    return int(kept)


@compiled
def _take_over(jobs: Rows, borrower: int) -> int:
    """Make a loan the borrower's own; return its blocks."""
    blocks = jobs["loan_blocks"][borrower]
    jobs["blocks"][borrower] += blocks
    jobs["lender"][borrower], jobs["loan_start"][borrower], jobs["loan_blocks"][borrower] = 0, 0, 0
    return int(blocks)


@compiled
def _first_lent(jobs: Rows, lender: int) -> int:
    """Return the first block that a row has lent, 0 = none."""
    first = 0
    for other in range(jobs.size):
        if jobs["loan_blocks"][other] and jobs["lender"][other] == lender:
            start = jobs["loan_start"][other]
            first = start if first == 0 else min(first, start)
    return int(first)


@compiled
def first_borrower(jobs: Rows, lender: int) -> int:
    """Return the borrower whose blocks a lender reaches first; asserts that there is one."""
    for other in range(jobs.size):
        borrows = jobs["loan_blocks"][other] and jobs["lender"][other] == lender
        if borrows and jobs["loan_start"][other] == jobs["first_lent_block"][lender]:
            return int(other)
    raise AssertionError("a row with lent blocks has a borrower")


# ---- checks


def kv_locations(jobs: Rows, rows: Ints, size: int) -> dict[int, list[tuple[int, int]]]:
    """Return where each row's KV lies: {row: [(owner's row, block of the owner's)]} in order.

    Raises AssertionError when a loan is not inside its lender's blocks.
    """
    at: dict[int, list[tuple[int, int]]] = {}

    def blocks(row: int) -> list[tuple[int, int]]:
        if row not in at:
            own = [(row, block) for block in range(int(jobs["blocks"][row]))]
            count, start = int(jobs["loan_blocks"][row]), int(jobs["loan_start"][row])
            if count:
                lent = blocks(int(jobs["lender"][row]))[start : start + count]
                assert len(lent) == count, f"the loan of row {row} is not inside its lender's blocks"
                own += lent
            at[row] = own
        return at[row]

    return {row: blocks(row)[: -(-int(jobs["computed"][row]) // size)] for row in rows.tolist()}


def check_integrity(jobs: Rows, rows: Ints, size: int, total: int, free: int) -> None:
    """Assert that every block has one owner and every computed token one location (a swapped one none)."""
    held = int(jobs["blocks"][rows].sum())
    assert held + free == total, f"{held} blocks held and {free} free are not {total}"
    resident = rows[jobs["saved"][rows] == 0]
    used = kv_locations(jobs, resident, size)
    flat = [block for blocks in used.values() for block in blocks]
    assert len(flat) == len(set(flat)), "two rows have written one block"
    for row in resident.tolist():
        assert len(used[row]) == -(-int(jobs["computed"][row]) // size), f"row {row} lacks blocks for its KV"
        lent, noted = _first_lent(jobs, row), int(jobs["first_lent_block"][row])
        assert lent == noted, f"row {row} has lent from block {lent} on, not {noted}"
