"""Reservations and loans: whatever is reserved, lent, evicted or swapped, a block has one owner and one
user."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engines.simulated import kernels
from headway.engines.simulated.kernels import Limits
from headway.policy.memory import reservations
from headway.policy.memory.reservations import allocatable, pool_blocks, tokens_to_reserve
from headway.types import Ints, Jobs

_EXAMPLES, _PROGRAMS = 133, 25
SIZE = 4


def some(*rows: int) -> Ints:
    return np.array(rows, np.int64)


class Account:
    """A small engine's account, worked by hand: one operation at a time."""

    def __init__(self, blocks: int) -> None:
        self.total, self.jobs, self.usage = blocks, Jobs(16), kernels.usage_of(blocks)
        self.limits, self.serial = Limits(SIZE, 16, 10_000, 10_000), 0

    def come(self, prompt: int, goal: int) -> int | None:
        """Admit a row with an exact allocation, None when it does not fit."""
        self.serial += 1
        row = self.jobs.add(f"r{self.serial}", prompt=prompt, serial=self.serial, tokens_left=float(goal - prompt))
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

    def lend(self, borrower: int, lender: int, start: int, blocks: int) -> None:
        reservations.begin_loans(self.jobs.data, some(borrower), some(lender), some(start), some(blocks))

    def end(self, row: int) -> None:
        kernels.release(self.jobs.data, self.usage, row)
        self.jobs.remove(self.jobs.names([row])[0])

    def check(self) -> None:
        reservations.check_integrity(self.jobs.data, self.jobs.rows(), SIZE, self.total, int(self.usage["free_blocks"]))
        assert self.usage["held_slots"] == np.count_nonzero(self.jobs.running & self.jobs.live)


class Program:
    """Random operations that a packer might do, each allowed only where it is allowed."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.rng, self.account = np.random.default_rng(seed), Account(blocks)
        self.seen = dict.fromkeys(("lent", "nested", "inherited"), 0)

    def pick(self, *, running: bool) -> int | None:
        rows = np.flatnonzero(self.account.jobs.live & (self.account.jobs.running == running))
        return int(self.rng.choice(rows)) if rows.size else None

    def one(self) -> None:
        actions = (self.come, self.borrower, self.advance, self.advance, self.advance, self.end, self.lose)
        actions[int(self.rng.integers(len(actions)))]()

    def come(self) -> None:
        if len(self.account.jobs) < 12:
            prompt = int(self.rng.integers(1, 20))
            self.account.come(prompt, prompt + int(self.rng.integers(1, 160)))

    def borrower(self) -> None:
        """A new row borrows from a running row's tail; its prompt goes into its own blocks or into the
        loan."""
        lender = self.pick(running=True)
        if lender is None or len(self.account.jobs) >= 12:
            return
        account, jobs = self.account, self.account.jobs
        filled, end = (reservations.filled_tokens(jobs.data, lender), reservations.lendable_end(jobs.data, lender))
        tail = reservations.tail_of(filled, end, reservations.lendable_start(jobs.data, lender), SIZE)
        if tail.stop <= tail.start:
            return
        blocks = int(self.rng.integers(1, tail.stop - tail.start + 1))
        prompt = int(self.rng.integers(1, 20))
        goal = max(prompt + 1, int(self.rng.integers(blocks * SIZE, blocks * SIZE + 12)))
        if -(-goal // SIZE) - blocks > account.usage["free_blocks"]:
            return
        account.serial += 1
        row = jobs.add(f"r{account.serial}", prompt=prompt, serial=account.serial, tokens_left=1.0)
        nested = jobs.loan_blocks[lender] > 0
        account.lend(row, lender, tail.stop - blocks, blocks)
        assert account.step(row, prompt, max(goal, blocks * SIZE))
        self.seen["lent"] += 1
        self.seen["nested"] += bool(nested)

    def advance(self) -> None:
        """Compute one token of a row that has a block for it, or can grow."""
        row = self.pick(running=True)
        if row is None:
            row = self.pick(running=False)
        if row is None:
            return
        jobs = self.account.jobs
        tokens = max(int(jobs.prompt[row] + jobs.output_tokens[row] - jobs.computed[row]), 1)
        end = -(-int(jobs.computed[row] + tokens) // SIZE)
        if jobs.first_lent_block[row] and end > jobs.first_lent_block[row]:
            return  # it would write into the loan
        if jobs.loan_blocks[row] and end > reservations.capacity_of(jobs.data, row):
            return
        self.account.step(row, tokens)

    def end(self) -> None:
        row = self.pick(running=True)
        if row is not None:
            heirs = np.flatnonzero((self.account.jobs.lender == row) & (self.account.jobs.loan_blocks > 0))
            own = self.account.jobs.loan_blocks[row] == 0
            self.account.end(row)
            self.seen["inherited"] += heirs.size if own else 0
            assert not own or (self.account.jobs.loan_blocks[heirs] == 0).all()

    def lose(self) -> None:
        row = self.pick(running=True)
        if row is not None:
            (kernels.evict, kernels.save)[int(self.rng.integers(2))](
                self.account.jobs.data, self.account.usage, some(row)
            )

    def finish(self) -> None:
        for row in self.rng.permutation(self.account.jobs.rows()).tolist():
            self.account.end(row)
            self.account.check()
        assert self.account.usage["free_blocks"] == self.account.total
        assert not self.account.jobs.loan_blocks.any()
        assert not self.account.jobs.first_lent_block.any()


@given(st.integers(0, 2**32 - 1), st.integers(4, 90))
@settings(max_examples=_EXAMPLES)
def test_random_programs_keep_every_block_with_one_owner_and_one_user(seed: int, blocks: int) -> None:
    for i in range(_PROGRAMS):
        program = Program(seed * _PROGRAMS + i, blocks)
        for _ in range(40):
            program.one()
            program.account.check()
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


def with_loan() -> tuple[Account, int, int]:
    """A lender of 10 blocks with a borrower in its last three."""
    account = Account(20)
    lender = account.come(8, 40)
    assert lender is not None
    borrower = account.jobs.add("borrower", prompt=4, serial=99)
    account.lend(borrower, lender, 7, 3)
    assert account.step(borrower, 4, 12)
    return account, lender, borrower


def test_a_borrower_takes_no_free_block() -> None:
    account, _, borrower = with_loan()
    assert account.usage["free_blocks"] == 10
    assert (account.jobs.blocks[borrower], account.jobs.loan_blocks[borrower]) == (0, 3)


def test_a_lender_does_not_write_into_a_loan() -> None:
    account, lender, _ = with_loan()
    account.jobs.computed[lender] = account.jobs.prompt[lender] = 28
    with pytest.raises(AssertionError, match="a lender reaches"):
        account.step(lender, 1)


def test_a_borrower_does_not_outgrow_its_loan() -> None:
    account, _, borrower = with_loan()
    account.jobs.computed[borrower] = account.jobs.prompt[borrower] = 12
    with pytest.raises(AssertionError, match="outgrows"):
        account.step(borrower, 1)


def test_what_a_leaving_owner_has_lent_becomes_the_borrowers_own() -> None:
    account, lender, borrower = with_loan()
    account.end(lender)
    assert (account.jobs.blocks[borrower], account.jobs.loan_blocks[borrower]) == (3, 0)
    assert account.usage["free_blocks"] == 17
    account.check()


def test_the_borrower_of_a_borrower_stays_where_it_is() -> None:
    account, lender, borrower = with_loan()
    nested = account.jobs.add("nested", prompt=4, serial=100)
    account.lend(nested, borrower, 2, 1)
    assert account.step(nested, 4, 4)
    account.end(borrower)
    assert (account.jobs.lender[nested], account.jobs.loan_start[nested]) == (lender, 9)
    assert account.jobs.first_lent_block[lender] == 9
    account.check()


@pytest.mark.parametrize(
    ("start", "blocks", "why"), [(0, 1, "first block"), (5, 6, "tail"), (5, 0, "at least one block")]
)
def test_a_loan_lies_in_its_lenders_tail(start: int, blocks: int, why: str) -> None:
    account = Account(20)
    lender = account.come(8, 40)
    assert lender is not None
    borrower = account.jobs.add("borrower", prompt=4, serial=99)
    with pytest.raises(AssertionError, match=why):
        account.lend(borrower, lender, start, blocks)


def test_tails_halve_what_is_left() -> None:
    """EcoServe 3.4: l/2, then l/4, then l/8."""
    assert reservations.tail_of(0, 16, 1, SIZE) == (8, 16, 32)
    assert reservations.tail_of(0, 8, 1, SIZE) == (4, 8, 16)
    assert reservations.tail_of(0, 4, 1, SIZE) == (2, 4, 8)
    assert reservations.tail_of(30, 8, 1, SIZE) == (8, 8, 2)


def test_the_pool_is_kept_for_prompts_that_wait() -> None:
    assert allocatable(20, 6, 0) == 14
    assert allocatable(20, 6, 4) == 18
    assert allocatable(20, 6, 9) == 20
    assert pool_blocks(915, 0.03) == 27
    assert tokens_to_reserve(10, 4.2, 100) == 15
    assert tokens_to_reserve(10, 0.0, 100) == 11
    assert tokens_to_reserve(90, 40.0, 100) == 100
