"""Who may live in what somebody else has reserved and not reached? (EcoServe 3.4, KVC pipelining.)

An answer of l tokens fills its reservation from the front, one token an iteration, so its second half is idle
for l/2 iterations: whoever needs at most that long, less a buffer b, lives there and is gone in time. What is
left before it is halved again (l/4 - b, l/8 - b, ...), and a guest lends its own tail in the same way.

Blocks of a row are counted from its first: its own, then the `span` that it borrows. Loans of one row are
taken from the end downwards, so that all it has lent begins at `lent`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.compiled import compiled
from headway.types import Ints

Rows = NDArray[np.void]


class Slot(NamedTuple):
    """The tail that a row could lend: blocks `start` to `stop`, reached by it in `time` iterations."""

    start: int
    stop: int
    time: int


@compiled
def room_of(jobs: Rows, row: int) -> int:
    """Return the blocks that a row may fill: its own and those it borrows."""
    return int(jobs["blocks"][row] + jobs["loan_blocks"][row])


@compiled
def stop_of(jobs: Rows, row: int) -> int:
    """Return the block before which all that a row may lend ends: the first that it has lent already."""
    return int(jobs["first_lent_block"][row]) if jobs["first_lent_block"][row] else room_of(jobs, row)


@compiled
def slot_in(front: int, stop: int, least: int, size: int) -> Slot:
    """Return the second half of the way from token `front` to block `stop`, from block `least` on.

    An empty slot when that is less than a block.
    """
    half = front + max(stop * size - front, 0) // 2
    start = max(-(-half // size), least)
    return Slot(start, max(stop, start), start * size - front)


@compiled
def front_of(jobs: Rows, row: int) -> int:
    """Return the tokens of a row that are written or about to be: a prompt counts as a whole."""
    return int(max(jobs["computed"][row], jobs["prompt"][row] + jobs["output_tokens"][row]))


@compiled
def least_of(jobs: Rows, row: int) -> int:
    """Return the first block that a row may lend: a guest's is behind the first that it borrows."""
    return int(jobs["blocks"][row] + 1) if jobs["loan_blocks"][row] else 1


@compiled
def lend(jobs: Rows, guest: Ints, host: Ints, start: Ints, span: Ints) -> None:
    """Begin loans, aligned; asserts that each lies in its host's room, before what that has lent already."""
    for i in range(guest.size):
        row, lender = guest[i], host[i]
        assert row != lender, "nobody is its own guest"
        assert span[i] > 0, "a loan has blocks"
        assert jobs["loan_blocks"][row] == 0, "a guest has one loan"
        assert jobs["first_lent_block"][row] == 0, "a guest has lent nothing yet"
        assert start[i] > 0, "a host keeps its first block"
        assert start[i] + span[i] <= stop_of(jobs, lender), "a loan lies in its host's tail"
        assert jobs["loan_blocks"][lender] == 0 or start[i] > jobs["blocks"][lender], (
            "what is borrowed is lent on"
        )
        jobs["lender"][row], jobs["loan_start"][row], jobs["loan_blocks"][row] = lender, start[i], span[i]
        jobs["first_lent_block"][lender] = start[i]


@compiled
def settle(jobs: Rows, row: int) -> int:
    """End all loans of a row that leaves; return the blocks of its own that stay with its guests.

    What an owner has lent becomes the guests' own. A guest's guests stay where they are, as guests of its
    host, to whom the rest returns.
    """
    kept, host, span = 0, jobs["lender"][row], jobs["loan_blocks"][row]
    if jobs["first_lent_block"][row]:
        for other in range(jobs.size):
            if jobs["loan_blocks"][other] and jobs["lender"][other] == row:
                if span:
                    jobs["lender"][other] = host
                    jobs["loan_start"][other] += jobs["loan_start"][row] - jobs["blocks"][row]
                else:
                    kept += _own(jobs, other)
    jobs["first_lent_block"][row] = 0
    if span:
        jobs["lender"][row], jobs["loan_start"][row], jobs["loan_blocks"][row] = 0, 0, 0
        jobs["first_lent_block"][host] = _first_lent(jobs, host)
    return int(kept)


@compiled
def _own(jobs: Rows, guest: int) -> int:
    """Make a loan the guest's own; return its blocks."""
    span = jobs["loan_blocks"][guest]
    jobs["blocks"][guest] += span
    jobs["lender"][guest], jobs["loan_start"][guest], jobs["loan_blocks"][guest] = 0, 0, 0
    return int(span)


@compiled
def _first_lent(jobs: Rows, host: int) -> int:
    """Return the first block that a row has lent, 0 = none."""
    first = 0
    for other in range(jobs.size):
        if jobs["loan_blocks"][other] and jobs["lender"][other] == host:
            start = jobs["loan_start"][other]
            first = start if first == 0 else min(first, start)
    return int(first)


@compiled
def guest_at(jobs: Rows, host: int) -> int:
    """Return the guest that a host reaches first; asserts that it has one."""
    for other in range(jobs.size):
        mine = jobs["loan_blocks"][other] and jobs["lender"][other] == host
        if mine and jobs["loan_start"][other] == jobs["first_lent_block"][host]:
            return int(other)
    raise AssertionError("a host that lends has a guest")


def placed(jobs: Rows, rows: Ints, size: int) -> dict[int, list[tuple[int, int]]]:
    """Return where each row's KV lies, for checks: {row: [(owner's row, block of the owner's)]} in order.

    Raises AssertionError when a loan is not inside its host.
    """
    at: dict[int, list[tuple[int, int]]] = {}

    def blocks(row: int) -> list[tuple[int, int]]:
        if row not in at:
            own = [(row, block) for block in range(int(jobs["blocks"][row]))]
            span, start = int(jobs["loan_blocks"][row]), int(jobs["loan_start"][row])
            if span:
                theirs = blocks(int(jobs["lender"][row]))[start : start + span]
                assert len(theirs) == span, f"the loan of row {row} is not inside its host"
                own += theirs
            at[row] = own
        return at[row]

    return {row: blocks(row)[: -(-int(jobs["computed"][row]) // size)] for row in rows.tolist()}


def check(jobs: Rows, rows: Ints, size: int, total: int, free: int) -> None:
    """Assert that every block has one owner and every computed token its own place (a swapped one none)."""
    held = int(jobs["blocks"][rows].sum())
    assert held + free == total, f"{held} blocks held and {free} free are not {total}"
    here = rows[jobs["saved"][rows] == 0]
    used = placed(jobs, here, size)
    flat = [block for blocks in used.values() for block in blocks]
    assert len(flat) == len(set(flat)), "two rows have written one block"
    for row in here.tolist():
        assert len(used[row]) == -(-int(jobs["computed"][row]) // size), f"row {row} has no place for its KV"
        lent = _first_lent(jobs, row)
        assert lent == jobs["first_lent_block"][row], (
            f"row {row} has lent from {lent}, not {jobs['lent'][row]}"
        )
