"""Whatever is reserved, lent, evicted or swapped, in whatever order: a block has one owner and one user."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.simulated import kernels
from headway.engines.simulated.kernels import Limits
from headway.memory import reservations
from headway.memory.exact import goal_of, pooled, reserve_of
from headway.types import Ints, Jobs

_EXAMPLES, _PROGRAMS = 400, 25  # 10,000 programs
SIZE = 4
NOBODY = np.empty(0, np.int64)


def some(*rows: int) -> Ints:
    return np.array(rows, np.int64)


class TwoEndedTable:
    """A small engine's account, worked by hand: one operation at a time."""

    def __init__(self, blocks: int) -> None:
        self.total, self.jobs, self.usage = blocks, Jobs(16), kernels.usage_of(blocks)
        self.limits, self.serial = Limits(SIZE, 16, 10_000, 10_000), 0

    def come(self, prompt: int, goal: int) -> int | None:
        """Admit a row with an exact allocation, None when it does not fit."""
        self.serial += 1
        row = self.jobs.add(
            f"r{self.serial}", prompt=prompt, serial=self.serial, tokens_left=float(goal - prompt)
        )
        if self.step(row, prompt, goal):
            return row
        self.jobs.remove(f"r{self.serial}")
        return None

    def step(self, row: int, tokens: int, reserve: int = 0) -> bool:
        """Compute tokens of one row; tell whether it could. The account is as it was when not."""
        grows = kernels._grows(self.jobs.data, row, tokens, reserve, SIZE)
        if grows > self.usage["free_blocks"]:
            return False
        ran = kernels.run_reserved(
            self.jobs.data, self.usage, self.limits, some(row), some(tokens), some(reserve), 16, 10_000
        )
        if ran.rows.size:
            kernels.complete(self.jobs.data, self.usage, np.full(16, 10**6), ran.rows, ran.tokens, 1.0)
        return bool(ran.rows.size)

    def lend(self, guest: int, host: int, start: int, span: int) -> None:
        reservations.lend(self.jobs.data, some(guest), some(host), some(start), some(span))

    def end(self, row: int) -> None:
        kernels.release(self.jobs.data, self.usage, row)
        self.jobs.remove(self.jobs.names([row])[0])

    def check(self) -> None:
        reservations.check(self.jobs.data, self.jobs.rows(), SIZE, self.total, int(self.usage["free_blocks"]))
        assert self.usage["held_slots"] == np.count_nonzero(self.jobs.running & self.jobs.live)


class Program:
    """Random operations that a packer might do, each allowed only where it is allowed."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.rng, self.book = np.random.default_rng(seed), TwoEndedTable(blocks)
        self.seen = dict.fromkeys(("lent", "nested", "inherited"), 0)

    def pick(self, *, running: bool) -> int | None:
        rows = np.flatnonzero(self.book.jobs.live & (self.book.jobs.running == running))
        return int(self.rng.choice(rows)) if rows.size else None

    def one(self) -> None:
        actions = (self.come, self.guest, self.advance, self.advance, self.advance, self.end, self.lose)
        actions[int(self.rng.integers(len(actions)))]()

    def come(self) -> None:
        if len(self.book.jobs) < 12:
            prompt = int(self.rng.integers(1, 20))
            self.book.come(prompt, prompt + int(self.rng.integers(1, 160)))

    def guest(self) -> None:
        """A new row moves into somebody's tail, its prompt into its own blocks or into the loan."""
        host = self.pick(running=True)
        if host is None or len(self.book.jobs) >= 12:
            return
        book, jobs = self.book, self.book.jobs
        front, least = reservations.front_of(jobs.data, host), reservations.least_of(jobs.data, host)
        slot = reservations.slot_in(front, reservations.stop_of(jobs.data, host), least, SIZE)
        if slot.stop <= slot.start:
            return
        span = int(self.rng.integers(1, slot.stop - slot.start + 1))
        prompt = int(self.rng.integers(1, 20))
        goal = max(prompt + 1, int(self.rng.integers(span * SIZE, span * SIZE + 12)))
        if -(-goal // SIZE) - span > book.usage["free_blocks"]:
            return
        book.serial += 1
        row = jobs.add(f"r{book.serial}", prompt=prompt, serial=book.serial, tokens_left=1.0)
        nested = jobs.loan_blocks[host] > 0
        book.lend(row, host, slot.stop - span, span)
        assert book.step(row, prompt, max(goal, span * SIZE))
        self.seen["lent"] += 1
        self.seen["nested"] += bool(nested)

    def advance(self) -> None:
        """One token of somebody who has room for it, or can grow."""
        row = self.pick(running=True)
        if row is None:
            row = self.pick(running=False)
        if row is None:
            return
        jobs = self.book.jobs
        tokens = max(int(jobs.prompt[row] + jobs.output_tokens[row] - jobs.computed[row]), 1)
        end = -(-int(jobs.computed[row] + tokens) // SIZE)
        if jobs.first_lent_block[row] and end > jobs.first_lent_block[row]:
            return  # it would run into its guest
        if jobs.loan_blocks[row] and end > reservations.room_of(jobs.data, row):
            return
        self.book.step(row, tokens)

    def end(self) -> None:
        row = self.pick(running=True)
        if row is not None:
            heirs = np.flatnonzero((self.book.jobs.lender == row) & (self.book.jobs.loan_blocks > 0))
            own = self.book.jobs.loan_blocks[row] == 0
            self.book.end(row)
            self.seen["inherited"] += heirs.size if own else 0
            assert not own or (self.book.jobs.loan_blocks[heirs] == 0).all()

    def lose(self) -> None:
        row = self.pick(running=True)
        if row is not None:
            (kernels.evict, kernels.save)[int(self.rng.integers(2))](
                self.book.jobs.data, self.book.usage, some(row)
            )

    def finish(self) -> None:
        for row in self.rng.permutation(self.book.jobs.rows()).tolist():
            self.book.end(row)
            self.book.check()
        assert self.book.usage["free_blocks"] == self.book.total
        assert not self.book.jobs.loan_blocks.any()
        assert not self.book.jobs.first_lent_block.any()


@given(st.integers(0, 2**32 - 1), st.integers(4, 90))
@settings(max_examples=_EXAMPLES)
def test_random_programs_keep_every_block_with_one_owner_and_one_user(seed: int, blocks: int) -> None:
    for i in range(_PROGRAMS):
        program = Program(seed * _PROGRAMS + i, blocks)
        for _ in range(40):
            program.one()
            program.book.check()
        program.finish()


def test_the_programs_lend_nest_and_inherit() -> None:
    seen = {"lent": 0, "nested": 0, "inherited": 0}
    for seed in range(300):
        program = Program(seed, 90)
        for _ in range(40):
            program.one()
        for name, count in program.seen.items():
            seen[name] += count
    assert min(seen.values()) > 30, seen


def hosted() -> tuple[TwoEndedTable, int, int]:
    """A host of 10 blocks with a guest in its last three."""
    book = TwoEndedTable(20)
    host = book.come(8, 40)
    assert host is not None
    guest = book.jobs.add("guest", prompt=4, serial=99)
    book.lend(guest, host, 7, 3)
    assert book.step(guest, 4, 12)
    return book, host, guest


def test_a_guest_takes_no_free_block() -> None:
    book, _, guest = hosted()
    assert book.usage["free_blocks"] == 10
    assert (book.jobs.blocks[guest], book.jobs.loan_blocks[guest]) == (0, 3)


def test_a_host_does_not_run_into_its_guest() -> None:
    book, host, _ = hosted()
    book.jobs.computed[host] = book.jobs.prompt[host] = 28
    with pytest.raises(AssertionError, match="a lender reaches"):
        book.step(host, 1)


def test_a_guest_does_not_outgrow_its_loan() -> None:
    book, _, guest = hosted()
    book.jobs.computed[guest] = book.jobs.prompt[guest] = 12
    with pytest.raises(AssertionError, match="outgrows"):
        book.step(guest, 1)


def test_what_a_leaving_host_has_lent_is_the_guests_own() -> None:
    book, host, guest = hosted()
    book.end(host)
    assert (book.jobs.blocks[guest], book.jobs.loan_blocks[guest]) == (3, 0)
    assert book.usage["free_blocks"] == 17
    book.check()


def test_a_guests_guest_stays_where_it_is() -> None:
    book, host, guest = hosted()
    nested = book.jobs.add("nested", prompt=4, serial=100)
    book.lend(nested, guest, 2, 1)
    assert book.step(nested, 4, 4)
    book.end(guest)
    assert (book.jobs.lender[nested], book.jobs.loan_start[nested]) == (host, 9)
    assert book.jobs.first_lent_block[host] == 9
    book.check()


@pytest.mark.parametrize(
    ("start", "span", "why"),
    [(0, 1, "first block"), (5, 6, "tail"), (5, 0, "has blocks")],
)
def test_a_loan_lies_in_its_hosts_tail(start: int, span: int, why: str) -> None:
    book = TwoEndedTable(20)
    host = book.come(8, 40)
    assert host is not None
    guest = book.jobs.add("guest", prompt=4, serial=99)
    with pytest.raises(AssertionError, match=why):
        book.lend(guest, host, start, span)


def test_slots_halve_what_is_left() -> None:
    """EcoServe 3.4: l/2, then l/4, then l/8."""
    assert reservations.slot_in(0, 16, 1, SIZE) == (8, 16, 32)
    assert reservations.slot_in(0, 8, 1, SIZE) == (4, 8, 16)
    assert reservations.slot_in(0, 4, 1, SIZE) == (2, 4, 8)
    assert reservations.slot_in(30, 8, 1, SIZE) == (8, 8, 2)


def test_the_pool_is_kept_for_prompts_that_wait() -> None:
    assert pooled(20, 6, 0) == 14
    assert pooled(20, 6, 4) == 18
    assert pooled(20, 6, 9) == 20
    assert reserve_of(915, 0.03) == 27
    assert goal_of(10, 4.2, 100) == 15
    assert goal_of(10, 0.0, 100) == 11
    assert goal_of(90, 40.0, 100) == 100
