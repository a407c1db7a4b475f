"""Two-ended blocks: every slot has one owner, and every request reads what it wrote."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.memory.two_ended import allocation
from headway.policy.memory.two_ended.block_table import BEST_EFFORT, REAL_TIME
from tests.memory.pool import NONE, Pool, random_program

_EXAMPLES, _PROGRAMS = 133, 25


@given(st.integers(0, 2**40))
@settings(max_examples=_EXAMPLES)
def test_random_programs_keep_the_pool_whole(seed: int) -> None:
    for i in range(_PROGRAMS):
        pool = random_program(seed * _PROGRAMS + i)
        assert pool.table.state[0]["num_empty"] == pool.blocks
        assert pool.table.state[0]["host_tokens"] == 0
        assert not pool.host


def test_a_block_has_a_real_time_row_on_the_left_and_a_best_effort_row_on_the_right() -> None:
    pool = Pool(blocks=1, size=4)
    pool.enter(0, BEST_EFFORT), pool.enter(1, REAL_TIME)
    pool.begin([0])
    assert pool.grow(0, 2)
    pool.begin([])
    assert pool.grow(1, 2)
    assert pool.device[0, 3] == (0, 1, 0)
    assert pool.device[0, 2] == (0, 1, 1)
    assert pool.device[0, 0] == (1, 1, 0)
    assert pool.device[0, 1] == (1, 1, 1)
    assert not pool.host, "the slots were free: nothing had to be saved"
    pool.check()


def test_find_block_prefers_an_empty_block_then_free_slots_then_who_has_lost_most() -> None:
    pool = Pool(blocks=4, size=4, rows=4)
    for row, kind in enumerate((BEST_EFFORT, BEST_EFFORT, REAL_TIME, REAL_TIME)):
        pool.enter(row, kind)
    pool.begin([0, 1])
    assert pool.grow(0, 4)
    assert pool.grow(1, 6)
    pool.begin([])
    assert pool.grow(2, 4)
    assert not pool.host
    pool.begin([])
    assert pool.grow(3, 2)
    assert not pool.host, "a tail with free slots before any full block"
    assert pool.table.right_row[pool.table.block_ids[3, 0]] == 1
    pool.begin([])
    assert pool.grow(3, 1)
    assert list(pool.host) == [(1, 5)], "only the slot that is about to be overwritten"
    assert pool.grow(3, 2), "and then on with the one that has lost some already"
    assert set(pool.host) == {(1, 5), (1, 4), (1, 3)}
    pool.check()


def test_by_the_text_the_block_with_most_empty_slots_goes_first() -> None:
    """Row 0 leaves 3 of 4 slots of its last block empty, row 1, which came later, 2."""
    for most_empty, victim in ((True, 0), (False, 1)):
        pool = Pool(blocks=4, size=4, rows=3, most_empty=most_empty)
        for row, kind in enumerate((BEST_EFFORT, BEST_EFFORT, REAL_TIME)):
            pool.enter(row, kind)
        pool.begin([0, 1])
        assert pool.grow(0, 5)
        assert pool.grow(1, 6)
        pool.begin([])
        assert pool.grow(2, 2)
        assert pool.table.right_row[pool.table.block_ids[2, 0]] == victim
        pool.check()


def test_by_the_text_a_best_effort_row_shares_the_block_with_most_empty_slots() -> None:
    for most_empty, beside in ((True, 1), (False, 0)):
        pool = Pool(blocks=2, size=8, rows=3, most_empty=most_empty)
        for row, kind in enumerate((REAL_TIME, REAL_TIME, BEST_EFFORT)):
            pool.enter(row, kind)
        pool.begin([2])
        assert pool.grow(0, 4)
        assert pool.grow(1, 2)
        assert pool.grow(2, 3)
        assert pool.table.left_row[pool.table.block_ids[2, 0]] == beside
        pool.check()


def test_a_row_is_read_back_into_its_own_slots_when_they_are_free_again() -> None:
    pool = Pool(blocks=1, size=4)
    pool.enter(0, BEST_EFFORT), pool.enter(1, REAL_TIME)
    pool.begin([0])
    pool.grow(0, 4)
    pool.begin([])
    pool.grow(1, 3)
    assert pool.table.host_tokens[0] == 3
    pool.leave(1)
    pool.begin([0])
    assert not pool.grow(0, 1), "there is no second block"
    assert pool.table.host_tokens[0] == 0, "but all of its tokens are back"
    pool.read(0, 4)
    pool.check()


def test_a_row_moves_to_an_empty_block_when_its_slots_have_another_owner() -> None:
    pool = Pool(blocks=3, size=4)
    pool.enter(0, BEST_EFFORT), pool.enter(1, REAL_TIME), pool.enter(2, REAL_TIME)
    pool.begin([0])
    pool.grow(0, 4)
    pool.begin([])
    pool.grow(2, 8), pool.grow(1, 3)
    assert pool.table.block_ids[1, 0] == pool.table.block_ids[0, 0]
    pool.leave(2)
    assert allocation.checkpoint.blocks_to_restore(pool.table, np.array([0])).tolist() == [1]
    pool.begin([0])
    assert pool.grow(0, 1)
    assert pool.table.block_ids[1, 0] not in pool.table.block_ids[0, :2]
    pool.check()


def test_in_extremity_a_row_is_dropped_from_its_end() -> None:
    pool = Pool(blocks=3, size=4, host_limit=2)
    pool.enter(0, BEST_EFFORT), pool.enter(1, REAL_TIME)
    pool.begin([0])
    pool.grow(0, 12)
    pool.begin([])
    assert pool.grow(1, 3)
    assert pool.table.state[0]["dropped_tokens"] == 4
    assert pool.table.num_tokens[0] == 8, "the last block, no more"
    assert pool.grow(1, 6), "the block that is free now, then the next from the end"
    assert pool.table.num_tokens[0] == 4
    assert pool.table.host_tokens[0] == 1
    assert list(pool.host) == [(0, 3)]
    pool.check()


def test_the_host_never_holds_more_than_it_may() -> None:
    pool = Pool(blocks=4, size=4, host_limit=5)
    pool.enter(0, REAL_TIME), pool.enter(1, REAL_TIME)
    pool.grow(0, 5), pool.grow(1, 4)
    assert pool.away(0)
    assert not pool.away(1), "five tokens are there already"
    assert pool.grow(0, 1), "and come back with their contents"
    pool.read(0, 6)
    pool.check()


def test_a_real_time_row_that_runs_beside_a_running_best_effort_one_makes_it_move_or_stop() -> None:
    pool = Pool(blocks=2, size=4)
    pool.enter(0, BEST_EFFORT), pool.enter(1, REAL_TIME)
    pool.begin([0])
    pool.grow(0, 2)
    pool.begin([])
    pool.grow(1, 4), pool.grow(1, 1)  # the second block is the other's
    assert pool.table.block_ids[1, 1] == pool.table.block_ids[0, 0]
    pool.begin([0])
    assert pool.grow(1, 2)
    assert pool.table.pinned[0] == 0, "no empty block: it cannot run"
    assert pool.table.host_tokens[0] == 1
    pool.check()


def test_without_any_free_left_end_there_is_no_block() -> None:
    pool = Pool(blocks=1, size=4)
    pool.enter(0, REAL_TIME), pool.enter(1, REAL_TIME)
    assert pool.grow(0, 1)
    assert allocation.find_block(pool.table) == NONE
    assert not pool.grow(1, 1)
    assert pool.table.num_blocks[1] == 0
    pool.check()
